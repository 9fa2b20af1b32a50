"""The backward kernel for keys and values: one program for one block of keys of one head.

:mod:`mgk.ops.triton.backward` has the algebra.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.former_tiles import (
    HEAD_NUMBERS,
    VARYING_WITH_WIDTH,
    column_randoms,
    component_bias,
    finite,
    hard_share,
    is_visible,
    load_terms,
    load_tile,
    partial_products,
    partial_sums,
    place,
    unless_dropped,
    visible_queries,
    weight_of,
)


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_key_value(
    d_query, d_key, d_value, d_grad_out, d_grad_key, d_grad_value, p_row, p_column, p_row_second, p_column_second, p_scale,
    p_shift, p_reference, p_delta, p_unfactored, p_grad_column, p_grad_scale, p_share, p_origin, p_mask, p_key_range,
    p_query_range, p_spans, p_row_random, p_column_random, stride_mask_batch, stride_mask_head, stride_mask_row,
    stride_mask_column, rows_per_span,
    scale, natural_scale,
    threshold, keep_scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ORIGIN: tl.constexpr, ONE_GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one block of keys of one key/value head: ``dk``, ``dv``, ``dcolumn``, ``dscale``. ``ONE_GROUP``
    tells the compiler that a key has one query head, where it makes better use of that than of a loop."""
    i_block = tl.program_id(0) % num_blocks
    i_kv = tl.program_id(0) // num_blocks
    num_kv_heads = num_heads // group_size
    num_samples = tl.num_programs(0) // (num_blocks * num_kv_heads)
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    o_first = i_block * BLOCK_J
    o_j = o_first + tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, D)
    if TWO_SHIFTS and not HARD:  # noqa: SIM102 (the outer condition is a constant: without it there is no such pointer)
        if (tl.load(p_unfactored + i_kv) != 0) != UNFACTORED:
            return

    first_query, first_full, end_query, causal_offset = visible_queries(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if not ONE_VARIANCE:
        p_scale += i_kv_head * M
    b_value = load_tile(d_value, i_batch, i_kv_head, o_first, BLOCK_J, DV)
    b_column_second = tl.zeros([BLOCK_J], tl.float32)
    if TWO_SHIFTS:
        b_column_second = tl.load(p_column_second + i_kv.to(tl.int64) * padded_keys + place(o_j))
    b_column_random = tl.zeros([BLOCK_J], tl.int32)
    if DROPOUT:
        b_column_random = column_randoms(p_column_random + i_kv.to(tl.int64) * (padded_keys // 2), o_j)
    b_grad_value = tl.zeros([BLOCK_J, DV], tl.float32)

    # The factored pair shares one key gradient; otherwise one component after the other.
    for r in range(1 if TWO_SHIFTS else M):
        b_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M + r, o_first, BLOCK_J, D)
        b_other_key = b_key
        if HARD and M == 2 and not SHARED_KEY:
            b_other_key = load_tile(d_key, i_batch, 2 * i_kv_head + 1 - r, o_first, BLOCK_J, D)
        b_column = tl.zeros([BLOCK_J], tl.float32)
        if HAS_COLUMN:
            b_column = tl.load(p_column + r * padded_keys + place(o_j))
        b_grad_key = tl.zeros([BLOCK_J, D], tl.float32)
        b_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        b_both_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        for g in range(1 if ONE_GROUP else group_size):
            i_query_head = i_kv_head * group_size + g
            i_head = (i_batch * num_heads + i_query_head).to(tl.int64)
            p_head_row = p_row
            if HAS_ROW:
                p_head_row = p_row + i_head * M * padded_queries
            p_head_mask = p_mask
            if HAS_MASK:
                p_head_mask = p_mask + i_batch.to(tl.int64) * stride_mask_batch
                p_head_mask += i_query_head.to(tl.int64) * stride_mask_head
            p_head_row_second = p_row_second
            if TWO_SHIFTS:
                p_head_row_second = p_row_second + i_head * padded_queries
            p_head_key = p_row_random
            if DROPOUT:
                p_head_key = p_row_random + i_head * padded_queries
            if CAUSAL:
                for o_i in tl.range(first_query, first_full, BLOCK_I):
                    b_grad_key, b_grad_value, b_sum, b_both_sum = _gather_key_value(
                        b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_column_second,
                        b_column_random, d_query, d_key, d_grad_out, p_head_row, p_column, p_head_row_second, p_scale,
                        p_reference + i_head * padded_queries, p_delta + i_head * padded_queries, p_head_mask,
                        p_head_key, i_batch, i_query_head, i_kv_head, r, o_i, o_first, o_j, scale, threshold,
                        stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys,
                        padded_queries, padded_keys,
                        M, SHARED_KEY, TWO_SHIFTS, UNFACTORED, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, True, HAS_MASK, DROPOUT,
                        INPUT_PRECISION, BLOCK_I, BLOCK_J, D, DV,
                    )  # fmt: skip
            for o_i in tl.range(first_full, end_query, BLOCK_I):
                b_grad_key, b_grad_value, b_sum, b_both_sum = _gather_key_value(
                    b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_column_second,
                    b_column_random, d_query, d_key, d_grad_out, p_head_row, p_column, p_head_row_second, p_scale,
                    p_reference + i_head * padded_queries, p_delta + i_head * padded_queries, p_head_mask, p_head_key,
                    i_batch, i_query_head, i_kv_head, r, o_i, o_first, o_j, scale, threshold,
                    stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
                    padded_keys,
                    M, SHARED_KEY, TWO_SHIFTS, UNFACTORED, HARD, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, False, HAS_MASK, DROPOUT,
                    INPUT_PRECISION, BLOCK_I, BLOCK_J, D, DV,
                )  # fmt: skip

        b_sum = tl.sum(b_sum, 1)
        b_both_sum = tl.sum(b_both_sum, 1)
        if TWO_SHIFTS and HARD and b_key.dtype != tl.float32:
            # The loop has added up what the second component has.
            b_sum = b_both_sum - b_sum
        if DROPOUT:
            b_grad_key *= keep_scale
            b_sum *= keep_scale
            b_both_sum *= keep_scale
        b_natural = natural_scale if ONE_VARIANCE else tl.load(p_scale + r) * 0.6931471805599453
        o_column = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
        if HAS_COLUMN:
            tl.store(p_grad_column + o_column, b_sum, mask=o_j < num_keys)
        if not ONE_VARIANCE:
            # sum_i dlogit_ij q_i . k_j is the gradient of the key, before scaling, times the key.
            b_grad_scale = tl.sum(b_grad_key * b_key.to(tl.float32), 1)
            tl.store(p_grad_scale + o_column, b_grad_scale, mask=o_j < num_keys)
        if GAUSSIAN:
            # The column holds -|k_j + shift_r|^2 / 2, times the scale.
            b_grad_key -= (b_both_sum if TWO_SHIFTS else b_sum)[:, None] * b_key.to(tl.float32)
        if GAUSSIAN and HAS_SHIFT:
            b_moved_key = b_key.to(tl.float32)
            if HAS_ORIGIN:
                b_moved_key -= tl.load(p_origin + i_kv.to(tl.int64) * D + o_d)[None, :]
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_grad_key -= b_sum[:, None] * b_shift[None, :]
            o_share = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_blocks + i_block
            p_own_share = p_share + o_share * D + o_d
            tl.store(p_own_share, tl.sum(b_sum[:, None] * (b_moved_key + b_shift[None, :]), 0))
        if TWO_SHIFTS:
            b_second = b_both_sum - b_sum
            o_column += num_samples.to(tl.int64) * num_keys
            tl.store(p_grad_column + o_column, b_second, mask=o_j < num_keys)
            if GAUSSIAN:
                b_shift = tl.load(p_shift + (i_kv_head * M + 1) * width + o_d, mask=o_d < width, other=0.0)
                b_grad_key -= b_second[:, None] * b_shift[None, :]
                p_own_share += num_samples.to(tl.int64) * num_blocks * D
                tl.store(p_own_share, tl.sum(b_second[:, None] * (b_moved_key + b_shift[None, :]), 0))
        i_out_head = i_kv_head if TWO_SHIFTS else i_kv_head * M + r
        d_grad_key.store(
            [i_batch, i_out_head, o_first, 0], (b_grad_key * b_natural).to(b_key.dtype).reshape(1, 1, BLOCK_J, D)
        )
    if DROPOUT:
        b_grad_value *= keep_scale
    d_grad_value.store([i_batch, i_kv_head, o_first, 0], b_grad_value.to(b_value.dtype).reshape(1, 1, BLOCK_J, DV))


@triton.jit
def _gather_key_value(
    b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_column_second, b_column_random, d_query,
    d_key, d_grad_out,
    p_row, p_column, p_row_second, p_scale, p_reference, p_delta, p_mask, p_row_random, i_batch, i_query_head, i_kv_head,
    i_component, o_first_row, o_first_column, o_j, scale, threshold, stride_mask_row, stride_mask_column,
    causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries sends back to a block of keys. Pairs are transposed, ``[BLOCK_J, BLOCK_I]``."""
    o_i = o_first_row + tl.arange(0, BLOCK_I)
    b_query = load_tile(d_query, i_batch, i_query_head, o_first_row, BLOCK_I, D)
    b_grad_out = load_tile(d_grad_out, i_batch, i_query_head, o_first_row, BLOCK_I, DV)
    b_reference = load_terms(p_reference, o_first_row, BLOCK_I)
    b_delta = load_terms(p_delta, o_first_row, BLOCK_I)
    b_product = tl.dot(b_key, b_query.T, input_precision=INPUT_PRECISION)
    b_grad_weight = tl.dot(b_value, b_grad_out.T, input_precision=INPUT_PRECISION)
    b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_component)
    b_row = -b_reference
    if HAS_ROW and not TWO_SHIFTS:
        b_row += load_terms(p_row + i_component * padded_queries, o_first_row, BLOCK_I)
    b_logit = b_product * b_scale + (b_row[None, :] + b_column[:, None])
    if TWO_SHIFTS and HARD:
        # Only the biases compete: `alpha` is how far the second row exceeds the first, `rho` the first column the
        # second.
        b_lead = load_terms(p_row_second, o_first_row, BLOCK_I)[None, :] - b_column_second[:, None]
        b_share = hard_share(b_lead)
        b_weight = weight_of(b_logit + b_lead * b_share, b_query)
    elif HARD and M == 2:
        b_other = b_product
        if not SHARED_KEY:
            b_other = tl.dot(b_other_key, b_query.T, input_precision=INPUT_PRECISION)
        b_other = b_other * (scale if ONE_VARIANCE else tl.load(p_scale + 1 - i_component)) + component_bias(
            p_row, p_column + (1 - i_component) * padded_keys if HAS_COLUMN else p_column, 1 - i_component,
            o_first_row, o_j, b_reference, padded_queries, HAS_ROW, HAS_COLUMN, False, BLOCK_J, True,
        )  # fmt: skip
        b_weight = hard_share(finite(b_logit) - b_other) * weight_of(b_logit, b_query)
    elif HARD and M > 2:
        b_best = tl.full([BLOCK_J, BLOCK_I], float("-inf"), tl.float32)
        b_ties = tl.zeros([BLOCK_J, BLOCK_I], tl.float32)
        for r in tl.static_range(M):
            b_other = _other_logit(
                b_product, b_query, d_key, p_row, p_column, p_scale, b_reference, i_batch, i_kv_head, r,
                o_first_row, o_first_column, o_j, scale, padded_queries, padded_keys,
                M, SHARED_KEY, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, INPUT_PRECISION, BLOCK_J, D,
            )  # fmt: skip
            b_ties = tl.where(b_other > b_best, 1.0, b_ties + (b_other == b_best).to(tl.float32))
            b_best = tl.maximum(b_best, b_other)
        b_weight = tl.where(b_logit >= b_best, weight_of(b_logit, b_query) / b_ties, 0.0)
    else:
        b_weight = weight_of(b_logit, b_query)
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[None, :], o_j[:, None], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        b_weight = tl.where(b_seen, b_weight, 0.0)
    b_kept_weight = b_weight
    if DROPOUT:
        b_row_random = load_terms(p_row_random, o_first_row, BLOCK_I)
        b_kept_weight = unless_dropped(b_weight, b_row_random[None, :], b_column_random[:, None], threshold)
        b_grad_logit = b_kept_weight * b_grad_weight - b_weight * b_delta[None, :]
    if TWO_SHIFTS and not HARD:
        if UNFACTORED:
            b_difference = load_terms(p_row + padded_queries, o_first_row, BLOCK_I)
            b_difference -= load_terms(p_row, o_first_row, BLOCK_I)
            b_step = tl.load(p_column + padded_keys + place(o_j))
            b_other = b_product * scale + ((b_difference - b_reference)[None, :] + b_step[:, None])
            b_other = weight_of(b_other, b_query)
            if CAUSAL or HAS_MASK:
                b_other = tl.where(b_seen, b_other, 0.0)
            b_kept_other = b_other
            if DROPOUT:
                b_kept_other = unless_dropped(b_other, b_row_random[None, :], b_column_random[:, None], threshold)
            b_kept_weight += b_kept_other
        else:
            b_ratio = load_terms(p_row_second, o_first_row, BLOCK_I)[None, :] * b_column_second[:, None]
            b_kept_weight += b_kept_weight * b_ratio
    if not DROPOUT:
        b_grad_weight -= b_delta[None, :]
        b_grad_logit = b_weight * b_grad_weight
    if TWO_SHIFTS and HARD:
        # In fp32 the first's share, so that a first that never wins has exactly nothing.
        b_sum += partial_products(b_grad_logit, 1.0 - b_share if b_query.dtype == tl.float32 else b_share)
        b_both_sum += partial_sums(b_grad_logit)
    elif TWO_SHIFTS or HAS_COLUMN:
        b_sum += partial_sums(b_grad_logit)
    if TWO_SHIFTS and not HARD:
        if UNFACTORED and DROPOUT:
            b_grad_logit += b_kept_other * b_grad_weight - b_other * b_delta[None, :]
        elif UNFACTORED:
            b_grad_logit += b_other * b_grad_weight
        else:
            b_grad_logit += b_grad_logit * b_ratio
        b_both_sum += partial_sums(b_grad_logit)
    # Last of all: while these products run, their operands stay in registers.
    b_grad_value = tl.dot(b_kept_weight.to(b_grad_out.dtype), b_grad_out, b_grad_value, input_precision=INPUT_PRECISION)
    b_grad_key = tl.dot(b_grad_logit.to(b_query.dtype), b_query, b_grad_key, input_precision=INPUT_PRECISION)
    return b_grad_key, b_grad_value, b_sum, b_both_sum


@triton.jit
def _other_logit(
    b_product, b_query, d_key, p_row, p_column, p_scale, b_reference, i_batch, i_kv_head, i_component, o_first_row,
    o_first_column, o_j, scale, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The transposed logits of any component, ``[BLOCK_J, BLOCK_I]``, to compare with."""
    if not SHARED_KEY:
        b_key = load_tile(d_key, i_batch, i_kv_head * M + i_component, o_first_column, BLOCK_J, D)
        b_product = tl.dot(b_key, b_query.T, input_precision=INPUT_PRECISION)
    b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_component)
    p_own_column = p_column + i_component * padded_keys if HAS_COLUMN else p_column
    return b_product * b_scale + component_bias(
        p_row,
        p_own_column,
        i_component,
        o_first_row,
        o_j,
        b_reference,
        padded_queries,
        HAS_ROW,
        HAS_COLUMN,
        False,
        BLOCK_J,
    )
