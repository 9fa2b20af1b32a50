"""The backward kernel for keys and values: one program for one block of keys of one head.

    dlogit[i,j,r] = weight[i,j,r] (dO_i . v_j - delta_i)
    dv_j          = sum_ir weight[i,j,r] dO_i
    dk_jr         = sum_i scale[r] dlogit[i,j,r] q_i     less scale[r] dcolumn[j,r] (k_j + shift_r) if gaussian
    dcolumn[j,r]  = sum_i dlogit[i,j,r]
    dscale[j,r]   = sum_i dlogit[i,j,r] q_i . k_jr

:mod:`mgk.ops.triton.kernels.gradient_sums` has the whole backward pass. What the shifts gain by way of the columns is
left as one partial sum a program, which another kernel adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.dropout import Dropout, column_randoms, unless_dropped
from mgk.ops.triton.kernels.terms import (
    Shifts,
    Terms,
    component_logit,
    component_scale,
    finite,
    hard_responsibility,
    less_reference,
    load_origin,
    load_shift,
    load_terms,
    of_head,
    own_terms,
    place,
    second_weight,
    weight_of,
)
from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    LN_2,
    VARYING_WITH_WIDTH,
    Case,
    Keys,
    load_key,
    load_tile,
    load_value,
    partial_products,
    partial_sums,
    product,
    store_tile,
)
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_queries


class Queries(NamedTuple):
    """The queries of one head, which pass by block by block, and what there is one of for each."""

    d_query: tl.tensor
    d_grad_out: tl.tensor
    i_batch: tl.tensor
    i_query_head: tl.tensor
    i_head: tl.tensor
    """among the query heads of all samples, int64"""
    p_reference: tl.tensor
    """``[B, H, padded_queries]``, as ``delta``"""
    p_delta: tl.tensor
    p_second: tl.tensor | None = None
    """``row_second``, of two shifted keys"""


class Columns(NamedTuple):
    """What a program holds of its block of keys, for the component that it works on."""

    i_component: tl.tensor
    o_first: tl.tensor
    o_j: tl.tensor
    b_key: tl.tensor
    b_other_key: tl.tensor
    """the other one of two, where they compete"""
    b_value: tl.tensor
    b_column: tl.tensor
    b_second: tl.tensor
    """``column_second``, ``[BLOCK_J]``"""


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_key_value(
    # tokens
    d_query, d_key, d_value, d_grad_out, d_grad_key, d_grad_value,
    # terms of the logits and of the gradients
    p_row, p_column, p_row_second, p_column_second, p_inverse_variance, p_shift, p_reference, p_delta, p_unfactored,
    p_grad_column, p_grad_scale, p_key_partials, p_origin,
    # visibility and dropout
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span,
    # numbers
    scale, natural_scale, threshold, keep_scale,
    num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    GAUSSIAN: tl.constexpr, CAUSAL: tl.constexpr, ONE_GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write ``dk``, ``dv``, ``dcolumn``, ``dscale`` and the partial sums of the shifts' gradients. ``ONE_GROUP`` tells
    the compiler that a key has one query head, where it makes better use of that than of a loop."""
    case: tl.constexpr = Case(
        M, SHARED_KEY, HARD, BLOCK_I, BLOCK_J, D, DV, TWO_SHIFTS=TWO_SHIFTS, UNFACTORED=UNFACTORED
    )
    ONE_VARIANCE: tl.constexpr = p_inverse_variance is None
    DROPOUT: tl.constexpr = p_row_random is not None
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

    span = visible_queries(
        num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first, CAUSAL, BLOCK_I,
        BLOCK_J,
    )  # fmt: skip
    p_column = of_head(p_column, i_kv, padded_keys, M)
    if not ONE_VARIANCE:
        p_inverse_variance += i_kv_head * M
    keys = Keys(d_key, d_value, i_batch, i_kv_head)
    b_value = load_value(keys, o_first, case)  # [BLOCK_J, DV]
    b_column_second = tl.zeros([BLOCK_J], tl.float32)
    if TWO_SHIFTS:
        b_column_second = own_terms(p_column_second, i_kv, padded_keys, o_j)
    b_column_random = tl.zeros([BLOCK_J], tl.int32)
    if DROPOUT:
        b_column_random = column_randoms(p_column_random + i_kv.to(tl.int64) * (padded_keys // 2), o_j)
    b_grad_value = tl.zeros([BLOCK_J, DV], tl.float32)

    # Two shifted keys of one variance share a key gradient; otherwise one component comes after the other.
    for r in range(1 if TWO_SHIFTS else M):
        b_key = load_key(keys, r, o_first, case)  # [BLOCK_J, D]
        b_other_key = b_key
        if HARD and M == 2 and not SHARED_KEY:
            b_other_key = load_tile(d_key, i_batch, 2 * i_kv_head + 1 - r, o_first, BLOCK_J, D)
        b_column = tl.zeros([BLOCK_J], tl.float32)
        if p_column is not None:
            b_column = tl.load(p_column + r * padded_keys + place(o_j))
        columns = Columns(r, o_first, o_j, b_key, b_other_key, b_value, b_column, b_column_second)
        b_grad_key = tl.zeros([BLOCK_J, D], tl.float32)
        b_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        b_both_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        for g in range(1 if ONE_GROUP else group_size):
            i_query_head = i_kv_head * group_size + g
            i_head = (i_batch * num_heads + i_query_head).to(tl.int64)
            terms = Terms(
                of_head(p_row, i_head, padded_queries, M), p_column, p_inverse_variance, scale, padded_queries,
                padded_keys,
            )  # fmt: skip
            p_own_mask = mask_of_head(p_mask, i_batch, i_query_head, stride_mask_batch, stride_mask_head)
            visibility = Visibility(
                num_queries, num_keys, span.causal_offset, p_own_mask, stride_mask_row, stride_mask_column
            )
            p_second = of_head(p_row_second, i_head, padded_queries)
            dropout = Dropout(p_row_random + i_head * padded_queries, b_column_random, threshold) if DROPOUT else None
            queries = Queries(d_query, d_grad_out, i_batch, i_query_head, i_head, p_reference, p_delta, p_second)
            if CAUSAL:
                for o_i in tl.range(span.first, span.full, BLOCK_I):
                    b_grad_key, b_grad_value, b_sum, b_both_sum = _gather(
                        b_grad_key, b_grad_value, b_sum, b_both_sum, columns, queries, keys, terms, visibility,
                        dropout, o_i, True, case,
                    )  # fmt: skip
            for o_i in tl.range(span.full, span.end, BLOCK_I):
                b_grad_key, b_grad_value, b_sum, b_both_sum = _gather(
                    b_grad_key, b_grad_value, b_sum, b_both_sum, columns, queries, keys, terms, visibility, dropout,
                    o_i, False, case,
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
        b_natural = natural_scale if ONE_VARIANCE else tl.load(p_inverse_variance + r) * LN_2
        o_column = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
        if p_column is not None:
            tl.store(p_grad_column + o_column, b_sum, mask=o_j < num_keys)
        if not ONE_VARIANCE:
            # sum_i dlogit_ij q_i . k_j is the gradient of the key, before scaling, times the key.
            b_grad_scale = tl.sum(b_grad_key * b_key.to(tl.float32), 1)
            tl.store(p_grad_scale + o_column, b_grad_scale, mask=o_j < num_keys)
        if GAUSSIAN:
            # The column holds -|k_j + shift_r|^2 / 2, times the scale.
            b_grad_key -= (b_both_sum if TWO_SHIFTS else b_sum)[:, None] * b_key.to(tl.float32)
        shifts = Shifts(p_shift, p_origin, width)
        if GAUSSIAN and p_shift is not None:
            b_moved_key = b_key.to(tl.float32)
            if p_origin is not None:
                b_moved_key -= load_origin(shifts, i_kv, D)[None, :]
            b_shift = load_shift(shifts, i_kv_head, r, M, D)
            b_grad_key -= b_sum[:, None] * b_shift[None, :]
            o_partial = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_blocks + i_block
            p_partial = p_key_partials + o_partial * D + o_d
            tl.store(p_partial, tl.sum(b_sum[:, None] * (b_moved_key + b_shift[None, :]), 0))
        if TWO_SHIFTS:
            b_second = b_both_sum - b_sum
            o_column += num_samples.to(tl.int64) * num_keys
            tl.store(p_grad_column + o_column, b_second, mask=o_j < num_keys)
            if GAUSSIAN:
                b_shift = load_shift(shifts, i_kv_head, 1, M, D)
                b_grad_key -= b_second[:, None] * b_shift[None, :]
                p_partial += num_samples.to(tl.int64) * num_blocks * D
                tl.store(p_partial, tl.sum(b_second[:, None] * (b_moved_key + b_shift[None, :]), 0))
        i_out_head = i_kv_head if TWO_SHIFTS else i_kv_head * M + r
        store_tile(d_grad_key, i_batch, i_out_head, o_first, (b_grad_key * b_natural).to(b_key.dtype))
    if DROPOUT:
        b_grad_value *= keep_scale
    store_tile(d_grad_value, i_batch, i_kv_head, o_first, b_grad_value.to(b_value.dtype))


@triton.jit
def _gather(
    b_grad_key, b_grad_value, b_sum, b_both_sum, columns, queries, keys, terms, visibility, dropout, o_i,
    CAUSAL: tl.constexpr, case: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries sends back to the block of keys. Pairs are transposed, ``[BLOCK_J, BLOCK_I]``."""
    p_reference = queries.p_reference + queries.i_head * terms.padded_queries
    p_delta = queries.p_delta + queries.i_head * terms.padded_queries
    o_rows = o_i + tl.arange(0, case.BLOCK_I)
    b_query = load_tile(queries.d_query, queries.i_batch, queries.i_query_head, o_i, case.BLOCK_I, case.D)
    b_grad_out = load_tile(queries.d_grad_out, queries.i_batch, queries.i_query_head, o_i, case.BLOCK_I, case.DV)
    b_reference = load_terms(p_reference, o_i, case.BLOCK_I)
    b_delta = load_terms(p_delta, o_i, case.BLOCK_I)
    b_product = product(columns.b_key, b_query.T)
    b_grad_weight = product(columns.b_value, b_grad_out.T)
    b_scale = component_scale(terms, columns.i_component)
    IN_ORDER: tl.constexpr = b_query.dtype == tl.float32
    b_row = tl.zeros_like(b_reference) if IN_ORDER else -b_reference
    if terms.p_row is not None and not case.TWO_SHIFTS:
        b_row += load_terms(terms.p_row + columns.i_component * terms.padded_queries, o_i, case.BLOCK_I)
    b_logit = b_product * b_scale + (b_row[None, :] + columns.b_column[:, None])
    if IN_ORDER:
        b_logit = less_reference(b_logit, b_reference, TRANSPOSED=True)
    if case.TWO_SHIFTS and case.HARD:
        # Only the biases compete, see `row_second` and `column_second` in terms.py.
        b_lead = load_terms(queries.p_second, o_i, case.BLOCK_I)[None, :] - columns.b_second[:, None]
        b_responsibility = hard_responsibility(b_lead)
        if IN_ORDER:
            b_other = tl.load(terms.p_column + terms.padded_keys + place(columns.o_j))[:, None]
            b_other += load_terms(queries.p_second, o_i, case.BLOCK_I)[None, :]
            b_logit = b_product * terms.scale + tl.maximum(columns.b_column[:, None], b_other)
            b_weight = weight_of(less_reference(b_logit, b_reference, TRANSPOSED=True), b_query)
        else:
            b_weight = weight_of(b_logit + b_lead * b_responsibility, b_query)
    elif case.HARD and case.M == 2:
        b_other = b_product
        if not case.SHARED_KEY:
            b_other = product(columns.b_other_key, b_query.T)
        b_other = component_logit(
            b_other, terms, 1 - columns.i_component, o_i, columns.o_j, b_reference, b_query, TRANSPOSED=True,
            FINITE=True,
        )  # fmt: skip
        b_weight = hard_responsibility(finite(b_logit) - b_other) * weight_of(b_logit, b_query)
    elif case.HARD and case.M > 2:
        b_best = tl.full([case.BLOCK_J, case.BLOCK_I], float("-inf"), tl.float32)
        b_ties = tl.zeros([case.BLOCK_J, case.BLOCK_I], tl.float32)
        for r in tl.static_range(case.M):
            b_other = b_product
            if not case.SHARED_KEY:
                b_key = load_key(keys, r, columns.o_first, case)
                b_other = product(b_key, b_query.T)
            b_other = component_logit(b_other, terms, r, o_i, columns.o_j, b_reference, b_query, True)
            b_ties = tl.where(b_other > b_best, 1.0, b_ties + (b_other == b_best).to(tl.float32))
            b_best = tl.maximum(b_best, b_other)
        b_weight = tl.where(b_logit >= b_best, weight_of(b_logit, b_query) / b_ties, 0.0)
    else:
        b_weight = weight_of(b_logit, b_query)
    if CAUSAL or visibility.p_mask is not None:
        m_seen = is_visible(o_rows[None, :], columns.o_j[:, None], visibility, CAUSAL)
        b_weight = tl.where(m_seen, b_weight, 0.0)
    b_kept_weight = b_weight
    if dropout is not None:
        b_row_random = load_terms(dropout.row_random, o_i, case.BLOCK_I)[None, :]
        b_column_random = dropout.column_random[:, None]
        b_kept_weight = unless_dropped(b_weight, b_row_random, b_column_random, dropout.threshold)
        b_grad_logit = b_kept_weight * b_grad_weight - b_weight * b_delta[None, :]
    if case.TWO_SHIFTS and not case.HARD:
        if case.UNFACTORED:
            b_gap = load_terms(terms.p_row + terms.padded_queries, o_i, case.BLOCK_I)
            b_gap -= load_terms(terms.p_row, o_i, case.BLOCK_I)
            b_second = tl.load(terms.p_column + terms.padded_keys + place(columns.o_j))
            if IN_ORDER:
                b_other = b_product * terms.scale + (b_gap[None, :] + b_second[:, None])
                b_other = weight_of(less_reference(b_other, b_reference, TRANSPOSED=True), b_query)
                b_ratio = load_terms(queries.p_second, o_i, case.BLOCK_I)[None, :] * columns.b_second[:, None]
                b_other = second_weight(b_weight, b_ratio, b_other)
            else:
                b_other = b_product * terms.scale + ((b_gap - b_reference)[None, :] + b_second[:, None])
                b_other = weight_of(b_other, b_query)
            if CAUSAL or visibility.p_mask is not None:
                b_other = tl.where(m_seen, b_other, 0.0)
            b_kept_other = b_other
            if dropout is not None:
                b_kept_other = unless_dropped(b_other, b_row_random, b_column_random, dropout.threshold)
            b_kept_weight += b_kept_other
        else:
            b_ratio = load_terms(queries.p_second, o_i, case.BLOCK_I)[None, :] * columns.b_second[:, None]
            b_kept_weight += b_kept_weight * b_ratio
    if dropout is None:
        b_grad_weight -= b_delta[None, :]
        b_grad_logit = b_weight * b_grad_weight
    if case.TWO_SHIFTS and case.HARD:
        # In fp32 what the first has, so that a first that never wins has exactly nothing.
        IS_FIRST: tl.constexpr = b_query.dtype == tl.float32
        b_sum += partial_products(b_grad_logit, 1.0 - b_responsibility if IS_FIRST else b_responsibility)
        b_both_sum += partial_sums(b_grad_logit)
    elif case.TWO_SHIFTS or terms.p_column is not None:
        b_sum += partial_sums(b_grad_logit)
    if case.TWO_SHIFTS and not case.HARD:
        if case.UNFACTORED and dropout is not None:
            b_grad_logit += b_kept_other * b_grad_weight - b_other * b_delta[None, :]
        elif case.UNFACTORED:
            b_grad_logit += b_other * b_grad_weight
        else:
            b_grad_logit += b_grad_logit * b_ratio
        b_both_sum += partial_sums(b_grad_logit)
    # Last of all: while these products run, their operands stay in registers.
    b_kept_weight = b_kept_weight.to(b_grad_out.dtype)
    b_grad_value = product(b_kept_weight, b_grad_out, b_grad_value)
    b_grad_key = product(b_grad_logit.to(b_query.dtype), b_query, b_grad_key)
    return b_grad_key, b_grad_value, b_sum, b_both_sum
