"""The kernel of the E-step: mean responsibilities without a matrix of pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.former_tiles import VARYING_WITH_WIDTH, component_bias, is_visible, load_tile, visible_keys


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH)
def responsibilities(
    d_query, d_key, p_row, p_column, p_scale, p_sums, p_mask, p_query_mask, p_spans, stride_mask_batch,
    stride_mask_head, stride_mask_row, stride_mask_column, rows_per_span, scale, num_heads, group_size, num_queries,
    num_keys, padded_queries, padded_keys, num_blocks,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, PACKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Each program sums ``p(r | i, j)`` over its queries and all keys they see into ``sums [programs, 8]``."""
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    if HAS_ROW:
        p_row += i_head.to(tl.int64) * M * padded_queries
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if HAS_MASK:
        p_mask += i_batch.to(tl.int64) * stride_mask_batch + i_query_head.to(tl.int64) * stride_mask_head
    if not ONE_VARIANCE:
        p_scale += i_kv_head * M
    m_i = o_i < num_queries
    if HAS_QUERY_MASK:
        m_i = m_i & (tl.load(p_query_mask + i_batch.to(tl.int64) * num_queries + o_i, mask=m_i, other=0) != 0)
    first_key, _, end_key, causal_offset = visible_keys(
        p_spans, p_spans, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, False, PACKED,
        BLOCK_I, BLOCK_J,
    )  # fmt: skip

    b_query = load_tile(d_query, i_batch, i_query_head, o_first, BLOCK_I, D)
    b_zero = tl.zeros([BLOCK_I], tl.float32)
    o_r = tl.arange(0, 8)
    b_sums = tl.zeros([8], tl.float32)
    for o_first_key in tl.range(first_key, end_key, BLOCK_J):
        o_j = o_first_key + tl.arange(0, BLOCK_J)
        b_seen = m_i[:, None] & is_visible(
            o_i[:, None], o_j[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        # Twice over the components, first for the largest logit, then for its posterior: no list of blocks is kept.
        b_best = tl.full([BLOCK_I, BLOCK_J], float("-inf"), tl.float32)
        for r in tl.static_range(M):
            b_best = tl.maximum(b_best, _component_logit(
                b_query, d_key, p_row, p_column, p_scale, b_zero, i_batch, i_kv_head, r, o_first_key, o_i, scale,
                padded_queries, padded_keys, M, SHARED_KEY, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, INPUT_PRECISION, BLOCK_J, D,
            ))  # fmt: skip
        b_seen = b_seen & (b_best > float("-inf"))
        b_best = tl.where(b_seen, b_best, 0.0)
        b_total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        for r in tl.static_range(M):
            b_total += tl.math.exp2(_component_logit(
                b_query, d_key, p_row, p_column, p_scale, b_zero, i_batch, i_kv_head, r, o_first_key, o_i, scale,
                padded_queries, padded_keys, M, SHARED_KEY, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, INPUT_PRECISION, BLOCK_J, D,
            ) - b_best)  # fmt: skip
        for r in tl.static_range(M):
            b_posterior = tl.math.exp2(_component_logit(
                b_query, d_key, p_row, p_column, p_scale, b_zero, i_batch, i_kv_head, r, o_first_key, o_i, scale,
                padded_queries, padded_keys, M, SHARED_KEY, HAS_ROW, HAS_COLUMN, ONE_VARIANCE, INPUT_PRECISION, BLOCK_J, D,
            ) - b_best) / b_total  # fmt: skip
            b_sum = tl.sum(tl.sum(tl.where(b_seen, b_posterior, 0.0), 1), 0)
            b_sums += tl.where(o_r == r, b_sum, 0.0)
    tl.store(p_sums + tl.program_id(0).to(tl.int64) * 8 + o_r, b_sums)


@triton.jit
def _component_logit(
    b_query, d_key, p_row, p_column, p_scale, b_reference, i_batch, i_kv_head, i_component, o_first_key, o_i,
    scale, padded_queries, padded_keys,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ONE_VARIANCE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_I, BLOCK_J]``"""
    b_key = load_tile(d_key, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M + i_component, o_first_key, BLOCK_J, D)
    b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_component)
    return tl.dot(b_query, b_key.T, input_precision=INPUT_PRECISION) * b_scale + component_bias(
        p_row, p_column + i_component * padded_keys if HAS_COLUMN else p_column, i_component, o_i, o_first_key,
        b_reference, padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
    )  # fmt: skip
