"""The kernel of the E-step: responsibilities summed over pairs, without a matrix of pairs.

p(r | i, j) = 2^logit[i,j,r] / sum_s 2^logit[i,j,s]
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.heads import query_head
from mgk.ops.triton.kernels.terms import Terms, component_logit, of_head
from mgk.ops.triton.kernels.tiles import VARYING_WITH_WIDTH, Case, Keys, load_key, load_tile, product
from mgk.ops.triton.kernels.visibility import Visibility, is_visible, mask_of_head, visible_keys


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH)
def responsibilities(
    # tokens, terms of the logits, and what is written
    d_query, d_key, p_row, p_column, p_inverse_variance, p_sums,
    # visibility
    p_mask, p_query_mask, p_spans, stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    rows_per_span,
    # numbers
    scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Each program sums ``p(r | i, j)`` over its queries and all keys they see into ``sums [programs, 8]``."""
    case: tl.constexpr = Case(M, SHARED_KEY, False, BLOCK_I, BLOCK_J, D, D)
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    head = query_head(i_head, num_heads, group_size)
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    terms = Terms(
        p_row=of_head(p_row, i_head, padded_queries, M),
        p_column=of_head(p_column, head.i_kv, padded_keys, M),
        p_inverse_variance=None if p_inverse_variance is None else p_inverse_variance + head.i_kv_head * M,
        scale=scale, padded_queries=padded_queries, padded_keys=padded_keys,
    )  # fmt: skip
    m_i = o_i < num_queries
    if p_query_mask is not None:
        m_i = m_i & (tl.load(p_query_mask + head.i_batch.to(tl.int64) * num_queries + o_i, mask=m_i, other=0) != 0)
    span = visible_keys(
        num_queries, num_keys, None, None, p_spans, rows_per_span, head.i_batch, o_first, CAUSAL, BLOCK_I, BLOCK_J
    )
    p_mask = mask_of_head(p_mask, head.i_batch, head.i_query_head, stride_mask_batch, stride_mask_head)
    visibility = Visibility(num_queries, num_keys, span.causal_offset, p_mask, stride_mask_row, stride_mask_column)
    keys = Keys(d_key, d_key, head.i_batch, head.i_kv_head)

    b_query = load_tile(d_query, head.i_batch, head.i_query_head, o_first, BLOCK_I, D)  # [BLOCK_I, D]
    o_r = tl.arange(0, 8)
    b_sums = tl.zeros([8], tl.float32)
    for o_j in tl.range(span.first, span.end, BLOCK_J):
        o_columns = o_j + tl.arange(0, BLOCK_J)
        m_seen = m_i[:, None] & is_visible(o_i[:, None], o_columns[None, :], visibility, CAUSAL)
        # First for the largest logit, then for the sum, then for each responsibility: no list of blocks is kept.
        b_best = tl.full([BLOCK_I, BLOCK_J], float("-inf"), tl.float32)
        for r in tl.static_range(M):
            b_best = tl.maximum(b_best, _logit(b_query, keys, terms, r, o_i, o_j, case))
        m_seen = m_seen & (b_best > float("-inf"))
        b_best = tl.where(m_seen, b_best, 0.0)
        b_total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        for r in tl.static_range(M):
            b_total += tl.math.exp2(_logit(b_query, keys, terms, r, o_i, o_j, case) - b_best)
        for r in tl.static_range(M):
            b_responsibility = tl.math.exp2(_logit(b_query, keys, terms, r, o_i, o_j, case) - b_best) / b_total
            b_sum = tl.sum(tl.sum(tl.where(m_seen, b_responsibility, 0.0), 1), 0)
            b_sums += tl.where(o_r == r, b_sum, 0.0)
    tl.store(p_sums + tl.program_id(0).to(tl.int64) * 8 + o_r, b_sums)


@triton.jit
def _logit(b_query, keys, terms, i_component, o_i, o_j, case: tl.constexpr):
    """The logits of one component, ``[BLOCK_I, BLOCK_J]``."""
    b_key = load_key(keys, i_component, o_j, case)  # [BLOCK_J, D]
    b_product = product(b_query, b_key.T)
    b_zero = tl.zeros([case.BLOCK_I], tl.float32)
    return component_logit(b_product, terms, i_component, o_i, o_j, b_zero, b_query)
