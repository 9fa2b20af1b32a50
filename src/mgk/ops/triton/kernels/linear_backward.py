"""Backward of linear attention, see :mod:`mgk.ops.triton.kernels.linear`::

    du_i = (S dO_i + delta_i z) / t_i     delta_i = -u_i . S dO_i / t_i, which is -o_i . dO_i
    R = sum_i u_i / t_i dO_i^T            y = sum_i u_i / t_i delta_i    queries from j on
    df_j = R v_j + y                      dv_j = R^T f_j

Queries come first, from the start, as forward; then keys, from the end. A program for keys leaves partial sums of the
gradients of shifts and priors, which a last kernel adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.heads import Head, query_head
from mgk.ops.triton.kernels.linear import (
    LINEAR_VARYING,
    Case,
    Mixture,
    component,
    features,
    key_value_head,
    load_key,
    load_key_mask,
    load_state,
    load_values,
    merged_features,
    multiply,
    operand,
    prior_of_head,
    store_rows,
    store_state,
)
from mgk.ops.triton.kernels.tiles import Tokens, as_product, load_tokens, where_at_least


class QuerySide(NamedTuple):
    """What keys and values get their gradients from."""

    query: Tokens
    grad: Tokens  # dO
    p_delta: tl.tensor | None  # [B, H, Nq]; None: the sum does not divide
    p_inverse: tl.tensor  # 1 / t, [B, H, Nq]


class QueryBlock(NamedTuple):
    """A block of it, 0 beyond the end."""

    b_query: tl.tensor  # u / t in fp32, [BLOCK, D]
    b_grad_out: tl.tensor  # dO as an operand, [BLOCK, DV]
    b_delta: tl.tensor  # [BLOCK]


class Partials(NamedTuple):
    """Where a partial sum of the gradients of shifts and priors is left."""

    p_shift: tl.tensor  # [Hkv, M, partials, D]
    p_prior: tl.tensor  # [Hkv, M, partials]
    i_partial: tl.tensor
    num_partials: tl.tensor


@triton.jit
def slopes(b_features, MAP: tl.constexpr):
    """The derivative of ``phi`` where it takes these values, which tell it for both maps."""
    if MAP == "elu":
        return tl.minimum(b_features, 1.0)
    return tl.where(b_features > 0.0, 1.0, 0.0)


@triton.jit
def _load_numbers(p_numbers, i_head, o_first, num_queries, ROWS: tl.constexpr):
    """One number of each query, 0 beyond the end."""
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
    M: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one head, as forward: ``dq``, contiguous, and for the kernels after
    it ``delta [B, H, Nq]``."""
    case: tl.constexpr = Case(MAP, BLOCK, D, DV, M, PRIOR_BY_KEY)
    if EVEN:
        width, value_width = D, DV
    query = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
    grad = Tokens(p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, value_width)
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
        m_i = o_i < num_queries
        b_grad_out = load_tokens(grad, head.i_batch, head.i_query_head, o_first, BLOCK, DV)
        b_grad_out = operand(b_grad_out, query)
        b_grad = multiply(b_grad_out, operand(b_state, query).T, query)  # [BLOCK, D]
        # What each row has seen of ``z``, [BLOCK, D].
        b_sums = tl.zeros([BLOCK, D], tl.float32) + b_total[None, :]
        if CAUSAL:
            b_features = merged_features(mixture, head, o_first, case, MEETS_PRODUCTS=True)
            b_value = load_values(value, mixture, head, o_first, case)
            b_total += tl.sum(b_features, 0)
            b_features = operand(b_features, key)
            b_pair = multiply(b_grad_out, b_value.T, query)  # [BLOCK, BLOCK]
            b_pair = operand(where_at_least(b_pair, o_i[:, None], o_i[None, :]), query)
            b_grad = multiply(b_pair, b_features, query, b_grad)
            b_state = multiply(b_features.T, b_value, key, b_state)
            if p_delta is not None:
                b_seen = operand(tl.where(o_i[:, None] >= o_i[None, :], 1.0, 0.0), query)
                b_sums = multiply(b_seen, b_features, query, b_sums)
        b_query = load_tokens(query, head.i_batch, head.i_query_head, o_first, BLOCK, D)
        b_query = features(as_product(b_query, D), MAP)
        b_inverse = _load_numbers(p_inverse, head.i_head, o_first, num_queries, BLOCK)
        if p_delta is not None:
            # From the very numbers that it is to cancel, as they were rounded.
            b_delta = -tl.sum(b_query * b_grad, 1) * b_inverse
            tl.store(p_delta + head.i_head.to(tl.int64) * num_queries + o_i, b_delta, mask=m_i)
            b_grad += b_delta[:, None] * b_sums
        b_grad *= slopes(b_query, MAP) * b_inverse[:, None]
        store_rows(p_grad_query, b_grad, head.i_head, o_i, num_queries, width, D)


@triton.jit
def _member(head, i_member, num_heads, group_size):
    """The query head that is number ``i_member`` of those that share this key/value head."""
    i_query_head = head.i_kv_head * group_size + i_member
    return Head(head.i_batch, i_query_head, head.i_kv_head, head.i_batch * num_heads + i_query_head, head.i_kv)


@triton.jit
def _load_query_side(side, head, o_first, case: tl.constexpr, MEETS_PRODUCTS: tl.constexpr):
    """A :class:`QueryBlock`. ``MEETS_PRODUCTS``: see ``as_product``; where it is faster has been measured."""
    b_query = load_tokens(side.query, head.i_batch, head.i_query_head, o_first, case.BLOCK, case.D)
    b_inverse = _load_numbers(side.p_inverse, head.i_head, o_first, side.query.length, case.BLOCK)
    b_query = as_product(b_query, case.D) if MEETS_PRODUCTS else b_query.to(tl.float32)
    b_query = features(b_query, case.MAP) * b_inverse[:, None]
    b_grad = load_tokens(side.grad, head.i_batch, head.i_query_head, o_first, case.BLOCK, case.DV)
    b_delta = tl.zeros([case.BLOCK], tl.float32)
    if side.p_delta is not None:
        b_delta = _load_numbers(side.p_delta, head.i_head, o_first, side.query.length, case.BLOCK)
    return QueryBlock(b_query, operand(b_grad, side.query), b_delta)


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_reverse_states(
    p_query, p_grad, p_delta, p_inverse, p_state, stride_query_batch, stride_query_head, stride_query_token,
    stride_grad_batch, stride_grad_head, stride_grad_token, num_heads, group_size, num_queries, num_segments,
    blocks_per_segment, width, value_width,
    MAP: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the queries of one key/value head: ``R`` and ``y``, laid out as ``linear_states``
    does."""
    case: tl.constexpr = Case(MAP, BLOCK, D, DV)
    if EVEN:
        width, value_width = D, DV
    query = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
    grad = Tokens(p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, value_width)
    side = QuerySide(query, grad, p_delta, p_inverse)
    i_segment = tl.program_id(0) % num_segments
    head = key_value_head(tl.program_id(0) // num_segments, num_heads // group_size)
    b_state = tl.zeros([D, DV], tl.float32)
    b_sum = tl.zeros([BLOCK, D], tl.float32)
    first = i_segment * blocks_per_segment * BLOCK
    for g in range(group_size):
        own = _member(head, g, num_heads, group_size)
        for o_first in tl.range(first, tl.minimum(first + blocks_per_segment * BLOCK, num_queries), BLOCK):
            block = _load_query_side(side, own, o_first, case, False)
            b_query = operand(block.b_query, query)
            b_state = multiply(b_query.T, block.b_grad_out, query, b_state)
            b_sum += block.b_query * block.b_delta[:, None]
    store_state(p_state, tl.program_id(0), b_state, tl.sum(b_sum, 0), D, DV)


@triton.jit
def _add_value_gradient(b_sum, b_features, block, o_j, query):
    """Add what queries of the same chunk send to values, ``[BLOCK, DV]``. Pairs are transposed, ``[keys, queries]``."""
    b_pair = multiply(b_features, operand(block.b_query, query).T, query)
    b_pair = where_at_least(b_pair, o_j[None, :], o_j[:, None])
    return multiply(operand(b_pair, query), block.b_grad_out, query, b_sum)


@triton.jit
def _add_feature_gradient(b_sum, b_value, block, o_j, query):
    """Add what they send to features, ``[BLOCK, D]``."""
    b_pair = multiply(b_value, block.b_grad_out.T, query) + block.b_delta[None, :]
    b_pair = where_at_least(b_pair, o_j[None, :], o_j[:, None])
    return multiply(operand(b_pair, query), operand(block.b_query, query), query, b_sum)


@triton.jit
def _component_gradient(b_grad, b_own, b_prior, MAP: tl.constexpr):
    """For one component: ``dk [BLOCK, D]``, and ``own * df``, whose sums are the gradient of its log prior. ``own``:
    ``prior_r phi(k_jr)``."""
    if MAP == "elu":
        b_slope = tl.minimum(b_own, b_prior[:, None])
    else:
        b_slope = tl.where(b_own > 0.0, b_prior[:, None], 0.0)
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
def _store_by_key(p_prior_partial, b_prior, i_own, i_batch, num_samples, o_j, num_keys):
    """The gradient of a prior that differs from key to key, in ``[Hkv, M, B, Nk]``."""
    o_partial = (i_own * num_samples + i_batch).to(tl.int64) * num_keys + o_j
    tl.store(p_prior_partial + o_partial, b_prior, mask=o_j < num_keys)


@triton.jit
def _store_prior(partials, b_prior, i_own):
    """The sum of ``b_prior [BLOCK]``."""
    tl.store(partials.p_prior + i_own.to(tl.int64) * partials.num_partials + partials.i_partial, tl.sum(b_prior, 0))


@triton.jit
def _store_shift(partials, b_shift, i_own, D: tl.constexpr):
    """``b_shift [D]``."""
    o_row = i_own.to(tl.int64) * partials.num_partials + partials.i_partial
    tl.store(partials.p_shift + o_row * D + tl.arange(0, D), b_shift)


@triton.jit
def _store_many_components(
    b_grad, p_grad_key, partials, num_samples, mixture, head, o_first, case: tl.constexpr
):  # fmt: skip
    """Gradients of more than two components, whose features are formed again: ``dk`` is stored, and a partial sum for
    every block."""
    num_keys, width = mixture.key.length, mixture.key.width
    o_j = o_first + tl.arange(0, case.BLOCK)
    b_grad_key = tl.zeros([case.BLOCK, case.D], tl.float32)
    b_key = tl.zeros([case.BLOCK, case.D], mixture.key.p_tokens.dtype.element_ty)
    for r in tl.static_range(case.M):
        if r == 0 or mixture.p_shift is None:
            b_key = load_key(mixture, head, r, o_first, case)
        prior = prior_of_head(mixture, head, r, case)
        b_features, b_prior = component(b_key, prior, mixture, head, r, o_first, case)
        b_own, b_chance = _component_gradient(b_grad, b_features * b_prior[:, None], b_prior, case.MAP)
        i_own = head.i_kv_head * case.M + r
        b_chance = tl.sum(b_chance, 1)
        if case.PRIOR_BY_KEY:
            _store_by_key(partials.p_prior, b_chance, i_own, head.i_batch, num_samples, o_j, num_keys)
        elif mixture.p_prior is not None:
            _store_prior(partials, b_chance, i_own)
        if mixture.p_shift is not None:
            b_grad_key += b_own
            _store_shift(partials, tl.sum(b_own, 0), i_own, case.D)
        else:
            store_rows(p_grad_key, b_own, head.i_kv * case.M + r, o_j, num_keys, width, case.D)
    if mixture.p_shift is not None:
        store_rows(p_grad_key, b_grad_key, head.i_kv, o_j, num_keys, width, case.D)


@triton.jit
def _store_sums(partials, b_shift, b_prior, i_own, case: tl.constexpr):
    """The partial sums of one of at most two components: ``b_shift [BLOCK / 16, 8, D]``, ``b_prior [BLOCK, ...]``."""
    if partials.p_prior is not None and not case.PRIOR_BY_KEY:
        _store_prior(partials, tl.sum(b_prior, 1), i_own)
    if partials.p_shift is not None:
        _store_shift(partials, tl.sum(tl.sum(b_shift, 0), 0), i_own, case.D)


@triton.jit
def _store_zeros(partials, head, case: tl.constexpr):
    """The partial sums of a block that there is not."""
    for r in tl.static_range(case.M):
        i_own = head.i_kv_head * case.M + r
        if partials.p_prior is not None and not case.PRIOR_BY_KEY:
            _store_prior(partials, tl.zeros([case.BLOCK], tl.float32), i_own)
        if partials.p_shift is not None:
            _store_shift(partials, tl.zeros([case.D], tl.float32), i_own, case.D)


@triton.jit
def _component_of_two(b_key, prior, mixture, head, i_component, o_first, case: tl.constexpr):
    """``prior_r phi(k_jr) [BLOCK, D]``, ``prior_r [BLOCK]`` and the key, which is loaded unless it has been."""
    if i_component == 0 or mixture.p_shift is None:
        b_key = as_product(load_key(mixture, head, i_component, o_first, case), case.D)
    b_features, b_prior = component(b_key, prior, mixture, head, i_component, o_first, case)
    return b_features * b_prior[:, None], b_prior, b_key


@triton.jit
def _add_to_sums(
    b_shift, b_prior, b_grad_key, b_chance, p_prior_partial, i_own, mixture, head, num_samples, o_j, case: tl.constexpr
):
    """Add a block's gradients of one of at most two components to what its program sums up."""
    if case.PRIOR_BY_KEY:
        _store_by_key(p_prior_partial, tl.sum(b_chance, 1), i_own, head.i_batch, num_samples, o_j, mixture.key.length)
    elif mixture.p_prior is not None:
        b_prior += _columns_added(b_chance, case.BLOCK, case.D)
    if mixture.p_shift is not None:
        b_shift += _rows_added(b_grad_key, case.BLOCK, case.D)
    return b_shift, b_prior


@triton.jit(do_not_specialize=LINEAR_VARYING)
def linear_backward_key_value(
    p_query, p_key, p_value, p_grad, p_grad_key, p_grad_value, p_delta, p_shift, p_prior, p_key_mask, p_state,
    p_inverse, p_shift_partial, p_prior_partial, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_component, stride_key_token, stride_value_batch, stride_value_head,
    stride_value_token, stride_grad_batch, stride_grad_head, stride_grad_token, stride_prior_head,
    stride_prior_component, stride_prior_token, num_heads, group_size, num_queries, num_keys, num_segments,
    blocks_per_segment, num_samples, width, value_width,
    M: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """One program for one segment of the keys of one head, from its end: ``dk``, ``dv``, contiguous, and the partial
    sums of shift and prior, one for each segment of each sample or, with more than two components, for each block.

    ``p_state``: what queries after the segment have left, or all of them without causality.
    """
    MEETS_PRODUCTS: tl.constexpr = D > 32 or M == 1
    case: tl.constexpr = Case(MAP, BLOCK, D, DV, M, PRIOR_BY_KEY)
    if EVEN:
        width, value_width = D, DV
    query = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
    grad = Tokens(p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, value_width)
    key = Tokens(p_key, stride_key_batch, stride_key_head, stride_key_token, num_keys, width)
    value = Tokens(p_value, stride_value_batch, stride_value_head, stride_value_token, num_keys, value_width)
    mixture = Mixture(
        key, stride_key_component, p_shift, p_prior, stride_prior_head, stride_prior_component, stride_prior_token,
        p_key_mask,
    )  # fmt: skip
    side = QuerySide(query, grad, p_delta, p_inverse)
    i_segment = tl.program_id(0) % num_segments
    i_kv = tl.program_id(0) // num_segments
    head = key_value_head(i_kv, num_heads // group_size)
    b_state, b_total = load_state(p_state, i_kv * (num_segments + 1) + i_segment if CAUSAL else i_kv, D, DV)
    # With one or two components, rows and columns are added up at the end: threads would have to meet for it in every
    # block.
    b_first_shift = tl.zeros([BLOCK // 16, 8, D], tl.float32)
    b_second_shift = tl.zeros([BLOCK // 16, 8, D], tl.float32)
    b_first_chance = _columns_added(tl.zeros([BLOCK, D], tl.float32), BLOCK, D)
    b_second_chance = _columns_added(tl.zeros([BLOCK, D], tl.float32), BLOCK, D)
    first_prior = prior_of_head(mixture, head, 0, case)
    second_prior = prior_of_head(mixture, head, M - 1, case)
    first = i_segment * blocks_per_segment * BLOCK
    end = tl.minimum(first + blocks_per_segment * BLOCK, num_keys)
    num_blocks = tl.maximum(end - first + BLOCK - 1, 0) // BLOCK
    for i_block in tl.range(0, num_blocks):
        o_first = first + (num_blocks - 1 - i_block) * BLOCK
        o_j = o_first + tl.arange(0, BLOCK)
        if M <= 2:
            b_first, b_first_prior, b_key = _component_of_two(None, first_prior, mixture, head, 0, o_first, case)
            b_features = b_first
            if M == 2:
                b_second, b_second_prior, _ = _component_of_two(b_key, second_prior, mixture, head, 1, o_first, case)
                b_features += b_second
        else:
            b_features = merged_features(mixture, head, o_first, case)
        b_features = operand(b_features, key)
        # The values' gradient first, and then it is gone: two at once would not fit into registers.
        b_rounded = operand(b_state, key)
        b_grad_value = multiply(b_features, b_rounded, key)  # [BLOCK, DV]
        if CAUSAL:
            if ONE_GROUP:
                block = _load_query_side(side, head, o_first, case, MEETS_PRODUCTS)
                b_grad_value = _add_value_gradient(b_grad_value, b_features, block, o_j, query)
            else:
                for g in range(group_size):
                    own = _member(head, g, num_heads, group_size)
                    block = _load_query_side(side, own, o_first, case, MEETS_PRODUCTS)
                    b_grad_value = _add_value_gradient(b_grad_value, b_features, block, o_j, query)
        if p_key_mask is not None:
            b_grad_value = tl.where(load_key_mask(mixture, head, o_j)[:, None], b_grad_value, 0.0)
        store_rows(p_grad_value, b_grad_value, i_kv, o_j, num_keys, value_width, DV)
        b_value = load_values(value, mixture, head, o_first, case)
        b_grad = multiply(b_value, b_rounded.T, key) + b_total[None, :]  # [BLOCK, D]
        if CAUSAL:
            if ONE_GROUP:
                b_grad = _add_feature_gradient(b_grad, b_value, block, o_j, query)
                b_total += tl.sum(block.b_query * block.b_delta[:, None], 0)
                b_query = operand(block.b_query, query)
                b_state = multiply(b_query.T, block.b_grad_out, query, b_state)
            else:
                for g in range(group_size):
                    own = _member(head, g, num_heads, group_size)
                    block = _load_query_side(side, own, o_first, case, MEETS_PRODUCTS)
                    b_grad = _add_feature_gradient(b_grad, b_value, block, o_j, query)
                    b_total += tl.sum(block.b_query * block.b_delta[:, None], 0)
                    b_query = operand(block.b_query, query)
                    b_state = multiply(b_query.T, block.b_grad_out, query, b_state)
        if M <= 2:
            i_own = head.i_kv_head * M
            b_grad_key, b_chance = _component_gradient(b_grad, b_first, b_first_prior, MAP)
            b_first_shift, b_first_chance = _add_to_sums(
                b_first_shift, b_first_chance, b_grad_key, b_chance, p_prior_partial, i_own, mixture, head, num_samples,
                o_j, case,
            )  # fmt: skip
            if M == 2:
                b_own, b_chance = _component_gradient(b_grad, b_second, b_second_prior, MAP)
                b_second_shift, b_second_chance = _add_to_sums(
                    b_second_shift, b_second_chance, b_own, b_chance, p_prior_partial, i_own + 1, mixture, head,
                    num_samples, o_j, case,
                )  # fmt: skip
                if p_shift is not None:
                    b_grad_key += b_own
                else:
                    store_rows(p_grad_key, b_own, i_kv * M + 1, o_j, num_keys, width, D)
            store_rows(p_grad_key, b_grad_key, i_kv if p_shift is not None else i_kv * M, o_j, num_keys, width, D)
        else:
            i_partial = (head.i_batch * num_segments + i_segment) * blocks_per_segment + i_block
            num_partials = num_samples * num_segments * blocks_per_segment
            partials = Partials(p_shift_partial, p_prior_partial, i_partial, num_partials)
            _store_many_components(b_grad, p_grad_key, partials, num_samples, mixture, head, o_first, case)
    if M <= 2:
        i_partial = head.i_batch * num_segments + i_segment
        partials = Partials(p_shift_partial, p_prior_partial, i_partial, num_samples * num_segments)
        _store_sums(partials, b_first_shift, b_first_chance, head.i_kv_head * M, case)
        if M == 2:
            _store_sums(partials, b_second_shift, b_second_chance, head.i_kv_head * M + 1, case)
    elif num_blocks < blocks_per_segment:
        # The last segment may have fewer blocks than the others.
        for i_block in range(num_blocks, blocks_per_segment):
            i_partial = (head.i_batch * num_segments + i_segment) * blocks_per_segment + i_block
            num_partials = num_samples * num_segments * blocks_per_segment
            _store_zeros(Partials(p_shift_partial, p_prior_partial, i_partial, num_partials), head, case)


@triton.jit(do_not_specialize=["num_kv_heads", "num_partials", "width", "stride_prior_head", "stride_prior_component"])
def linear_add_partials(
    p_shift_partial, p_prior_partial, p_prior, p_grad_shift, p_grad_prior, stride_prior_head, stride_prior_component,
    num_kv_heads, num_partials, width,
    M: tl.constexpr, BY_SUM: tl.constexpr, D: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program for 16 numbers of the gradient of one shift, and after those one for the priors of each head, if they
    are the same for all keys. ``BY_SUM``: the sum divides."""
    PARTS: tl.constexpr = D // 16 if p_shift_partial is not None else 0
    o_partial = tl.arange(0, TOGETHER)
    i_own = tl.program_id(0) // max(PARTS, 1)
    if p_shift_partial is not None and i_own < num_kv_heads * M:
        o_d = (tl.program_id(0) % max(PARTS, 1)) * 16 + tl.arange(0, 16)
        b_shift = tl.zeros([16], tl.float32)
        for first in range(0, num_partials, TOGETHER):
            o_rows = (i_own.to(tl.int64) * num_partials + first + o_partial)[:, None] * D + o_d[None, :]
            b_partial = tl.load(p_shift_partial + o_rows, mask=(first + o_partial < num_partials)[:, None], other=0.0)
            b_shift += tl.sum(b_partial, 0)
        tl.store(p_grad_shift + i_own * width + o_d, b_shift, mask=o_d < width)
    elif p_prior_partial is not None:
        i_kv_head = tl.program_id(0) - num_kv_heads * M * PARTS
        o_r = tl.arange(0, 8)
        b_priors = tl.zeros([8], tl.float32)
        for r in tl.static_range(M):
            p_own = p_prior_partial + (i_kv_head * M + r).to(tl.int64) * num_partials
            b_prior = 0.0
            for first in range(0, num_partials, TOGETHER):
                b_prior += tl.sum(
                    tl.load(p_own + first + o_partial, mask=first + o_partial < num_partials, other=0.0), 0
                )
            b_priors += tl.where(o_r == r, b_prior, 0.0)
        if BY_SUM:
            # To multiply all priors by a number changes nothing, so these gradients add up to 0: whatever else they
            # add up to is rounding, of sums far larger than their differences, and is taken back by weight.
            p_own = p_prior + i_kv_head * stride_prior_head + o_r * stride_prior_component
            b_log = tl.load(p_own, mask=o_r < M, other=float("-inf"))
            b_largest = tl.max(b_log, 0)
            b_weight = tl.exp(b_log - tl.where(b_largest == float("-inf"), 0.0, b_largest))
            b_whole = tl.sum(b_weight, 0)
            b_priors -= tl.sum(b_priors, 0) * b_weight / tl.where(b_whole == 0.0, 1.0, b_whole)
        tl.store(p_grad_prior + i_kv_head * M + o_r, b_priors, mask=o_r < M)
