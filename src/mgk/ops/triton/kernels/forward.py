"""The forward kernel: one program for one block of queries of one head.

Weights are not taken against a running maximum, which would cost a comparison and a rescaling a pair. Distances are
measured from a level that the columns hold already, about the logit of the first query and key; other logits (and all
in fp16, where weights must stay small) from a reference that stays fixed, the row's largest logit in the first block.
Two shifted keys of one variance need a single exponential, ``exp(s_ij + w_j0) (1 + alpha_i rho_j)``.

All this is exact as long as a row's sum stays within what the number format holds. Rows that leave it (their sum is
checked at the end, and ``alpha`` or ``rho`` out of range are NaN to begin with) get NaN as their normaliser, and a
second kernel attends to those again, with a running maximum and one exponential for each component. The choice is made
row by row from what the row sees, so that later tokens never change the bits of earlier rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    VARYING_WITH_WIDTH,
    awaited,
    component_bias,
    in_order,
    is_visible,
    load_rows,
    load_terms,
    load_tile,
    mark_unfactored,
    partial_sums,
    place,
    row_term,
    rows_unless_dropped,
    safe_ratio,
    terms_at,
    visible_keys,
)

MOST_ROWS_TOGETHER = tl.constexpr(1024)
"""Rows that a program of the second kernel looks at before it ends."""


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_forward(
    d_query, d_key, d_value, d_out, p_row, p_column, p_row_second, p_column_second, p_unscaled, p_unfactored, p_level, p_scale, p_shift,
    p_origin, p_normaliser,
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random, stride_mask_batch, stride_mask_head,
    stride_mask_row, stride_mask_column, rows_per_span,
    scale, threshold, keep_scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys,
    num_blocks, width, largest_ratio, lowest_sum, highest_sum, margin,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, TWO_KEYS: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_LEVEL: tl.constexpr,
    FROM_BIAS: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr, AWAIT_PRODUCTS: tl.constexpr,
    DIRECT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write ``out [B, H, Nq, Dv]`` and ``normaliser [B, H, Nq]`` (natural logarithm, NaN where unsafe)."""
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    if CAUSAL:
        # The longest rows first: short ones fill the gaps at the end.
        i_block = num_blocks - 1 - i_block
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    num_kv_heads = num_heads // group_size
    i_kv = i_batch * num_kv_heads + i_kv_head
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)

    p_normaliser += i_head.to(tl.int64) * num_queries
    if HAS_ROW:
        p_row += i_head.to(tl.int64) * M * padded_queries
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if TWO_SHIFTS:
        p_column_second += i_kv.to(tl.int64) * padded_keys
    if FROM_BIAS:
        p_unscaled += i_kv.to(tl.int64) * 2 * padded_keys
    if HAS_MASK:
        p_mask += i_batch.to(tl.int64) * stride_mask_batch + i_query_head.to(tl.int64) * stride_mask_head
    if not ONE_VARIANCE:
        p_scale += i_kv_head * M

    first_key, end_full, end_key, causal_offset = visible_keys(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    b_query = load_tile(d_query, i_batch, i_query_head, o_first, BLOCK_I, D)
    b_row_second = tl.zeros([BLOCK_I], tl.float32)
    b_first_row = tl.zeros([BLOCK_I], tl.float32)
    b_gap = tl.zeros([BLOCK_I], tl.float32)
    if TWO_SHIFTS:
        # The query is here already: its row terms are made on the way, and kept for repair and backward.
        b_first = row_term(b_query, p_shift, p_origin, i_kv_head, i_kv, 0, width, M, HAS_ORIGIN, D)
        b_second = row_term(b_query, p_shift, p_origin, i_kv_head, i_kv, 1, width, M, HAS_ORIGIN, D)
        # Scaled last: the compiler would round one of the two products and not the other, and no tie were one.
        b_gap = (b_second - b_first) * scale
        b_first_row = b_first * scale
        tl.store(p_row + place(o_i), b_first_row)
        tl.store(p_row + padded_queries + place(o_i), b_second * scale)
        p_row_second += i_head.to(tl.int64) * padded_queries
        if HARD:
            tl.store(p_row_second + place(o_i), b_gap)
            if FROM_BIAS:
                b_gap = b_second - b_first
        else:
            b_row_second = safe_ratio(b_gap, largest_ratio)
            mark_unfactored(p_unfactored, i_kv, b_row_second)
            tl.store(p_row_second + place(o_i), b_row_second)
        # The last block may lie in the padding, and has done its work.
        if o_first >= num_queries:
            end_key = 0
            end_full = 0
    b_row_random = tl.zeros([BLOCK_I], tl.int32)
    if DROPOUT:
        b_row_random = tl.load(p_row_random + i_head.to(tl.int64) * padded_queries + place(o_i))
        p_column_random += i_kv.to(tl.int64) * (padded_keys // 2)

    b_out = tl.zeros([BLOCK_I, DV], tl.float32)
    b_sum = tl.zeros([BLOCK_I, 4], tl.float32)
    b_reference = tl.zeros([BLOCK_I], tl.float32)
    if not HAS_LEVEL and end_key > first_key:
        b_reference = _largest_logit(
            b_query, b_gap, d_key, p_row, p_column, p_scale, p_mask, i_batch, i_kv_head, first_key, o_i, scale,
            stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
            M, SHARED_KEY, TWO_SHIFTS, TWO_KEYS, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, CAUSAL, HAS_MASK, INPUT_PRECISION, BLOCK_J, D,
        ) + margin  # fmt: skip
    # Of one component a pointer goes along, which takes fewer registers than to find it from the block's number.
    ALONE: tl.constexpr = HAS_LEVEL and M == 1
    p_columns = p_column + first_key if ALONE else p_column
    for o_j in tl.range(first_key, end_full, BLOCK_J):
        b_out, b_sum = _attend(
            b_out, b_sum, b_reference, b_query, b_gap, b_row_second, b_row_random, d_key, d_value, p_row, p_column, p_columns,
            p_column_second, p_unscaled, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_j, o_i, scale, threshold,
            stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
            M, SHARED_KEY, TWO_SHIFTS, TWO_KEYS, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, False, HAS_MASK, HAS_LEVEL, FROM_BIAS, DROPOUT,
            INPUT_PRECISION, AWAIT_PRODUCTS, DIRECT, BLOCK_J, D, DV,
        )  # fmt: skip
        if ALONE:
            p_columns += BLOCK_J
    if CAUSAL:
        for o_j in tl.range(end_full, end_key, BLOCK_J):
            b_out, b_sum = _attend(
                b_out, b_sum, b_reference, b_query, b_gap, b_row_second, b_row_random, d_key, d_value, p_row, p_column,
                p_columns, p_column_second, p_unscaled, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_j, o_i, scale,
                threshold, stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
                padded_keys,
                M, SHARED_KEY, TWO_SHIFTS, TWO_KEYS, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, True, HAS_MASK, HAS_LEVEL, FROM_BIAS,
                DROPOUT, INPUT_PRECISION, AWAIT_PRODUCTS, DIRECT, BLOCK_J, D, DV,
            )  # fmt: skip
            if ALONE:
                p_columns += BLOCK_J

    b_sum = tl.sum(b_sum, 1)
    b_normaliser = b_first_row + b_reference + tl.math.log2(b_sum)
    if HAS_LEVEL:
        b_normaliser += tl.load(p_level + i_kv)
    b_safe = (b_sum >= lowest_sum) & (b_sum <= highest_sum)
    b_normaliser = tl.where(b_safe, b_normaliser * 0.6931471805599453, float("nan"))
    # Where there is nothing to see, 0 is right: padding would else be repaired.
    b_normaliser = tl.where(end_key > first_key, b_normaliser, float("-inf"))
    b_sum = tl.where(end_key > first_key, b_sum, 1.0)
    tl.store(p_normaliser + o_i, b_normaliser, mask=o_i < num_queries)
    b_out = b_out * (keep_scale / b_sum)[:, None]
    d_out.store([i_batch, i_query_head, o_first, 0], b_out.to(b_query.dtype).reshape(1, 1, BLOCK_I, DV))


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_repair(
    p_query, p_key, p_value, p_out, p_row, p_column, p_level, p_scale, p_normaliser, p_mask, p_key_range,
    p_query_range, p_spans, p_row_random, p_column_random, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_out_batch, stride_out_head, stride_out_token, stride_mask_batch, stride_mask_head, stride_mask_row,
    stride_mask_column, rows_per_span, scale, threshold, keep_scale, num_heads, group_size, num_queries, num_keys,
    padded_queries, padded_keys, num_blocks, blocks_together, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr,
    ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_RANGE: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEVEL: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Attend again, exactly, for the rows whose normaliser is NaN. Most programs find none and end: each looks at some
    blocks together, since to start a program takes longer than that."""
    num_programs = (num_blocks + blocks_together - 1) // blocks_together
    i_first = tl.program_id(0) % num_programs * blocks_together
    i_head = tl.program_id(0) // num_programs
    p_normaliser += i_head.to(tl.int64) * num_queries
    o_all = tl.arange(0, MOST_ROWS_TOGETHER)
    m_all = (o_all < blocks_together * BLOCK_I) & (i_first * BLOCK_I + o_all < num_queries)
    b_all = tl.load(p_normaliser + i_first * BLOCK_I + o_all, mask=m_all, other=0.0)
    if tl.max((b_all != b_all).to(tl.int32), 0) == 0:
        return
    for i_block in range(i_first, tl.minimum(i_first + blocks_together, num_blocks)):
        o_i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
        b_normaliser = tl.load(p_normaliser + o_i, mask=o_i < num_queries, other=0.0)
        b_unsafe = b_normaliser != b_normaliser
        if tl.max(b_unsafe.to(tl.int32), 0) != 0:
            _repair(
                b_unsafe, p_query, p_key, p_value, p_out, p_row, p_column, p_level, p_scale, p_normaliser, p_mask,
                p_key_range, p_query_range, p_spans, p_row_random, p_column_random, stride_query_batch, stride_query_head,
                stride_query_token, stride_key_batch, stride_key_head, stride_key_token, stride_value_batch,
                stride_value_head, stride_value_token, stride_out_batch, stride_out_head, stride_out_token,
                stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span, scale,
                threshold, keep_scale, i_block, i_head, num_heads, group_size, num_queries, num_keys, padded_queries,
                padded_keys, width, value_width,
                M, SHARED_KEY, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, CAUSAL, HAS_MASK, HAS_RANGE, PACKED, HAS_LEVEL, DROPOUT,
                INPUT_PRECISION, BLOCK_I, BLOCK_J, D, DV,
            )  # fmt: skip


@triton.jit
def _repair(
    b_unsafe, p_query, p_key, p_value, p_out, p_row, p_column, p_level, p_scale, p_normaliser, p_mask, p_key_range,
    p_query_range, p_spans, p_row_random, p_column_random, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_out_batch, stride_out_head, stride_out_token, stride_mask_batch, stride_mask_head, stride_mask_row,
    stride_mask_column, rows_per_span, scale, threshold, keep_scale, i_block, i_head, num_heads, group_size,
    num_queries, num_keys, padded_queries, padded_keys, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr,
    ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_RANGE: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEVEL: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One block of queries, of which the ``unsafe`` rows are written anew."""
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    if HAS_ROW:
        p_row += i_head.to(tl.int64) * M * padded_queries
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if HAS_MASK:
        p_mask += i_batch.to(tl.int64) * stride_mask_batch + i_query_head.to(tl.int64) * stride_mask_head
    if not ONE_VARIANCE:
        p_scale += i_kv_head * M
    first_key, _, end_key, causal_offset = visible_keys(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    b_query = load_rows(
        p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
        num_queries, width, BLOCK_I, D,
    )  # fmt: skip
    b_row_random = tl.zeros([BLOCK_I], tl.int32)
    if DROPOUT:
        b_row_random = tl.load(p_row_random + i_head.to(tl.int64) * padded_queries + place(o_i))
        p_column_random += i_kv.to(tl.int64) * (padded_keys // 2)
    b_out = tl.zeros([BLOCK_I, DV], tl.float32)
    b_sum = tl.zeros([BLOCK_I], tl.float32)
    b_maximum = tl.full([BLOCK_I], float("-inf"), tl.float32)
    for o_j in tl.range(first_key, end_key, BLOCK_J):
        b_out, b_sum, b_maximum = _attend_exactly(
            b_out, b_sum, b_maximum, b_query, b_row_random, p_key, p_value, p_row, p_column, p_scale, p_mask,
            p_column_random, i_batch, i_kv_head, o_j, o_i, stride_key_batch, stride_key_head, stride_key_token,
            stride_value_batch, stride_value_head, stride_value_token, scale, threshold, stride_mask_row,
            stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys, width, value_width,
            M, SHARED_KEY, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, CAUSAL, HAS_MASK, DROPOUT, INPUT_PRECISION, BLOCK_J, D, DV,
        )  # fmt: skip
    b_exact = b_maximum + tl.math.log2(b_sum)
    if HAS_LEVEL:
        b_exact += tl.load(p_level + i_kv)
    b_exact *= 0.6931471805599453
    b_exact = tl.where(b_sum == 0.0, float("-inf"), b_exact)
    tl.store(p_normaliser + o_i, b_exact, mask=(o_i < num_queries) & b_unsafe)
    b_out = b_out * (keep_scale / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    o_d = tl.arange(0, DV)
    p_out += i_batch.to(tl.int64) * stride_out_batch + i_query_head.to(tl.int64) * stride_out_head
    p_out += o_i.to(tl.int64)[:, None] * stride_out_token + o_d[None, :]
    m_out = ((o_i < num_queries) & b_unsafe)[:, None] & (o_d < value_width)[None, :]
    tl.store(p_out, b_out.to(b_query.dtype), mask=m_out)


@triton.jit
def _largest_logit(
    b_query, b_gap, d_key, p_row, p_column, p_scale, p_mask, i_batch, i_kv_head, o_j, o_i, scale, stride_mask_row,
    stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, TWO_KEYS: tl.constexpr, HAS_ROW: tl.constexpr,
    HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Of every row within one block of keys, ``[BLOCK_I]``; 0 where it sees none."""
    o_columns = o_j + tl.arange(0, BLOCK_J)
    b_zero = tl.zeros([b_query.shape[0]], tl.float32)
    b_largest = tl.full([b_query.shape[0], BLOCK_J], float("-inf"), tl.float32)
    b_product = b_largest
    if TWO_KEYS:
        b_logit = _two_key_logits(
            b_query, d_key, p_column, i_batch, i_kv_head, o_j, b_zero, scale, padded_keys,
            HAS_COLUMN, False, INPUT_PRECISION, False, BLOCK_J, D,
        )  # fmt: skip
        b_largest = tl.max(b_logit.reshape(b_query.shape[0], 2, BLOCK_J), 1)
    elif TWO_SHIFTS:
        b_key = load_tile(d_key, i_batch, i_kv_head, o_j, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        b_second = b_gap[:, None] + load_terms(p_column + padded_keys, o_j, BLOCK_J)[None, :]
        b_largest = b_product * scale + tl.maximum(load_terms(p_column, o_j, BLOCK_J)[None, :], b_second)
    for r in tl.static_range(0 if TWO_KEYS or TWO_SHIFTS else M):
        if r == 0 or not SHARED_KEY:
            i_key_head = i_kv_head if SHARED_KEY else i_kv_head * M + r
            b_key = load_tile(d_key, i_batch, i_key_head, o_j, BLOCK_J, D)
            b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + r)
        b_logit = b_product * b_scale + component_bias(
            p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_j, b_zero, padded_queries,
            HAS_ROW, HAS_COLUMN, True, BLOCK_J,
        )  # fmt: skip
        b_largest = tl.maximum(b_largest, b_logit)
    b_seen = is_visible(
        o_i[:, None], o_columns[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
        num_keys, CAUSAL, HAS_MASK,
    )  # fmt: skip
    b_largest = tl.max(tl.where(b_seen, b_largest, float("-inf")), 1)
    return tl.where(b_largest == float("-inf"), 0.0, b_largest)


@triton.jit
def _two_key_logits(
    b_query, d_key, p_column, i_batch, i_kv_head, o_j, b_reference, scale, padded_keys,
    HAS_COLUMN: tl.constexpr, HAS_LEVEL: tl.constexpr, INPUT_PRECISION: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The logits of two projected components side by side, ``[BLOCK_I, 2 * BLOCK_J]``: one copy, one product."""
    b_key = d_key.load([i_batch, 2 * i_kv_head, o_j, 0]).reshape(2 * BLOCK_J, D)
    b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
    b_bias = -b_reference[:, None]
    if HAS_COLUMN:
        o_both = tl.arange(0, 2 * BLOCK_J)
        o_both = o_both // BLOCK_J * padded_keys + place(o_both % BLOCK_J)
        b_column = (terms_at(p_column + o_j, o_both) if DIRECT else tl.load(p_column + o_j + o_both))[None, :]
        b_bias = b_column if HAS_LEVEL else b_column + b_bias
    return b_product * scale + b_bias


@triton.jit
def _attend(
    b_out, b_sum, b_reference, b_query, b_gap, b_row_second, b_row_random, d_key, d_value, p_row, p_column, p_columns, p_column_second,
    p_unscaled, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_j, o_i, scale, threshold, stride_mask_row,
    stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, TWO_KEYS: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LEVEL: tl.constexpr, FROM_BIAS: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    AWAIT_PRODUCTS: tl.constexpr, DIRECT: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add one block of keys, weighed against the fixed reference."""
    o_columns = o_j + tl.arange(0, BLOCK_J)
    if FROM_BIAS:
        # Only the biases compete. They do so while products of the last block run, and the product is added to them.
        b_second = b_gap[:, None] + load_terms(p_unscaled + padded_keys, o_j, BLOCK_J)[None, :]
        b_bias = tl.maximum(load_terms(p_unscaled, o_j, BLOCK_J)[None, :], b_second)
        b_key = load_tile(d_key, i_batch, i_kv_head, o_j, BLOCK_J, D)
        b_weight = tl.math.exp2(tl.dot(b_query, b_key.T, b_bias, input_precision=INPUT_PRECISION) * scale)
    elif TWO_SHIFTS:
        # Where registers last, before the product: who reads them after it waits for them.
        BEFORE_PRODUCT: tl.constexpr = D > 64 and not HARD
        # Narrow heads are quicker so. The sum loses digits where two columns lie far apart, which fp32 would show.
        STEPS: tl.constexpr = HARD and D <= 32 and b_query.dtype != tl.float32
        b_bias = load_terms(p_column, o_j, BLOCK_J)[None, :] if BEFORE_PRODUCT else 0.0
        b_key = load_tile(d_key, i_batch, i_kv_head, o_j, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        if STEPS:
            # In this order, too: with the maximum first it is slower.
            b_step = load_terms(p_column_second, o_j, BLOCK_J)[None, :]
            b_second = load_terms(p_column + padded_keys, o_j, BLOCK_J)[None, :]
            b_logit = b_product * scale + b_second + tl.maximum(b_gap[:, None], b_step)
            if not HAS_LEVEL:
                b_logit -= b_reference[:, None]
            b_weight = tl.math.exp2(b_logit)
        else:
            b_bias = b_bias if BEFORE_PRODUCT else load_terms(p_column, o_j, BLOCK_J)[None, :]
            if HARD:
                b_bias = tl.maximum(b_bias, b_gap[:, None] + load_terms(p_column + padded_keys, o_j, BLOCK_J)[None, :])
            if not HAS_LEVEL:
                b_bias -= b_reference[:, None]
            b_weight = tl.math.exp2(b_product * scale + b_bias)
        if not HARD:
            b_weight = b_weight + b_weight * (b_row_second[:, None] * load_terms(p_column_second, o_j, BLOCK_J)[None, :])
    elif HARD and SHARED_KEY and ONE_VARIANCE:
        # Only the biases compete: one product, one exponential.
        b_key = load_tile(d_key, i_batch, i_kv_head, o_j, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        b_bias = component_bias(
            p_row, p_column, 0, o_i, o_j, b_reference, padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J
        )
        for r in tl.static_range(1, M):
            b_bias = tl.maximum(b_bias, component_bias(
                p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_j, b_reference,
                padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
            ))  # fmt: skip
        b_weight = tl.math.exp2(b_product * scale + b_bias)
    elif HAS_LEVEL and M == 1:
        o_block = tl.arange(0, BLOCK_J)
        b_bias = terms_at(p_columns, place(o_block)) if DIRECT else in_order(tl.load(p_columns + o_block))
        b_key = load_tile(d_key, i_batch, i_kv_head, o_j, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        b_weight = tl.math.exp2(b_product * scale + b_bias[None, :])
    elif TWO_KEYS:
        b_logit = _two_key_logits(
            b_query, d_key, p_column, i_batch, i_kv_head, o_j, b_reference, scale, padded_keys,
            HAS_COLUMN, HAS_LEVEL, INPUT_PRECISION, DIRECT, BLOCK_J, D,
        )  # fmt: skip
        if HARD:
            b_weight = tl.math.exp2(tl.max(b_logit.reshape(b_query.shape[0], 2, BLOCK_J), 1))
        else:
            b_weight = tl.sum(tl.math.exp2(b_logit).reshape(b_query.shape[0], 2, BLOCK_J), 1)
    else:
        b_weight = tl.zeros([b_query.shape[0], BLOCK_J], tl.float32)
        b_product = b_weight
        for r in tl.static_range(M):
            if r == 0 or not SHARED_KEY:
                i_key_head = i_kv_head if SHARED_KEY else i_kv_head * M + r
                b_key = load_tile(d_key, i_batch, i_key_head, o_j, BLOCK_J, D)
                b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
            b_scale = scale if ONE_VARIANCE else tl.load(p_scale + r)
            b_logit = b_product * b_scale + component_bias(
                p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_j, b_reference,
                padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
            )  # fmt: skip
            if r == 0:
                b_weight = b_logit if HARD else tl.math.exp2(b_logit)
            elif HARD:
                b_weight = tl.maximum(b_weight, b_logit)
            else:
                b_weight += tl.math.exp2(b_logit)
        if HARD:
            b_weight = tl.math.exp2(b_weight)
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[:, None], o_columns[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        b_weight = tl.where(b_seen, b_weight, 0.0)
    # In this order: with the values read first, the compiler's schedule is a tenth slower.
    b_sum += partial_sums(b_weight)
    b_factor = b_weight.to(b_query.dtype)
    if DROPOUT:
        AS_PRODUCT: tl.constexpr = b_query.dtype != tl.float32 and not HAS_MASK
        b_factor = rows_unless_dropped(b_factor, b_row_random, p_column_random, o_j, threshold, AS_PRODUCT)
    b_value = load_tile(d_value, i_batch, i_kv_head, o_j, BLOCK_J, DV)
    b_out = tl.dot(b_factor, b_value, b_out, input_precision=INPUT_PRECISION)
    return awaited(b_out) if AWAIT_PRODUCTS else b_out, b_sum


@triton.jit
def _attend_exactly(
    b_out, b_sum, b_maximum, b_query, b_row_random, p_key, p_value, p_row, p_column, p_scale, p_mask, p_column_random,
    i_batch, i_kv_head, o_j, o_i, stride_key_batch, stride_key_head, stride_key_token, stride_value_batch,
    stride_value_head, stride_value_token, scale, threshold, stride_mask_row, stride_mask_column, causal_offset,
    num_queries, num_keys, padded_queries, padded_keys, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr,
    ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add one block of keys under a running maximum, one component after the other (hard: the best one alone)."""
    o_columns = o_j + tl.arange(0, BLOCK_J)
    b_zero = tl.zeros([b_query.shape[0]], tl.float32)
    b_value = load_rows(
        p_value, stride_value_batch, stride_value_head, stride_value_token, i_batch, i_kv_head, o_j, num_keys,
        value_width, BLOCK_J, DV,
    )  # fmt: skip
    b_seen = is_visible(
        o_i[:, None], o_columns[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
        num_keys, CAUSAL, HAS_MASK,
    )  # fmt: skip
    b_best = tl.full([b_query.shape[0], BLOCK_J], float("-inf"), tl.float32)
    b_product = b_best
    for r in tl.static_range(M):
        if r == 0 or not SHARED_KEY:
            i_key_head = i_kv_head if SHARED_KEY else i_kv_head * M + r
            b_key = load_rows(
                p_key, stride_key_batch, stride_key_head, stride_key_token, i_batch, i_key_head, o_j, num_keys, width,
                BLOCK_J, D,
            )  # fmt: skip
            b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + r)
        b_logit = b_product * b_scale + component_bias(
            p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_j, b_zero, padded_queries,
            HAS_ROW, HAS_COLUMN, True, BLOCK_J,
        )  # fmt: skip
        b_logit = tl.where(b_seen, b_logit, float("-inf"))
        if HARD:
            b_best = tl.maximum(b_best, b_logit)
            b_logit = b_best
        if not HARD or r == M - 1:
            b_new = tl.maximum(b_maximum, tl.max(b_logit, 1))
            # Nothing seen so far: any finite stand-in keeps exp(-inf - stand-in) = 0.
            b_stand_in = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = tl.math.exp2(b_logit - b_stand_in[:, None])
            b_decay = tl.math.exp2(b_maximum - b_stand_in)
            b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
            if DROPOUT:
                b_weight = rows_unless_dropped(b_weight, b_row_random, p_column_random, o_j, threshold, False)
            b_out = tl.dot(b_weight.to(b_value.dtype), b_value, b_out * b_decay[:, None], input_precision=INPUT_PRECISION)
            b_maximum = b_new
    return b_out, b_sum, b_maximum
