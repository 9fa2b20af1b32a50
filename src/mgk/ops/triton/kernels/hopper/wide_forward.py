"""The forward kernel for wide heads on Hopper: TMA, warp specialisation and ping-pong, in Gluon.

It computes what :mod:`mgk.ops.triton.kernels.forward` computes, for calls without masks or dropout::

    weight[i, j] = 2^(scale q_i . k_j + column[j])                                           one key
                 = 2^(scale q_i . k_j + column[j]) (1 + row_second[i] column_second[j])      two shifted keys, soft
                 = 2^(scale (q_i . k_j + max(column[j], row_second[i] + column_second[j])))  two shifted keys, hard
    out[i]       = sum_j weight[i, j] v_j / sum_j weight[i, j]

With heads of 128 numbers a multiprocessor has registers for two warp groups of 64 queries and no more, and whatever
they wait for is lost. So the program is split by warps, which the compiler of Triton does not do by itself (in Gluon,
the language below it, a product is issued and awaited where that is written):

- The producer, one warp, copies queries, keys, values and terms to shared memory by TMA as soon as there is room.
- The consumers, two warp groups, have one half of a tile of 128 queries each. A group computes the weights of block
  ``i`` while its product of the weights and values of block ``i - 1`` still runs. With ``PING_PONG`` the groups also
  issue their products in turn, so that one group's products run while the other exponentiates.

Programs are persistent: while the output of one tile is stored, the queries of the next are copied. How producer and
consumers hand over shared memory is written in :mod:`mgk.ops.triton.kernels.hopper.pipeline`, which tiles a program
takes in :mod:`mgk.ops.triton.kernels.hopper.tile_scheduler`.

Names are those of :mod:`mgk.ops.triton.kernels.tiles`; ``s_`` is shared memory and ``d_`` a TMA descriptor.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mgk.ops.triton.kernels.hopper.copies import copy_out
from mgk.ops.triton.kernels.hopper.pipeline import (
    GROUP_ROWS,
    Case,
    Descriptors,
    allocate_barriers,
    allocate_buffers,
    copy_tiles,
)
from mgk.ops.triton.kernels.hopper.tile_scheduler import TILE_ROWS, Sizes, count_tiles, find_tile
from mgk.ops.triton.kernels.terms import in_order, mark_unfactored, place, safe_ratio
from mgk.ops.triton.kernels.tiles import HEAD_NUMBERS, VARYING_WITH_WIDTH, partial_sums

CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
LN_2 = gl.constexpr(0.6931471805599453)


class Limits(NamedTuple):
    """What a row may hold before it is marked by NaN, and repaired by another kernel."""

    largest_ratio: gl.tensor  # row_second lies between 2^-largest_ratio and 2^largest_ratio
    lowest_sum: gl.tensor
    highest_sum: gl.tensor  # of the weights
    margin: gl.tensor  # log2 of the room above the largest weight of the first block, where that is the reference


class Pointers(NamedTuple):
    """What consumers read and write without TMA."""

    p_row: gl.tensor
    p_row_second: gl.tensor
    p_unfactored: gl.tensor
    p_level: gl.tensor
    p_shift: gl.tensor
    p_origin: gl.tensor
    p_normaliser: gl.tensor


class Rows(NamedTuple):
    """What a consumer knows of its queries."""

    o_i: gl.tensor  # [GROUP_ROWS]
    causal_offset: gl.tensor  # query i sees keys up to i + causal_offset
    b_row: gl.tensor  # [GROUP_ROWS], the first shifted key's term, scaled; else 0
    b_row_second: gl.tensor  # [GROUP_ROWS], the second's relative to it: a ratio; if hard a gap that is not scaled
    b_reference: gl.tensor  # [GROUP_ROWS], the logit that weights are taken against where columns hold no level


class Running(NamedTuple):
    """What a consumer carries from block to block."""

    b_out: gl.tensor  # [GROUP_ROWS, DV], weights times values of all blocks but the last
    b_weight: gl.tensor  # [GROUP_ROWS, BLOCK_J], the weights of the last block, an operand of the next product
    b_sum: gl.tensor  # [GROUP_ROWS, 4], the weights of all blocks, added up by thread


@gluon.jit(
    do_not_specialize=[*VARYING_WITH_WIDTH, "num_tiles", "num_rows", "section"],
    do_not_specialize_on_alignment=HEAD_NUMBERS,
)
def attention_forward_wide(
    d_query, d_key, d_value, d_out, d_column, d_other, p_row, p_row_second, p_unfactored, p_level, p_shift, p_origin,
    p_normaliser, scale, num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles, num_rows,
    num_blocks, section, width, largest_ratio, lowest_sum, highest_sum, margin,
    TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_J: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Write ``out [B, H, Nq, Dv]`` and ``normaliser [B, H, Nq]`` (natural logarithm, NaN where unsafe); for two shifted
    keys also ``row`` and ``row_second``, as :func:`mgk.ops.triton.kernels.forward.attention_forward` does.

    ``d_other`` holds what two shifted keys have for a column beside the first term: ``column_second``, or the second
    term if the choice is hard; then both terms are not scaled yet, so that products can be added to them.
    Where columns hold no level, the logits are dot products of one component, which have no columns, and weights are
    taken against the row's largest logit in the first block. Under causality there are no more queries than keys.
    """
    HAS_LEVEL: gl.constexpr = p_level is not None
    case: gl.constexpr = Case(TWO_SHIFTS, HARD, HAS_LEVEL, CAUSAL, PING_PONG, STAGES, BLOCK_J, D, DV)
    sizes = Sizes(
        num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles, num_rows, num_blocks, section, width
    )
    limits = Limits(largest_ratio, lowest_sum, highest_sum, margin)
    descriptors = Descriptors(d_query, d_key, d_value, d_out, d_column, d_other)
    pointers = Pointers(p_row, p_row_second, p_unfactored, p_level, p_shift, p_origin, p_normaliser)
    buffers = allocate_buffers(descriptors, case)
    barriers = allocate_barriers(STAGES)
    if HAS_LEVEL:
        _await_terms()
    gl.warp_specialize([
        (_attend_tiles, (gl.constexpr(0), descriptors, buffers, barriers, pointers, scale, sizes, limits, case)),
        (_attend_tiles, (gl.constexpr(1), descriptors, buffers, barriers, pointers, scale, sizes, limits, case)),
        (copy_tiles, (descriptors, buffers, barriers, sizes, case)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def _await_terms():
    """Wait until the kernel before, which makes the terms, has ended: this one is launched earlier (programmatic
    dependent launch), so that nobody waits for the launch."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _attend_tiles(GROUP: gl.constexpr, d, buffers, barriers, pointers, scale, sizes, limits, case: gl.constexpr):
    """A consumer group: its half of every tile, tile after tile."""
    s_query = buffers.s_query.index(GROUP).reshape([GROUP_ROWS, case.D])
    # Blocks of keys that have been read, and how often the two groups have taken turns.
    num_read = 0
    num_turns = 0
    for i_own in range(count_tiles(sizes.num_tiles, case.CAUSAL)):
        tile = find_tile(i_own, sizes, case.CAUSAL, case.BLOCK_J)
        rows, running = _attend_first_block(
            GROUP, tile, i_own, num_read, s_query, buffers, barriers, pointers, scale, sizes, limits, case
        )
        for i in range(1, gl.maximum(tile.full, 1)):
            running = _attend_block(
                GROUP, running, rows, i, num_read + i, num_turns + i - 1, s_query, buffers, barriers, scale, False, case
            )
        if case.CAUSAL:
            for i in range(gl.maximum(tile.full, 1), tile.count):
                running = _attend_block(
                    GROUP, running, rows, i, num_read + i, num_turns + i - 1, s_query, buffers, barriers, scale, True,
                    case,
                )  # fmt: skip
        num_read += tile.count
        num_turns += tile.count - 1
        mbarrier.arrive(barriers.query_empty, count=1)
        _store_tile(GROUP, running, rows, tile, num_read - 1, d, buffers, barriers, pointers, sizes, limits, case)
    tma.store_wait(0)


@gluon.jit
def _attend_first_block(
    GROUP: gl.constexpr, tile, i_own, num_read, s_query, buffers, barriers, pointers, scale, sizes, limits,
    case: gl.constexpr,
):  # fmt: skip
    """:class:`Rows` and :class:`Running` after one block. It has no other to run beside; the terms of the rows are made
    meanwhile."""
    pairs: gl.constexpr = _product_layout(case.BLOCK_J)
    row_layout: gl.constexpr = gl.SliceLayout(1, pairs)
    o_i = tile.i_block * TILE_ROWS + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, row_layout)
    b_zero = gl.full([GROUP_ROWS, case.BLOCK_J], 0.0, gl.float32, pairs)
    b_out = gl.full([GROUP_ROWS, case.DV], 0.0, gl.float32, _product_layout(case.DV))
    b_reference = gl.full([GROUP_ROWS], 0.0, gl.float32, row_layout)
    b_row = b_reference
    b_row_second = b_reference
    if case.TWO_SHIFTS:
        # They are on their way before the queries are awaited.
        shifts = _load_shifts(pointers, tile, sizes, case)

    stage = num_read % case.STAGES
    mbarrier.wait(barriers.query_full, i_own & 1)
    mbarrier.wait(barriers.key_full.index(stage), (num_read // case.STAGES) & 1)
    b_product = _multiply_keys(s_query, buffers, stage, b_zero, False, case)
    if case.TWO_SHIFTS:
        b_row, b_row_second = _make_row_terms(s_query, o_i, shifts, tile, pointers, scale, sizes, limits, case)
    b_column, b_other = _read_columns(buffers, case.STAGES, case)
    b_product = warpgroup_mma_wait(0, deps=[b_product])
    if case.HARD:
        b_product += _larger_bias(b_column, b_other, b_row_second)
    mbarrier.arrive(barriers.key_empty.index(stage), count=1)
    causal_offset = sizes.num_keys - sizes.num_queries
    if not case.HAS_LEVEL:
        b_logit = b_product * scale
        if case.CAUSAL:
            b_logit = gl.where(_sees(o_i, 0, causal_offset, case.BLOCK_J), b_logit, float("-inf"))
        b_reference = gl.max(b_logit, 1) + limits.margin
    rows = Rows(o_i, causal_offset, b_row, b_row_second, b_reference)
    b_weight = _weigh(b_product, b_column, b_other, rows, 0, scale, case.CAUSAL, case)
    b_sum = partial_sums(b_weight)
    return rows, Running(b_out, _as_operand(b_weight, buffers.s_value.dtype, case.DV), b_sum)


@gluon.jit
def _attend_block(
    GROUP: gl.constexpr, running, rows, i, num_read, num_turns, s_query, buffers, barriers, scale, MASKED: gl.constexpr,
    case: gl.constexpr,
):  # fmt: skip
    """Multiply the last block's weights with its values and, meanwhile, compute the weights of block ``i``."""
    stage = num_read % case.STAGES
    last = (num_read - 1) % case.STAGES
    b_start = gl.full([GROUP_ROWS, case.BLOCK_J], 0.0, gl.float32, _product_layout(case.BLOCK_J))
    if case.HARD:
        # The terms of this block came with the last one's values.
        mbarrier.wait(barriers.value_full.index(last), ((num_read - 1) // case.STAGES) & 1)
        b_column, b_other = _read_columns(buffers, last, case)
        b_start = _larger_bias(b_column, b_other, rows.b_row_second)
    mbarrier.wait(barriers.key_full.index(stage), (num_read // case.STAGES) & 1)
    if case.PING_PONG:
        # The other group has issued its products: while ours run, it exponentiates.
        mbarrier.wait(barriers.turn.index(GROUP), (num_turns & 1) ^ (1 - GROUP))
    b_product = _multiply_keys(s_query, buffers, stage, b_start, case.HARD, case)
    if not case.HARD:
        mbarrier.wait(barriers.value_full.index(last), ((num_read - 1) // case.STAGES) & 1)
    b_out = _multiply_values(running, buffers, last, case)
    if case.PING_PONG:
        mbarrier.arrive(barriers.turn.index(1 - GROUP), count=1)
    b_product = warpgroup_mma_wait(1, deps=[b_product])
    mbarrier.arrive(barriers.key_empty.index(stage), count=1)
    if not case.HARD:
        # Measured: two shifted keys are slower if these are read before the product is awaited.
        b_column, b_other = _read_columns(buffers, last, case)
    b_weight = _weigh(b_product, b_column, b_other, rows, i * case.BLOCK_J, scale, MASKED, case)
    b_sum = running.b_sum + partial_sums(b_weight)
    b_out = warpgroup_mma_wait(0, deps=[b_out])
    mbarrier.arrive(barriers.value_empty.index(last), count=1)
    return Running(b_out, _as_operand(b_weight, buffers.s_value.dtype, case.DV), b_sum)


@gluon.jit
def _store_tile(
    GROUP: gl.constexpr, running, rows, tile, last_read, d, buffers, barriers, pointers, sizes, limits,
    case: gl.constexpr,
):  # fmt: skip
    """Add the last block's values, divide by the sum, and store output and normaliser."""
    stage = last_read % case.STAGES
    mbarrier.wait(barriers.value_full.index(stage), (last_read // case.STAGES) & 1)
    b_out = _multiply_values(running, buffers, stage, case)
    b_total = gl.convert_layout(gl.sum(running.b_sum, 1), rows.o_i.type.layout, assert_trivial=True)
    b_normaliser = rows.b_row + rows.b_reference + gl.log2(b_total)
    if case.HAS_LEVEL:
        b_normaliser += gl.load(pointers.p_level + tile.i_kv)
    m_safe = (b_total >= limits.lowest_sum) & (b_total <= limits.highest_sum)
    b_normaliser = gl.where(m_safe, b_normaliser * LN_2, float("nan"))
    m_i = rows.o_i < sizes.num_queries
    gl.store(pointers.p_normaliser + tile.i_head * sizes.num_queries + rows.o_i, b_normaliser, mask=m_i)
    b_inverse = gl.convert_layout(1.0 / b_total, gl.SliceLayout(1, _product_layout(case.DV)), assert_trivial=True)
    b_out = warpgroup_mma_wait(0, deps=[b_out])
    mbarrier.arrive(barriers.value_empty.index(stage), count=1)
    b_out = (b_out * b_inverse.expand_dims(1)).to(buffers.s_out.dtype)
    # The output of the tile before must have left shared memory.
    tma.store_wait(0)
    s_out = buffers.s_out.index(GROUP)
    s_out.reshape([GROUP_ROWS, case.DV]).store(b_out)
    fence_async_shared()
    o_first = tile.i_block * TILE_ROWS + GROUP * GROUP_ROWS
    copy_out(d.d_out, [tile.i_batch, tile.i_query_head, o_first, 0], s_out)


@gluon.jit
def _multiply_keys(s_query, buffers, stage, b_start, ADDS: gl.constexpr, case: gl.constexpr):
    """Issue ``q k^T``, ``[GROUP_ROWS, BLOCK_J]``; ``ADDS``: added to ``b_start``."""
    s_key = buffers.s_key.index(stage).reshape([case.BLOCK_J, case.D]).permute([1, 0])
    return warpgroup_mma(s_query, s_key, b_start, use_acc=ADDS, is_async=True)


@gluon.jit
def _multiply_values(running, buffers, stage, case: gl.constexpr):
    """Issue the product of the last block's weights and values, added to ``out``, ``[GROUP_ROWS, DV]``."""
    s_value = buffers.s_value.index(stage).reshape([case.BLOCK_J, case.DV])
    return warpgroup_mma(running.b_weight, s_value, running.b_out, is_async=True)


@gluon.jit
def _larger_bias(b_column, b_other, b_row_second):
    """Where the product of a hard choice starts from, ``[GROUP_ROWS, BLOCK_J]``: only the biases compete."""
    return gl.maximum(b_column.expand_dims(0), b_row_second.expand_dims(1) + b_other.expand_dims(0))


@gluon.jit
def _weigh(b_product, b_column, b_other, rows, o_j, scale, MASKED: gl.constexpr, case: gl.constexpr):
    """The weights of one block of keys, ``[GROUP_ROWS, BLOCK_J]``. If the choice is hard, products hold the bias."""
    if case.HARD:
        b_logit = b_product * scale
    elif case.HAS_LEVEL:
        b_logit = b_product * scale + b_column.expand_dims(0)
    else:
        b_logit = b_product * scale - rows.b_reference.expand_dims(1)
    b_weight = gl.exp2(b_logit)
    if case.TWO_SHIFTS and not case.HARD:
        b_weight = b_weight + b_weight * (rows.b_row_second.expand_dims(1) * b_other.expand_dims(0))
    if MASKED:
        b_weight = gl.where(_sees(rows.o_i, o_j, rows.causal_offset, case.BLOCK_J), b_weight, 0.0)
    return b_weight


@gluon.jit
def _sees(o_i, o_j, causal_offset, BLOCK_J: gl.constexpr):
    """Whether a query sees a key, ``[GROUP_ROWS, BLOCK_J]``. (Keys beyond the end have -inf as their column.)"""
    o_columns = o_j + gl.arange(0, BLOCK_J, gl.SliceLayout(0, _product_layout(BLOCK_J)))
    return o_columns.expand_dims(0) <= o_i.expand_dims(1) + causal_offset


@gluon.jit
def _load_shifts(pointers, tile, sizes, case: gl.constexpr):
    """The two shifts of a head, ``[D]``, and ``origin . shift`` of both, 0 without an origin."""
    layout: gl.constexpr = gl.SliceLayout(0, _product_layout(case.D))
    width = sizes.width
    p_first = pointers.p_shift + tile.i_kv_head * 2 * width
    b_first = _load_shift(p_first, width, case.D, layout)
    b_second = _load_shift(p_first + width, width, case.D, layout)
    first_origin = 0.0
    second_origin = 0.0
    if pointers.p_origin is not None:
        p_origin = pointers.p_origin + tile.i_kv * case.D
        first_origin = _shifted_origin(p_first, p_origin, width, case.D)
        second_origin = _shifted_origin(p_first + width, p_origin, width, case.D)
    return b_first, b_second, first_origin, second_origin


@gluon.jit
def _load_shift(p_shift, width, D: gl.constexpr, layout: gl.constexpr):
    """The shift of one component, ``[D]``, 0 beyond its width."""
    o_d = gl.arange(0, D, layout)
    return gl.load(p_shift + o_d, mask=o_d < width, other=0.0)


@gluon.jit
def _shifted_origin(p_shift, p_origin, width, D: gl.constexpr):
    """``origin . shift``."""
    layout: gl.constexpr = gl.BlockedLayout([D // 32], [32], [4], [0])
    return gl.sum(gl.load(p_origin + gl.arange(0, D, layout)) * _load_shift(p_shift, width, D, layout), 0)


@gluon.jit
def _make_row_terms(s_query, o_i, shifts, tile, pointers, scale, sizes, limits, case: gl.constexpr):
    """``scale (q_i - origin) . shift_r`` of two shifted keys: the first, and the second relative to it as
    :class:`Rows` holds it. Both and ``row_second`` are kept for repair and backward."""
    b_first_shift, b_second_shift, first_origin, second_origin = shifts
    p_row = pointers.p_row + tile.i_head * 2 * sizes.padded_queries
    p_row_second = pointers.p_row_second + tile.i_head * sizes.padded_queries
    b_query = s_query.load(_product_layout(case.D)).to(gl.float32)
    b_first = gl.sum(b_query * b_first_shift.expand_dims(0), 1) - first_origin
    b_second = gl.sum(b_query * b_second_shift.expand_dims(0), 1) - second_origin
    b_first = gl.convert_layout(b_first, o_i.type.layout, assert_trivial=True)
    b_second = gl.convert_layout(b_second, o_i.type.layout, assert_trivial=True)
    # Scaled last, so that a tie is one.
    b_gap = b_second - b_first
    b_row_second = b_gap * scale
    if not case.HARD:
        b_row_second = safe_ratio(b_row_second, limits.largest_ratio)
        mark_unfactored(pointers.p_unfactored, tile.i_kv, b_row_second)
    o_row = place(o_i)
    gl.store(p_row + o_row, b_first * scale)
    gl.store(p_row + sizes.padded_queries + o_row, b_second * scale)
    gl.store(p_row_second + o_row, b_row_second)
    return b_first * scale, b_gap if case.HARD else b_row_second


@gluon.jit
def _read_columns(buffers, stage, case: gl.constexpr):
    """``column`` and what two shifted keys have beside it, ``[BLOCK_J]`` both; 0 where there is none."""
    b_column = 0.0
    b_other = 0.0
    if case.HAS_LEVEL:
        b_column = _read_terms(buffers.s_column.index(stage), case.BLOCK_J)
    if case.TWO_SHIFTS:
        b_other = _read_terms(buffers.s_other.index(stage), case.BLOCK_J)
    return b_column, b_other


@gluon.jit
def _read_terms(s_terms, COUNT: gl.constexpr):
    """The terms of the columns of a product: a thread reads those that it holds, and keeps them where they are."""
    b_terms = in_order(s_terms.reshape([COUNT]).load(_terms_layout(COUNT)))
    return gl.convert_layout(b_terms, gl.SliceLayout(0, _product_layout(COUNT)), assert_trivial=True)


@gluon.jit
def _as_operand(b_weight, dtype: gl.constexpr, DV: gl.constexpr):
    """Weights rounded, in the registers in which ``wgmma`` takes them: those in which it left their logits."""
    return gl.convert_layout(b_weight.to(dtype), gl.DotOperandLayout(0, _product_layout(DV), 2), assert_trivial=True)


@gluon.constexpr_function
def _product_layout(columns):
    """How a warp group's product of so many columns lies in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _terms_layout(count):
    """Terms as they lie in memory, see :func:`mgk.ops.triton.kernels.terms.place`: a thread reads those of its columns,
    four at a time, and all rows read the same."""
    registers = [[1], [2], *([1 << bit] for bit in range(4, count.bit_length() - 1))]
    return gl.DistributedLinearLayout(registers, [[4], [8], [0], [0], [0]], [[0], [0]], [], [count])
