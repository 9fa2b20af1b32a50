"""Linear attention with a mixture of keys: time grows with the length.

With ``f_j = sum_r prior_r phi(k_jr)``, which is formed in registers and never written, and ``u_i = phi(q_i)``::

    state   S = sum_j f_j v_j^T    z = sum_j f_j                 keys up to i under causality
    total   t_i = u_i . z          (or the square root of the number of keys)
    out     o_i = u_i S / t_i

A sequence is cut into segments: one kernel leaves the state of each, a small one adds them up, and another walks
through the segments at the same time. Under causality it goes on chunk by chunk: within a chunk every pair is formed,
from chunk to chunk the state goes on in registers.

A state is one row of numbers, ``D * Dv`` for ``S`` or ``R`` and ``D`` for ``z`` or ``y``, all in fp32. Of bf16 tokens
the matrix units are given bf16; values and ``dO`` so enter as they are, and what ``t`` divides is divided afterwards.
Of fp16 tokens they are given tf32: the sum of a long sequence would not fit. ``EVEN``: heads are as wide as blocks,
so that rows are read and written by the 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.tiles import VARYING_WITH_WIDTH, as_product, fast_exp, load_rows, where_at_least

LINEAR_VARYING = [*VARYING_WITH_WIDTH, "num_segments", "blocks_per_segment", "stride_key_component", "num_samples"]


@triton.jit
def features(b_x, MAP: tl.constexpr):
    """``phi``, see :mod:`mgk.ops.feature_maps`."""
    if MAP == "elu":
        return tl.maximum(b_x, 0.0) + fast_exp(tl.minimum(b_x, 0.0))
    return tl.maximum(b_x, 0.0)


@triton.jit
def rows_apart(p_tokens, stride):
    """A stride of which the compiler knows that rows start at multiples of 16 bytes, as ``load_rows`` tells it."""
    STEP: tl.constexpr = 128 // p_tokens.dtype.element_ty.primitive_bitwidth
    return (stride // STEP * STEP).to(tl.int64)


@triton.jit
def operand(b_x, p_tokens):
    """What the matrix units are given for tokens of this type."""
    return b_x.to(tl.bfloat16 if p_tokens.dtype.element_ty == tl.bfloat16 else tl.float32)


@triton.jit
def prior_of_head(
    p_prior, i_kv_head, i_component, stride_prior_head, stride_prior_component,
    M: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
):  # fmt: skip
    """``prior_r`` of one head, a scalar, where it is the same for all keys."""
    if HAS_PRIOR and not PRIOR_BY_KEY:
        return tl.exp(tl.load(p_prior + i_kv_head * stride_prior_head + i_component * stride_prior_component))
    return 1.0 / M


@triton.jit
def component(
    b_key, p_shift, prior, p_prior, p_key_mask, i_batch, i_kv_head, i_component, o_first, stride_prior_head,
    stride_prior_component, stride_prior_token, num_keys, width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MAP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``phi(k_jr) [ROWS, D]``, 0 beyond the width, and ``prior_r [ROWS]``, 0 at masked keys and beyond the end."""
    o_j = o_first + tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    b_seen = o_j < num_keys
    if HAS_KEY_MASK:
        b_seen = b_seen & (tl.load(p_key_mask + i_batch.to(tl.int64) * num_keys + o_j, mask=b_seen, other=0) != 0)
    b_x = b_key.to(tl.float32)
    if HAS_SHIFT:
        b_x += tl.load(p_shift + (i_kv_head * M + i_component) * width + o_d, mask=o_d < width, other=0.0)[None, :]
    if HAS_KEY_MASK:
        # What stands at masked keys may be anything.
        b_x = tl.where(b_seen[:, None], b_x, 0.0)
    if PRIOR_BY_KEY:
        p_own = p_prior + i_kv_head * stride_prior_head + i_component * stride_prior_component
        b_weight = tl.exp(tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=b_seen, other=float("-inf")))
    else:
        b_weight = tl.where(b_seen, prior, 0.0)
    return tl.where((o_d < width)[None, :], features(b_x, MAP), 0.0), b_weight


@triton.jit
def merged_features(
    p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_prior_head, stride_prior_component, stride_prior_token, num_keys,
    width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    MEETS_PRODUCTS: tl.constexpr = False,
):  # fmt: skip
    """``f``, ``[ROWS, D]`` in fp32. ``MEETS_PRODUCTS``: see ``as_product``."""
    b_total = tl.zeros([ROWS, D], tl.float32)
    b_key = tl.zeros([ROWS, D], p_key.dtype.element_ty)
    for r in tl.static_range(M):
        if r == 0 or not HAS_SHIFT:
            b_key = load_rows(
                p_key + r * rows_apart(p_key, stride_key_component), stride_key_batch, stride_key_head,
                stride_key_token, i_batch, i_kv_head, o_first, num_keys, width, ROWS, D,
            )  # fmt: skip
            if MEETS_PRODUCTS:
                b_key = as_product(b_key, D)
        prior = prior_of_head(
            p_prior, i_kv_head, r, stride_prior_head, stride_prior_component, M, HAS_PRIOR, PRIOR_BY_KEY
        )
        b_own, b_weight = component(
            b_key, p_shift, prior, p_prior, p_key_mask, i_batch, i_kv_head, r, o_first, stride_prior_head,
            stride_prior_component, stride_prior_token, num_keys, width,
            M, HAS_SHIFT, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, ROWS, D,
        )  # fmt: skip
        b_total += b_own * b_weight[:, None]
    return b_total


@triton.jit
def load_values(
    p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_batch, stride_head, stride_token, num_keys, value_width,
    HAS_KEY_MASK: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """``v`` as an operand, 0 at masked keys."""
    b_value = load_rows(
        p_value, stride_batch, stride_head, stride_token, i_batch, i_kv_head, o_first, num_keys, value_width, ROWS, DV
    )
    b_value = operand(b_value, p_value)
    if HAS_KEY_MASK:
        o_j = o_first + tl.arange(0, ROWS)
        p_mask = p_key_mask + i_batch.to(tl.int64) * num_keys + o_j
        b_value = tl.where((tl.load(p_mask, mask=o_j < num_keys, other=0) != 0)[:, None], b_value, 0.0)
    return b_value


@triton.jit
def store_state(p_state, i, b_state, b_total, D: tl.constexpr, DV: tl.constexpr):
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    p_state += i.to(tl.int64) * (D * DV + D)
    tl.store(p_state + o_d[:, None] * DV + o_v[None, :], b_state)
    tl.store(p_state + D * DV + o_d, b_total)


@triton.jit
def load_state(p_state, i, D: tl.constexpr, DV: tl.constexpr):
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    p_state += i.to(tl.int64) * (D * DV + D)
    return tl.load(p_state + o_d[:, None] * DV + o_v[None, :]), tl.load(p_state + D * DV + o_d)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_states(
    p_key, p_value, p_shift, p_prior, p_key_mask, p_state, stride_key_batch, stride_key_head, stride_key_component,
    stride_key_token, stride_value_batch, stride_value_head, stride_value_token, stride_prior_head,
    stride_prior_component, stride_prior_token, num_kv_heads, num_keys, num_segments, blocks_per_segment, width,
    value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the keys of one head: its state, ``[B, Hkv, segments, state]``."""
    if EVEN:
        width, value_width = D, DV
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    b_state = tl.zeros([D, DV], tl.float32)
    b_sum = tl.zeros([BLOCK, D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_keys), BLOCK):
        b_features = merged_features(
            p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
            stride_key_component, stride_key_token, stride_prior_head, stride_prior_component, stride_prior_token,
            num_keys, width,
            M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
        )  # fmt: skip
        b_value = load_values(
            p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
            stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
        )  # fmt: skip
        b_state = tl.dot(operand(b_features, p_key).T, b_value, b_state, input_precision=INPUT_PRECISION)
        # Rows are added up at the end: threads would have to meet for it in every block.
        b_sum += b_features
    store_state(p_state, tl.program_id(0), b_state, tl.sum(b_sum, 0), D, DV)


@triton.jit(do_not_specialize=["num_segments"])
def linear_add_states(
    p_state, p_initial, p_sums, num_segments,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, STATE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program for some numbers of the states of one head: under causality what each segment finds that is begun
    with (``REVERSE``: from the end) and, last, what all leave, ``[heads, segments + 1, state]``; else that alone."""
    PARTS: tl.constexpr = (STATE + TOGETHER - 1) // TOGETHER
    i_head = (tl.program_id(0) // PARTS).to(tl.int64)
    o_part = (tl.program_id(0) % PARTS) * TOGETHER + tl.arange(0, TOGETHER)
    m_part = o_part < STATE
    b_sum = tl.zeros([TOGETHER], tl.float32)
    if HAS_INITIAL:
        b_sum += tl.load(p_initial + i_head * STATE + o_part, mask=m_part, other=0.0)
    p_own = p_sums + i_head * ((num_segments + 1) if CAUSAL else 1) * STATE + o_part
    for i in range(num_segments):
        i_segment = num_segments - 1 - i if REVERSE else i
        if CAUSAL:
            tl.store(p_own + i_segment * STATE, b_sum, mask=m_part)
        b_sum += tl.load(p_state + (i_head * num_segments + i_segment) * STATE + o_part, mask=m_part, other=0.0)
    tl.store(p_own + (num_segments if CAUSAL else 0) * STATE, b_sum, mask=m_part)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_forward(
    p_query, p_key, p_value, p_out, p_shift, p_prior, p_key_mask, p_state, p_length, p_inverse,
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_prior_head, stride_prior_component, stride_prior_token, num_heads, group_size, num_queries, num_keys,
    num_segments, blocks_per_segment, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head: ``out``, contiguous, and ``1 / t [B, H, Nq]``, 0 of a
    row that has seen nothing.

    ``p_state``: what keys before the segment have left, or all of them without causality.
    """
    MEETS_PRODUCTS: tl.constexpr = D < 64 or not CAUSAL  # where it is faster, as has been measured
    if EVEN:
        width, value_width = D, DV
    i_segment = tl.program_id(0) % num_segments
    i_head = tl.program_id(0) // num_segments
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    b_state, b_total = load_state(p_state, i_kv * (num_segments + 1) + i_segment if CAUSAL else i_kv, D, DV)
    o_v = tl.arange(0, DV)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        o_i = o_first + tl.arange(0, BLOCK)
        b_query = load_rows(
            p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
            num_queries, width, BLOCK, D,
        )  # fmt: skip
        # Where keys are not as wide as blocks, their features are 0, and rows beyond the end are not stored.
        b_query = features(as_product(b_query, D) if MEETS_PRODUCTS else b_query.to(tl.float32), MAP)
        b_sum = tl.sum(b_query * b_total[None, :], 1)
        b_query = operand(b_query, p_query)
        b_out = tl.dot(b_query, operand(b_state, p_query), input_precision=INPUT_PRECISION)
        if CAUSAL:
            # As many keys as queries: chunk by chunk.
            b_features = merged_features(
                p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
                stride_key_component, stride_key_token, stride_prior_head, stride_prior_component,
                stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D, MEETS_PRODUCTS,
            )  # fmt: skip
            b_value = load_values(
                p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
                stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
            )  # fmt: skip
            b_total += tl.sum(b_features, 0)
            b_features = operand(b_features, p_key)
            b_pair = tl.dot(b_query, b_features.T, input_precision=INPUT_PRECISION)
            b_pair = where_at_least(b_pair, o_i[:, None], o_i[None, :])
            b_sum += tl.sum(b_pair, 1)
            b_out = tl.dot(operand(b_pair, p_query), b_value, b_out, input_precision=INPUT_PRECISION)
            b_state = tl.dot(b_features.T, b_value, b_state, input_precision=INPUT_PRECISION)
        if not BY_SUM:
            b_sum = tl.load(p_length + i_batch.to(tl.int64) * num_queries + o_i, mask=o_i < num_queries, other=1.0)
        m_i = o_i < num_queries
        # A sum so small that fp32 has no inverse of it is none.
        b_inverse = tl.where(b_sum < 1.2e-38, 0.0, 1.0 / tl.where(b_sum < 1.2e-38, 1.0, b_sum))
        tl.store(p_inverse + i_head.to(tl.int64) * num_queries + o_i, b_inverse, mask=m_i)
        b_out *= b_inverse[:, None]
        p_rows = p_out + (i_head.to(tl.int64) * num_queries + o_i)[:, None] * value_width + o_v[None, :]
        tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_i[:, None] & (o_v < value_width)[None, :])
