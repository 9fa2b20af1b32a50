"""Few queries, many keys: a step of generation, with split-KV.

One program for each block of queries would leave most of a GPU idle while it walks through the cache. So the keys of a
head are split between programs, each of which reads its split once with online softmax and leaves a weighted sum of
values, a maximum and a sum of weights; a second kernel merges them by their log-sum-exp. Query heads that share a key
head are rows of one block.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + constant[r] + column[j,r]

in units of log 2. What belongs to a key alone is computed as the key passes by, so that nothing is read twice.

A step waits for memory, so everything is arranged for that: keys and values go by TMA into shared memory, where the
matrix units read them, as the larger operand of their products (pairs are transposed, ``[keys, rows]``). Rows that no
query needs hold the shifts, as sums of two halves each, whose products with the keys so cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.terms import Prior, Shifts, load_shift
from mgk.ops.triton.kernels.tiles import LOG2_E, VARYING, Case, apart, product, stand_in

DECODE_VARYING = [*VARYING, "keys_per_split", "num_splits", "stride_key_component", "stride_mask_key"]

MASKS_TOGETHER = tl.constexpr(1024)
"""Entries of a mask that are looked at together."""


class Rows(NamedTuple):
    """What a program holds of the queries of a group."""

    b_query: tl.tensor
    """``[ROWS, D]``; rows that no query needs hold the shifts"""
    b_row: tl.tensor
    """the row terms of each component, ``[8, ROWS]``"""
    b_constant: tl.tensor
    """what neither key nor query changes, ``[8]``"""
    o_shift: tl.tensor | None
    """which half of which shift a row holds: two for each component, from 0 on; ``None``: no key needs the shifts"""
    m_row: tl.tensor
    """which rows are queries"""
    i_query: tl.tensor
    """which query of its head a row is"""
    num_queries: tl.tensor


class Cache(NamedTuple):
    """The keys and values of one head: by descriptor, and by pointer where some of them are masked."""

    d_key: tl.tensor
    d_value: tl.tensor
    i_batch: tl.tensor
    i_kv_head: tl.tensor
    p_key: tl.tensor
    p_value: tl.tensor
    p_mask: tl.tensor | None
    stride_key_component: tl.tensor
    stride_key_token: tl.tensor
    stride_value_token: tl.tensor
    stride_mask_key: tl.tensor
    num_keys: tl.tensor
    width: tl.tensor
    value_width: tl.tensor
    scale: tl.tensor
    p_inverse_variance: tl.tensor | None


@triton.jit(do_not_specialize=DECODE_VARYING)
def decode_split(
    # tokens and the mixture
    d_key, d_value, p_query, p_key, p_value, p_shift, p_prior, p_inverse_variance, p_key_mask,
    # what is written
    p_partial, p_maximum, p_sum,
    # strides
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head, stride_key_component,
    stride_key_token, stride_value_batch, stride_value_head, stride_value_token, stride_prior_head,
    stride_prior_component, stride_prior_token, stride_mask_batch, stride_mask_key,
    # numbers
    scale, num_heads, group_size, num_queries, num_keys, keys_per_split, num_splits, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr,
    PRIOR_BY_KEY: tl.constexpr, PRIOR_BY_SAMPLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one split of the keys of one key/value head: ``partial [.., rows, Dv]``, maximum and sum."""
    case: tl.constexpr = Case(M, SHARED_KEY, HARD, ROWS, BLOCK_J, D, DV, GAUSSIAN=GAUSSIAN)
    stride_key_batch = apart(stride_key_batch, p_key)
    stride_key_head = apart(stride_key_head, p_key)
    stride_key_component = apart(stride_key_component, p_key)
    stride_key_token = apart(stride_key_token, p_key)
    stride_value_batch = apart(stride_value_batch, p_value)
    stride_value_head = apart(stride_value_head, p_value)
    stride_value_token = apart(stride_value_token, p_value)
    i_split = tl.program_id(0) % num_splits
    i_kv = tl.program_id(0) // num_splits
    num_kv_heads = num_heads // group_size
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    if PRIOR_BY_SAMPLE:
        p_prior += i_batch.to(tl.int64) * num_kv_heads * stride_prior_head
    key_prior = Prior(p_prior if PRIOR_BY_KEY else None, stride_prior_head, stride_prior_component, stride_prior_token)
    shifts = Shifts(p_shift, None, width)
    o_row = tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    o_r = tl.arange(0, 8)
    num_rows = group_size * num_queries
    m_row = o_row < num_rows
    i_query = o_row % num_queries
    i_head = (i_kv_head * group_size + o_row // num_queries).to(tl.int64)
    p_rows = p_query + i_batch.to(tl.int64) * stride_query_batch + i_head * stride_query_head
    p_rows += i_query * stride_query_token
    b_query = tl.load(p_rows[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < width)[None, :], other=0.0)

    # What no key changes, for each component: a column for each.
    b_rows = tl.zeros([8, ROWS], tl.float32)
    b_constant = tl.zeros([8], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if p_inverse_variance is None else tl.load(p_inverse_variance + i_kv_head * M + r)
        b_row = tl.zeros([ROWS], tl.float32)
        b_one = 0.0
        if p_shift is not None:
            b_shift = load_shift(shifts, i_kv_head, r, M, D)
            b_row += tl.sum(b_query.to(tl.float32) * b_shift[None, :], 1)
            if GAUSSIAN:
                b_one -= 0.5 * tl.sum(b_shift * b_shift, 0)
        if GAUSSIAN and p_inverse_variance is not None:
            b_row -= 0.5 * tl.sum(b_query.to(tl.float32) * b_query.to(tl.float32), 1)
        b_rows += tl.where(o_r[:, None] == r, (b_row * b_scale)[None, :], 0.0)
        b_one *= b_scale
        if p_prior is not None and not PRIOR_BY_KEY:
            b_prior = tl.load(p_prior + i_kv_head * stride_prior_head + r * stride_prior_component)
            b_one += b_prior * LOG2_E
        b_constant += tl.where(o_r == r, b_one, 0.0)
    # Two rows for the shift of each component: the number that the tokens' format holds, and what is missing from it.
    o_shift = None
    if GAUSSIAN and p_shift is not None:
        o_shift = o_row - num_rows
        m_shift = (o_shift >= 0) & (o_shift < 2 * M)
        p_own = p_shift + (i_kv_head * M + o_shift // 2)[:, None] * width + o_d[None, :]
        b_shift = tl.load(p_own, mask=m_shift[:, None] & (o_d < width)[None, :], other=0.0)
        b_high = b_shift.to(b_query.dtype)
        b_low = (b_shift - b_high.to(tl.float32)).to(b_query.dtype)
        b_query += tl.where(o_shift[:, None] % 2 == 0, b_high, b_low)

    first_key = i_split * keys_per_split
    end_key = tl.minimum(first_key + keys_per_split, num_keys)
    first_full = first_key
    end_full = end_key
    if p_key_mask is not None:
        p_key_mask += i_batch.to(tl.int64) * stride_mask_batch
        first_key, first_full, end_full, end_key = _seen_range(p_key_mask, first_key, end_key, stride_mask_key, BLOCK_J)
    p_key += i_batch.to(tl.int64) * stride_key_batch + i_kv_head.to(tl.int64) * stride_key_head
    p_value += i_batch.to(tl.int64) * stride_value_batch + i_kv_head.to(tl.int64) * stride_value_head
    rows = Rows(b_query, b_rows, b_constant, o_shift, m_row, i_query, num_queries)
    cache = Cache(
        d_key, d_value, i_batch, i_kv_head, p_key, p_value, p_key_mask, stride_key_component, stride_key_token,
        stride_value_token, stride_mask_key, num_keys, width, value_width, scale, p_inverse_variance,
    )  # fmt: skip
    b_out = tl.zeros([DV, ROWS], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for o_first in tl.range(first_full, end_full, BLOCK_J):
        b_out, b_sum, b_maximum = _attend(
            b_out, b_sum, b_maximum, rows, cache, key_prior, o_first, end_full, CAUSAL, False, BLOCK_J, case
        )
    if p_key_mask is not None:
        # Blocks of which some keys are masked: those before the others and those after them, or all if there are gaps.
        # They are so small that they are no work for a warp group: in products of one, whose operands come through
        # registers, Triton 3.6 read outside of shared memory here.
        PART: tl.constexpr = min(BLOCK_J, 32)
        before = (first_full - first_key) // PART
        after = (end_key - end_full + PART - 1) // PART
        for i in range(before + after):
            o_first = tl.where(i < before, first_key + i * PART, end_full + (i - before) * PART)
            b_out, b_sum, b_maximum = _attend(
                b_out, b_sum, b_maximum, rows, cache, key_prior, o_first, end_key, CAUSAL, True, PART, case
            )

    o_own = (i_kv.to(tl.int64) * num_splits + i_split) * num_rows + o_row
    tl.store(p_maximum + o_own, b_maximum, mask=m_row)
    tl.store(p_sum + o_own, b_sum, mask=m_row)
    tl.store(p_partial + o_own[None, :] * DV + o_v[:, None], b_out, mask=m_row[None, :])


@triton.jit
def _seen_range(p_key_mask, first_key, end_key, stride_mask_key, BLOCK_J: tl.constexpr):
    """``first, first_full, end_full, end``: keys ``first ... end`` hold all that is seen of a split; in the blocks
    ``first_full ... end_full`` every key is seen. The cache of a padded prompt is seen in one piece."""
    first = end_key
    end = first_key
    count = 0
    for o_first in range(first_key, end_key, MASKS_TOGETHER):
        o_j = o_first + tl.arange(0, MASKS_TOGETHER)
        m_seen = tl.load(p_key_mask + o_j.to(tl.int64) * stride_mask_key, mask=o_j < end_key, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(m_seen, o_j, end_key), 0))
        end = tl.maximum(end, tl.max(tl.where(m_seen, o_j + 1, first_key), 0))
        count += tl.sum(m_seen.to(tl.int32), 0)
    is_whole = count == end - first
    first_full = (first + BLOCK_J - 1) // BLOCK_J * BLOCK_J
    end_full = end // BLOCK_J * BLOCK_J
    first = first // BLOCK_J * BLOCK_J
    if (is_whole == 0) | (first_full >= end_full):
        first_full = first
        end_full = first
    return first, first_full, end_full, end


@triton.jit
def _attend(
    b_out, b_sum, b_maximum, rows, cache, key_prior, o_first, end_key,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_J: tl.constexpr, case: tl.constexpr,
):  # fmt: skip
    """Add one block of keys with online softmax. ``MASKED``: what stands at masked keys is not read.

    ``key_prior`` is one that differs from key to key. ``BLOCK_J`` may be less than ``case.BLOCK_J``.
    """
    ROWS: tl.constexpr = rows.b_query.shape[0]
    o_j = o_first + tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, case.D)
    o_v = tl.arange(0, case.DV)
    o_r = tl.arange(0, 8)
    m_valid = o_j < end_key
    if MASKED:
        p_mask = cache.p_mask + o_j.to(tl.int64) * cache.stride_mask_key
        m_valid = m_valid & (tl.load(p_mask, mask=m_valid, other=0) != 0)
    m_seen = m_valid[:, None] & rows.m_row[None, :]  # [BLOCK_J, ROWS]
    if CAUSAL:
        m_seen = m_seen & (o_j[:, None] <= (rows.i_query + cache.num_keys - rows.num_queries)[None, :])
    b_norm = tl.zeros([BLOCK_J], tl.float32)
    b_product = tl.zeros([BLOCK_J, ROWS], tl.float32)
    b_weight = tl.zeros([BLOCK_J, ROWS], tl.float32)
    b_best = tl.full([BLOCK_J, ROWS], float("-inf"), tl.float32)
    b_before = b_maximum
    for r in tl.static_range(case.M):
        if r == 0 or not case.SHARED_KEY:
            if MASKED:
                p_tile = cache.p_key + r * cache.stride_key_component
                p_tile += o_j.to(tl.int64)[:, None] * cache.stride_key_token
                m_tile = m_valid[:, None] & (o_d < cache.width)[None, :]
                b_key = tl.load(p_tile + o_d[None, :], mask=m_tile, other=0.0)
            else:
                b_key = cache.d_key.load([cache.i_batch, cache.i_kv_head, r, o_first, 0]).reshape(BLOCK_J, case.D)
            b_product = product(b_key, rows.b_query.T)
            if case.GAUSSIAN:
                b_norm = 0.5 * tl.sum(b_key.to(tl.float32) * b_key.to(tl.float32), 1)
        p_scale = cache.p_inverse_variance
        b_scale = cache.scale if p_scale is None else tl.load(p_scale + cache.i_kv_head * case.M + r)
        b_column = b_norm
        if rows.o_shift is not None:
            m_own = (rows.o_shift == 2 * r) | (rows.o_shift == 2 * r + 1)
            b_column += tl.sum(tl.where(m_own[None, :], b_product, 0.0), 1)
        b_column = tl.sum(tl.where(o_r == r, rows.b_constant, 0.0), 0) - b_scale * b_column
        if key_prior.p_prior is not None:
            p_own = key_prior.p_prior + cache.i_kv_head * key_prior.stride_head + r * key_prior.stride_component
            b_prior = tl.load(p_own + o_j.to(tl.int64) * key_prior.stride_token, mask=m_valid, other=0.0)
            b_column += b_prior * LOG2_E
        b_row = tl.sum(tl.where(o_r[:, None] == r, rows.b_row, 0.0), 0)
        b_logit = b_product * b_scale + (b_row[None, :] + b_column[:, None])
        b_logit = tl.where(m_seen, b_logit, float("-inf"))  # [BLOCK_J, ROWS]
        if case.HARD:
            b_best = tl.maximum(b_best, b_logit)
            b_logit = b_best
        if not case.HARD or r == case.M - 1:
            b_new = tl.maximum(b_maximum, tl.max(b_logit, 0))
            b_weight = b_weight * tl.math.exp2(b_maximum - stand_in(b_new))[None, :]
            b_weight += tl.math.exp2(b_logit - stand_in(b_new)[None, :])
            b_maximum = b_new
    b_decay = tl.math.exp2(b_before - stand_in(b_maximum))
    b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
    if MASKED:
        p_tile = cache.p_value + o_j.to(tl.int64)[:, None] * cache.stride_value_token + o_v[None, :]
        b_value = tl.load(p_tile, mask=m_valid[:, None] & (o_v < cache.value_width)[None, :], other=0.0)
    else:
        b_value = cache.d_value.load([cache.i_batch, cache.i_kv_head, o_first, 0]).reshape(BLOCK_J, case.DV)
    b_weight = b_weight.to(b_value.dtype)
    b_out *= b_decay[None, :]
    if MASKED:
        # The other way round it is no work for a warp group, see `decode_split`.
        b_out += product(b_weight.T, b_value).T
    else:
        b_out = product(b_value.T, b_weight, b_out)
    return b_out, b_sum, b_maximum


@triton.jit(do_not_specialize=["num_splits", "num_rows", "value_width"])
def decode_merge(
    p_partial, p_maximum, p_sum, p_out, num_splits, num_rows, value_width, SPLITS: tl.constexpr, DV: tl.constexpr
):
    """One program for one row: the splits are weighed by their maxima and sums. A row that sees nothing is 0."""
    i_row = tl.program_id(0) % num_rows
    i_kv = (tl.program_id(0) // num_rows).to(tl.int64)
    o_v = tl.arange(0, DV)
    o_split = tl.arange(0, SPLITS)
    m_split = o_split < num_splits
    o_own = (i_kv * num_splits + o_split) * num_rows + i_row
    b_maximum = tl.load(p_maximum + o_own, mask=m_split, other=float("-inf"))
    b_largest = tl.max(b_maximum, 0)
    b_scale = tl.math.exp2(b_maximum - stand_in(b_largest))
    b_total = tl.sum(b_scale * tl.load(p_sum + o_own, mask=m_split, other=0.0), 0)
    b_partial = tl.load(p_partial + o_own[:, None] * DV + o_v[None, :], mask=m_split[:, None], other=0.0)
    b_out = tl.sum(b_partial * b_scale[:, None], 0) / tl.where(b_total == 0.0, 1.0, b_total)
    p_out += (i_kv * num_rows + i_row) * value_width + o_v
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=o_v < value_width)
