"""The backward kernel for keys and values where there are two projected keys: the two are done at once.

They share the gradient of their weights, and under a hard choice compete for it. The formulas are those of
:mod:`mgk.ops.triton.kernels.key_value_gradients`, which does one key after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.dropout import Dropout, column_randoms, unless_dropped
from mgk.ops.triton.kernels.key_value_gradients import Queries
from mgk.ops.triton.kernels.terms import finite, hard_responsibility, less_reference, load_terms, place, weight_of
from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    LN_2,
    VARYING_WITH_WIDTH,
    Case,
    Keys,
    load_key,
    load_tile,
    load_value,
    partial_sums,
    product,
    store_tile,
)
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_queries


class TwoKeys(NamedTuple):
    """What a program holds of its block of keys: of the first and of the second component."""

    o_j: tl.tensor
    b_value: tl.tensor
    b_first_key: tl.tensor
    b_second_key: tl.tensor
    b_first_column: tl.tensor
    b_second_column: tl.tensor
    first_scale: tl.tensor
    second_scale: tl.tensor


class Gradients(NamedTuple):
    """What a program adds up."""

    b_value: tl.tensor
    """of the values, ``[BLOCK_J, DV]``"""
    b_first: tl.tensor
    """of the first key, ``[BLOCK_J, D]``"""
    b_second: tl.tensor
    b_first_sum: tl.tensor
    """of the first column, ``[BLOCK_J, 4]``"""
    b_second_sum: tl.tensor


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_two_keys(
    # tokens
    d_query, d_key, d_value, d_grad_out, d_grad_key, d_grad_value,
    # terms of the logits and of the gradients
    p_row, p_column, p_inverse_variance, p_reference, p_delta, p_grad_column, p_grad_scale,
    # visibility and dropout
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span,
    # numbers
    scale, natural_scale, threshold, keep_scale,
    num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks,
    HARD: tl.constexpr, GAUSSIAN: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write both ``dk``, ``dv``, both ``dcolumn`` and both ``dscale``."""
    case: tl.constexpr = Case(2, False, HARD, BLOCK_I, BLOCK_J, D, DV)
    ONE_VARIANCE: tl.constexpr = p_inverse_variance is None
    DROPOUT: tl.constexpr = p_row_random is not None
    HAS_COLUMN: tl.constexpr = p_column is not None
    i_block = tl.program_id(0) % num_blocks
    i_kv = tl.program_id(0) // num_blocks
    num_kv_heads = num_heads // group_size
    num_samples = tl.num_programs(0) // (num_blocks * num_kv_heads)
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    o_first = i_block * BLOCK_J
    o_j = o_first + tl.arange(0, BLOCK_J)
    span = visible_queries(
        num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first, CAUSAL, BLOCK_I,
        BLOCK_J,
    )  # fmt: skip

    keys = Keys(d_key, d_value, i_batch, i_kv_head)
    b_value = load_value(keys, o_first, case)  # [BLOCK_J, DV]
    b_first_key = load_key(keys, 0, o_first, case)  # [BLOCK_J, D]
    b_second_key = load_key(keys, 1, o_first, case)  # [BLOCK_J, D]
    b_first_column = tl.zeros([BLOCK_J], tl.float32)
    b_second_column = tl.zeros([BLOCK_J], tl.float32)
    if HAS_COLUMN:
        p_column += 2 * i_kv.to(tl.int64) * padded_keys
        b_first_column = finite(tl.load(p_column + place(o_j)))
        b_second_column = finite(tl.load(p_column + padded_keys + place(o_j)))
    first_scale = scale if ONE_VARIANCE else tl.load(p_inverse_variance + 2 * i_kv_head)
    second_scale = scale if ONE_VARIANCE else tl.load(p_inverse_variance + 2 * i_kv_head + 1)
    columns = TwoKeys(
        o_j, b_value, b_first_key, b_second_key, b_first_column, b_second_column, first_scale, second_scale
    )
    b_column_random = tl.zeros([BLOCK_J], tl.int32)
    if DROPOUT:
        b_column_random = column_randoms(p_column_random + i_kv.to(tl.int64) * (padded_keys // 2), o_j)
    b_zero_key = tl.zeros([BLOCK_J, D], tl.float32)
    b_zero_sum = tl.zeros([BLOCK_J, 4], tl.float32)
    gradients = Gradients(tl.zeros([BLOCK_J, DV], tl.float32), b_zero_key, b_zero_key, b_zero_sum, b_zero_sum)
    for g in range(group_size):
        i_query_head = i_kv_head * group_size + g
        i_head = (i_batch * num_heads + i_query_head).to(tl.int64)
        p_own_row = p_row + 2 * i_head * padded_queries if p_row is not None else None
        p_own_mask = mask_of_head(p_mask, i_batch, i_query_head, stride_mask_batch, stride_mask_head)
        visibility = Visibility(
            num_queries, num_keys, span.causal_offset, p_own_mask, stride_mask_row, stride_mask_column
        )
        dropout = Dropout(p_row_random + i_head * padded_queries, b_column_random, threshold) if DROPOUT else None
        queries = Queries(d_query, d_grad_out, i_batch, i_query_head, i_head, p_reference, p_delta)
        if CAUSAL:
            for o_i in tl.range(span.first, span.full, BLOCK_I):
                gradients = _gather(
                    gradients, columns, queries, p_own_row, padded_queries, visibility, dropout, o_i, HAS_COLUMN, True,
                    case,
                )  # fmt: skip
        for o_i in tl.range(span.full, span.end, BLOCK_I):
            gradients = _gather(
                gradients, columns, queries, p_own_row, padded_queries, visibility, dropout, o_i, HAS_COLUMN, False,
                case,
            )  # fmt: skip

    for r in tl.static_range(2):
        b_key = b_first_key if r == 0 else b_second_key
        b_grad_key = gradients.b_first if r == 0 else gradients.b_second
        b_sum = tl.sum(gradients.b_first_sum if r == 0 else gradients.b_second_sum, 1)
        if DROPOUT:
            b_grad_key *= keep_scale
            b_sum *= keep_scale
        b_natural = natural_scale if ONE_VARIANCE else tl.load(p_inverse_variance + 2 * i_kv_head + r) * LN_2
        o_column = ((2 * i_kv_head + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
        if HAS_COLUMN:
            tl.store(p_grad_column + o_column, b_sum, mask=o_j < num_keys)
        if not ONE_VARIANCE:
            b_grad_scale = tl.sum(b_grad_key * b_key.to(tl.float32), 1)
            tl.store(p_grad_scale + o_column, b_grad_scale, mask=o_j < num_keys)
        if GAUSSIAN:
            b_grad_key -= b_sum[:, None] * b_key.to(tl.float32)
        store_tile(d_grad_key, i_batch, 2 * i_kv_head + r, o_first, (b_grad_key * b_natural).to(b_key.dtype))
    b_grad_value = gradients.b_value
    if DROPOUT:
        b_grad_value *= keep_scale
    store_tile(d_grad_value, i_batch, i_kv_head, o_first, b_grad_value.to(b_value.dtype))


@triton.jit
def _gather(
    gradients, columns, queries, p_row, padded_queries, visibility, dropout, o_i,
    HAS_COLUMN: tl.constexpr, CAUSAL: tl.constexpr, case: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries sends back to the block of both keys. Pairs are transposed,
    ``[BLOCK_J, BLOCK_I]``."""
    p_reference = queries.p_reference + queries.i_head * padded_queries
    p_delta = queries.p_delta + queries.i_head * padded_queries
    o_rows = o_i + tl.arange(0, case.BLOCK_I)
    b_query = load_tile(queries.d_query, queries.i_batch, queries.i_query_head, o_i, case.BLOCK_I, case.D)
    b_grad_out = load_tile(queries.d_grad_out, queries.i_batch, queries.i_query_head, o_i, case.BLOCK_I, case.DV)
    IN_ORDER: tl.constexpr = b_query.dtype == tl.float32
    b_reference = load_terms(p_reference, o_i, case.BLOCK_I)
    b_first_row = tl.zeros_like(b_reference) if IN_ORDER else finite(-b_reference)
    b_second_row = b_first_row
    if p_row is not None:
        b_first_row += load_terms(p_row, o_i, case.BLOCK_I)
        b_second_row += load_terms(p_row + padded_queries, o_i, case.BLOCK_I)
    b_delta = load_terms(p_delta, o_i, case.BLOCK_I)
    b_first = product(columns.b_first_key, b_query.T) * columns.first_scale
    b_second = product(columns.b_second_key, b_query.T) * columns.second_scale
    b_first += b_first_row[None, :] + columns.b_first_column[:, None]
    b_second += b_second_row[None, :] + columns.b_second_column[:, None]
    if IN_ORDER:
        b_first = less_reference(b_first, b_reference, TRANSPOSED=True, FINITE=True)
        b_second = less_reference(b_second, b_reference, TRANSPOSED=True, FINITE=True)
    b_grad_weight = product(columns.b_value, b_grad_out.T)
    if case.HARD:
        b_responsibility = hard_responsibility(b_first - b_second)
        b_weight = weight_of(tl.maximum(b_first, b_second), b_query)
    else:
        b_first = weight_of(b_first, b_query)
        b_second = weight_of(b_second, b_query)
    if CAUSAL or visibility.p_mask is not None:
        m_seen = is_visible(o_rows[None, :], columns.o_j[:, None], visibility, CAUSAL)
        if case.HARD:
            b_weight = tl.where(m_seen, b_weight, 0.0)
        else:
            b_first = tl.where(m_seen, b_first, 0.0)
            b_second = tl.where(m_seen, b_second, 0.0)
    if not case.HARD:
        b_weight = b_first + b_second
    b_kept_weight = b_weight
    if dropout is not None:
        b_row_random = load_terms(dropout.row_random, o_i, case.BLOCK_I)[None, :]
        b_column_random = dropout.column_random[:, None]
        b_kept_weight = unless_dropped(b_weight, b_row_random, b_column_random, dropout.threshold)
        b_grad_weight = unless_dropped(b_grad_weight, b_row_random, b_column_random, dropout.threshold)
    b_grad_weight -= b_delta[None, :]
    if case.HARD:
        b_both = b_weight * b_grad_weight
        b_first = b_both * b_responsibility
        b_second = b_both - b_first
    else:
        b_first *= b_grad_weight
        b_second *= b_grad_weight
    b_grad_value, b_first_grad, b_second_grad, b_first_sum, b_second_sum = gradients
    if HAS_COLUMN:
        b_first_sum += partial_sums(b_first)
        b_second_sum += partial_sums(b_second)
    b_kept_weight = b_kept_weight.to(b_grad_out.dtype)
    b_grad_value = product(b_kept_weight, b_grad_out, b_grad_value)
    b_first_grad = product(b_first.to(b_query.dtype), b_query, b_first_grad)
    b_second_grad = product(b_second.to(b_query.dtype), b_query, b_second_grad)
    return Gradients(b_grad_value, b_first_grad, b_second_grad, b_first_sum, b_second_sum)
