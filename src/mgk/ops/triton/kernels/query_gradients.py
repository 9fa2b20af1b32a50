"""The backward kernel for queries: one program for one block of queries of one head.

:mod:`mgk.ops.triton.backward` has the algebra.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.former_tiles import (
    HEAD_NUMBERS,
    VARYING_WITH_WIDTH,
    component_bias,
    hard_share,
    is_visible,
    load_terms,
    load_tile,
    partial_products,
    partial_sums,
    place,
    rows_unless_dropped,
    visible_keys,
    weight_of,
)


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_query(
    d_query, d_key, d_value, d_grad_out, d_grad_query, p_row, p_column, p_row_second, p_column_second, p_scale, p_reference,
    p_delta, p_grad_normaliser, p_unfactored, p_shift, p_grad_row, p_share, p_origin, p_mask, p_key_range, p_query_range,
    p_spans, p_row_random, p_column_random, stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    rows_per_span, scale, natural_scale, threshold, keep_scale, num_heads, group_size, num_queries, num_keys,
    padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ORIGIN: tl.constexpr,
    HAS_GRAD_NORMALISER: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One program for one block of queries of one head: ``dq`` and ``drow``."""
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    if CAUSAL:
        i_block = num_blocks - 1 - i_block
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    if TWO_SHIFTS and not HARD:  # noqa: SIM102 (the outer condition is a constant: without it there is no such pointer)
        if (tl.load(p_unfactored + i_kv) != 0) != UNFACTORED:
            return

    if HAS_ROW:
        p_row += i_head.to(tl.int64) * M * padded_queries
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if HAS_MASK:
        p_mask += i_batch.to(tl.int64) * stride_mask_batch + i_query_head.to(tl.int64) * stride_mask_head
    if not ONE_VARIANCE:
        p_scale += i_kv_head * M
    b_row_second = tl.zeros([BLOCK_I], tl.float32)
    if TWO_SHIFTS:
        p_column_second += i_kv.to(tl.int64) * padded_keys
        b_row_second = tl.load(p_row_second + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_row_random = tl.zeros([BLOCK_I], tl.int32)
    if DROPOUT:
        b_row_random = tl.load(p_row_random + i_head.to(tl.int64) * padded_queries + place(o_i))
        p_column_random += i_kv.to(tl.int64) * (padded_keys // 2)

    first_key, end_full, end_key, causal_offset = visible_keys(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    b_query = load_tile(d_query, i_batch, i_query_head, o_first, BLOCK_I, D)
    b_grad_out = load_tile(d_grad_out, i_batch, i_query_head, o_first, BLOCK_I, DV)
    b_reference = tl.load(p_reference + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_delta = tl.load(p_delta + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_grad_query = tl.zeros([BLOCK_I, D], tl.float32)
    # One column for each component; a pair keeps the sums of one component, one for each thread of a row.
    b_grad_row = tl.zeros([BLOCK_I, 4], tl.float32) if TWO_SHIFTS else tl.zeros([BLOCK_I, 8], tl.float32)
    for o_j in tl.range(first_key, end_full, BLOCK_J):
        b_grad_query, b_grad_row = _gather_query(
            b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_row_second, b_row_random, d_key,
            d_value, p_row, p_column, p_column_second, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_j, o_i, scale,
            threshold, stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys,
            padded_queries, padded_keys,
            M, SHARED_KEY, TWO_SHIFTS, UNFACTORED, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, False, HAS_MASK, DROPOUT, INPUT_PRECISION,
            BLOCK_J, D, DV,
        )  # fmt: skip
    if CAUSAL:
        for o_j in tl.range(end_full, end_key, BLOCK_J):
            b_grad_query, b_grad_row = _gather_query(
                b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_row_second, b_row_random, d_key,
                d_value, p_row, p_column, p_column_second, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_j, o_i,
                scale, threshold, stride_mask_row, stride_mask_column, causal_offset, num_queries,
                num_keys, padded_queries, padded_keys,
                M, SHARED_KEY, TWO_SHIFTS, UNFACTORED, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, True, HAS_MASK, DROPOUT, INPUT_PRECISION,
                BLOCK_J, D, DV,
            )  # fmt: skip

    if TWO_SHIFTS:
        b_grad_row = tl.sum(b_grad_row, 1)
    if DROPOUT:
        b_grad_query *= keep_scale
        b_grad_row *= keep_scale
    m_i = o_i < num_queries
    o_d = tl.arange(0, D)
    # Of one component of one key/value head, over samples, query heads and blocks.
    num_shares = (tl.num_programs(0) // (num_heads // group_size)).to(tl.int64)
    if HAS_SHIFT:
        i_share = (i_batch * group_size + i_query_head % group_size) * num_blocks + i_block
        p_share += (i_kv_head * M * num_shares + i_share) * D + o_d
    b_moved_query = b_query.to(tl.float32)
    if HAS_ORIGIN:
        b_moved_query -= tl.load(p_origin + i_kv.to(tl.int64) * D + o_d)[None, :]
    if TWO_SHIFTS:
        # The logits of a row rise and fall together with its normaliser alone: what one component does not get, the
        # other does.
        b_other = -b_grad_row
        if HAS_GRAD_NORMALISER:
            b_total = tl.load(p_grad_normaliser + i_head.to(tl.int64) * num_queries + o_i, mask=m_i, other=0.0)
            b_other += tl.where(b_reference == float("inf"), 0.0, b_total)
        # Rows beyond the end have no gradient, but what stands for their query is not zero once it is moved.
        b_other = tl.where(m_i, b_other, 0.0)
        # Logits of the second are the first's and more, and less exact where that is much. Then rows add up to a little
        # more or less than they should, which in fp32 would show if it went to a first that has nothing.
        SECOND: tl.constexpr = HARD and b_query.dtype != tl.float32
        b_first = b_other if SECOND else b_grad_row
        b_second = b_grad_row if SECOND else b_other
        b_shift = tl.load(p_shift + i_kv_head * M * width + o_d, mask=o_d < width, other=0.0)
        b_grad_query += b_first[:, None] * b_shift[None, :]
        b_shift = tl.load(p_shift + (i_kv_head * M + 1) * width + o_d, mask=o_d < width, other=0.0)
        b_grad_query += b_second[:, None] * b_shift[None, :]
        tl.store(p_share, tl.sum(b_first[:, None] * b_moved_query, 0))
        tl.store(p_share + num_shares * D, tl.sum(b_second[:, None] * b_moved_query, 0))
    elif HAS_ROW:
        o_r = tl.arange(0, 8)
        for r in tl.static_range(M):
            b_own = tl.sum(tl.where(o_r[None, :] == r, b_grad_row, 0.0), 1)
            b_scaled = b_own if ONE_VARIANCE else b_own * tl.load(p_scale + r) * 0.6931471805599453
            if HAS_SHIFT:
                b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
                b_grad_query += b_scaled[:, None] * b_shift[None, :]
                tl.store(p_share + r * num_shares * D, tl.sum(b_own[:, None] * b_moved_query, 0))
            if GAUSSIAN and not ONE_VARIANCE:
                b_grad_query -= b_scaled[:, None] * b_query.to(tl.float32)
            if not ONE_VARIANCE:
                tl.store(p_grad_row + (i_head.to(tl.int64) * M + r) * num_queries + o_i, b_own, mask=m_i)
    if ONE_VARIANCE:
        b_grad_query *= natural_scale
    d_grad_query.store([i_batch, i_query_head, o_first, 0], b_grad_query.to(b_query.dtype).reshape(1, 1, BLOCK_I, D))


@triton.jit
def _gather_query(
    b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_row_second, b_row_random, d_key, d_value, p_row,
    p_column, p_column_second, p_scale, p_mask, p_column_random, i_batch, i_kv_head, o_first, o_i, scale, threshold,
    stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add what one block of keys sends back to a block of queries."""
    o_j = o_first + tl.arange(0, BLOCK_J)
    b_value = load_tile(d_value, i_batch, i_kv_head, o_first, BLOCK_J, DV)
    b_grad_weight = tl.dot(b_grad_out, b_value.T, input_precision=INPUT_PRECISION)
    if DROPOUT:
        AS_PRODUCT: tl.constexpr = b_query.dtype != tl.float32 and not HAS_MASK
        b_grad_weight = rows_unless_dropped(b_grad_weight, b_row_random, p_column_random, o_first, threshold, AS_PRODUCT)
    b_grad_weight -= b_delta[:, None]
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[:, None], o_j[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        # Every gradient of a pair is a weight times this.
        b_grad_weight = tl.where(b_seen, b_grad_weight, 0.0)

    if TWO_SHIFTS:
        b_key = load_tile(d_key, i_batch, i_kv_head, o_first, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
        if HARD:
            # Only the biases compete: `alpha` is how far the second row exceeds the first, `rho` the first column the
            # second.
            b_lead = b_row_second[:, None] - load_terms(p_column_second, o_first, BLOCK_J)[None, :]
            b_share = hard_share(b_lead)
            b_bias = load_terms(p_column, o_first, BLOCK_J)[None, :] - b_reference[:, None]
            b_weight = weight_of(b_product * scale + b_bias + b_lead * b_share, b_query)
        else:
            b_logit = b_product * scale + (load_terms(p_column, o_first, BLOCK_J)[None, :] - b_reference[:, None])
            b_weight = weight_of(b_logit, b_query)
        if CAUSAL or HAS_MASK:
            # An unseen key may be infinitely likely: 0 times it must stay 0.
            b_weight = tl.where(b_seen, b_weight, 0.0)
        b_first = b_weight * b_grad_weight
        if HARD:
            b_grad_logit = b_first
        elif UNFACTORED:
            b_difference = tl.load(p_row + padded_queries + place(o_i)) - tl.load(p_row + place(o_i))
            b_step = load_terms(p_column + padded_keys, o_first, BLOCK_J)
            b_other = b_product * scale + ((b_difference - b_reference)[:, None] + b_step[None, :])
            b_weight = weight_of(b_other, b_query)
            if CAUSAL or HAS_MASK:
                b_weight = tl.where(b_seen, b_weight, 0.0)
            b_grad_logit = b_first + b_weight * b_grad_weight
        else:
            b_grad_logit = b_first + b_first * (b_row_second[:, None] * load_terms(p_column_second, o_first, BLOCK_J)[None, :])
        b_grad_query = tl.dot(b_grad_logit.to(b_key.dtype), b_key, b_grad_query, input_precision=INPUT_PRECISION)
        # What the first component has of it; of a hard choice in half precision the second, which is less work.
        if not HARD:
            b_grad_row += partial_sums(b_first)
        elif b_query.dtype == tl.float32:
            b_grad_row += partial_products(b_grad_logit, 1.0 - b_share)
        else:
            b_grad_row += partial_products(b_grad_logit, b_share)
    elif HARD and M == 2:
        b_first_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M, o_first, BLOCK_J, D)
        b_second_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M + 1, o_first, BLOCK_J, D)
        b_first_scale = scale if ONE_VARIANCE else tl.load(p_scale)
        b_second_scale = scale if ONE_VARIANCE else tl.load(p_scale + 1)
        b_first = tl.dot(b_query, b_first_key.T, input_precision=INPUT_PRECISION) * b_first_scale + component_bias(
            p_row, p_column, 0, o_i, o_first, b_reference, padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J, True
        )
        b_second = tl.dot(b_query, b_second_key.T, input_precision=INPUT_PRECISION) * b_second_scale + component_bias(
            p_row, p_column + padded_keys if HAS_COLUMN else p_column, 1, o_i, o_first, b_reference, padded_queries,
            HAS_ROW, HAS_COLUMN, True, BLOCK_J, True,
        )  # fmt: skip
        b_weight = weight_of(tl.maximum(b_first, b_second), b_query)
        if CAUSAL or HAS_MASK:
            b_weight = tl.where(b_seen, b_weight, 0.0)
        b_share = hard_share(b_first - b_second)
        b_grad_logit = b_weight * b_grad_weight
        b_first = b_share * b_grad_logit
        b_second = b_grad_logit - b_first
        if HAS_ROW:
            o_r = tl.arange(0, 8)
            b_grad_row += tl.where(o_r[None, :] == 0, tl.sum(b_first, 1)[:, None], 0.0)
            b_grad_row += tl.where(o_r[None, :] == 1, tl.sum(b_second, 1)[:, None], 0.0)
        if not ONE_VARIANCE:
            b_first *= b_first_scale * 0.6931471805599453
            b_second *= b_second_scale * 0.6931471805599453
        b_grad_query = tl.dot(b_first.to(b_first_key.dtype), b_first_key, b_grad_query, input_precision=INPUT_PRECISION)
        b_grad_query = tl.dot(b_second.to(b_first_key.dtype), b_second_key, b_grad_query, input_precision=INPUT_PRECISION)
    else:
        o_r = tl.arange(0, 8)
        b_best = tl.full([b_query.shape[0], BLOCK_J], float("-inf"), tl.float32)
        b_ties = tl.zeros([b_query.shape[0], BLOCK_J], tl.float32)
        if HARD and M > 2:
            for r in tl.static_range(M):
                b_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M + r, o_first, BLOCK_J, D)
                b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
                b_logit = b_product * (scale if ONE_VARIANCE else tl.load(p_scale + r)) + component_bias(
                    p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_first, b_reference,
                    padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
                )  # fmt: skip
                b_ties = tl.where(b_logit > b_best, 1.0, b_ties + (b_logit == b_best).to(tl.float32))
                b_best = tl.maximum(b_best, b_logit)
            b_ties = tl.maximum(b_ties, 1.0)
        for r in tl.static_range(M):
            b_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M + r, o_first, BLOCK_J, D)
            b_product = tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION)
            b_scale = scale if ONE_VARIANCE else tl.load(p_scale + r)
            b_logit = b_product * b_scale + component_bias(
                p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_first, b_reference,
                padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
            )  # fmt: skip
            b_weight = weight_of(b_logit, b_query)
            if HARD and M > 2:
                b_weight = tl.where(b_logit == b_best, b_weight / b_ties, 0.0)
            if CAUSAL or HAS_MASK:
                b_weight = tl.where(b_seen, b_weight, 0.0)
            b_grad_logit = b_weight * b_grad_weight
            if HAS_ROW:
                b_grad_row += tl.where(o_r[None, :] == r, tl.sum(b_grad_logit, 1)[:, None], 0.0)
            if not ONE_VARIANCE:
                b_grad_logit *= b_scale * 0.6931471805599453
            b_grad_query = tl.dot(b_grad_logit.to(b_key.dtype), b_key, b_grad_query, input_precision=INPUT_PRECISION)
    return b_grad_query, b_grad_row
