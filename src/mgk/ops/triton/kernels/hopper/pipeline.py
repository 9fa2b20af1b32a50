"""What lies in shared memory in :mod:`mgk.ops.triton.kernels.hopper.wide_forward`, and the warp that copies it there.

A buffer is handed over by two mbarriers: ``full`` completes when TMA has written it and consumers may read it,
``empty`` when both consumers have read it and the producer may write it again. Every handover flips the phase of the
barrier, so a wait names the phase that it waits for. Keys and values have ``STAGES`` buffers each, taken by turns.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mgk.ops.triton.kernels.hopper.copies import copy_in
from mgk.ops.triton.kernels.hopper.tile_scheduler import TILE_ROWS, count_tiles, find_tile

GROUP_ROWS = gl.constexpr(64)
"""Queries of a consumer, a warp group: the rows of one ``wgmma`` instruction."""


class Case(NamedTuple):
    """Compile-time constants: the kind of keys, the schedule and the blocks, see :func:`attention_forward_wide`."""

    TWO_SHIFTS: gl.constexpr
    HARD: gl.constexpr
    HAS_LEVEL: gl.constexpr
    CAUSAL: gl.constexpr
    PING_PONG: gl.constexpr
    STAGES: gl.constexpr
    BLOCK_J: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr


class Descriptors(NamedTuple):
    """What TMA reads and writes."""

    d_query: gl.tensor
    d_key: gl.tensor
    d_value: gl.tensor
    d_out: gl.tensor
    d_column: gl.tensor
    d_other: gl.tensor


class Buffers(NamedTuple):
    """Shared memory. Terms are one block ahead: stage ``s`` holds those of the block after the values in stage ``s``,
    and the stage after the last those of the first block."""

    s_query: gl.shared_memory_descriptor  # [2, 1, 1, GROUP_ROWS, D]
    s_key: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_J, D]
    s_value: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_J, DV]
    s_column: gl.shared_memory_descriptor  # [STAGES + 1, 1, BLOCK_J]
    s_other: gl.shared_memory_descriptor  # [STAGES + 1, 1, BLOCK_J]
    s_out: gl.shared_memory_descriptor  # [2, 1, 1, GROUP_ROWS, DV]


class Barriers(NamedTuple):
    """Mbarriers: one for queries, one for each stage of keys and of values, one for each consumer's turn."""

    query_full: gl.shared_memory_descriptor
    query_empty: gl.shared_memory_descriptor
    key_full: gl.shared_memory_descriptor
    key_empty: gl.shared_memory_descriptor
    value_full: gl.shared_memory_descriptor
    value_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor


@gluon.jit
def allocate_buffers(d, case: gl.constexpr):
    s_query = gl.allocate_shared_memory(d.d_query.dtype, [2, 1, 1, GROUP_ROWS, case.D], d.d_query.layout)
    s_key = gl.allocate_shared_memory(d.d_key.dtype, [case.STAGES, 1, 1, case.BLOCK_J, case.D], d.d_key.layout)
    s_value = gl.allocate_shared_memory(d.d_value.dtype, [case.STAGES, 1, 1, case.BLOCK_J, case.DV], d.d_value.layout)
    s_out = gl.allocate_shared_memory(d.d_out.dtype, [2, 1, 1, GROUP_ROWS, case.DV], d.d_out.layout)
    s_column = s_query
    s_other = s_query
    if case.HAS_LEVEL:
        s_column = gl.allocate_shared_memory(gl.float32, [case.STAGES + 1, 1, case.BLOCK_J], d.d_column.layout)
    if case.TWO_SHIFTS:
        s_other = gl.allocate_shared_memory(gl.float32, [case.STAGES + 1, 1, case.BLOCK_J], d.d_other.layout)
    return Buffers(s_query, s_key, s_value, s_column, s_other, s_out)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    """``full`` barriers wait for one arrival, the producer's, and its bytes; ``empty`` ones for those of two groups."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = Barriers(
        query_full=gl.allocate_shared_memory(gl.int64, [1], layout),
        query_empty=gl.allocate_shared_memory(gl.int64, [1], layout),
        key_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout),
        key_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout),
        value_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout),
        value_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout),
        turn=gl.allocate_shared_memory(gl.int64, [2, 1], layout),
    )
    mbarrier.init(barriers.query_full, count=1)
    mbarrier.init(barriers.query_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.key_full.index(stage), count=1)
        mbarrier.init(barriers.key_empty.index(stage), count=2)
        mbarrier.init(barriers.value_full.index(stage), count=1)
        mbarrier.init(barriers.value_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(barriers.turn.index(group), count=1)
    fence_async_shared()
    return barriers


@gluon.jit
def copy_tiles(d, buffers, barriers, sizes, case: gl.constexpr):
    """The producer: it copies queries, keys, values and terms of columns as soon as there is room."""
    BLOCK_J: gl.constexpr = case.BLOCK_J
    TERM_BYTES: gl.constexpr = 4 * BLOCK_J * ((1 if case.HAS_LEVEL else 0) + (1 if case.TWO_SHIFTS else 0))
    num_copied = 0
    for i_own in range(count_tiles(sizes.num_tiles, case.CAUSAL)):
        tile = find_tile(i_own, sizes, case.CAUSAL, BLOCK_J)
        i_kv = tile.i_kv.to(gl.int32)
        i_other = i_kv * 2 + 1 if case.HARD else i_kv
        mbarrier.wait(barriers.query_empty, (i_own & 1) ^ 1)
        mbarrier.expect(barriers.query_full, TILE_ROWS * case.D * 2 + TERM_BYTES)
        # The terms of the first block come with the queries, all others with the values of the block before.
        _copy_terms(d, buffers, barriers.query_full, i_kv, i_other, 0, case.STAGES, case)
        for group in gl.static_range(2):
            o_first = tile.i_block * TILE_ROWS + group * GROUP_ROWS
            place_of_queries = [tile.i_batch, tile.i_query_head, o_first, 0]
            copy_in(d.d_query, place_of_queries, barriers.query_full, buffers.s_query.index(group))
        for i in range(tile.count):
            stage = num_copied % case.STAGES
            was_read = ((num_copied // case.STAGES) & 1) ^ 1
            o_j = i * BLOCK_J
            place_of_block = [tile.i_batch, tile.i_kv_head, o_j, 0]
            mbarrier.wait(barriers.key_empty.index(stage), was_read)
            key_full = barriers.key_full.index(stage)
            mbarrier.expect(key_full, BLOCK_J * case.D * 2)
            copy_in(d.d_key, place_of_block, key_full, buffers.s_key.index(stage))
            mbarrier.wait(barriers.value_empty.index(stage), was_read)
            value_full = barriers.value_full.index(stage)
            mbarrier.expect(value_full, BLOCK_J * case.DV * 2 + TERM_BYTES)
            # The terms of the next block are read before these values are done with.
            _copy_terms(d, buffers, value_full, i_kv, i_other, o_j + BLOCK_J, stage, case)
            copy_in(d.d_value, place_of_block, value_full, buffers.s_value.index(stage))
            num_copied += 1


@gluon.jit
def _copy_terms(d, buffers, full, i_kv, i_other, o_j, stage, case: gl.constexpr):
    """Copy the terms of the columns from ``o_j`` on."""
    if case.HAS_LEVEL:
        i_column = i_kv * 2 if case.TWO_SHIFTS else i_kv
        copy_in(d.d_column, [i_column, o_j], full, buffers.s_column.index(stage))
    if case.TWO_SHIFTS:
        copy_in(d.d_other, [i_other, o_j], full, buffers.s_other.index(stage))
