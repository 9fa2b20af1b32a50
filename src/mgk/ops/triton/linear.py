"""Linear attention with a mixture of keys: time grows with the length.

With ``f_j = sum_r prior_r phi(k_jr)``, which is formed in registers and never written, and ``u_i = phi(q_i)``::

    state   S = sum_j f_j v_j^T    z = sum_j f_j                 keys up to i under causality
    total   t_i = u_i . z          (or the square root of the number of keys)
    out     o_i = u_i S / t_i

    g_i = dO_i / t_i               delta_i = -dO_i . o_i / t_i
    du_i = S g_i + delta_i z       R = sum_i u_i g_i^T    y = sum_i delta_i u_i        queries from j on
    df_j = R v_j + y               dv_j = R^T f_j

Without causality there is one state for all. With it, a sequence is cut into segments: one kernel leaves the state of
each, the host adds them up, and another walks through the segments at the same time, chunk by chunk: within a chunk
every pair is formed, from chunk to chunk the state goes on in registers. Backward does the same, keys from the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.tiles import VARYING_WITH_WIDTH, load_rows

LINEAR_VARYING = [*VARYING_WITH_WIDTH, "num_segments", "blocks_per_segment", "stride_key_component", "num_samples"]


@triton.jit
def features(b_x, MAP: tl.constexpr):
    """``phi``, see :mod:`mgk.ops.feature_maps`."""
    if MAP == "elu":
        return tl.where(b_x > 0.0, b_x + 1.0, tl.exp(tl.minimum(b_x, 0.0)))
    return tl.maximum(b_x, 0.0)


@triton.jit
def slopes(b_x, MAP: tl.constexpr):
    """Its derivative."""
    if MAP == "elu":
        return tl.where(b_x > 0.0, 1.0, tl.exp(tl.minimum(b_x, 0.0)))
    return tl.where(b_x > 0.0, 1.0, 0.0)


@triton.jit
def _query_features(b_query, o_first, num_queries, width, MAP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """``u``, 0 beyond the end and beyond the width."""
    b_seen = (o_first + tl.arange(0, ROWS) < num_queries)[:, None] & (tl.arange(0, D) < width)[None, :]
    return tl.where(b_seen, features(b_query.to(tl.float32), MAP), 0.0)


@triton.jit
def _component(
    b_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, i_component, o_first, stride_prior_head,
    stride_prior_component, stride_prior_token, num_keys, width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One component: its keys in fp32, and how much it weighs, ``[ROWS, D]``: 0 at masked keys and beyond the end."""
    o_j = o_first + tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    b_x = b_key.to(tl.float32)
    if HAS_SHIFT:
        b_x += tl.load(p_shift + (i_kv_head * M + i_component) * width + o_d, mask=o_d < width, other=0.0)[None, :]
    b_seen = o_j < num_keys
    if HAS_KEY_MASK:
        b_seen = b_seen & (tl.load(p_key_mask + i_batch.to(tl.int64) * num_keys + o_j, mask=b_seen, other=0) != 0)
    b_weight = tl.where(b_seen, 1.0 / M, 0.0)
    if HAS_PRIOR:
        p_own = p_prior + i_kv_head * stride_prior_head + i_component * stride_prior_component
        if PRIOR_BY_KEY:
            b_prior = tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=b_seen, other=float("-inf"))
            b_weight = tl.exp(b_prior)
        else:
            b_weight = tl.where(b_seen, tl.exp(tl.load(p_own)), 0.0)
    return b_x, tl.where((o_d < width)[None, :], b_weight[:, None], 0.0)


@triton.jit
def _merged_features(
    p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_prior_head, stride_prior_component, stride_prior_token, num_keys,
    width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``f``, ``[ROWS, D]`` in fp32."""
    b_total = tl.zeros([ROWS, D], tl.float32)
    b_key = load_rows(
        p_key, stride_key_batch, stride_key_head, stride_key_token, i_batch, i_kv_head, o_first, num_keys, width,
        ROWS, D,
    )  # fmt: skip
    for r in tl.static_range(M):
        if r > 0 and not HAS_SHIFT:
            b_key = load_rows(
                p_key + r * stride_key_component.to(tl.int64), stride_key_batch, stride_key_head, stride_key_token,
                i_batch, i_kv_head, o_first, num_keys, width, ROWS, D,
            )  # fmt: skip
        b_x, b_weight = _component(
            b_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, r, o_first, stride_prior_head,
            stride_prior_component, stride_prior_token, num_keys, width,
            M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, ROWS, D,
        )  # fmt: skip
        # What stands at masked keys may be anything.
        b_total += tl.where(b_weight > 0.0, b_weight * features(b_x, MAP), 0.0)
    return b_total


@triton.jit
def _load_values(
    p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_batch, stride_head, stride_token, num_keys, value_width,
    HAS_KEY_MASK: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """``v`` in fp32, 0 at masked keys."""
    b_value = load_rows(
        p_value, stride_batch, stride_head, stride_token, i_batch, i_kv_head, o_first, num_keys, value_width, ROWS, DV
    ).to(tl.float32)
    if HAS_KEY_MASK:
        o_j = o_first + tl.arange(0, ROWS)
        p_mask = p_key_mask + i_batch.to(tl.int64) * num_keys + o_j
        b_value = tl.where((tl.load(p_mask, mask=o_j < num_keys, other=0) != 0)[:, None], b_value, 0.0)
    return b_value


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_states(
    p_key, p_value, p_shift, p_prior, p_key_mask, p_state, p_total, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_prior_head, stride_prior_component, stride_prior_token, num_kv_heads, num_keys, num_segments,
    blocks_per_segment, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One program for one segment of one head: ``state [B, Hkv, segments, D, Dv]`` and ``total [.., D]``."""
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    b_state = tl.zeros([D, DV], tl.float32)
    b_total = tl.zeros([D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_keys), BLOCK):
        b_features = _merged_features(
            p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
            stride_key_component, stride_key_token, stride_prior_head, stride_prior_component, stride_prior_token,
            num_keys, width,
            M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
        )  # fmt: skip
        b_value = _load_values(
            p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
            stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
        )  # fmt: skip
        b_state = tl.dot(b_features.T, b_value, b_state, input_precision=PRECISION)
        b_total += tl.sum(b_features, 0)
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    i = tl.program_id(0).to(tl.int64)
    tl.store(p_state + i * D * DV + o_d[:, None] * DV + o_v[None, :], b_state)
    tl.store(p_total + i * D + o_d, b_total)


@triton.jit
def _load_state(p_state, p_total, i, D: tl.constexpr, DV: tl.constexpr):
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    return tl.load(p_state + i * D * DV + o_d[:, None] * DV + o_v[None, :]), tl.load(p_total + i * D + o_d)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_forward(
    p_query, p_key, p_value, p_out, p_shift, p_prior, p_key_mask, p_state, p_total, p_length, p_normaliser,
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_out_batch, stride_out_head, stride_out_token, stride_prior_head, stride_prior_component,
    stride_prior_token, num_heads, group_size, num_queries, num_keys, num_segments, blocks_per_segment, width,
    value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head: ``out`` and the normaliser ``t [B, H, Nq]``.

    ``p_state``, ``p_total``: what keys before the segment have left, or all of them without causality.
    """
    i_segment = tl.program_id(0) % num_segments
    i_head = tl.program_id(0) // num_segments
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = (i_batch * (num_heads // group_size) + i_kv_head).to(tl.int64)
    b_state, b_total = _load_state(p_state, p_total, i_kv * num_segments + i_segment if CAUSAL else i_kv, D, DV)
    o_v = tl.arange(0, DV)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        o_i = o_first + tl.arange(0, BLOCK)
        b_query = load_rows(
            p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
            num_queries, width, BLOCK, D,
        )  # fmt: skip
        b_query = _query_features(b_query, o_first, num_queries, width, MAP, BLOCK, D)
        b_out = tl.dot(b_query, b_state, input_precision=PRECISION)
        b_sum = tl.sum(b_query * b_total[None, :], 1)
        if CAUSAL:
            # As many keys as queries: chunk by chunk.
            b_features = _merged_features(
                p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
                stride_key_component, stride_key_token, stride_prior_head, stride_prior_component,
                stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
            )  # fmt: skip
            b_value = _load_values(
                p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
                stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
            )  # fmt: skip
            b_pair = tl.dot(b_query, b_features.T, input_precision=PRECISION)
            b_pair = tl.where(o_i[:, None] >= o_i[None, :], b_pair, 0.0)
            b_out = tl.dot(b_pair, b_value, b_out, input_precision=PRECISION)
            b_sum += tl.sum(b_pair, 1)
            b_state = tl.dot(b_features.T, b_value, b_state, input_precision=PRECISION)
            b_total += tl.sum(b_features, 0)
        if not BY_SUM:
            b_sum = tl.load(p_length + i_batch.to(tl.int64) * num_queries + o_i, mask=o_i < num_queries, other=1.0)
        m_i = o_i < num_queries
        tl.store(p_normaliser + i_head.to(tl.int64) * num_queries + o_i, b_sum, mask=m_i)
        b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
        p_rows = p_out + i_batch.to(tl.int64) * stride_out_batch + i_query_head.to(tl.int64) * stride_out_head
        p_rows += o_i.to(tl.int64)[:, None] * stride_out_token + o_v[None, :]
        tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_i[:, None] & (o_v < value_width)[None, :])


@triton.jit
def _load_gradient(
    p_grad, p_out, p_normaliser, i_batch, i_head, i_query_head, o_first, stride_grad_batch, stride_grad_head,
    stride_grad_token, stride_out_batch, stride_out_head, stride_out_token, num_queries, value_width,
    BY_SUM: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """``g [ROWS, DV]`` and ``delta [ROWS]``, 0 where a row has seen nothing."""
    o_i = o_first + tl.arange(0, ROWS)
    b_grad = load_rows(
        p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, i_batch, i_query_head, o_first, num_queries,
        value_width, ROWS, DV,
    ).to(tl.float32)  # fmt: skip
    b_sum = tl.load(p_normaliser + i_head.to(tl.int64) * num_queries + o_i, mask=o_i < num_queries, other=0.0)
    b_inverse = tl.where(b_sum == 0.0, 0.0, 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum))
    b_delta = tl.zeros([ROWS], tl.float32)
    if BY_SUM:
        b_out = load_rows(
            p_out, stride_out_batch, stride_out_head, stride_out_token, i_batch, i_query_head, o_first, num_queries,
            value_width, ROWS, DV,
        ).to(tl.float32)  # fmt: skip
        b_delta = -tl.sum(b_grad * b_out, 1) * b_inverse
    return b_grad * b_inverse[:, None], b_delta


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_backward_query(
    p_query, p_key, p_value, p_out, p_grad, p_grad_query, p_shift, p_prior, p_key_mask, p_state, p_total,
    p_normaliser, stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_out_batch, stride_out_head, stride_out_token, stride_grad_batch, stride_grad_head, stride_grad_token,
    stride_prior_head, stride_prior_component, stride_prior_token, num_heads, group_size, num_queries, num_keys,
    num_segments, blocks_per_segment, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head, as forward: ``dq``, contiguous."""
    i_segment = tl.program_id(0) % num_segments
    i_head = tl.program_id(0) // num_segments
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = (i_batch * (num_heads // group_size) + i_kv_head).to(tl.int64)
    b_state, b_total = _load_state(p_state, p_total, i_kv * num_segments + i_segment if CAUSAL else i_kv, D, DV)
    o_d = tl.arange(0, D)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        o_i = o_first + tl.arange(0, BLOCK)
        b_g, b_delta = _load_gradient(
            p_grad, p_out, p_normaliser, i_batch, i_head, i_query_head, o_first, stride_grad_batch, stride_grad_head,
            stride_grad_token, stride_out_batch, stride_out_head, stride_out_token, num_queries, value_width, BY_SUM,
            BLOCK, DV,
        )  # fmt: skip
        b_grad = tl.dot(b_g, b_state.T, input_precision=PRECISION) + b_delta[:, None] * b_total[None, :]
        if CAUSAL:
            b_features = _merged_features(
                p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
                stride_key_component, stride_key_token, stride_prior_head, stride_prior_component,
                stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
            )  # fmt: skip
            b_value = _load_values(
                p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
                stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
            )  # fmt: skip
            b_pair = tl.dot(b_g, b_value.T, input_precision=PRECISION) + b_delta[:, None]
            b_pair = tl.where(o_i[:, None] >= o_i[None, :], b_pair, 0.0)
            b_grad = tl.dot(b_pair, b_features, b_grad, input_precision=PRECISION)
            b_state = tl.dot(b_features.T, b_value, b_state, input_precision=PRECISION)
            b_total += tl.sum(b_features, 0)
        b_query = load_rows(
            p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
            num_queries, width, BLOCK, D,
        )  # fmt: skip
        b_grad *= slopes(b_query.to(tl.float32), MAP)
        p_rows = p_grad_query + (i_head.to(tl.int64) * num_queries + o_i)[:, None] * width + o_d[None, :]
        m_rows = (o_i < num_queries)[:, None] & (o_d < width)[None, :]
        tl.store(p_rows, b_grad.to(p_grad_query.dtype.element_ty), mask=m_rows)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_reverse_states(
    p_query, p_out, p_grad, p_normaliser, p_state, p_total, stride_query_batch, stride_query_head,
    stride_query_token, stride_out_batch, stride_out_head, stride_out_token, stride_grad_batch, stride_grad_head,
    stride_grad_token, num_heads, group_size, num_queries, num_segments, blocks_per_segment, width, value_width,
    MAP: tl.constexpr, BY_SUM: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One program for one segment of queries of one key/value head: ``R [B, Hkv, segments, D, Dv]``, ``y [.., D]``."""
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    num_kv_heads = num_heads // group_size
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    b_state = tl.zeros([D, DV], tl.float32)
    b_total = tl.zeros([D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        for g in range(group_size):
            i_query_head = i_kv_head * group_size + g
            i_head = i_batch * num_heads + i_query_head
            b_g, b_delta = _load_gradient(
                p_grad, p_out, p_normaliser, i_batch, i_head, i_query_head, o_first, stride_grad_batch,
                stride_grad_head, stride_grad_token, stride_out_batch, stride_out_head, stride_out_token, num_queries,
                value_width, BY_SUM, BLOCK, DV,
            )  # fmt: skip
            b_query = load_rows(
                p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
                num_queries, width, BLOCK, D,
            )  # fmt: skip
            b_query = _query_features(b_query, o_first, num_queries, width, MAP, BLOCK, D)
            b_state = tl.dot(b_query.T, b_g, b_state, input_precision=PRECISION)
            b_total += tl.sum(b_query * b_delta[:, None], 0)
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    i = tl.program_id(0).to(tl.int64)
    tl.store(p_state + i * D * DV + o_d[:, None] * DV + o_v[None, :], b_state)
    tl.store(p_total + i * D + o_d, b_total)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_backward_key_value(
    p_query, p_key, p_value, p_out, p_grad, p_grad_key, p_grad_value, p_shift, p_prior, p_key_mask, p_state, p_total,
    p_normaliser, p_shift_share, p_prior_share, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_component, stride_key_token, stride_value_batch, stride_value_head,
    stride_value_token, stride_out_batch, stride_out_head, stride_out_token, stride_grad_batch, stride_grad_head,
    stride_grad_token, stride_prior_head, stride_prior_component, stride_prior_token, num_heads, group_size,
    num_queries, num_keys, num_segments, blocks_per_segment, num_samples, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the keys of one head, from its end: ``dk``, ``dv``, contiguous, and the shares of
    shift ``[Hkv, M, B * segments, D]`` and prior ``[Hkv, M, B * segments]`` (or ``[Hkv, M, B, Nk]`` by key).

    ``p_state``, ``p_total``: what queries after the segment have left, or all of them without causality.
    """
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    num_kv_heads = num_heads // group_size
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    i_state = i_kv.to(tl.int64) * num_segments + i_segment if CAUSAL else i_kv.to(tl.int64)
    b_state, b_total = _load_state(p_state, p_total, i_state, D, DV)
    o_d, o_v, o_r = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, 8)
    b_shift_sum = tl.zeros([8, D], tl.float32)
    b_prior_sum = tl.zeros([8], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    end = tl.minimum(first + blocks_per_segment * BLOCK, num_keys)
    num_blocks = tl.maximum(end - first + BLOCK - 1, 0) // BLOCK
    for i_block in tl.range(0, num_blocks):
        o_first = first + (num_blocks - 1 - i_block) * BLOCK
        o_j = o_first + tl.arange(0, BLOCK)
        b_features = _merged_features(
            p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
            stride_key_component, stride_key_token, stride_prior_head, stride_prior_component, stride_prior_token,
            num_keys, width,
            M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
        )  # fmt: skip
        b_value = _load_values(
            p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
            stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
        )  # fmt: skip
        b_grad = tl.dot(b_value, b_state.T, input_precision=PRECISION) + b_total[None, :]
        b_grad_value = tl.dot(b_features, b_state, input_precision=PRECISION)
        if CAUSAL:
            for g in range(group_size):
                i_query_head = i_kv_head * group_size + g
                i_head = i_batch * num_heads + i_query_head
                b_g, b_delta = _load_gradient(
                    p_grad, p_out, p_normaliser, i_batch, i_head, i_query_head, o_first, stride_grad_batch,
                    stride_grad_head, stride_grad_token, stride_out_batch, stride_out_head, stride_out_token,
                    num_queries, value_width, BY_SUM, BLOCK, DV,
                )  # fmt: skip
                b_query = load_rows(
                    p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head,
                    o_first, num_queries, width, BLOCK, D,
                )  # fmt: skip
                b_query = _query_features(b_query, o_first, num_queries, width, MAP, BLOCK, D)
                m_pair = o_j[None, :] >= o_j[:, None]
                b_pair = tl.dot(b_value, b_g.T, input_precision=PRECISION) + b_delta[None, :]
                b_grad = tl.dot(tl.where(m_pair, b_pair, 0.0), b_query, b_grad, input_precision=PRECISION)
                b_pair = tl.dot(b_features, b_query.T, input_precision=PRECISION)
                b_grad_value = tl.dot(tl.where(m_pair, b_pair, 0.0), b_g, b_grad_value, input_precision=PRECISION)
                b_state = tl.dot(b_query.T, b_g, b_state, input_precision=PRECISION)
                b_total += tl.sum(b_query * b_delta[:, None], 0)
        m_j = o_j < num_keys
        b_grad_key = tl.zeros([BLOCK, D], tl.float32)
        b_key = load_rows(
            p_key, stride_key_batch, stride_key_head, stride_key_token, i_batch, i_kv_head, o_first, num_keys, width,
            BLOCK, D,
        )  # fmt: skip
        for r in tl.static_range(M):
            if r > 0 and not HAS_SHIFT:
                b_key = load_rows(
                    p_key + r * stride_key_component.to(tl.int64), stride_key_batch, stride_key_head,
                    stride_key_token, i_batch, i_kv_head, o_first, num_keys, width, BLOCK, D,
                )  # fmt: skip
            b_x, b_weight = _component(
                b_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, r, o_first, stride_prior_head,
                stride_prior_component, stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, BLOCK, D,
            )  # fmt: skip
            b_own = tl.where(b_weight > 0.0, b_weight * b_grad * slopes(b_x, MAP), 0.0)
            if HAS_PRIOR:
                b_chance = tl.sum(tl.where(b_weight > 0.0, b_weight * b_grad * features(b_x, MAP), 0.0), 1)
                if PRIOR_BY_KEY:
                    o_share = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
                    tl.store(p_prior_share + o_share, b_chance, mask=m_j)
                else:
                    b_prior_sum += tl.where(o_r == r, tl.sum(b_chance, 0), 0.0)
            if HAS_SHIFT:
                b_shift_sum += tl.where(o_r[:, None] == r, tl.sum(b_own, 0)[None, :], 0.0)
                b_grad_key += b_own
            if not HAS_SHIFT or r == M - 1:
                b_grad_key = b_grad_key if HAS_SHIFT else b_own
                i_key_head = i_kv.to(tl.int64) * (1 if HAS_SHIFT else M) + (0 if HAS_SHIFT else r)
                p_rows = p_grad_key + (i_key_head * num_keys + o_j)[:, None] * width + o_d[None, :]
                m_rows = m_j[:, None] & (o_d < width)[None, :]
                tl.store(p_rows, b_grad_key.to(p_grad_key.dtype.element_ty), mask=m_rows)
        if HAS_KEY_MASK:
            p_mask = p_key_mask + i_batch.to(tl.int64) * num_keys + o_j
            b_grad_value = tl.where((tl.load(p_mask, mask=m_j, other=0) != 0)[:, None], b_grad_value, 0.0)
        p_rows = p_grad_value + (i_kv.to(tl.int64) * num_keys + o_j)[:, None] * value_width + o_v[None, :]
        m_rows = m_j[:, None] & (o_v < value_width)[None, :]
        tl.store(p_rows, b_grad_value.to(p_grad_value.dtype.element_ty), mask=m_rows)
    i_share = i_batch * num_segments + i_segment
    num_shares = num_samples * num_segments
    for r in tl.static_range(M):
        o_share = (i_kv_head * M + r).to(tl.int64) * num_shares + i_share
        if HAS_SHIFT:
            b_row = tl.sum(tl.where(o_r[:, None] == r, b_shift_sum, 0.0), 0)
            tl.store(p_shift_share + o_share * D + o_d, b_row)
        if HAS_PRIOR and not PRIOR_BY_KEY:
            tl.store(p_prior_share + o_share, tl.sum(tl.where(o_r == r, b_prior_sum, 0.0), 0))
