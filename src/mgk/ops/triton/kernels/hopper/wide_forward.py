"""The forward kernel for wide heads on Hopper, in which warps have roles: one copies, two groups of four multiply.

What :mod:`mgk.ops.triton.forward` computes, for calls without masks or dropout. With heads of 128 numbers a
multiprocessor has registers for two warp groups of queries and no more, and whatever they wait for is lost. So nobody
waits for a copy, and a group weighs the pairs of one block while its product of the last block's weights and values
still runs. Triton's compiler has no such overlap; in Gluon, the language below it, a product is issued and awaited
where that is written. A program takes tile after tile (128 queries of a head, the two groups one half each): the next
one's queries come while the last one's output leaves. Under causality a long tile and a short one make a pair.

Shared memory is handed over by barriers: ``full`` when it can be read, ``empty`` when both groups have read it. Every
handover of a stage flips its barrier's phase. Names as in :mod:`mgk.ops.triton.tiles`; ``s_`` is shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mgk.ops.triton.kernels.hopper.copies import copy_in, copy_out
from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    VARYING_WITH_WIDTH,
    in_order,
    mark_unfactored,
    partial_sums,
    place,
    safe_ratio,
)

GROUP_ROWS = gl.constexpr(64)
"""Queries of a warp group: what one instruction of its matrix unit takes."""
TILE_ROWS = gl.constexpr(128)
MOST_REGISTERS = gl.constexpr(240)
"""Of a thread that multiplies; those of the warp that copies have few, and the other group the rest."""


@gluon.jit(
    do_not_specialize=[*VARYING_WITH_WIDTH, "num_tiles", "num_rows", "section"],
    do_not_specialize_on_alignment=HEAD_NUMBERS,
)
def attention_forward_wide(
    d_query, d_key, d_value, d_out, d_column, d_other, p_row, p_row_second, p_unfactored, p_level, p_shift, p_origin, p_normaliser,
    scale, num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles, num_rows,
    num_blocks, section, width, largest_ratio, lowest_sum, highest_sum, margin,
    TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, HAS_ORIGIN: gl.constexpr, HAS_LEVEL: gl.constexpr,
    CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr, BLOCK_J: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr,
):  # fmt: skip
    """Write ``out [B, H, Nq, Dv]`` and ``normaliser [B, H, Nq]`` (natural logarithm, NaN where unsafe); of a pair also
    ``row`` and ``alpha``, as :func:`mgk.ops.triton.forward.attention_forward` does.

    ``other`` is what a pair has for a column beside its first term: ``rho``, or the second term if the choice is hard;
    then both are not scaled yet, so that products can be added.
    ``HAS_LEVEL``: columns hold the level of the logits. Without it these are dot products of one component, which have
    no columns, weighed against the row's largest logit in the first block. Heads of a ``section`` are worked on at a
    time. Under causality there are no more queries than keys. ``PING_PONG``: the two groups issue their products in turn.
    """
    s_query = gl.allocate_shared_memory(d_query.dtype, [2, 1, 1, GROUP_ROWS, D], d_query.layout)
    s_key = gl.allocate_shared_memory(d_key.dtype, [STAGES, 1, 1, BLOCK_J, D], d_key.layout)
    s_value = gl.allocate_shared_memory(d_value.dtype, [STAGES, 1, 1, BLOCK_J, DV], d_value.layout)
    s_out = gl.allocate_shared_memory(d_out.dtype, [2, 1, 1, GROUP_ROWS, DV], d_out.layout)
    s_column = s_query
    s_other = s_query
    if HAS_LEVEL:
        s_column = gl.allocate_shared_memory(gl.float32, [STAGES + 1, 1, BLOCK_J], d_column.layout)
    if TWO_SHIFTS:
        s_other = gl.allocate_shared_memory(gl.float32, [STAGES + 1, 1, BLOCK_J], d_other.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    s_query_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    s_query_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    s_key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    s_key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    s_value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    s_value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    s_turn = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(s_query_full, count=1)
    mbarrier.init(s_query_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(s_key_full.index(stage), count=1)
        mbarrier.init(s_key_empty.index(stage), count=2)
        mbarrier.init(s_value_full.index(stage), count=1)
        mbarrier.init(s_value_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(s_turn.index(group), count=1)
    fence_async_shared()
    if HAS_LEVEL:
        _await_terms()
    gl.warp_specialize([
        (_attend, (
            gl.constexpr(0), d_out, s_query, s_key, s_value, s_column, s_other, s_out, s_query_full, s_query_empty,
            s_key_full, s_key_empty, s_value_full, s_value_empty, s_turn, p_row, p_row_second, p_unfactored, p_level, p_shift,
            p_origin, p_normaliser, scale, num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles,
            num_rows, num_blocks, section, width, largest_ratio, lowest_sum, highest_sum, margin, TWO_SHIFTS,
            HARD, HAS_ORIGIN, HAS_LEVEL, CAUSAL, PING_PONG, STAGES, BLOCK_J, D, DV,
        )),
        (_attend, (
            gl.constexpr(1), d_out, s_query, s_key, s_value, s_column, s_other, s_out, s_query_full, s_query_empty,
            s_key_full, s_key_empty, s_value_full, s_value_empty, s_turn, p_row, p_row_second, p_unfactored, p_level, p_shift,
            p_origin, p_normaliser, scale, num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles,
            num_rows, num_blocks, section, width, largest_ratio, lowest_sum, highest_sum, margin, TWO_SHIFTS,
            HARD, HAS_ORIGIN, HAS_LEVEL, CAUSAL, PING_PONG, STAGES, BLOCK_J, D, DV,
        )),
        (_copy, (
            d_query, d_key, d_value, d_column, d_other, s_query, s_key, s_value, s_column, s_other, s_query_full,
            s_query_empty, s_key_full, s_key_empty, s_value_full, s_value_empty, num_heads, group_size, num_queries,
            num_keys, num_tiles, num_rows, num_blocks, section, TWO_SHIFTS, HARD, HAS_LEVEL, CAUSAL, STAGES, BLOCK_J, D, DV,
        )),
    ], [4, 1], [MOST_REGISTERS, 24])  # fmt: skip


@gluon.jit
def _await_terms():
    """Until the kernel before, which makes them, has ended. This one is launched earlier, so that nobody waits for the
    launch."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _count_tiles(num_tiles, CAUSAL: gl.constexpr):
    """Of this program. Under causality it takes them in pairs, a long row of blocks and a short one, so that all
    programs have as much to do; unless there is a program for each."""
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    count = (num_tiles - i_program + num_programs - 1) // num_programs
    if CAUSAL:
        num_pairs = num_tiles // 2
        own_pairs = (num_pairs - i_program + num_programs - 1) // num_programs
        # The last of an odd number is left to whoever would have had the next pair.
        is_left = (num_tiles % 2 == 1) & (num_pairs % num_programs == i_program)
        in_pairs = 2 * own_pairs + gl.where(is_left, 1, 0)
        count = gl.where(num_programs < num_tiles, in_pairs, count)
    return count


@gluon.jit
def _find_tile(
    i_own, num_tiles, num_heads, group_size, num_queries, num_keys, num_rows, num_blocks, section,
    CAUSAL: gl.constexpr, BLOCK_J: gl.constexpr,
):  # fmt: skip
    """``batch, query head, key/value head, block, full, count``: the place of this program's tile number ``own``, and
    how many blocks of keys it sees; of the first ``full`` every row sees all."""
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    i_tile = i_own * num_programs + i_program
    if CAUSAL:
        i_in_pairs = 2 * (i_own // 2 * num_programs + i_program) + i_own % 2
        i_tile = gl.where(num_programs < num_tiles, i_in_pairs, i_tile)
        # Of a section by turns the longest row and the shortest; its keys stay in the cache.
        i_section = i_tile // (section * num_blocks)
        i_within = i_tile % (section * num_blocks)
        heads = gl.minimum(section, num_rows - i_section * section)
        i_rank = gl.where(i_within % 2 == 0, i_within // 2, heads * num_blocks - 1 - i_within // 2)
        i_block = num_blocks - 1 - i_rank // heads
        i_row = i_section * section + i_rank % heads
        first_unseen = i_block * TILE_ROWS + (num_keys - num_queries) + 1
        full = gl.minimum(first_unseen, num_keys) // BLOCK_J
        count = (gl.minimum(first_unseen + TILE_ROWS - 1, num_keys) + BLOCK_J - 1) // BLOCK_J
    else:
        i_block = i_tile % num_blocks
        i_row = i_tile // num_blocks
        count = (num_keys + BLOCK_J - 1) // BLOCK_J
        full = count
    i_batch = i_row // num_heads
    i_query_head = i_row % num_heads
    return i_batch, i_query_head, i_query_head // group_size, i_block, full, count


@gluon.jit
def _copy(
    d_query, d_key, d_value, d_column, d_other, s_query, s_key, s_value, s_column, s_other, s_query_full, s_query_empty,
    s_key_full, s_key_empty, s_value_full, s_value_empty, num_heads, group_size, num_queries, num_keys, num_tiles,
    num_rows, num_blocks, section,
    TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, HAS_LEVEL: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_J: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """The warp that copies: queries, keys, values and terms of columns, as soon as there is room."""
    M: gl.constexpr = 2 if TWO_SHIFTS else 1
    TERM_BYTES: gl.constexpr = 4 * BLOCK_J * ((1 if HAS_LEVEL else 0) + (1 if TWO_SHIFTS else 0))
    num_copied = 0
    for i_own in range(_count_tiles(num_tiles, CAUSAL)):
        i_batch, i_query_head, i_kv_head, i_block, _, count = _find_tile(
            i_own, num_tiles, num_heads, group_size, num_queries, num_keys, num_rows, num_blocks, section,
            CAUSAL, BLOCK_J,
        )  # fmt: skip
        i_kv = i_batch * (num_heads // group_size) + i_kv_head
        i_other = i_kv * M + 1 if HARD else i_kv
        mbarrier.wait(s_query_empty, (i_own & 1) ^ 1)
        mbarrier.expect(s_query_full, TILE_ROWS * D * 2 + TERM_BYTES)
        # Terms of the first block come with the queries, others with the values of the block before.
        if HAS_LEVEL:
            copy_in(d_column, [i_kv * M, 0], s_query_full, s_column.index(STAGES))
        if TWO_SHIFTS:
            copy_in(d_other, [i_other, 0], s_query_full, s_other.index(STAGES))
        for group in gl.static_range(2):
            o_first = i_block * TILE_ROWS + group * GROUP_ROWS
            copy_in(
                d_query, [i_batch, i_query_head, o_first, 0], s_query_full, s_query.index(group)
            )
        for i in range(count):
            stage = num_copied % STAGES
            was_read = ((num_copied // STAGES) & 1) ^ 1
            o_j = i * BLOCK_J
            mbarrier.wait(s_key_empty.index(stage), was_read)
            key_full = s_key_full.index(stage)
            mbarrier.expect(key_full, BLOCK_J * D * 2)
            copy_in(d_key, [i_batch, i_kv_head, o_j, 0], key_full, s_key.index(stage))
            mbarrier.wait(s_value_empty.index(stage), was_read)
            value_full = s_value_full.index(stage)
            mbarrier.expect(value_full, BLOCK_J * DV * 2 + TERM_BYTES)
            # Terms of the next block: they are read before these values are done with.
            if HAS_LEVEL:
                copy_in(d_column, [i_kv * M, o_j + BLOCK_J], value_full, s_column.index(stage))
            if TWO_SHIFTS:
                copy_in(d_other, [i_other, o_j + BLOCK_J], value_full, s_other.index(stage))
            copy_in(d_value, [i_batch, i_kv_head, o_j, 0], value_full, s_value.index(stage))
            num_copied += 1


@gluon.jit
def _attend(
    GROUP: gl.constexpr, d_out, s_query, s_key, s_value, s_column, s_other, s_out, s_query_full, s_query_empty,
    s_key_full, s_key_empty, s_value_full, s_value_empty, s_turn, p_row, p_row_second, p_unfactored, p_level,
    p_shift, p_origin, p_normaliser, scale, num_heads, group_size, num_queries, num_keys, padded_queries, num_tiles,
    num_rows, num_blocks, section, width, largest_ratio, lowest_sum, highest_sum, margin,
    TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, HAS_ORIGIN: gl.constexpr, HAS_LEVEL: gl.constexpr,
    CAUSAL: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr, BLOCK_J: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr,
):  # fmt: skip
    """A warp group: its half of every tile, tile after tile."""
    pairs: gl.constexpr = _product_layout(BLOCK_J)
    outputs: gl.constexpr = _product_layout(DV)
    rows: gl.constexpr = gl.SliceLayout(1, pairs)
    s_own_query = s_query.index(GROUP).reshape([GROUP_ROWS, D])
    causal_offset = num_keys - num_queries
    # Blocks, and how often the two groups have taken turns.
    num_read = 0
    num_turns = 0
    for i_own in range(_count_tiles(num_tiles, CAUSAL)):
        i_batch, i_query_head, i_kv_head, i_block, full, count = _find_tile(
            i_own, num_tiles, num_heads, group_size, num_queries, num_keys, num_rows, num_blocks, section,
            CAUSAL, BLOCK_J,
        )  # fmt: skip
        i_head = (i_batch * num_heads + i_query_head).to(gl.int64)
        i_kv = (i_batch * (num_heads // group_size) + i_kv_head).to(gl.int64)
        o_first = i_block * TILE_ROWS + GROUP * GROUP_ROWS
        o_i = o_first + gl.arange(0, GROUP_ROWS, rows)
        b_zero = gl.full([GROUP_ROWS, BLOCK_J], 0.0, gl.float32, pairs)
        b_out = gl.full([GROUP_ROWS, DV], 0.0, gl.float32, outputs)
        b_reference = gl.full([GROUP_ROWS], 0.0, gl.float32, rows)
        b_first_row = b_reference
        b_factor = b_reference

        queries: gl.constexpr = _product_layout(D)
        b_first_shift = b_reference
        b_second_shift = b_reference
        b_first_origin = 0.0
        b_second_origin = 0.0
        if TWO_SHIFTS:
            # On their way before the queries are awaited.
            p_own_shift = p_shift + i_kv_head * 2 * width
            b_first_shift = _shift_of(p_own_shift, width, D, gl.SliceLayout(0, queries))
            b_second_shift = _shift_of(p_own_shift + width, width, D, gl.SliceLayout(0, queries))
            if HAS_ORIGIN:
                b_first_origin = _shifted_origin(p_own_shift, p_origin + i_kv * D, width, D)
                b_second_origin = _shifted_origin(p_own_shift + width, p_origin + i_kv * D, width, D)

        # The first block has no other to run beside; the terms of a row are made meanwhile.
        stage = num_read % STAGES
        mbarrier.wait(s_query_full, i_own & 1)
        mbarrier.wait(s_key_full.index(stage), (num_read // STAGES) & 1)
        s_own_key = s_key.index(stage).reshape([BLOCK_J, D]).permute([1, 0])
        b_product = warpgroup_mma(s_own_query, s_own_key, b_zero, use_acc=False, is_async=True)
        if TWO_SHIFTS:
            b_first_row, b_factor = _row_terms(
                s_own_query, b_first_shift, b_second_shift, b_first_origin, b_second_origin,
                p_row + i_head * 2 * padded_queries, p_row_second + i_head * padded_queries, p_unfactored, i_kv, o_i, scale,
                padded_queries, largest_ratio, HARD, queries, rows,
            )  # fmt: skip
        b_column = b_zero
        b_other = b_zero
        if HAS_LEVEL:
            b_column = _read_terms(s_column.index(STAGES), BLOCK_J, pairs)
        if TWO_SHIFTS:
            b_other = _read_terms(s_other.index(STAGES), BLOCK_J, pairs)
        b_product = warpgroup_mma_wait(0, deps=[b_product])
        if HARD:
            b_product += _larger_bias(b_column, b_other, b_factor)
        mbarrier.arrive(s_key_empty.index(stage), count=1)
        if not HAS_LEVEL:
            b_logit = b_product * scale
            if CAUSAL:
                b_logit = gl.where(_sees(o_i, 0, causal_offset, BLOCK_J, pairs), b_logit, float("-inf"))
            b_reference = gl.max(b_logit, 1) + margin
        b_weight = _weights(
            b_product, b_column, b_other, b_factor, b_reference, o_i, 0, scale, causal_offset,
            TWO_SHIFTS, HARD, HAS_LEVEL, CAUSAL, BLOCK_J, pairs,
        )  # fmt: skip
        b_sum = partial_sums(b_weight)
        b_weight = _as_operand(b_weight, s_value.dtype, outputs)

        for i in range(1, gl.maximum(full, 1)):
            b_out, b_sum, b_weight = _attend_block(
                b_out, b_sum, b_weight, b_zero, b_factor, b_reference, s_own_query, s_key, s_value, s_column, s_other,
                s_key_full, s_key_empty, s_value_full, s_value_empty, s_turn, num_read + i, num_turns + i - 1, o_i,
                i * BLOCK_J, scale, causal_offset,
                GROUP, TWO_SHIFTS, HARD, HAS_LEVEL, False, PING_PONG, STAGES, BLOCK_J, D, DV, pairs, outputs,
            )  # fmt: skip
        if CAUSAL:
            for i in range(gl.maximum(full, 1), count):
                b_out, b_sum, b_weight = _attend_block(
                    b_out, b_sum, b_weight, b_zero, b_factor, b_reference, s_own_query, s_key, s_value, s_column,
                    s_other, s_key_full, s_key_empty, s_value_full, s_value_empty, s_turn, num_read + i,
                    num_turns + i - 1, o_i, i * BLOCK_J, scale, causal_offset,
                    GROUP, TWO_SHIFTS, HARD, HAS_LEVEL, True, PING_PONG, STAGES, BLOCK_J, D, DV, pairs, outputs,
                )  # fmt: skip
        num_read += count
        num_turns += count - 1
        mbarrier.arrive(s_query_empty, count=1)

        stage = (num_read - 1) % STAGES
        mbarrier.wait(s_value_full.index(stage), ((num_read - 1) // STAGES) & 1)
        b_out = warpgroup_mma(b_weight, s_value.index(stage).reshape([BLOCK_J, DV]), b_out, is_async=True)
        b_total = gl.convert_layout(gl.sum(b_sum, 1), rows, assert_trivial=True)
        b_normaliser = b_first_row + b_reference + gl.log2(b_total)
        if HAS_LEVEL:
            b_normaliser += gl.load(p_level + i_kv)
        b_safe = (b_total >= lowest_sum) & (b_total <= highest_sum)
        b_normaliser = gl.where(b_safe, b_normaliser * 0.6931471805599453, float("nan"))
        gl.store(p_normaliser + i_head * num_queries + o_i, b_normaliser, mask=o_i < num_queries)
        b_inverse = gl.convert_layout(1.0 / b_total, gl.SliceLayout(1, outputs), assert_trivial=True)
        b_out = warpgroup_mma_wait(0, deps=[b_out])
        mbarrier.arrive(s_value_empty.index(stage), count=1)
        b_out = (b_out * b_inverse.expand_dims(1)).to(s_out.dtype)
        # The last tile's output has left.
        tma.store_wait(0)
        s_out.index(GROUP).reshape([GROUP_ROWS, DV]).store(b_out)
        fence_async_shared()
        copy_out(d_out, [i_batch, i_query_head, o_first, 0], s_out.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def _attend_block(
    b_out, b_sum, b_weight, b_zero, b_factor, b_reference, s_own_query, s_key, s_value, s_column, s_other, s_key_full,
    s_key_empty, s_value_full, s_value_empty, s_turn, num_read, num_turns, o_i, o_j, scale, causal_offset,
    GROUP: gl.constexpr, TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, HAS_LEVEL: gl.constexpr, MASKED: gl.constexpr,
    PING_PONG: gl.constexpr, STAGES: gl.constexpr, BLOCK_J: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    pairs: gl.constexpr, outputs: gl.constexpr,
):  # fmt: skip
    """Multiply the last block's weights with its values and, meanwhile, weigh one block of keys."""
    stage = num_read % STAGES
    last = (num_read - 1) % STAGES
    b_column = b_zero
    b_other = b_zero
    b_start = b_zero
    if HARD:
        # Terms of this block came with the last one's values.
        mbarrier.wait(s_value_full.index(last), ((num_read - 1) // STAGES) & 1)
        b_column = _read_terms(s_column.index(last), BLOCK_J, pairs)
        b_other = _read_terms(s_other.index(last), BLOCK_J, pairs)
        b_start = _larger_bias(b_column, b_other, b_factor)
    mbarrier.wait(s_key_full.index(stage), (num_read // STAGES) & 1)
    if PING_PONG:
        # The other group has issued its products: while ours run, it weighs.
        mbarrier.wait(s_turn.index(GROUP), (num_turns & 1) ^ (1 - GROUP))
    s_own_key = s_key.index(stage).reshape([BLOCK_J, D]).permute([1, 0])
    b_product = warpgroup_mma(s_own_query, s_own_key, b_start, use_acc=HARD, is_async=True)
    if not HARD:
        mbarrier.wait(s_value_full.index(last), ((num_read - 1) // STAGES) & 1)
    b_out = warpgroup_mma(b_weight, s_value.index(last).reshape([BLOCK_J, DV]), b_out, is_async=True)
    if PING_PONG:
        mbarrier.arrive(s_turn.index(1 - GROUP), count=1)
    b_product = warpgroup_mma_wait(1, deps=[b_product])
    mbarrier.arrive(s_key_empty.index(stage), count=1)
    # Only now: measured, pairs are slower if they read them before the product is awaited.
    if HAS_LEVEL and not HARD:
        b_column = _read_terms(s_column.index(last), BLOCK_J, pairs)
    if TWO_SHIFTS and not HARD:
        b_other = _read_terms(s_other.index(last), BLOCK_J, pairs)
    b_new_weight = _weights(
        b_product, b_column, b_other, b_factor, b_reference, o_i, o_j, scale, causal_offset,
        TWO_SHIFTS, HARD, HAS_LEVEL, MASKED, BLOCK_J, pairs,
    )  # fmt: skip
    b_sum += partial_sums(b_new_weight)
    b_out = warpgroup_mma_wait(0, deps=[b_out])
    mbarrier.arrive(s_value_empty.index(last), count=1)
    return b_out, b_sum, _as_operand(b_new_weight, s_value.dtype, outputs)


@gluon.jit
def _larger_bias(b_column, b_other, b_factor):
    """Where the product of a hard choice starts from, ``[rows, BLOCK_J]``: only the biases compete."""
    return gl.maximum(b_column.expand_dims(0), b_factor.expand_dims(1) + b_other.expand_dims(0))


@gluon.jit
def _weights(
    b_product, b_column, b_other, b_factor, b_reference, o_i, o_j, scale, causal_offset,
    TWO_SHIFTS: gl.constexpr, HARD: gl.constexpr, HAS_LEVEL: gl.constexpr, MASKED: gl.constexpr, BLOCK_J: gl.constexpr,
    pairs: gl.constexpr,
):  # fmt: skip
    """Of one block of keys. ``factor`` of a row is ``alpha``. (If the choice is hard, products hold the bias.)"""
    if HARD:
        b_logit = b_product * scale
    elif HAS_LEVEL:
        b_logit = b_product * scale + b_column.expand_dims(0)
    else:
        b_logit = b_product * scale - b_reference.expand_dims(1)
    b_weight = gl.exp2(b_logit)
    if TWO_SHIFTS and not HARD:
        b_weight = b_weight + b_weight * (b_factor.expand_dims(1) * b_other.expand_dims(0))
    if MASKED:
        b_weight = gl.where(_sees(o_i, o_j, causal_offset, BLOCK_J, pairs), b_weight, 0.0)
    return b_weight


@gluon.jit
def _sees(o_i, o_j, causal_offset, BLOCK_J: gl.constexpr, pairs: gl.constexpr):
    """Whether a query sees a key, ``[rows, BLOCK_J]``. (Keys beyond the end have -inf as their column.)"""
    o_columns = o_j + gl.arange(0, BLOCK_J, gl.SliceLayout(0, pairs))
    return o_columns.expand_dims(0) <= o_i.expand_dims(1) + causal_offset


@gluon.jit
def _shift_of(p_shift, width, D: gl.constexpr, layout: gl.constexpr):
    """The shift of one component, ``[D]``, 0 beyond its width."""
    o_d = gl.arange(0, D, layout)
    return gl.load(p_shift + o_d, mask=o_d < width, other=0.0)


@gluon.jit
def _shifted_origin(p_shift, p_origin, width, D: gl.constexpr):
    """``origin . shift``."""
    layout: gl.constexpr = gl.BlockedLayout([D // 32], [32], [4], [0])
    return gl.sum(gl.load(p_origin + gl.arange(0, D, layout)) * _shift_of(p_shift, width, D, layout), 0)


@gluon.jit
def _row_terms(
    s_own_query, b_first_shift, b_second_shift, b_first_origin, b_second_origin, p_row, p_row_second, p_unfactored, i_kv, o_i,
    scale, padded_queries, largest_ratio, HARD: gl.constexpr, queries: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    """Of a pair, ``scale (q_i - origin) . shift_r``: the first, and ``alpha``; or if the choice is hard how far the
    second exceeds it, before it is scaled. Both rows and ``alpha`` are kept for repair and backward."""
    b_query = s_own_query.load(queries).to(gl.float32)
    b_first = gl.sum(b_query * b_first_shift.expand_dims(0), 1) - b_first_origin
    b_second = gl.sum(b_query * b_second_shift.expand_dims(0), 1) - b_second_origin
    b_first = gl.convert_layout(b_first, rows, assert_trivial=True)
    b_second = gl.convert_layout(b_second, rows, assert_trivial=True)
    # Scaled last, so that a tie is one.
    b_factor = b_second - b_first
    b_row_second = b_factor * scale
    if not HARD:
        b_row_second = safe_ratio(b_row_second, largest_ratio)
        mark_unfactored(p_unfactored, i_kv, b_row_second)
    o_row = place(o_i)
    gl.store(p_row + o_row, b_first * scale)
    gl.store(p_row + padded_queries + o_row, b_second * scale)
    gl.store(p_row_second + o_row, b_row_second)
    return b_first * scale, b_factor if HARD else b_row_second


@gluon.jit
def _as_operand(b_weight, dtype: gl.constexpr, outputs: gl.constexpr):
    """Rounded, in the registers in which the matrix units take them: those in which they were left."""
    return gl.convert_layout(b_weight.to(dtype), gl.DotOperandLayout(0, outputs, 2), assert_trivial=True)


@gluon.constexpr_function
def _product_layout(columns):
    """What a warp group's product of so many columns lies like."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _terms_layout(count):
    """Terms as they lie in memory, see :func:`mgk.ops.triton.tiles.place`: a thread reads those of its columns, four
    at a time, and all rows read the same."""
    registers = [[1], [2], *([1 << bit] for bit in range(4, count.bit_length() - 1))]
    return gl.DistributedLinearLayout(registers, [[4], [8], [0], [0], [0]], [[0], [0]], [], [count])


@gluon.jit
def _read_terms(s_terms, COUNT: gl.constexpr, pairs: gl.constexpr):
    """Of the columns of a product: a thread reads those that it holds, and keeps them where they are."""
    b_terms = in_order(s_terms.reshape([COUNT]).load(_terms_layout(COUNT)))
    return gl.convert_layout(b_terms, gl.SliceLayout(0, pairs), assert_trivial=True)
