"""Linear attention with a mixture of keys: time grows with the length.

With ``f_j = sum_r prior_r phi(k_jr)``, which is formed in registers and never written, and ``u_i = phi(q_i)``::

    state   S = sum_j f_j v_j^T    z = sum_j f_j                 keys up to i under causality
    total   t_i = u_i . z          (or the square root of the number of keys)
    out     o_i = u_i S / t_i

A sequence is cut into segments: one kernel leaves the state of each, a small one adds them up, and another walks
through all segments at the same time. Under causality it goes chunk by chunk: within a chunk every pair is formed, and
from chunk to chunk the state is carried in registers.

A state is one row of numbers, ``D * Dv`` for ``S`` (or ``R``, see :mod:`mgk.ops.triton.kernels.linear_backward`) and
``D`` for ``z`` (or ``y``), all in fp32. The matrix units are given bf16 for bf16 tokens; values and ``dO`` so enter as
they are, and what ``t`` divides is divided afterwards. For fp16 tokens they are given tf32, because the sum of a long
sequence would not fit. ``EVEN``: heads are as wide as blocks, so that rows are read and written by the 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.heads import Head, query_head
from mgk.ops.triton.kernels.tiles import (
    VARYING_WITH_WIDTH,
    Tokens,
    apart,
    as_product,
    fast_exp,
    load_tokens,
    where_at_least,
)

LINEAR_VARYING = [*VARYING_WITH_WIDTH, "num_segments", "blocks_per_segment", "stride_key_component", "num_samples"]


class Case(NamedTuple):
    """What the compiler knows of a call. A kernel makes it of its constants and hands it to its helpers."""

    MAP: tl.constexpr  # "elu" or "relu"
    BLOCK: tl.constexpr  # tokens of a chunk
    D: tl.constexpr  # the width of queries and keys, rounded up to a power of two
    DV: tl.constexpr  # the same for values
    M: tl.constexpr = 1  # components
    PRIOR_BY_KEY: tl.constexpr = False


class Mixture(NamedTuple):
    """What the features of keys are formed from. A pointer is ``None`` where the call has no such tensor."""

    key: Tokens  # of the first component
    stride_component: tl.tensor
    p_shift: tl.tensor | None  # [Hkv, M, width]
    p_prior: tl.tensor | None  # logarithms, [Hkv, M, Nk] or [Hkv, M, 1]
    stride_prior_head: tl.tensor
    stride_prior_component: tl.tensor
    stride_prior_token: tl.tensor
    p_key_mask: tl.tensor | None  # [B, Nk]


@triton.jit
def features(b_x, MAP: tl.constexpr):
    """``phi``, see :mod:`mgk.ops.feature_maps`."""
    if MAP == "elu":
        return tl.maximum(b_x, 0.0) + fast_exp(tl.minimum(b_x, 0.0))
    return tl.maximum(b_x, 0.0)


@triton.jit
def operand(b_x, tokens):
    """What the matrix units are given for tokens of this type."""
    return b_x.to(tl.bfloat16 if tokens.p_tokens.dtype.element_ty == tl.bfloat16 else tl.float32)


@triton.jit
def multiply(b_left, b_right, tokens, b_sum=None):
    """``left right`` in fp32, added to ``sum`` if there is one: exact for tokens in fp32, else with tf32."""
    PRECISION: tl.constexpr = "ieee" if tokens.p_tokens.dtype.element_ty == tl.float32 else "tf32"
    return tl.dot(b_left, b_right, b_sum, input_precision=PRECISION)


@triton.jit
def key_value_head(i_kv, num_kv_heads):
    """The key/value head that is number ``i_kv`` of all samples, as the head of a group of one."""
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    return Head(i_batch, i_kv_head, i_kv_head, i_kv, i_kv)


@triton.jit
def load_key(mixture, head, i_component, o_first, case: tl.constexpr):
    """Keys ``o_first ...`` of one component, ``[BLOCK, D]``."""
    p_first, stride_batch, stride_head, stride_token, num_keys, width = mixture.key
    p_key = p_first + i_component * apart(mixture.stride_component, p_first).to(tl.int64)
    key = Tokens(p_key, stride_batch, stride_head, stride_token, num_keys, width)
    return load_tokens(key, head.i_batch, head.i_kv_head, o_first, case.BLOCK, case.D)


@triton.jit
def load_key_mask(mixture, head, o_j):
    """Which keys are seen, ``[BLOCK]``, none beyond the end."""
    num_keys = mixture.key.length
    p_mask = mixture.p_key_mask + head.i_batch.to(tl.int64) * num_keys + o_j
    return tl.load(p_mask, mask=o_j < num_keys, other=0) != 0


@triton.jit
def prior_of_head(mixture, head, i_component, case: tl.constexpr):
    """``prior_r`` of one head, a scalar, where it is the same for all keys."""
    if mixture.p_prior is not None and not case.PRIOR_BY_KEY:
        o_head = head.i_kv_head * mixture.stride_prior_head
        return tl.exp(tl.load(mixture.p_prior + o_head + i_component * mixture.stride_prior_component))
    return 1.0 / case.M


@triton.jit
def component(b_key, prior, mixture, head, i_component, o_first, case: tl.constexpr):
    """``phi(k_jr) [BLOCK, D]``, 0 beyond the width, and ``prior_r [BLOCK]``, 0 at masked keys and beyond the end."""
    width = mixture.key.width
    o_j = o_first + tl.arange(0, case.BLOCK)
    o_d = tl.arange(0, case.D)
    m_j = o_j < mixture.key.length
    if mixture.p_key_mask is not None:
        m_j = m_j & load_key_mask(mixture, head, o_j)
    b_x = b_key.to(tl.float32)  # [BLOCK, D]
    if mixture.p_shift is not None:
        i_own = head.i_kv_head * case.M + i_component
        b_x += tl.load(mixture.p_shift + i_own * width + o_d, mask=o_d < width, other=0.0)[None, :]
    if mixture.p_key_mask is not None:
        # What stands at masked keys may be anything.
        b_x = tl.where(m_j[:, None], b_x, 0.0)
    if case.PRIOR_BY_KEY:
        p_prior = mixture.p_prior + head.i_kv_head * mixture.stride_prior_head
        p_prior += i_component * mixture.stride_prior_component
        p_prior += o_j.to(tl.int64) * mixture.stride_prior_token
        b_prior = tl.exp(tl.load(p_prior, mask=m_j, other=float("-inf")))
    else:
        b_prior = tl.where(m_j, prior, 0.0)
    return tl.where((o_d < width)[None, :], features(b_x, case.MAP), 0.0), b_prior


@triton.jit
def merged_features(mixture, head, o_first, case: tl.constexpr, MEETS_PRODUCTS: tl.constexpr = False):
    """``f``, ``[BLOCK, D]`` in fp32. ``MEETS_PRODUCTS``: see ``as_product``."""
    b_total = tl.zeros([case.BLOCK, case.D], tl.float32)
    b_key = tl.zeros([case.BLOCK, case.D], mixture.key.p_tokens.dtype.element_ty)
    for r in tl.static_range(case.M):
        if r == 0 or mixture.p_shift is None:
            b_key = load_key(mixture, head, r, o_first, case)
            if MEETS_PRODUCTS:
                b_key = as_product(b_key, case.D)
        prior = prior_of_head(mixture, head, r, case)
        b_features, b_prior = component(b_key, prior, mixture, head, r, o_first, case)
        b_total += b_features * b_prior[:, None]
    return b_total


@triton.jit
def load_values(value, mixture, head, o_first, case: tl.constexpr):
    """``v [BLOCK, DV]`` as an operand, 0 at masked keys."""
    b_value = operand(load_tokens(value, head.i_batch, head.i_kv_head, o_first, case.BLOCK, case.DV), value)
    if mixture.p_key_mask is not None:
        m_j = load_key_mask(mixture, head, o_first + tl.arange(0, case.BLOCK))
        b_value = tl.where(m_j[:, None], b_value, 0.0)
    return b_value


@triton.jit
def store_state(p_state, i_state, b_state, b_total, D: tl.constexpr, DV: tl.constexpr):
    """Write ``S [D, DV]`` and ``z [D]``."""
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    p_state += i_state.to(tl.int64) * (D * DV + D)
    tl.store(p_state + o_d[:, None] * DV + o_v[None, :], b_state)
    tl.store(p_state + D * DV + o_d, b_total)


@triton.jit
def load_state(p_state, i_state, D: tl.constexpr, DV: tl.constexpr):
    """``S [D, DV]`` and ``z [D]``."""
    o_d, o_v = tl.arange(0, D), tl.arange(0, DV)
    p_state += i_state.to(tl.int64) * (D * DV + D)
    return tl.load(p_state + o_d[:, None] * DV + o_v[None, :]), tl.load(p_state + D * DV + o_d)


@triton.jit
def store_rows(p_tensor, b_x, i_head, o_rows, length, width, D: tl.constexpr):
    """Write rows ``o_rows`` of one head of a contiguous ``[heads, length, width]``."""
    o_d = tl.arange(0, D)
    p_rows = p_tensor + (i_head.to(tl.int64) * length + o_rows)[:, None] * width + o_d[None, :]
    tl.store(p_rows, b_x.to(p_tensor.dtype.element_ty), mask=(o_rows < length)[:, None] & (o_d < width)[None, :])


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_states(
    p_key, p_value, p_shift, p_prior, p_key_mask, p_state, stride_key_batch, stride_key_head, stride_key_component,
    stride_key_token, stride_value_batch, stride_value_head, stride_value_token, stride_prior_head,
    stride_prior_component, stride_prior_token, num_kv_heads, num_keys, num_segments, blocks_per_segment, width,
    value_width,
    M: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, MAP: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the keys of one head: its state, ``[B, Hkv, segments, state]``."""
    case: tl.constexpr = Case(MAP, BLOCK, D, DV, M, PRIOR_BY_KEY)
    if EVEN:
        width, value_width = D, DV
    key = Tokens(p_key, stride_key_batch, stride_key_head, stride_key_token, num_keys, width)
    value = Tokens(p_value, stride_value_batch, stride_value_head, stride_value_token, num_keys, value_width)
    mixture = Mixture(
        key, stride_key_component, p_shift, p_prior, stride_prior_head, stride_prior_component, stride_prior_token,
        p_key_mask,
    )  # fmt: skip
    i_segment = tl.program_id(0) % num_segments
    head = key_value_head(tl.program_id(0) // num_segments, num_kv_heads)
    b_state = tl.zeros([D, DV], tl.float32)
    b_sum = tl.zeros([BLOCK, D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_keys), BLOCK):
        b_features = merged_features(mixture, head, o_first, case)
        b_value = load_values(value, mixture, head, o_first, case)
        b_state = multiply(operand(b_features, key).T, b_value, key, b_state)
        # Rows are added up at the end: threads would have to meet for it in every block.
        b_sum += b_features
    store_state(p_state, tl.program_id(0), b_state, tl.sum(b_sum, 0), D, DV)


@triton.jit(do_not_specialize=["num_segments"])
def linear_add_states(
    p_state, p_initial, p_sums, num_segments,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, STATE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program for some numbers of the states of one head: under causality what each segment finds that is begun
    with (``REVERSE``: from the end) and, last, what all leave, ``[heads, segments + 1, state]``; else that alone."""
    PARTS: tl.constexpr = (STATE + TOGETHER - 1) // TOGETHER
    i_head = (tl.program_id(0) // PARTS).to(tl.int64)
    o_part = (tl.program_id(0) % PARTS) * TOGETHER + tl.arange(0, TOGETHER)
    m_part = o_part < STATE
    b_sum = tl.zeros([TOGETHER], tl.float32)
    if p_initial is not None:
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
    M: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head: ``out``, contiguous, and ``1 / t [B, H, Nq]``, 0 for a
    row that has seen nothing.

    ``p_state``: what keys before the segment have left, or all of them without causality.
    """
    MEETS_PRODUCTS: tl.constexpr = D < 64 or not CAUSAL  # where it was measured to be faster
    case: tl.constexpr = Case(MAP, BLOCK, D, DV, M, PRIOR_BY_KEY)
    if EVEN:
        width, value_width = D, DV
    query = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
    key = Tokens(p_key, stride_key_batch, stride_key_head, stride_key_token, num_keys, width)
    value = Tokens(p_value, stride_value_batch, stride_value_head, stride_value_token, num_keys, value_width)
    mixture = Mixture(
        key, stride_key_component, p_shift, p_prior, stride_prior_head, stride_prior_component, stride_prior_token,
        p_key_mask,
    )  # fmt: skip
    i_segment = tl.program_id(0) % num_segments
    head = query_head(tl.program_id(0) // num_segments, num_heads, group_size)
    i_state = head.i_kv * (num_segments + 1) + i_segment if CAUSAL else head.i_kv
    b_state, b_total = load_state(p_state, i_state, D, DV)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        o_i = o_first + tl.arange(0, BLOCK)
        b_query = load_tokens(query, head.i_batch, head.i_query_head, o_first, BLOCK, D)
        # Where keys are not as wide as blocks, their features are 0, and rows beyond the end are not stored.
        b_query = features(as_product(b_query, D) if MEETS_PRODUCTS else b_query.to(tl.float32), MAP)  # [BLOCK, D]
        b_sum = tl.sum(b_query * b_total[None, :], 1)  # [BLOCK]
        b_query = operand(b_query, query)
        b_out = multiply(b_query, operand(b_state, query), query)  # [BLOCK, DV]
        if CAUSAL:
            # There are as many keys as queries, and they are added chunk by chunk.
            b_features = merged_features(mixture, head, o_first, case, MEETS_PRODUCTS)
            b_value = load_values(value, mixture, head, o_first, case)
            b_total += tl.sum(b_features, 0)
            b_features = operand(b_features, key)
            b_pair = multiply(b_query, b_features.T, query)  # [BLOCK, BLOCK]
            b_pair = where_at_least(b_pair, o_i[:, None], o_i[None, :])
            b_sum += tl.sum(b_pair, 1)
            b_out = multiply(operand(b_pair, query), b_value, query, b_out)
            b_state = multiply(b_features.T, b_value, key, b_state)
        m_i = o_i < num_queries
        if p_length is not None:
            b_sum = tl.load(p_length + head.i_batch.to(tl.int64) * num_queries + o_i, mask=m_i, other=1.0)
        # A sum so small that fp32 has no inverse of it is none.
        b_inverse = tl.where(b_sum < 1.2e-38, 0.0, 1.0 / tl.where(b_sum < 1.2e-38, 1.0, b_sum))
        tl.store(p_inverse + head.i_head.to(tl.int64) * num_queries + o_i, b_inverse, mask=m_i)
        store_rows(p_out, b_out * b_inverse[:, None], head.i_head, o_i, num_queries, value_width, DV)
