"""The kernel that attends again, exactly, to rows for which the forward kernel's fixed reference was not safe.

It is online softmax, with one exponential for each component (hard: for the best one)::

    maximum' = max(maximum, max_j logit[j]),    decay = 2^(maximum - maximum')
    sum'     = decay sum + sum_j 2^(logit[j] - maximum'),    out' = decay out + sum_j 2^(logit[j] - maximum') v_j
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.dropout import dropout_of_rows, rows_unless_dropped
from mgk.ops.triton.kernels.heads import query_head
from mgk.ops.triton.kernels.terms import (
    Terms,
    component_logit,
    load_terms,
    of_head,
    own_terms,
    place,
    second_logit,
    second_weight,
)
from mgk.ops.triton.kernels.tiles import (
    HEAD_NUMBERS,
    LN_2,
    VARYING_WITH_WIDTH,
    Case,
    Tokens,
    load_tokens,
    product,
    stand_in,
)
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_keys

MOST_ROWS_TOGETHER = tl.constexpr(1024)
"""Rows that a program looks at before it ends."""


class Rows(NamedTuple):
    """What a program holds of its block of queries."""

    o_i: tl.tensor
    b_query: tl.tensor
    b_second: tl.tensor | None
    """``row_second``, of two shifted keys in fp32"""


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_repair(
    # tokens and terms of the logits
    p_query, p_key, p_value, p_out, p_row, p_column, p_row_second, p_column_second, p_level, p_inverse_variance,
    p_normaliser,
    # visibility and dropout
    p_mask, p_key_range, p_query_range, p_spans, p_row_random, p_column_random,
    # strides
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head, stride_key_token,
    stride_value_batch, stride_value_head, stride_value_token, stride_out_batch, stride_out_head, stride_out_token,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span,
    # numbers
    scale, threshold, keep_scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys,
    num_blocks, blocks_together, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Attend again, exactly, for the rows whose normaliser is NaN. Most programs find none and end: each looks at some
    blocks together, since to start a program takes longer than that.

    ``row_second``: there are two shifted keys of one variance, whose logits are made as the other kernels make them,
    without the first row term. In fp32 they must be rounded alike, see ``less_reference`` in terms.py.
    """
    RELATIVE: tl.constexpr = p_row_second is not None
    case: tl.constexpr = Case(M, SHARED_KEY, HARD, BLOCK_I, BLOCK_J, D, DV, TWO_SHIFTS=RELATIVE)
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
        o_first = i_block * BLOCK_I
        o_i = o_first + tl.arange(0, BLOCK_I)
        b_normaliser = tl.load(p_normaliser + o_i, mask=o_i < num_queries, other=0.0)
        m_unsafe = b_normaliser != b_normaliser
        if tl.max(m_unsafe.to(tl.int32), 0) != 0:
            head = query_head(i_head, num_heads, group_size)
            i_batch, i_query_head, i_kv_head, _, i_kv = head
            terms = Terms(
                p_row=of_head(p_row, i_head, padded_queries, M),
                p_column=of_head(p_column, i_kv, padded_keys, M),
                p_column_second=of_head(p_column_second, i_kv, padded_keys),
                p_inverse_variance=None if p_inverse_variance is None else p_inverse_variance + i_kv_head * M,
                scale=scale, padded_queries=padded_queries, padded_keys=padded_keys,
            )  # fmt: skip
            span = visible_keys(
                num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first, CAUSAL,
                BLOCK_I, BLOCK_J,
            )  # fmt: skip
            p_own_mask = mask_of_head(p_mask, i_batch, i_query_head, stride_mask_batch, stride_mask_head)
            visibility = Visibility(
                num_queries, num_keys, span.causal_offset, p_own_mask, stride_mask_row, stride_mask_column
            )
            queries = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
            keys = Tokens(p_key, stride_key_batch, stride_key_head, stride_key_token, num_keys, width)
            values = Tokens(p_value, stride_value_batch, stride_value_head, stride_value_token, num_keys, value_width)
            b_query = load_tokens(queries, i_batch, i_query_head, o_first, BLOCK_I, D)
            b_second = None
            if RELATIVE:
                b_second = own_terms(p_row_second, i_head, padded_queries, o_i)
            rows = Rows(o_i, b_query, b_second)
            dropout = None
            if p_row_random is not None:
                dropout = dropout_of_rows(p_row_random, p_column_random, threshold, head, terms, o_i)
            b_out = tl.zeros([BLOCK_I, DV], tl.float32)
            b_sum = tl.zeros([BLOCK_I], tl.float32)
            b_maximum = tl.full([BLOCK_I], float("-inf"), tl.float32)
            for o_j in tl.range(span.first, span.end, BLOCK_J):
                b_out, b_sum, b_maximum = _attend_exactly(
                    b_out, b_sum, b_maximum, rows, head, keys, values, terms, visibility, dropout, o_j, CAUSAL, case,
                )  # fmt: skip
            b_exact = b_maximum + tl.math.log2(b_sum)
            if RELATIVE:
                b_exact += tl.load(terms.p_row + place(o_i))
            if p_level is not None:
                b_exact += tl.load(p_level + i_kv)
            b_exact *= LN_2
            b_exact = tl.where(b_sum == 0.0, float("-inf"), b_exact)
            m_write = (o_i < num_queries) & m_unsafe
            tl.store(p_normaliser + o_i, b_exact, mask=m_write)
            b_out = b_out * (keep_scale / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
            o_d = tl.arange(0, DV)
            p_own = p_out + i_batch.to(tl.int64) * stride_out_batch + i_query_head.to(tl.int64) * stride_out_head
            p_own += o_i.to(tl.int64)[:, None] * stride_out_token + o_d[None, :]
            tl.store(p_own, b_out.to(b_query.dtype), mask=m_write[:, None] & (o_d < value_width)[None, :])


@triton.jit
def _attend_exactly(
    b_out, b_sum, b_maximum, rows, head, keys, values, terms, visibility, dropout, o_j,
    CAUSAL: tl.constexpr, case: tl.constexpr,
):  # fmt: skip
    """Add one block of keys with online softmax, one component after the other (hard: the best one alone)."""
    o_columns = o_j + tl.arange(0, case.BLOCK_J)
    b_zero = tl.zeros([case.BLOCK_I], tl.float32)
    b_value = load_tokens(values, head.i_batch, head.i_kv_head, o_j, case.BLOCK_J, case.DV)  # [BLOCK_J, DV]
    m_seen = is_visible(rows.o_i[:, None], o_columns[None, :], visibility, CAUSAL)
    if case.TWO_SHIFTS:
        return _attend_to_two_shifts(
            b_out, b_sum, b_maximum, b_value, m_seen, rows, head, keys, terms, dropout, o_j, case
        )
    b_best = tl.full([case.BLOCK_I, case.BLOCK_J], float("-inf"), tl.float32)
    b_product = b_best
    for r in tl.static_range(case.M):
        if r == 0 or not case.SHARED_KEY:
            i_key_head = head.i_kv_head if case.SHARED_KEY else head.i_kv_head * case.M + r
            b_key = load_tokens(keys, head.i_batch, i_key_head, o_j, case.BLOCK_J, case.D)  # [BLOCK_J, D]
            b_product = product(rows.b_query, b_key.T)
        b_logit = component_logit(b_product, terms, r, rows.o_i, o_j, b_zero, rows.b_query)
        b_logit = tl.where(m_seen, b_logit, float("-inf"))
        if case.HARD:
            b_best = tl.maximum(b_best, b_logit)
            b_logit = b_best
        if not case.HARD or r == case.M - 1:
            b_new = tl.maximum(b_maximum, tl.max(b_logit, 1))
            b_weight = tl.math.exp2(b_logit - stand_in(b_new)[:, None])
            b_decay = tl.math.exp2(b_maximum - stand_in(b_new))
            b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
            if dropout is not None:
                b_weight = rows_unless_dropped(b_weight, dropout, o_j, False)
            b_out = product(b_weight.to(b_value.dtype), b_value, b_out * b_decay[:, None])
            b_maximum = b_new
    return b_out, b_sum, b_maximum


@triton.jit
def _attend_to_two_shifts(
    b_out, b_sum, b_maximum, b_value, m_seen, rows, head, keys, terms, dropout, o_j, case: tl.constexpr
):
    """The same for two shifted keys of one variance, whose logits are taken without the first row term."""
    b_key = load_tokens(keys, head.i_batch, head.i_kv_head, o_j, case.BLOCK_J, case.D)  # [BLOCK_J, D]
    b_product = product(rows.b_query, b_key.T)  # [BLOCK_I, BLOCK_J]
    b_column = load_terms(terms.p_column, o_j, case.BLOCK_J)
    if case.HARD:
        b_bias = rows.b_second[:, None] + load_terms(terms.p_column + terms.padded_keys, o_j, case.BLOCK_J)[None, :]
        b_first = b_product * terms.scale + tl.maximum(b_column[None, :], b_bias)
        b_second = b_first
    else:
        b_first = b_product * terms.scale + b_column[None, :]
        b_second = second_logit(b_product, terms, rows.o_i, o_j, case.BLOCK_J)
    b_first = tl.where(m_seen, b_first, float("-inf"))
    b_second = tl.where(m_seen, b_second, float("-inf"))
    b_new = tl.maximum(b_maximum, tl.max(tl.maximum(b_first, b_second), 1))
    b_weight = tl.math.exp2(b_first - stand_in(b_new)[:, None])
    if not case.HARD:
        b_ratio = rows.b_second[:, None] * load_terms(terms.p_column_second, o_j, case.BLOCK_J)[None, :]
        b_weight += second_weight(b_weight, b_ratio, tl.math.exp2(b_second - stand_in(b_new)[:, None]))
    b_decay = tl.math.exp2(b_maximum - stand_in(b_new))
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    if dropout is not None:
        b_weight = rows_unless_dropped(b_weight, dropout, o_j, False)
    b_out = product(b_weight, b_value, b_out * b_decay[:, None])
    return b_out, b_sum, b_new
