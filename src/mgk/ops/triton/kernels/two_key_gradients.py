"""The backward kernel for keys and values where there are two projected keys: the two are done at once.

They share the gradient of their weights, and under hard assignment compete for it. The kernel of
:mod:`mgk.ops.triton.key_value_gradients` does one key after the other; :mod:`mgk.ops.triton.backward` has the algebra.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.former_tiles import (
    HEAD_NUMBERS,
    VARYING_WITH_WIDTH,
    column_randoms,
    finite,
    hard_share,
    is_visible,
    load_terms,
    load_tile,
    partial_sums,
    place,
    unless_dropped,
    visible_queries,
    weight_of,
)


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_two_keys(
    d_query, d_key, d_value, d_grad_out, d_grad_key, d_grad_value, p_row, p_column, p_scale, p_reference, p_delta,
    p_grad_column, p_grad_scale, p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span, scale, natural_scale,
    threshold, keep_scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks,
    HARD: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, GAUSSIAN: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One program for one block of keys of one key/value head: both ``dk``, ``dv``, ``dcolumn``, ``dscale``."""
    i_block = tl.program_id(0) % num_blocks
    i_kv = tl.program_id(0) // num_blocks
    num_kv_heads = num_heads // group_size
    num_samples = tl.num_programs(0) // (num_blocks * num_kv_heads)
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    o_first = i_block * BLOCK_J
    o_j = o_first + tl.arange(0, BLOCK_J)
    first_query, first_full, end_query, causal_offset = visible_queries(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip

    b_value = load_tile(d_value, i_batch, i_kv_head, o_first, BLOCK_J, DV)
    b_first_key = load_tile(d_key, i_batch, 2 * i_kv_head, o_first, BLOCK_J, D)
    b_second_key = load_tile(d_key, i_batch, 2 * i_kv_head + 1, o_first, BLOCK_J, D)
    b_first_column = tl.zeros([BLOCK_J], tl.float32)
    b_second_column = tl.zeros([BLOCK_J], tl.float32)
    if HAS_COLUMN:
        p_column += 2 * i_kv.to(tl.int64) * padded_keys
        b_first_column = finite(tl.load(p_column + place(o_j)))
        b_second_column = finite(tl.load(p_column + padded_keys + place(o_j)))
    b_first_scale = scale if ONE_VARIANCE else tl.load(p_scale + 2 * i_kv_head)
    b_second_scale = scale if ONE_VARIANCE else tl.load(p_scale + 2 * i_kv_head + 1)
    b_column_random = tl.zeros([BLOCK_J], tl.int32)
    if DROPOUT:
        b_column_random = column_randoms(p_column_random + i_kv.to(tl.int64) * (padded_keys // 2), o_j)
    b_grad_value = tl.zeros([BLOCK_J, DV], tl.float32)
    b_first_grad = tl.zeros([BLOCK_J, D], tl.float32)
    b_second_grad = tl.zeros([BLOCK_J, D], tl.float32)
    b_first_sum = tl.zeros([BLOCK_J, 4], tl.float32)
    b_second_sum = tl.zeros([BLOCK_J, 4], tl.float32)
    for g in range(group_size):
        i_query_head = i_kv_head * group_size + g
        i_head = (i_batch * num_heads + i_query_head).to(tl.int64)
        p_head_row = p_row
        if HAS_ROW:
            p_head_row = p_row + 2 * i_head * padded_queries
        p_head_mask = p_mask
        if HAS_MASK:
            p_head_mask = p_mask + i_batch.to(tl.int64) * stride_mask_batch
            p_head_mask += i_query_head.to(tl.int64) * stride_mask_head
        p_head_key = p_row_random
        if DROPOUT:
            p_head_key = p_row_random + i_head * padded_queries
        if CAUSAL:
            for o_i in tl.range(first_query, first_full, BLOCK_I):
                b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum = _gather_two_keys(
                    b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum, b_first_key, b_second_key,
                    b_value, b_first_column, b_second_column, b_first_scale, b_second_scale, b_column_random, d_query,
                    d_grad_out, p_head_row, p_reference + i_head * padded_queries, p_delta + i_head * padded_queries,
                    p_head_mask, p_head_key, i_batch, i_query_head, o_i, o_j, threshold, stride_mask_row,
                    stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
                    HARD, HAS_ROW, HAS_COLUMN, True, HAS_MASK, DROPOUT, INPUT_PRECISION, BLOCK_I, D, DV,
                )  # fmt: skip
        for o_i in tl.range(first_full, end_query, BLOCK_I):
            b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum = _gather_two_keys(
                b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum, b_first_key, b_second_key,
                b_value, b_first_column, b_second_column, b_first_scale, b_second_scale, b_column_random, d_query,
                d_grad_out, p_head_row, p_reference + i_head * padded_queries, p_delta + i_head * padded_queries,
                p_head_mask, p_head_key, i_batch, i_query_head, o_i, o_j, threshold, stride_mask_row,
                stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
                HARD, HAS_ROW, HAS_COLUMN, False, HAS_MASK, DROPOUT, INPUT_PRECISION, BLOCK_I, D, DV,
            )  # fmt: skip

    for r in tl.static_range(2):
        b_key = b_first_key if r == 0 else b_second_key
        b_grad_key = b_first_grad if r == 0 else b_second_grad
        b_sum = tl.sum(b_first_sum if r == 0 else b_second_sum, 1)
        if DROPOUT:
            b_grad_key *= keep_scale
            b_sum *= keep_scale
        b_natural = natural_scale if ONE_VARIANCE else tl.load(p_scale + 2 * i_kv_head + r) * 0.6931471805599453
        o_column = ((2 * i_kv_head + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
        if HAS_COLUMN:
            tl.store(p_grad_column + o_column, b_sum, mask=o_j < num_keys)
        if not ONE_VARIANCE:
            b_grad_scale = tl.sum(b_grad_key * b_key.to(tl.float32), 1)
            tl.store(p_grad_scale + o_column, b_grad_scale, mask=o_j < num_keys)
        if GAUSSIAN:
            b_grad_key -= b_sum[:, None] * b_key.to(tl.float32)
        d_grad_key.store(
            [i_batch, 2 * i_kv_head + r, o_first, 0],
            (b_grad_key * b_natural).to(b_key.dtype).reshape(1, 1, BLOCK_J, D),
        )
    if DROPOUT:
        b_grad_value *= keep_scale
    d_grad_value.store([i_batch, i_kv_head, o_first, 0], b_grad_value.to(b_value.dtype).reshape(1, 1, BLOCK_J, DV))


@triton.jit
def _gather_two_keys(
    b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum, b_first_key, b_second_key, b_value,
    b_first_column, b_second_column, b_first_scale, b_second_scale, b_column_random, d_query, d_grad_out, p_row,
    p_reference, p_delta, p_mask, p_row_random, i_batch, i_query_head, o_first_row, o_j, threshold,
    stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
    HARD: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries sends back to a block of both keys. Pairs are transposed."""
    o_i = o_first_row + tl.arange(0, BLOCK_I)
    b_query = load_tile(d_query, i_batch, i_query_head, o_first_row, BLOCK_I, D)
    b_grad_out = load_tile(d_grad_out, i_batch, i_query_head, o_first_row, BLOCK_I, DV)
    b_first_row = finite(-load_terms(p_reference, o_first_row, BLOCK_I))
    b_second_row = b_first_row
    if HAS_ROW:
        b_first_row += load_terms(p_row, o_first_row, BLOCK_I)
        b_second_row += load_terms(p_row + padded_queries, o_first_row, BLOCK_I)
    b_delta = load_terms(p_delta, o_first_row, BLOCK_I)
    b_first = tl.dot(b_first_key, b_query.T, input_precision=INPUT_PRECISION) * b_first_scale
    b_second = tl.dot(b_second_key, b_query.T, input_precision=INPUT_PRECISION) * b_second_scale
    b_first += b_first_row[None, :] + b_first_column[:, None]
    b_second += b_second_row[None, :] + b_second_column[:, None]
    b_grad_weight = tl.dot(b_value, b_grad_out.T, input_precision=INPUT_PRECISION)
    if HARD:
        b_share = hard_share(b_first - b_second)
        b_weight = weight_of(tl.maximum(b_first, b_second), b_query)
    else:
        b_first = weight_of(b_first, b_query)
        b_second = weight_of(b_second, b_query)
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[None, :], o_j[:, None], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        if HARD:
            b_weight = tl.where(b_seen, b_weight, 0.0)
        else:
            b_first = tl.where(b_seen, b_first, 0.0)
            b_second = tl.where(b_seen, b_second, 0.0)
    if not HARD:
        b_weight = b_first + b_second
    b_kept_weight = b_weight
    if DROPOUT:
        b_row_random = load_terms(p_row_random, o_first_row, BLOCK_I)
        b_kept_weight = unless_dropped(b_weight, b_row_random[None, :], b_column_random[:, None], threshold)
        b_grad_weight = unless_dropped(b_grad_weight, b_row_random[None, :], b_column_random[:, None], threshold)
    b_grad_weight -= b_delta[None, :]
    if HARD:
        b_both = b_weight * b_grad_weight
        b_first = b_both * b_share
        b_second = b_both - b_first
    else:
        b_first *= b_grad_weight
        b_second *= b_grad_weight
    if HAS_COLUMN:
        b_first_sum += partial_sums(b_first)
        b_second_sum += partial_sums(b_second)
    b_grad_value = tl.dot(b_kept_weight.to(b_grad_out.dtype), b_grad_out, b_grad_value, input_precision=INPUT_PRECISION)
    b_first_grad = tl.dot(b_first.to(b_query.dtype), b_query, b_first_grad, input_precision=INPUT_PRECISION)
    b_second_grad = tl.dot(b_second.to(b_query.dtype), b_query, b_second_grad, input_precision=INPUT_PRECISION)
    return b_first_grad, b_second_grad, b_grad_value, b_first_sum, b_second_sum
