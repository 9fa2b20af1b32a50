"""The forward kernel: one program for one block of queries of one head.

    weight[i,j] = sum_r 2^logit[i,j,r]        (hard: 2^max_r logit[i,j,r])
    out[i]      = sum_j weight[i,j] v_j / sum_j weight[i,j]

with the logits of :mod:`mgk.ops.triton.kernels.terms`. Online softmax takes weights against a running maximum, which
costs a comparison and a rescaling a pair. Here they are taken against a reference that stays fixed: distances against a
level that the columns hold already, about the logit of the first query and key; other logits (and all in fp16, where
weights must stay small) against the row's largest logit in the first block of keys. Two shifted keys of one variance
need a single exponential, ``2^logit[i,j,0] (1 + row_second[i] column_second[j])``.

All this is exact as long as a row's sum stays within what the number format holds. A row that leaves it gets NaN as its
normaliser (its sum is checked at the end, and a ratio out of range is NaN to begin with), and
:mod:`mgk.ops.triton.kernels.repair` attends to it again. The choice is made row by row from what the row sees, so that
later tokens never change the bits of earlier rows.
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
    component_bias,
    component_logit,
    in_order,
    less_reference,
    load_terms,
    mark_unfactored,
    of_head,
    place,
    safe_ratio,
    shift_product,
    terms_at,
)
from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    LN_2,
    VARYING_WITH_WIDTH,
    Case,
    Keys,
    awaited,
    load_key,
    load_tile,
    load_value,
    partial_sums,
    product,
    stand_in,
    store_tile,
)
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_keys


class Rows(NamedTuple):
    """What a program holds of its block of queries."""

    o_i: tl.tensor
    b_query: tl.tensor
    b_gap: tl.tensor
    """how far the row term of the second shifted key exceeds the first's, ``[BLOCK_I]``"""
    b_second: tl.tensor
    """``row_second``, ``[BLOCK_I]``"""
    b_reference: tl.tensor
    """what logits are measured from, ``[BLOCK_I]``; 0 if columns hold a level"""


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_forward(
    # tokens
    d_query, d_key, d_value, d_out,
    # terms of the logits
    p_row, p_column, p_row_second, p_column_second, p_unscaled, p_unfactored, p_level, p_inverse_variance, p_shift,
    p_origin, p_normaliser,
    # visibility and dropout
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span,
    # numbers
    scale, threshold, keep_scale,
    num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks, width,
    largest_ratio, lowest_sum, highest_sum, margin,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, TWO_KEYS: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, AWAIT_PRODUCTS: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write ``out [B, H, Nq, Dv]`` and ``normaliser [B, H, Nq]`` (natural logarithm, NaN where unsafe)."""
    HAS_LEVEL: tl.constexpr = p_level is not None
    case: tl.constexpr = Case(
        M, SHARED_KEY, HARD, BLOCK_I, BLOCK_J, D, DV, TWO_SHIFTS=TWO_SHIFTS, TWO_KEYS=TWO_KEYS, HAS_LEVEL=HAS_LEVEL,
        AWAIT_PRODUCTS=AWAIT_PRODUCTS, DIRECT=DIRECT,
    )  # fmt: skip
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    if CAUSAL:
        # The longest rows come first: short ones fill the gaps at the end.
        i_block = num_blocks - 1 - i_block
    head = query_head(i_head, num_heads, group_size)
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)

    p_normaliser += i_head.to(tl.int64) * num_queries
    terms = Terms(
        p_row=of_head(p_row, i_head, padded_queries, M),
        p_column=of_head(p_column, head.i_kv, padded_keys, M),
        p_column_second=of_head(p_column_second, head.i_kv, padded_keys),
        p_unscaled=of_head(p_unscaled, head.i_kv, padded_keys, 2),
        p_inverse_variance=None if p_inverse_variance is None else p_inverse_variance + head.i_kv_head * M,
        scale=scale, padded_queries=padded_queries, padded_keys=padded_keys,
    )  # fmt: skip
    first_key, end_full, end_key, causal_offset = visible_keys(
        num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, head.i_batch, o_first, CAUSAL,
        BLOCK_I, BLOCK_J,
    )  # fmt: skip
    p_mask = mask_of_head(p_mask, head.i_batch, head.i_query_head, stride_mask_batch, stride_mask_head)
    visibility = Visibility(num_queries, num_keys, causal_offset, p_mask, stride_mask_row, stride_mask_column)
    keys = Keys(d_key, d_value, head.i_batch, head.i_kv_head)

    b_query = load_tile(d_query, head.i_batch, head.i_query_head, o_first, BLOCK_I, D)  # [BLOCK_I, D]
    b_first_row = tl.zeros([BLOCK_I], tl.float32)
    b_gap = tl.zeros([BLOCK_I], tl.float32)
    b_second = tl.zeros([BLOCK_I], tl.float32)
    if TWO_SHIFTS:
        b_first_row, b_gap, b_second = _write_rows(
            b_query, o_i, head, terms, Shifts(p_shift, p_origin, width), p_row_second, p_unfactored, largest_ratio,
            case,
        )  # fmt: skip
        # The last block may lie in the padding, and has done its work.
        if o_first >= num_queries:
            end_key = 0
            end_full = 0
    dropout = None
    if p_row_random is not None:
        dropout = dropout_of_rows(p_row_random, p_column_random, threshold, head, terms, o_i)

    b_out = tl.zeros([BLOCK_I, DV], tl.float32)
    b_sum = tl.zeros([BLOCK_I, 4], tl.float32)
    b_reference = tl.zeros([BLOCK_I], tl.float32)
    if not HAS_LEVEL and end_key > first_key:
        rows = Rows(o_i, b_query, b_gap, b_second, b_reference)
        b_reference = _largest_logit(rows, keys, terms, visibility, first_key, CAUSAL, case) + margin
    rows = Rows(o_i, b_query, b_gap, b_second, b_reference)
    # With one component a pointer goes along, which takes fewer registers than to find it from the block's number.
    ALONE: tl.constexpr = HAS_LEVEL and M == 1
    p_block = terms.p_column + first_key if ALONE else None
    for o_j in tl.range(first_key, end_full, BLOCK_J):
        b_out, b_sum = _attend(b_out, b_sum, rows, keys, terms, p_block, visibility, dropout, o_j, False, case)
        if ALONE:
            p_block += BLOCK_J
    if CAUSAL:
        for o_j in tl.range(end_full, end_key, BLOCK_J):
            b_out, b_sum = _attend(b_out, b_sum, rows, keys, terms, p_block, visibility, dropout, o_j, True, case)
            if ALONE:
                p_block += BLOCK_J

    b_sum = tl.sum(b_sum, 1)
    b_normaliser = b_first_row + b_reference + tl.math.log2(b_sum)
    if HAS_LEVEL:
        b_normaliser += tl.load(p_level + head.i_kv)
    m_safe = (b_sum >= lowest_sum) & (b_sum <= highest_sum)
    b_normaliser = tl.where(m_safe, b_normaliser * LN_2, float("nan"))
    # Where there is nothing to see, 0 is right: padding would otherwise be repaired.
    b_normaliser = tl.where(end_key > first_key, b_normaliser, float("-inf"))
    b_sum = tl.where(end_key > first_key, b_sum, 1.0)
    tl.store(p_normaliser + o_i, b_normaliser, mask=o_i < num_queries)
    b_out = b_out * (keep_scale / b_sum)[:, None]
    store_tile(d_out, head.i_batch, head.i_query_head, o_first, b_out.to(b_query.dtype))


@triton.jit
def _write_rows(b_query, o_i, head, terms, shifts, p_row_second, p_unfactored, largest_ratio, case: tl.constexpr):
    """Make the row terms of two shifted keys, since the query is here already, and keep them for repair and backward.

    Returns:
        The first row term, how far the second exceeds it, and ``row_second``, each ``[BLOCK_I]``.
    """
    b_first = shift_product(b_query, shifts, head.i_kv_head, head.i_kv, 0, case.M, case.D)
    b_second = shift_product(b_query, shifts, head.i_kv_head, head.i_kv, 1, case.M, case.D)
    # Scaled last: the compiler would round one of the two products and not the other, and no tie would be one.
    b_gap = (b_second - b_first) * terms.scale
    b_first_row = b_first * terms.scale
    tl.store(terms.p_row + place(o_i), b_first_row)
    tl.store(terms.p_row + terms.padded_queries + place(o_i), b_second * terms.scale)
    p_row_second += head.i_head.to(tl.int64) * terms.padded_queries
    b_row_second = tl.zeros([case.BLOCK_I], tl.float32)
    if case.HARD:
        tl.store(p_row_second + place(o_i), b_gap)
        if terms.p_unscaled is not None:
            b_gap = b_second - b_first
    else:
        b_row_second = safe_ratio(b_gap, largest_ratio)
        mark_unfactored(p_unfactored, head.i_kv, b_row_second)
        tl.store(p_row_second + place(o_i), b_row_second)
    return b_first_row, b_gap, b_row_second


@triton.jit
def _attend(
    b_out, b_sum, rows, keys, terms, p_block, visibility, dropout, o_j, CAUSAL: tl.constexpr, case: tl.constexpr
):
    """Add one block of keys, weighed against the fixed reference.

    ``p_block`` is where the columns of this block begin if there is one component.
    """
    o_columns = o_j + tl.arange(0, case.BLOCK_J)
    if terms.p_unscaled is not None:
        b_weight = _weights_from_bias(rows, keys, terms, o_j, case)
    elif case.TWO_SHIFTS:
        b_weight = _weights_of_two_shifts(rows, keys, terms, o_j, case)
    elif case.HARD and case.SHARED_KEY and terms.p_inverse_variance is None:
        b_weight = _weights_of_best_bias(rows, keys, terms, o_j, case)
    elif case.HAS_LEVEL and case.M == 1:
        b_weight = _weights_of_one_key(rows, keys, terms, p_block, o_j, case)
    elif case.TWO_KEYS:
        b_weight = _weights_of_two_keys(rows, keys, terms, o_j, case)
    else:
        b_weight = _weights_of_components(rows, keys, terms, o_j, case)
    if CAUSAL or visibility.p_mask is not None:
        m_seen = is_visible(rows.o_i[:, None], o_columns[None, :], visibility, CAUSAL)
        b_weight = tl.where(m_seen, b_weight, 0.0)  # [BLOCK_I, BLOCK_J]
    # In this order: with the values read first, the compiler's schedule is a tenth slower.
    b_sum += partial_sums(b_weight)
    b_factor = b_weight.to(rows.b_query.dtype)
    if dropout is not None:
        AS_PRODUCT: tl.constexpr = rows.b_query.dtype != tl.float32 and visibility.p_mask is None
        b_factor = rows_unless_dropped(b_factor, dropout, o_j, AS_PRODUCT)
    b_out = product(b_factor, load_value(keys, o_j, case), b_out)
    return awaited(b_out) if case.AWAIT_PRODUCTS else b_out, b_sum


@triton.jit
def _weights_of_one_key(rows, keys, terms, p_block, o_j, case: tl.constexpr):
    """``2^(s_ij + column_j)``, where columns hold the level."""
    o_block = tl.arange(0, case.BLOCK_J)
    b_bias = terms_at(p_block, place(o_block)) if case.DIRECT else in_order(tl.load(p_block + o_block))  # [BLOCK_J]
    b_key = load_key(keys, 0, o_j, case)  # [BLOCK_J, D]
    b_product = product(rows.b_query, b_key.T)
    return tl.math.exp2(b_product * terms.scale + b_bias[None, :])


@triton.jit
def _weights_of_two_shifts(rows, keys, terms, o_j, case: tl.constexpr):
    """``2^(s_ij + column_j0) (1 + row_second_i column_second_j)``, or hard ``2^(s_ij + max(column_j0, gap_i +
    column_j1))``, less the reference. The first row term is left to the normaliser."""
    # Where there are registers for it, before the product: who reads them after it waits for them.
    BEFORE_PRODUCT: tl.constexpr = case.D > 64 and not case.HARD
    # Narrow heads are quicker so. The sum loses digits where two columns lie far apart, which fp32 would show.
    STEPS: tl.constexpr = case.HARD and case.D <= 32 and rows.b_query.dtype != tl.float32
    b_bias = load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :] if BEFORE_PRODUCT else 0.0
    b_key = load_key(keys, 0, o_j, case)
    b_product = product(rows.b_query, b_key.T)  # [BLOCK_I, BLOCK_J]
    if STEPS:
        # In this order, too: with the maximum first it is slower.
        b_step = load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
        b_second = load_terms(terms.p_column + terms.padded_keys, o_j, case.BLOCK_J)[None, :]
        b_logit = b_product * terms.scale + b_second + tl.maximum(rows.b_gap[:, None], b_step)
        if not case.HAS_LEVEL:
            b_logit -= rows.b_reference[:, None]
        b_weight = tl.math.exp2(b_logit)
    else:
        b_bias = b_bias if BEFORE_PRODUCT else load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :]
        if case.HARD:
            b_second = rows.b_gap[:, None] + load_terms(terms.p_column + terms.padded_keys, o_j, case.BLOCK_J)[None, :]
            b_bias = tl.maximum(b_bias, b_second)
        IN_ORDER: tl.constexpr = not case.HAS_LEVEL and rows.b_query.dtype == tl.float32
        if not case.HAS_LEVEL and not IN_ORDER:
            b_bias -= rows.b_reference[:, None]
        b_logit = b_product * terms.scale + b_bias
        b_weight = tl.math.exp2(less_reference(b_logit, rows.b_reference) if IN_ORDER else b_logit)
    if not case.HARD:
        b_ratio = rows.b_second[:, None] * load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
        b_weight = b_weight + b_weight * b_ratio
    return b_weight


@triton.jit
def _weights_from_bias(rows, keys, terms, o_j, case: tl.constexpr):
    """Hard weights of two shifted keys, of which only the biases compete. They do so while products of the last block
    run, and the product is added to the larger one: ``2^(scale (q_i . k_j + max(column_j0, gap_i + column_j1)))``."""
    b_second = rows.b_gap[:, None] + load_terms(terms.p_unscaled + terms.padded_keys, o_j, case.BLOCK_J)[None, :]
    b_bias = tl.maximum(load_terms(terms.p_unscaled, o_j, case.BLOCK_J)[None, :], b_second)  # [BLOCK_I, BLOCK_J]
    b_key = load_key(keys, 0, o_j, case)
    b_product = product(rows.b_query, b_key.T, b_bias)
    return tl.math.exp2(b_product * terms.scale)


@triton.jit
def _weights_of_best_bias(rows, keys, terms, o_j, case: tl.constexpr):
    """Hard weights of any number of shifted keys of one variance: one product, one exponential."""
    b_key = load_key(keys, 0, o_j, case)
    b_product = product(rows.b_query, b_key.T)
    IN_ORDER: tl.constexpr = rows.b_query.dtype == tl.float32
    b_reference = tl.zeros_like(rows.b_reference) if IN_ORDER else rows.b_reference
    b_bias = component_bias(terms, 0, rows.o_i, o_j, b_reference, case.BLOCK_J)
    for r in tl.static_range(1, case.M):
        b_bias = tl.maximum(b_bias, component_bias(terms, r, rows.o_i, o_j, b_reference, case.BLOCK_J))
    b_logit = b_product * terms.scale + b_bias
    return tl.math.exp2(less_reference(b_logit, rows.b_reference) if IN_ORDER else b_logit)


@triton.jit
def _weights_of_two_keys(rows, keys, terms, o_j, case: tl.constexpr):
    """Weights of two projected keys of one variance, whose logits stand side by side."""
    b_logit = _two_key_logits(rows, keys, terms, o_j, case.HAS_LEVEL, case.DIRECT, case)
    if case.HARD:
        return tl.math.exp2(tl.max(b_logit.reshape(case.BLOCK_I, 2, case.BLOCK_J), 1))
    return tl.sum(tl.math.exp2(b_logit).reshape(case.BLOCK_I, 2, case.BLOCK_J), 1)


@triton.jit
def _two_key_logits(rows, keys, terms, o_j, HAS_LEVEL: tl.constexpr, DIRECT: tl.constexpr, case: tl.constexpr):
    """The logits of two projected components side by side, ``[BLOCK_I, 2 * BLOCK_J]``: one copy, one product."""
    b_key = keys.d_key.load([keys.i_batch, 2 * keys.i_kv_head, o_j, 0]).reshape(2 * case.BLOCK_J, case.D)
    b_product = product(rows.b_query, b_key.T)
    IN_ORDER: tl.constexpr = not HAS_LEVEL and rows.b_query.dtype == tl.float32
    b_bias = -rows.b_reference[:, None]
    if terms.p_column is not None:
        o_both = tl.arange(0, 2 * case.BLOCK_J)
        o_both = o_both // case.BLOCK_J * terms.padded_keys + place(o_both % case.BLOCK_J)
        p_block = terms.p_column + o_j
        b_column = (terms_at(p_block, o_both) if DIRECT else tl.load(p_block + o_both))[None, :]
        if IN_ORDER:
            return less_reference(b_product * terms.scale + b_column, rows.b_reference)
        b_bias = b_column if HAS_LEVEL else b_column + b_bias
    return b_product * terms.scale + b_bias


@triton.jit
def _weights_of_components(rows, keys, terms, o_j, case: tl.constexpr):
    """Weights of any mixture, one component after the other."""
    b_weight = tl.zeros([case.BLOCK_I, case.BLOCK_J], tl.float32)
    b_product = b_weight
    for r in tl.static_range(case.M):
        if r == 0 or not case.SHARED_KEY:
            b_key = load_key(keys, r, o_j, case)
            b_product = product(rows.b_query, b_key.T)
        b_logit = component_logit(b_product, terms, r, rows.o_i, o_j, rows.b_reference, rows.b_query)
        if r == 0:
            b_weight = b_logit if case.HARD else tl.math.exp2(b_logit)
        elif case.HARD:
            b_weight = tl.maximum(b_weight, b_logit)
        else:
            b_weight += tl.math.exp2(b_logit)
    return tl.math.exp2(b_weight) if case.HARD else b_weight


@triton.jit
def _largest_logit(rows, keys, terms, visibility, o_j, CAUSAL: tl.constexpr, case: tl.constexpr):
    """The largest logit of every row within one block of keys, ``[BLOCK_I]``; 0 where it sees none."""
    o_columns = o_j + tl.arange(0, case.BLOCK_J)
    b_largest = tl.full([case.BLOCK_I, case.BLOCK_J], float("-inf"), tl.float32)
    b_product = b_largest
    if case.TWO_KEYS:
        b_logit = _two_key_logits(rows, keys, terms, o_j, False, False, case)
        b_largest = tl.max(b_logit.reshape(case.BLOCK_I, 2, case.BLOCK_J), 1)
    elif case.TWO_SHIFTS:
        b_key = load_key(keys, 0, o_j, case)
        b_product = product(rows.b_query, b_key.T)
        b_second = rows.b_gap[:, None] + load_terms(terms.p_column + terms.padded_keys, o_j, case.BLOCK_J)[None, :]
        b_scaled = b_product * terms.scale
        b_largest = b_scaled + tl.maximum(load_terms(terms.p_column, o_j, case.BLOCK_J)[None, :], b_second)
    for r in tl.static_range(0 if case.TWO_KEYS or case.TWO_SHIFTS else case.M):
        if r == 0 or not case.SHARED_KEY:
            b_key = load_key(keys, r, o_j, case)
            b_product = product(rows.b_query, b_key.T)
        b_logit = component_logit(b_product, terms, r, rows.o_i, o_j, rows.b_reference, rows.b_query)
        b_largest = tl.maximum(b_largest, b_logit)
    m_seen = is_visible(rows.o_i[:, None], o_columns[None, :], visibility, CAUSAL)
    b_largest = tl.max(tl.where(m_seen, b_largest, float("-inf")), 1)
    return stand_in(b_largest)
