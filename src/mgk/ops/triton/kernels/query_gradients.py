"""The backward kernel for queries: one program for one block of queries of one head.

    dlogit[i,j,r] = weight[i,j,r] (dO_i . v_j - delta_i)
    dq_i          = sum_jr scale[r] dlogit[i,j,r] k_jr  + sum_r drow[i,r] scale[r] shift_r
    drow[i,r]     = sum_j dlogit[i,j,r]

:mod:`mgk.ops.triton.kernels.gradient_sums` has the whole backward pass. What the shifts gain by way of the rows is left
as one partial sum a program, which another kernel adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.dropout import dropout_of_rows, rows_unless_dropped
from mgk.ops.triton.kernels.heads import query_head
from mgk.ops.triton.kernels.terms import (
    Shifts,
    Terms,
    component_logit,
    component_scale,
    hard_responsibility,
    less_reference,
    load_origin,
    load_shift,
    load_terms,
    of_head,
    own_terms,
    place,
    second_logit,
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
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_keys


class Rows(NamedTuple):
    """What a program holds of its block of queries; one number for each query but for the first two."""

    b_query: tl.tensor
    b_grad_out: tl.tensor
    o_i: tl.tensor
    b_reference: tl.tensor
    """the normaliser, in units of log 2; of two shifted keys less the first row term, less the level"""
    b_delta: tl.tensor
    b_second: tl.tensor
    """``row_second``"""


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_query(
    # tokens
    d_query, d_key, d_value, d_grad_out, d_grad_query,
    # terms of the logits and of the gradients
    p_row, p_column, p_row_second, p_column_second, p_inverse_variance, p_reference, p_delta, p_grad_normaliser,
    p_unfactored, p_shift, p_grad_row, p_query_partials, p_origin,
    # visibility and dropout
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span,
    # numbers
    scale, natural_scale, threshold, keep_scale,
    num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, UNFACTORED: tl.constexpr, HARD: tl.constexpr,
    GAUSSIAN: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write ``dq``, the partial sums of the shifts' gradients and, where variances differ, ``drow``."""
    case: tl.constexpr = Case(
        M, SHARED_KEY, HARD, BLOCK_I, BLOCK_J, D, DV, TWO_SHIFTS=TWO_SHIFTS, UNFACTORED=UNFACTORED
    )
    ONE_VARIANCE: tl.constexpr = p_inverse_variance is None
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    if CAUSAL:
        i_block = num_blocks - 1 - i_block
    head = query_head(i_head, num_heads, group_size)
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    if TWO_SHIFTS and not HARD:  # noqa: SIM102 (the outer condition is a constant: without it there is no such pointer)
        if (tl.load(p_unfactored + head.i_kv) != 0) != UNFACTORED:
            return

    terms = Terms(
        p_row=of_head(p_row, i_head, padded_queries, M),
        p_column=of_head(p_column, head.i_kv, padded_keys, M),
        p_column_second=of_head(p_column_second, head.i_kv, padded_keys),
        p_inverse_variance=None if ONE_VARIANCE else p_inverse_variance + head.i_kv_head * M,
        scale=scale, padded_queries=padded_queries, padded_keys=padded_keys,
    )  # fmt: skip
    p_mask = mask_of_head(p_mask, head.i_batch, head.i_query_head, stride_mask_batch, stride_mask_head)
    b_row_second = tl.zeros([BLOCK_I], tl.float32)
    if TWO_SHIFTS:
        b_row_second = own_terms(p_row_second, i_head, padded_queries, o_i)
    dropout = None
    if p_row_random is not None:
        dropout = dropout_of_rows(p_row_random, p_column_random, threshold, head, terms, o_i)
    span = visible_keys(
        num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, head.i_batch, o_first, CAUSAL,
        BLOCK_I, BLOCK_J,
    )  # fmt: skip
    visibility = Visibility(num_queries, num_keys, span.causal_offset, p_mask, stride_mask_row, stride_mask_column)
    keys = Keys(d_key, d_value, head.i_batch, head.i_kv_head)
    b_query = load_tile(d_query, head.i_batch, head.i_query_head, o_first, BLOCK_I, D)  # [BLOCK_I, D]
    b_grad_out = load_tile(d_grad_out, head.i_batch, head.i_query_head, o_first, BLOCK_I, DV)  # [BLOCK_I, DV]
    b_reference = own_terms(p_reference, i_head, padded_queries, o_i)
    b_delta = own_terms(p_delta, i_head, padded_queries, o_i)
    rows = Rows(b_query, b_grad_out, o_i, b_reference, b_delta, b_row_second)

    b_grad_query = tl.zeros([BLOCK_I, D], tl.float32)
    # One column for each component; two shifted keys keep the sums of one, in one column for each thread of a row.
    b_grad_row = tl.zeros([BLOCK_I, 4], tl.float32) if TWO_SHIFTS else tl.zeros([BLOCK_I, 8], tl.float32)
    for o_j in tl.range(span.first, span.full, BLOCK_J):
        b_grad_query, b_grad_row = _gather(
            b_grad_query, b_grad_row, rows, keys, terms, visibility, dropout, o_j, False, case
        )
    if CAUSAL:
        for o_j in tl.range(span.full, span.end, BLOCK_J):
            b_grad_query, b_grad_row = _gather(
                b_grad_query, b_grad_row, rows, keys, terms, visibility, dropout, o_j, True, case
            )

    if TWO_SHIFTS:
        b_grad_row = tl.sum(b_grad_row, 1)
    if p_row_random is not None:
        b_grad_query *= keep_scale
        b_grad_row *= keep_scale
    m_i = o_i < num_queries
    o_d = tl.arange(0, D)
    shifts = Shifts(p_shift, p_origin, width)
    # The partial sums of one component of one key/value head, over samples, query heads and blocks.
    num_partials = (tl.num_programs(0) // (num_heads // group_size)).to(tl.int64)
    if p_shift is not None:
        i_partial = (head.i_batch * group_size + head.i_query_head % group_size) * num_blocks + i_block
        p_query_partials += (head.i_kv_head * M * num_partials + i_partial) * D + o_d
    b_moved_query = b_query.to(tl.float32)
    if p_origin is not None:
        b_moved_query -= load_origin(shifts, head.i_kv, D)[None, :]
    if TWO_SHIFTS:
        b_total = None
        if p_grad_normaliser is not None:
            b_total = tl.load(p_grad_normaliser + i_head.to(tl.int64) * num_queries + o_i, mask=m_i, other=0.0)
        b_first, b_second = _both_rows(b_grad_row, b_total, rows, m_i, case)
        b_shift = load_shift(shifts, head.i_kv_head, 0, M, D)
        b_grad_query += b_first[:, None] * b_shift[None, :]
        b_shift = load_shift(shifts, head.i_kv_head, 1, M, D)
        b_grad_query += b_second[:, None] * b_shift[None, :]
        tl.store(p_query_partials, tl.sum(b_first[:, None] * b_moved_query, 0))
        tl.store(p_query_partials + num_partials * D, tl.sum(b_second[:, None] * b_moved_query, 0))
    elif p_row is not None:
        o_r = tl.arange(0, 8)
        for r in tl.static_range(M):
            b_own = tl.sum(tl.where(o_r[None, :] == r, b_grad_row, 0.0), 1)  # [BLOCK_I]
            b_scaled = b_own if ONE_VARIANCE else b_own * tl.load(terms.p_inverse_variance + r) * LN_2
            if p_shift is not None:
                b_shift = load_shift(shifts, head.i_kv_head, r, M, D)
                b_grad_query += b_scaled[:, None] * b_shift[None, :]
                tl.store(p_query_partials + r * num_partials * D, tl.sum(b_own[:, None] * b_moved_query, 0))
            if GAUSSIAN and not ONE_VARIANCE:
                b_grad_query -= b_scaled[:, None] * b_query.to(tl.float32)
            if not ONE_VARIANCE:
                tl.store(p_grad_row + (i_head.to(tl.int64) * M + r) * num_queries + o_i, b_own, mask=m_i)
    if ONE_VARIANCE:
        b_grad_query *= natural_scale
    store_tile(d_grad_query, head.i_batch, head.i_query_head, o_first, b_grad_query.to(b_query.dtype))


@triton.jit
def _both_rows(b_grad_row, b_total, rows, m_i, case: tl.constexpr):
    """``drow`` of both shifted keys from that of one, ``[BLOCK_I]`` each.

    The logits of a row rise and fall together with its normaliser alone: what one component does not get, the other
    does. ``total`` is the gradient of the normaliser, ``None`` if it has none.
    """
    b_other = -b_grad_row
    if b_total is not None:
        b_other += tl.where(rows.b_reference == float("inf"), 0.0, b_total)
    # Rows beyond the end have no gradient, but what stands for their query is not zero once it is moved.
    b_other = tl.where(m_i, b_other, 0.0)
    # Logits of the second are the first's and more, and less exact where that is much. Then rows add up to a little
    # more or less than they should, which in fp32 would show if it went to a first that has nothing.
    if case.HARD and rows.b_query.dtype != tl.float32:
        return b_other, b_grad_row
    return b_grad_row, b_other


@triton.jit
def _gather(
    b_grad_query, b_grad_row, rows, keys, terms, visibility, dropout, o_j, CAUSAL: tl.constexpr, case: tl.constexpr
):
    """Add what one block of keys sends back to the block of queries."""
    o_columns = o_j + tl.arange(0, case.BLOCK_J)
    b_value = load_value(keys, o_j, case)
    b_grad_weight = product(rows.b_grad_out, b_value.T)  # [BLOCK_I, BLOCK_J]
    if dropout is not None:
        AS_PRODUCT: tl.constexpr = rows.b_query.dtype != tl.float32 and visibility.p_mask is None
        b_grad_weight = rows_unless_dropped(b_grad_weight, dropout, o_j, AS_PRODUCT)
    b_grad_weight -= rows.b_delta[:, None]
    m_seen = None
    if CAUSAL or visibility.p_mask is not None:
        m_seen = is_visible(rows.o_i[:, None], o_columns[None, :], visibility, CAUSAL)
        # Every gradient of a pair is a weight times this.
        b_grad_weight = tl.where(m_seen, b_grad_weight, 0.0)
    if case.TWO_SHIFTS:
        gather: tl.constexpr = _gather_two_shifts
    elif case.HARD and case.M == 2:
        gather: tl.constexpr = _gather_best_of_two
    else:
        gather: tl.constexpr = _gather_components
    return gather(b_grad_query, b_grad_row, b_grad_weight, m_seen, rows, keys, terms, o_j, case)


@triton.jit
def _where_seen(m_seen, b_weight):
    """``weight``, or 0 where a pair is not visible: an unseen key may be infinitely likely, and 0 times it must stay 0.
    ``m_seen`` is ``None`` where all are visible."""
    return b_weight if m_seen is None else tl.where(m_seen, b_weight, 0.0)


@triton.jit
def _gather_two_shifts(b_grad_query, b_grad_row, b_grad_weight, m_seen, rows, keys, terms, o_j, case: tl.constexpr):
    """Two shifted keys of one variance share the product, and the gradient of the key."""
    b_key = load_key(keys, 0, o_j, case)  # [BLOCK_J, D]
    b_product = product(rows.b_query, b_key.T)  # [BLOCK_I, BLOCK_J]
    IN_ORDER: tl.constexpr = rows.b_query.dtype == tl.float32
    p_second_column = terms.p_column + terms.padded_keys
    if case.HARD:
        # Only the biases compete, see `row_second` and `column_second` in terms.py.
        b_lead = rows.b_second[:, None] - load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
        b_responsibility = hard_responsibility(b_lead)
        if IN_ORDER:
            b_bias = rows.b_second[:, None] + load_terms(p_second_column, o_j, case.BLOCK_J)[None, :]
            b_bias = tl.maximum(load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :], b_bias)
            b_logit = less_reference(b_product * terms.scale + b_bias, rows.b_reference)
        else:
            b_bias = load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :] - rows.b_reference[:, None]
            b_logit = b_product * terms.scale + b_bias + b_lead * b_responsibility
        b_weight = weight_of(b_logit, rows.b_query)
    elif IN_ORDER:
        b_logit = b_product * terms.scale + load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :]
        b_weight = weight_of(less_reference(b_logit, rows.b_reference), rows.b_query)
    else:
        b_scaled = b_product * terms.scale
        b_bias = load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :] - rows.b_reference[:, None]
        b_weight = weight_of(b_scaled + b_bias, rows.b_query)
    b_first = _where_seen(m_seen, b_weight) * b_grad_weight
    if case.HARD:
        b_grad_logit = b_first
    elif case.UNFACTORED:
        if IN_ORDER:
            b_other = less_reference(second_logit(b_product, terms, rows.o_i, o_j, case.BLOCK_J), rows.b_reference)
            b_ratio = rows.b_second[:, None] * load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
            b_other = second_weight(b_weight, b_ratio, weight_of(b_other, rows.b_query))
        else:
            b_gap = tl.load(terms.p_row + terms.padded_queries + place(rows.o_i))
            b_gap -= tl.load(terms.p_row + place(rows.o_i))
            b_column = load_terms(p_second_column, o_j, case.BLOCK_J)
            b_other = b_product * terms.scale + ((b_gap - rows.b_reference)[:, None] + b_column[None, :])
            b_other = weight_of(b_other, rows.b_query)
        b_grad_logit = b_first + _where_seen(m_seen, b_other) * b_grad_weight
    else:
        b_ratio = rows.b_second[:, None] * load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
        b_grad_logit = b_first + b_first * b_ratio
    b_grad_query = product(b_grad_logit.to(b_key.dtype), b_key, b_grad_query)
    # What the first component has of it; of a hard choice in half precision the second, which is less work.
    if not case.HARD:
        b_grad_row += partial_sums(b_first)
    elif rows.b_query.dtype == tl.float32:
        b_grad_row += partial_products(b_grad_logit, 1.0 - b_responsibility)
    else:
        b_grad_row += partial_products(b_grad_logit, b_responsibility)
    return b_grad_query, b_grad_row


@triton.jit
def _gather_best_of_two(b_grad_query, b_grad_row, b_grad_weight, m_seen, rows, keys, terms, o_j, case: tl.constexpr):
    """Under a hard choice the better of two components has the gradient of the weight; of a tie each has half."""
    b_first_key = load_key(keys, 0, o_j, case)
    b_second_key = load_key(keys, 1, o_j, case)
    b_first_scale = component_scale(terms, 0)
    b_second_scale = component_scale(terms, 1)
    b_first = product(rows.b_query, b_first_key.T)
    b_first = component_logit(b_first, terms, 0, rows.o_i, o_j, rows.b_reference, rows.b_query, FINITE=True)
    b_second = product(rows.b_query, b_second_key.T)
    b_second = component_logit(b_second, terms, 1, rows.o_i, o_j, rows.b_reference, rows.b_query, FINITE=True)
    b_weight = _where_seen(m_seen, weight_of(tl.maximum(b_first, b_second), rows.b_query))
    b_responsibility = hard_responsibility(b_first - b_second)
    b_grad_logit = b_weight * b_grad_weight
    b_first = b_responsibility * b_grad_logit
    b_second = b_grad_logit - b_first
    if terms.p_row is not None:
        o_r = tl.arange(0, 8)
        b_grad_row += tl.where(o_r[None, :] == 0, tl.sum(b_first, 1)[:, None], 0.0)
        b_grad_row += tl.where(o_r[None, :] == 1, tl.sum(b_second, 1)[:, None], 0.0)
    if terms.p_inverse_variance is not None:
        b_first *= b_first_scale * LN_2
        b_second *= b_second_scale * LN_2
    b_grad_query = product(b_first.to(b_first_key.dtype), b_first_key, b_grad_query)
    b_grad_query = product(b_second.to(b_second_key.dtype), b_second_key, b_grad_query)
    return b_grad_query, b_grad_row


@triton.jit
def _gather_components(b_grad_query, b_grad_row, b_grad_weight, m_seen, rows, keys, terms, o_j, case: tl.constexpr):
    """One component after the other; under a hard choice the largest are found first, and share the weight."""
    o_r = tl.arange(0, 8)
    b_best = tl.full([case.BLOCK_I, case.BLOCK_J], float("-inf"), tl.float32)
    b_ties = tl.zeros([case.BLOCK_I, case.BLOCK_J], tl.float32)
    if case.HARD and case.M > 2:
        for r in tl.static_range(case.M):
            b_key = load_key(keys, r, o_j, case)
            b_product = product(rows.b_query, b_key.T)
            b_logit = component_logit(b_product, terms, r, rows.o_i, o_j, rows.b_reference, rows.b_query)
            b_ties = tl.where(b_logit > b_best, 1.0, b_ties + (b_logit == b_best).to(tl.float32))
            b_best = tl.maximum(b_best, b_logit)
        b_ties = tl.maximum(b_ties, 1.0)
    for r in tl.static_range(case.M):
        b_key = load_key(keys, r, o_j, case)
        b_product = product(rows.b_query, b_key.T)
        b_logit = component_logit(b_product, terms, r, rows.o_i, o_j, rows.b_reference, rows.b_query)
        b_weight = weight_of(b_logit, rows.b_query)
        if case.HARD and case.M > 2:
            b_weight = tl.where(b_logit == b_best, b_weight / b_ties, 0.0)
        b_grad_logit = _where_seen(m_seen, b_weight) * b_grad_weight
        if terms.p_row is not None:
            b_grad_row += tl.where(o_r[None, :] == r, tl.sum(b_grad_logit, 1)[:, None], 0.0)
        if terms.p_inverse_variance is not None:
            b_grad_logit *= component_scale(terms, r) * LN_2
        b_grad_query = product(b_grad_logit.to(b_key.dtype), b_key, b_grad_query)
    return b_grad_query, b_grad_row
