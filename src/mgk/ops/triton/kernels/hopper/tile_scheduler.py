"""Which tiles a persistent program of :mod:`mgk.ops.triton.kernels.hopper.wide_forward` takes, and in which order.

A tile is 128 queries of one head. There are as many programs as multiprocessors, and each takes tile after tile. Under
causality tiles differ in how many keys they see, so a program takes them in pairs, a long one and a short one: all
programs then have as much to do. Heads come in sections whose keys and values stay in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_ROWS = gl.constexpr(128)


class Sizes(NamedTuple):
    """How much there is to do."""

    num_heads: gl.tensor
    group_size: gl.tensor  # query heads for each key/value head
    num_queries: gl.tensor
    num_keys: gl.tensor
    padded_queries: gl.tensor
    num_tiles: gl.tensor  # num_rows * num_blocks
    num_rows: gl.tensor  # heads of all samples
    num_blocks: gl.tensor  # tiles of a head
    section: gl.tensor  # heads that are worked on at a time
    width: gl.tensor  # numbers of a shift in memory, of which a block has D


class Tile(NamedTuple):
    """128 queries of a head, and the blocks of keys that they see."""

    i_batch: gl.tensor
    i_query_head: gl.tensor
    i_kv_head: gl.tensor
    i_head: gl.tensor  # the query head, counted through all samples
    i_kv: gl.tensor  # the key/value head, likewise
    i_block: gl.tensor
    full: gl.tensor  # of the first so many blocks every query sees every key
    count: gl.tensor  # of so many some query sees some key


@gluon.jit
def count_tiles(num_tiles, CAUSAL: gl.constexpr):
    """How many tiles this program has. They come in pairs only if there are more tiles than programs."""
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    count = (num_tiles - i_program + num_programs - 1) // num_programs
    if CAUSAL:
        num_pairs = num_tiles // 2
        own_pairs = (num_pairs - i_program + num_programs - 1) // num_programs
        # The last of an odd number is left to the program that would have had the next pair.
        is_left = (num_tiles % 2 == 1) & (num_pairs % num_programs == i_program)
        in_pairs = 2 * own_pairs + gl.where(is_left, 1, 0)
        count = gl.where(num_programs < num_tiles, in_pairs, count)
    return count


@gluon.jit
def find_tile(i_own, sizes, CAUSAL: gl.constexpr, BLOCK_J: gl.constexpr):
    """The :class:`Tile` that is number ``i_own`` of this program."""
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    num_blocks = sizes.num_blocks
    i_tile = i_own * num_programs + i_program
    if CAUSAL:
        i_in_pairs = 2 * (i_own // 2 * num_programs + i_program) + i_own % 2
        i_tile = gl.where(num_programs < sizes.num_tiles, i_in_pairs, i_tile)
        # In a section the longest tile that is left and the shortest come by turns.
        i_section = i_tile // (sizes.section * num_blocks)
        i_within = i_tile % (sizes.section * num_blocks)
        heads = gl.minimum(sizes.section, sizes.num_rows - i_section * sizes.section)
        i_rank = gl.where(i_within % 2 == 0, i_within // 2, heads * num_blocks - 1 - i_within // 2)
        i_block = num_blocks - 1 - i_rank // heads
        i_row = i_section * sizes.section + i_rank % heads
        first_unseen = i_block * TILE_ROWS + (sizes.num_keys - sizes.num_queries) + 1
        full = gl.minimum(first_unseen, sizes.num_keys) // BLOCK_J
        count = (gl.minimum(first_unseen + TILE_ROWS - 1, sizes.num_keys) + BLOCK_J - 1) // BLOCK_J
    else:
        i_block = i_tile % num_blocks
        i_row = i_tile // num_blocks
        count = (sizes.num_keys + BLOCK_J - 1) // BLOCK_J
        full = count
    i_batch = i_row // sizes.num_heads
    i_query_head = i_row % sizes.num_heads
    i_kv_head = i_query_head // sizes.group_size
    i_head = gl.cast(i_batch * sizes.num_heads + i_query_head, gl.int64)
    i_kv = gl.cast(i_batch * (sizes.num_heads // sizes.group_size) + i_kv_head, gl.int64)
    return Tile(i_batch, i_query_head, i_kv_head, i_head, i_kv, i_block, full, count)
