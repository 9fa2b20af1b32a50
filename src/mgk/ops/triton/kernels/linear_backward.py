"""Backward of linear attention, see :mod:`mgk.ops.triton.linear`.

    du_i = (S dO_i + delta_i z) / t_i     delta_i = -u_i . S dO_i / t_i, which is -o_i . dO_i
    R = sum_i u_i / t_i dO_i^T            y = sum_i u_i / t_i delta_i    queries from j on
    df_j = R v_j + y                      dv_j = R^T f_j

Queries first, from the start, as forward; then keys, from the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.linear import (
    LINEAR_VARYING,
    component,
    features,
    load_state,
    load_values,
    merged_features,
    operand,
    prior_of_head,
    rows_apart,
    store_state,
)
from mgk.ops.triton.kernels.tiles import as_product, load_rows, where_at_least


@triton.jit
def slopes(b_features, MAP: tl.constexpr):
    """Its derivative where it takes these values: of both maps they tell it."""
    if MAP == "elu":
        return tl.minimum(b_features, 1.0)
    return tl.where(b_features > 0.0, 1.0, 0.0)


@triton.jit
def _load_numbers(p_numbers, i_head, o_first, num_queries, ROWS: tl.constexpr):
    """One of each query, 0 beyond the end."""
    o_i = o_first + tl.arange(0, ROWS)
    return tl.load(p_numbers + i_head.to(tl.int64) * num_queries + o_i, mask=o_i < num_queries, other=0.0)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_backward_query(
    p_query, p_key, p_value, p_grad, p_grad_query, p_delta, p_shift, p_prior, p_key_mask, p_state,
    p_inverse, stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head,
    stride_key_component, stride_key_token, stride_value_batch, stride_value_head, stride_value_token,
    stride_grad_batch, stride_grad_head, stride_grad_token,
    stride_prior_head, stride_prior_component, stride_prior_token, num_heads, group_size, num_queries, num_keys,
    num_segments, blocks_per_segment, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head, as forward: ``dq``, contiguous, and for the kernels after
    it ``delta [B, H, Nq]``."""
    if EVEN:
        width, value_width = D, DV
    i_segment = tl.program_id(0) % num_segments
    i_head = tl.program_id(0) // num_segments
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    b_state, b_total = load_state(p_state, i_kv * (num_segments + 1) + i_segment if CAUSAL else i_kv, D, DV)
    o_d = tl.arange(0, D)
    first = i_segment * blocks_per_segment * BLOCK
    for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
        o_i = o_first + tl.arange(0, BLOCK)
        m_i = o_i < num_queries
        b_grad_out = load_rows(
            p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, i_batch, i_query_head, o_first,
            num_queries, value_width, BLOCK, DV,
        )  # fmt: skip
        b_grad_out = operand(b_grad_out, p_query)
        b_grad = tl.dot(b_grad_out, operand(b_state, p_query).T, input_precision=INPUT_PRECISION)
        # What each row has seen of ``z``.
        b_sums = tl.zeros([BLOCK, D], tl.float32) + b_total[None, :]
        if CAUSAL:
            b_features = merged_features(
                p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
                stride_key_component, stride_key_token, stride_prior_head, stride_prior_component,
                stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D, MEETS_PRODUCTS=True,
            )  # fmt: skip
            b_value = load_values(
                p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
                stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
            )  # fmt: skip
            b_total += tl.sum(b_features, 0)
            b_features = operand(b_features, p_key)
            b_pair = tl.dot(b_grad_out, b_value.T, input_precision=INPUT_PRECISION)
            b_pair = operand(where_at_least(b_pair, o_i[:, None], o_i[None, :]), p_query)
            b_grad = tl.dot(b_pair, b_features, b_grad, input_precision=INPUT_PRECISION)
            b_state = tl.dot(b_features.T, b_value, b_state, input_precision=INPUT_PRECISION)
            if BY_SUM:
                b_seen = operand(tl.where(o_i[:, None] >= o_i[None, :], 1.0, 0.0), p_query)
                b_sums = tl.dot(b_seen, b_features, b_sums, input_precision=INPUT_PRECISION)
        b_query = load_rows(
            p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
            num_queries, width, BLOCK, D,
        )  # fmt: skip
        b_query = features(as_product(b_query, D), MAP)
        b_inverse = _load_numbers(p_inverse, i_head, o_first, num_queries, BLOCK)
        if BY_SUM:
            # From the very numbers that it is to cancel, as they were rounded.
            b_delta = -tl.sum(b_query * b_grad, 1) * b_inverse
            tl.store(p_delta + i_head.to(tl.int64) * num_queries + o_i, b_delta, mask=m_i)
            b_grad += b_delta[:, None] * b_sums
        b_grad *= slopes(b_query, MAP) * b_inverse[:, None]
        p_rows = p_grad_query + (i_head.to(tl.int64) * num_queries + o_i)[:, None] * width + o_d[None, :]
        tl.store(p_rows, b_grad.to(p_grad_query.dtype.element_ty), mask=m_i[:, None] & (o_d < width)[None, :])


@triton.jit
def _load_query_side(
    p_query, p_grad, p_delta, p_inverse, i_batch, i_head, i_query_head, o_first, stride_query_batch,
    stride_query_head, stride_query_token, stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, width,
    value_width,
    MAP: tl.constexpr, BY_SUM: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MEETS_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """``u / t`` in fp32, ``dO`` as an operand, and ``delta``, all 0 beyond the end. ``MEETS_PRODUCTS``: see
    ``as_product``; where it is faster has been measured."""
    b_query = load_rows(
        p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_query_head, o_first,
        num_queries, width, ROWS, D,
    )  # fmt: skip
    b_inverse = _load_numbers(p_inverse, i_head, o_first, num_queries, ROWS)
    b_query = as_product(b_query, D) if MEETS_PRODUCTS else b_query.to(tl.float32)
    b_query = features(b_query, MAP) * b_inverse[:, None]
    b_grad = load_rows(
        p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, i_batch, i_query_head, o_first, num_queries,
        value_width, ROWS, DV,
    )  # fmt: skip
    b_delta = tl.zeros([ROWS], tl.float32)
    if BY_SUM:
        b_delta = _load_numbers(p_delta, i_head, o_first, num_queries, ROWS)
    return b_query, operand(b_grad, p_query), b_delta


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_reverse_states(
    p_query, p_grad, p_delta, p_inverse, p_state, stride_query_batch, stride_query_head, stride_query_token,
    stride_grad_batch, stride_grad_head, stride_grad_token, num_heads, group_size, num_queries, num_segments,
    blocks_per_segment, width, value_width,
    MAP: tl.constexpr, BY_SUM: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one key/value head: ``R`` and ``y``, as of ``linear_states``."""
    if EVEN:
        width, value_width = D, DV
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    num_kv_heads = num_heads // group_size
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    b_state = tl.zeros([D, DV], tl.float32)
    b_sum = tl.zeros([BLOCK, D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for g in range(group_size):
        i_query_head = i_kv_head * group_size + g
        i_head = i_batch * num_heads + i_query_head
        for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
            b_query, b_grad, b_delta = _load_query_side(
                p_query, p_grad, p_delta, p_inverse, i_batch, i_head, i_query_head, o_first, stride_query_batch,
                stride_query_head, stride_query_token, stride_grad_batch, stride_grad_head, stride_grad_token,
                num_queries, width, value_width, MAP, BY_SUM, BLOCK, D, DV, False,
            )  # fmt: skip
            b_state = tl.dot(operand(b_query, p_query).T, b_grad, b_state, input_precision=INPUT_PRECISION)
            b_sum += b_query * b_delta[:, None]
    store_state(p_state, tl.program_id(0), b_state, tl.sum(b_sum, 0), D, DV)


@triton.jit
def _value_gradient(b_sum, b_features, b_query, b_grad_out, o_j, p_query, INPUT_PRECISION: tl.constexpr):
    """Add what queries of the same chunk send to values. Pairs are transposed, ``[keys, queries]``."""
    b_pair = tl.dot(b_features, operand(b_query, p_query).T, input_precision=INPUT_PRECISION)
    b_pair = where_at_least(b_pair, o_j[None, :], o_j[:, None])
    return tl.dot(operand(b_pair, p_query), b_grad_out, b_sum, input_precision=INPUT_PRECISION)


@triton.jit
def _feature_gradient(b_sum, b_value, b_query, b_grad_out, b_delta, o_j, p_query, INPUT_PRECISION: tl.constexpr):
    """Likewise to features."""
    b_pair = tl.dot(b_value, b_grad_out.T, input_precision=INPUT_PRECISION) + b_delta[None, :]
    b_pair = where_at_least(b_pair, o_j[None, :], o_j[:, None])
    return tl.dot(operand(b_pair, p_query), operand(b_query, p_query), b_sum, input_precision=INPUT_PRECISION)


@triton.jit
def _component_gradient(b_grad, b_own, b_weight, MAP: tl.constexpr):
    """Of one component: ``dk [ROWS, D]``, and ``own * df``, whose sums are the gradient of its log prior. ``own``:
    ``prior_r phi(k_jr)``."""
    if MAP == "elu":
        b_slope = tl.minimum(b_own, b_weight[:, None])
    else:
        b_slope = tl.where(b_own > 0.0, b_weight[:, None], 0.0)
    return b_grad * b_slope, b_grad * b_own


@triton.jit
def _rows_added(b_x, ROWS: tl.constexpr, D: tl.constexpr):
    """``[ROWS, D]``: rows that a thread of the matrix units has together, 8 apart, added to ``[ROWS / 16, 8, D]``."""
    return tl.sum(tl.reshape(b_x, [ROWS // 16, 2, 8, D]), 1)


@triton.jit
def _columns_added(b_x, ROWS: tl.constexpr, D: tl.constexpr):
    """Columns that a thread has together, neighbours and those 16 or 32 apart, added to ``[ROWS, 8 or 16]``."""
    LEFT: tl.constexpr = 8 if ROWS >= 64 or D < 32 else 16
    return tl.sum(tl.sum(tl.reshape(b_x, [ROWS, D // 2 // LEFT, LEFT, 2]), 3), 1)


@triton.jit
def _store_rows(p_tensor, b_x, i_head, o_first, length, width, D: tl.constexpr):
    """``o_first``: the tokens."""
    o_d = tl.arange(0, D)
    p_rows = p_tensor + (i_head.to(tl.int64) * length + o_first)[:, None] * width + o_d[None, :]
    tl.store(p_rows, b_x.to(p_tensor.dtype.element_ty), mask=(o_first < length)[:, None] & (o_d < width)[None, :])


@triton.jit
def _store_chance(p_share, b_chance, i_own, i_batch, o_j, num_samples, num_keys):
    o_share = (i_own * num_samples + i_batch).to(tl.int64) * num_keys + o_j
    tl.store(p_share + o_share, b_chance, mask=o_j < num_keys)


@triton.jit
def _store_sum(p_share, b_chance, i_own, i_share, num_shares):
    tl.store(p_share + i_own.to(tl.int64) * num_shares + i_share, tl.sum(b_chance, 0))


@triton.jit
def _store_column_sums(p_share, b_sums, i_own, i_share, num_shares, D: tl.constexpr):
    tl.store(p_share + (i_own.to(tl.int64) * num_shares + i_share) * D + tl.arange(0, D), b_sums)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_backward_key_value(
    p_query, p_key, p_value, p_grad, p_grad_key, p_grad_value, p_delta, p_shift, p_prior, p_key_mask, p_state,
    p_inverse, p_shift_share, p_prior_share, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_component, stride_key_token, stride_value_batch, stride_value_head,
    stride_value_token, stride_grad_batch, stride_grad_head, stride_grad_token, stride_prior_head,
    stride_prior_component, stride_prior_token, num_heads, group_size, num_queries, num_keys, num_segments,
    blocks_per_segment, num_samples, width, value_width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_SUM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
    ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the keys of one head, from its end: ``dk``, ``dv``, contiguous, and the shares of
    shift ``[Hkv, M, shares, D]`` and prior ``[Hkv, M, shares]`` (or ``[Hkv, M, B, Nk]`` by key), one for each segment
    of each sample or, of more than two components, for each block.

    ``p_state``: what queries after the segment have left, or all of them without causality.
    """
    if EVEN:
        width, value_width = D, DV
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    num_kv_heads = num_heads // group_size
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    b_state, b_total = load_state(p_state, i_kv * (num_segments + 1) + i_segment if CAUSAL else i_kv, D, DV)
    # Of one or two components, rows and columns are added up at the end: threads would have to meet for it in every
    # block.
    b_first_shift = tl.zeros([BLOCK // 16, 8, D], tl.float32)
    b_second_shift = tl.zeros([BLOCK // 16, 8, D], tl.float32)
    b_first_share = _columns_added(tl.zeros([BLOCK, D], tl.float32), BLOCK, D)
    b_second_share = _columns_added(tl.zeros([BLOCK, D], tl.float32), BLOCK, D)
    first_prior = prior_of_head(
        p_prior, i_kv_head, 0, stride_prior_head, stride_prior_component, M, HAS_PRIOR, PRIOR_BY_KEY
    )
    second_prior = prior_of_head(
        p_prior, i_kv_head, M - 1, stride_prior_head, stride_prior_component, M, HAS_PRIOR, PRIOR_BY_KEY
    )
    first = i_segment * blocks_per_segment * BLOCK
    end = tl.minimum(first + blocks_per_segment * BLOCK, num_keys)
    num_blocks = tl.maximum(end - first + BLOCK - 1, 0) // BLOCK
    for i_block in tl.range(0, num_blocks):
        o_first = first + (num_blocks - 1 - i_block) * BLOCK
        o_j = o_first + tl.arange(0, BLOCK)
        if M <= 2:
            b_key = load_rows(
                p_key, stride_key_batch, stride_key_head, stride_key_token, i_batch, i_kv_head,
                o_first, num_keys, width, BLOCK, D,
            )  # fmt: skip
            b_key = as_product(b_key, D)
            b_first, b_first_weight = component(
                b_key, p_shift, first_prior, p_prior, p_key_mask, i_batch, i_kv_head, 0, o_first, stride_prior_head,
                stride_prior_component, stride_prior_token, num_keys, width,
                M, HAS_SHIFT, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
            )  # fmt: skip
            b_features = b_first * b_first_weight[:, None]
            b_first = b_features
            if M == 2:
                if not HAS_SHIFT:
                    b_key = load_rows(
                        p_key + rows_apart(p_key, stride_key_component), stride_key_batch, stride_key_head,
                        stride_key_token, i_batch, i_kv_head, o_first, num_keys, width, BLOCK, D,
                    )  # fmt: skip
                    b_key = as_product(b_key, D)
                b_second, b_second_weight = component(
                    b_key, p_shift, second_prior, p_prior, p_key_mask, i_batch, i_kv_head, 1, o_first,
                    stride_prior_head, stride_prior_component, stride_prior_token, num_keys, width,
                    M, HAS_SHIFT, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
                )  # fmt: skip
                b_second *= b_second_weight[:, None]
                b_features += b_second
        else:
            b_features = merged_features(
                p_key, p_shift, p_prior, p_key_mask, i_batch, i_kv_head, o_first, stride_key_batch, stride_key_head,
                stride_key_component, stride_key_token, stride_prior_head, stride_prior_component,
                stride_prior_token, num_keys, width,
                M, HAS_SHIFT, HAS_PRIOR, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
            )  # fmt: skip
        b_features = operand(b_features, p_key)
        # The values' gradient first, and then it is gone: two at once would not fit into registers.
        b_rounded = operand(b_state, p_key)
        b_grad_value = tl.dot(b_features, b_rounded, input_precision=INPUT_PRECISION)
        if CAUSAL:
            if ONE_GROUP:
                b_query, b_grad_out, b_delta = _load_query_side(
                    p_query, p_grad, p_delta, p_inverse, i_batch, i_kv, i_kv_head, o_first, stride_query_batch,
                    stride_query_head, stride_query_token, stride_grad_batch, stride_grad_head, stride_grad_token,
                    num_queries, width, value_width, MAP, BY_SUM, BLOCK, D, DV, D > 32 or M == 1,
                )  # fmt: skip
                b_grad_value = _value_gradient(b_grad_value, b_features, b_query, b_grad_out, o_j, p_query, INPUT_PRECISION)
            else:
                for g in range(group_size):
                    i_query_head = i_kv_head * group_size + g
                    b_query, b_grad_out, b_delta = _load_query_side(
                        p_query, p_grad, p_delta, p_inverse, i_batch, i_batch * num_heads + i_query_head,
                        i_query_head, o_first, stride_query_batch, stride_query_head, stride_query_token,
                        stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, width, value_width,
                        MAP, BY_SUM, BLOCK, D, DV, D > 32 or M == 1,
                    )  # fmt: skip
                    b_grad_value = _value_gradient(
                        b_grad_value, b_features, b_query, b_grad_out, o_j, p_query, INPUT_PRECISION
                    )
        m_j = o_j < num_keys
        if HAS_KEY_MASK:
            p_mask = p_key_mask + i_batch.to(tl.int64) * num_keys + o_j
            b_grad_value = tl.where((tl.load(p_mask, mask=m_j, other=0) != 0)[:, None], b_grad_value, 0.0)
        _store_rows(p_grad_value, b_grad_value, i_kv, o_j, num_keys, value_width, DV)
        b_value = load_values(
            p_value, p_key_mask, i_batch, i_kv_head, o_first, stride_value_batch, stride_value_head,
            stride_value_token, num_keys, value_width, HAS_KEY_MASK, BLOCK, DV,
        )  # fmt: skip
        b_grad = tl.dot(b_value, b_rounded.T, input_precision=INPUT_PRECISION) + b_total[None, :]
        if CAUSAL:
            if ONE_GROUP:
                b_grad = _feature_gradient(b_grad, b_value, b_query, b_grad_out, b_delta, o_j, p_query, INPUT_PRECISION)
                b_total += tl.sum(b_query * b_delta[:, None], 0)
                b_state = tl.dot(operand(b_query, p_query).T, b_grad_out, b_state, input_precision=INPUT_PRECISION)
            else:
                for g in range(group_size):
                    i_query_head = i_kv_head * group_size + g
                    b_query, b_grad_out, b_delta = _load_query_side(
                        p_query, p_grad, p_delta, p_inverse, i_batch, i_batch * num_heads + i_query_head,
                        i_query_head, o_first, stride_query_batch, stride_query_head, stride_query_token,
                        stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, width, value_width,
                        MAP, BY_SUM, BLOCK, D, DV, D > 32 or M == 1,
                    )  # fmt: skip
                    b_grad = _feature_gradient(b_grad, b_value, b_query, b_grad_out, b_delta, o_j, p_query, INPUT_PRECISION)
                    b_total += tl.sum(b_query * b_delta[:, None], 0)
                    b_state = tl.dot(operand(b_query, p_query).T, b_grad_out, b_state, input_precision=INPUT_PRECISION)
        if M <= 2:
            b_grad_key, b_chance = _component_gradient(b_grad, b_first, b_first_weight, MAP)
            if HAS_PRIOR and PRIOR_BY_KEY:
                _store_chance(p_prior_share, tl.sum(b_chance, 1), i_kv_head * M, i_batch, o_j, num_samples, num_keys)
            elif HAS_PRIOR:
                b_first_share += _columns_added(b_chance, BLOCK, D)
            if HAS_SHIFT:
                b_first_shift += _rows_added(b_grad_key, BLOCK, D)
            if M == 2:
                b_own, b_chance = _component_gradient(b_grad, b_second, b_second_weight, MAP)
                if HAS_PRIOR and PRIOR_BY_KEY:
                    i_own = i_kv_head * M + 1
                    _store_chance(p_prior_share, tl.sum(b_chance, 1), i_own, i_batch, o_j, num_samples, num_keys)
                elif HAS_PRIOR:
                    b_second_share += _columns_added(b_chance, BLOCK, D)
                if HAS_SHIFT:
                    b_second_shift += _rows_added(b_own, BLOCK, D)
                    b_grad_key += b_own
                else:
                    _store_rows(p_grad_key, b_own, i_kv * M + 1, o_j, num_keys, width, D)
            _store_rows(p_grad_key, b_grad_key, i_kv if HAS_SHIFT else i_kv * M, o_j, num_keys, width, D)
        else:
            b_grad_key = tl.zeros([BLOCK, D], tl.float32)
            b_key = tl.zeros([BLOCK, D], p_key.dtype.element_ty)
            for r in tl.static_range(M):
                if r == 0 or not HAS_SHIFT:
                    b_key = load_rows(
                        p_key + r * rows_apart(p_key, stride_key_component), stride_key_batch, stride_key_head,
                        stride_key_token, i_batch, i_kv_head, o_first, num_keys, width, BLOCK, D,
                    )  # fmt: skip
                prior = prior_of_head(
                    p_prior, i_kv_head, r, stride_prior_head, stride_prior_component, M, HAS_PRIOR, PRIOR_BY_KEY
                )
                b_component, b_weight = component(
                    b_key, p_shift, prior, p_prior, p_key_mask, i_batch, i_kv_head, r, o_first, stride_prior_head,
                    stride_prior_component, stride_prior_token, num_keys, width,
                    M, HAS_SHIFT, PRIOR_BY_KEY, HAS_KEY_MASK, MAP, BLOCK, D,
                )  # fmt: skip
                b_own, b_chance = _component_gradient(b_grad, b_component * b_weight[:, None], b_weight, MAP)
                i_share = (i_batch * num_segments + i_segment) * blocks_per_segment + i_block
                num_shares = num_samples * num_segments * blocks_per_segment
                b_chance = tl.sum(b_chance, 1)
                if HAS_PRIOR and PRIOR_BY_KEY:
                    _store_chance(p_prior_share, b_chance, i_kv_head * M + r, i_batch, o_j, num_samples, num_keys)
                elif HAS_PRIOR:
                    _store_sum(p_prior_share, b_chance, i_kv_head * M + r, i_share, num_shares)
                if HAS_SHIFT:
                    b_grad_key += b_own
                    _store_column_sums(p_shift_share, tl.sum(b_own, 0), i_kv_head * M + r, i_share, num_shares, D)
                else:
                    _store_rows(p_grad_key, b_own, i_kv * M + r, o_j, num_keys, width, D)
            if HAS_SHIFT:
                _store_rows(p_grad_key, b_grad_key, i_kv, o_j, num_keys, width, D)
    if M <= 2:
        i_share = i_batch * num_segments + i_segment
        num_shares = num_samples * num_segments
        if HAS_PRIOR and not PRIOR_BY_KEY:
            _store_sum(p_prior_share, tl.sum(b_first_share, 1), i_kv_head * M, i_share, num_shares)
        if HAS_SHIFT:
            b_sums = tl.sum(tl.sum(b_first_shift, 0), 0)
            _store_column_sums(p_shift_share, b_sums, i_kv_head * M, i_share, num_shares, D)
        if M == 2:
            if HAS_PRIOR and not PRIOR_BY_KEY:
                _store_sum(p_prior_share, tl.sum(b_second_share, 1), i_kv_head * M + 1, i_share, num_shares)
            if HAS_SHIFT:
                b_sums = tl.sum(tl.sum(b_second_shift, 0), 0)
                _store_column_sums(p_shift_share, b_sums, i_kv_head * M + 1, i_share, num_shares, D)
    elif num_blocks < blocks_per_segment:
        # The last segment may have fewer blocks than the others.
        for i_block in range(num_blocks, blocks_per_segment):
            i_share = (i_batch * num_segments + i_segment) * blocks_per_segment + i_block
            num_shares = num_samples * num_segments * blocks_per_segment
            for r in tl.static_range(M):
                if HAS_PRIOR and not PRIOR_BY_KEY:
                    _store_sum(p_prior_share, tl.zeros([BLOCK], tl.float32), i_kv_head * M + r, i_share, num_shares)
                if HAS_SHIFT:
                    b_sums = tl.zeros([D], tl.float32)
                    _store_column_sums(p_shift_share, b_sums, i_kv_head * M + r, i_share, num_shares, D)


@triton.jit(do_not_specialize=["num_kv_heads", "num_shares", "width", "stride_prior_head", "stride_prior_component"])
def linear_add_shares(
    p_shift_share, p_prior_share, p_prior, p_grad_shift, p_grad_prior, stride_prior_head, stride_prior_component,
    num_kv_heads, num_shares, width,
    M: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr,
    BY_SUM: tl.constexpr, D: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program for 16 numbers of the gradient of one shift, and after those one for the priors of each head."""
    PARTS: tl.constexpr = D // 16 if HAS_SHIFT else 0
    o_share = tl.arange(0, TOGETHER)
    i_own = tl.program_id(0) // max(PARTS, 1)
    if HAS_SHIFT and i_own < num_kv_heads * M:
        o_d = (tl.program_id(0) % max(PARTS, 1)) * 16 + tl.arange(0, 16)
        b_shift = tl.zeros([16], tl.float32)
        for first in range(0, num_shares, TOGETHER):
            o_rows = (i_own.to(tl.int64) * num_shares + first + o_share)[:, None] * D + o_d[None, :]
            b_share = tl.load(p_shift_share + o_rows, mask=(first + o_share < num_shares)[:, None], other=0.0)
            b_shift += tl.sum(b_share, 0)
        tl.store(p_grad_shift + i_own * width + o_d, b_shift, mask=o_d < width)
    elif HAS_PRIOR and not PRIOR_BY_KEY:
        i_kv_head = tl.program_id(0) - num_kv_heads * M * PARTS
        o_r = tl.arange(0, 8)
        b_priors = tl.zeros([8], tl.float32)
        for r in tl.static_range(M):
            p_own = p_prior_share + (i_kv_head * M + r).to(tl.int64) * num_shares
            b_prior = 0.0
            for first in range(0, num_shares, TOGETHER):
                b_prior += tl.sum(tl.load(p_own + first + o_share, mask=first + o_share < num_shares, other=0.0), 0)
            b_priors += tl.where(o_r == r, b_prior, 0.0)
        if BY_SUM:
            # All priors times a number change nothing, so these gradients add up to 0: whatever else they add up to is
            # rounding, of sums far larger than their differences, and is taken back from each by its weight.
            p_own = p_prior + i_kv_head * stride_prior_head + o_r * stride_prior_component
            b_log = tl.load(p_own, mask=o_r < M, other=float("-inf"))
            b_largest = tl.max(b_log, 0)
            b_weight = tl.exp(b_log - tl.where(b_largest == float("-inf"), 0.0, b_largest))
            b_whole = tl.sum(b_weight, 0)
            b_priors -= tl.sum(b_priors, 0) * b_weight / tl.where(b_whole == 0.0, 1.0, b_whole)
        tl.store(p_grad_prior + i_kv_head * M + o_r, b_priors, mask=o_r < M)
