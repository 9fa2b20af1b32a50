"""Few queries, many keys: a step of generation.

One program for each block of queries would leave most of a GPU idle while it walks through the cache. So the keys of a
head are split between programs, each of which reads its share once and leaves an average, a maximum and a sum; a second
kernel merges them by their log-sum-exp. Query heads that share a key head are rows of one block.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + constant[r] + column[j,r]

in units of log 2. What belongs to a key alone is computed as the key passes by, so that nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.tiles import VARYING

DECODE_VARYING = [*VARYING, "keys_per_split", "num_splits", "stride_key_component", "stride_mask_key"]


@triton.jit(do_not_specialize=DECODE_VARYING)
def decode_split(
    p_query, p_key, p_value, p_shift, p_prior, p_scale, p_key_mask, p_partial, p_maximum, p_sum, stride_query_batch,
    stride_query_head, stride_query_token, stride_key_batch, stride_key_head, stride_key_component, stride_key_token,
    stride_value_batch, stride_value_head, stride_value_token, stride_prior_head, stride_prior_component,
    stride_prior_token, stride_mask_batch, stride_mask_key, scale, num_heads, group_size, num_queries, num_keys,
    keys_per_split, num_splits, width, value_width,
    M: tl.constexpr, SHARED: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr, EQUAL: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, HAS_KEY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one share of the keys of one key/value head: ``partial [.., rows, Dv]``, maximum and sum."""
    # Rows start at multiples of 16 bytes, as in `load_rows`.
    STEP: tl.constexpr = 128 // p_key.dtype.element_ty.primitive_bitwidth
    stride_key_batch = stride_key_batch // STEP * STEP
    stride_key_head = stride_key_head // STEP * STEP
    stride_key_component = stride_key_component // STEP * STEP
    stride_key_token = stride_key_token // STEP * STEP
    stride_value_batch = stride_value_batch // STEP * STEP
    stride_value_head = stride_value_head // STEP * STEP
    stride_value_token = stride_value_token // STEP * STEP
    i_split = tl.program_id(0) % num_splits
    i_kv = tl.program_id(0) // num_splits
    num_kv_heads = num_heads // group_size
    i_batch = (i_kv // num_kv_heads).to(tl.int64)
    i_kv_head = i_kv % num_kv_heads
    o_row = tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    o_r = tl.arange(0, 8)
    num_rows = group_size * num_queries
    m_row = o_row < num_rows
    i_query = o_row % num_queries
    i_head = (i_kv_head * group_size + o_row // num_queries).to(tl.int64)
    p_rows = p_query + i_batch * stride_query_batch + i_head * stride_query_head + i_query * stride_query_token
    b_query = tl.load(p_rows[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < width)[None, :], other=0.0)

    # Of each component what no key changes: a column for each.
    b_rows = tl.zeros([ROWS, 8], tl.float32)
    b_constant = tl.zeros([8], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if EQUAL else tl.load(p_scale + i_kv_head * M + r)
        b_row = tl.zeros([ROWS], tl.float32)
        b_one = 0.0
        if HAS_SHIFT:
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_row += tl.sum(b_query.to(tl.float32) * b_shift[None, :], 1)
            if GAUSSIAN:
                b_one -= 0.5 * tl.sum(b_shift * b_shift, 0)
        if GAUSSIAN and not EQUAL:
            b_row -= 0.5 * tl.sum(b_query.to(tl.float32) * b_query.to(tl.float32), 1)
        b_rows += tl.where(o_r[None, :] == r, (b_row * b_scale)[:, None], 0.0)
        b_constant += tl.where(o_r == r, b_one * b_scale, 0.0)

    p_key += i_batch * stride_key_batch + i_kv_head * stride_key_head
    p_value += i_batch * stride_value_batch + i_kv_head * stride_value_head
    first_key = i_split * keys_per_split
    end_key = tl.minimum(first_key + keys_per_split, num_keys)
    b_out = tl.zeros([ROWS, DV], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for o_first in tl.range(first_key, end_key, BLOCK_J):
        o_j = o_first + tl.arange(0, BLOCK_J)
        b_valid = o_j < end_key
        is_needed = True
        if HAS_KEY_MASK:
            p_mask = p_key_mask + i_batch * stride_mask_batch + o_j * stride_mask_key
            b_valid = b_valid & (tl.load(p_mask, mask=b_valid, other=0) != 0)
            # Slots of a cache that are not yet written, or padding: not read.
            is_needed = tl.max(b_valid.to(tl.int32), 0) > 0
        if is_needed:
            b_seen = b_valid[None, :] & m_row[:, None]
            if CAUSAL:
                b_seen = b_seen & (o_j[None, :] <= (i_query + num_keys - num_queries)[:, None])
            b_key = tl.zeros([BLOCK_J, D], p_key.dtype.element_ty)
            b_norm = tl.zeros([BLOCK_J], tl.float32)
            b_product = tl.zeros([ROWS, BLOCK_J], tl.float32)
            b_weight = tl.zeros([ROWS, BLOCK_J], tl.float32)
            b_best = tl.full([ROWS, BLOCK_J], float("-inf"), tl.float32)
            b_before = b_maximum
            for r in tl.static_range(M):
                if r == 0 or not SHARED:
                    p_tile = p_key + r * stride_key_component + o_j.to(tl.int64)[:, None] * stride_key_token
                    m_tile = b_valid[:, None] & (o_d < width)[None, :]
                    b_key = tl.load(p_tile + o_d[None, :], mask=m_tile, other=0.0)
                    b_product = tl.dot(b_query, b_key.T, input_precision=PRECISION)
                    if GAUSSIAN:
                        b_norm = 0.5 * tl.sum(b_key.to(tl.float32) * b_key.to(tl.float32), 1)
                b_scale = scale if EQUAL else tl.load(p_scale + i_kv_head * M + r)
                b_column = tl.sum(tl.where(o_r == r, b_constant, 0.0), 0) - b_scale * b_norm
                if GAUSSIAN and HAS_SHIFT:
                    b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
                    b_column -= b_scale * tl.sum(b_key.to(tl.float32) * b_shift[None, :], 1)
                if HAS_PRIOR:
                    p_own = p_prior + i_kv_head * stride_prior_head + r * stride_prior_component
                    b_prior = tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=b_valid, other=0.0)
                    b_column += b_prior * 1.4426950408889634
                b_row = tl.sum(tl.where(o_r[None, :] == r, b_rows, 0.0), 1)
                b_logit = b_product * b_scale + (b_row[:, None] + b_column[None, :])
                b_logit = tl.where(b_seen, b_logit, float("-inf"))
                if HARD:
                    b_best = tl.maximum(b_best, b_logit)
                    b_logit = b_best
                if not HARD or r == M - 1:
                    b_new = tl.maximum(b_maximum, tl.max(b_logit, 1))
                    # Nothing seen so far: any finite stand-in keeps exp(-inf - stand-in) = 0.
                    b_stand_in = tl.where(b_new == float("-inf"), 0.0, b_new)
                    b_weight = b_weight * tl.math.exp2(b_maximum - b_stand_in)[:, None]
                    b_weight += tl.math.exp2(b_logit - b_stand_in[:, None])
                    b_maximum = b_new
            b_stand_in = tl.where(b_maximum == float("-inf"), 0.0, b_maximum)
            b_decay = tl.math.exp2(b_before - b_stand_in)
            b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
            p_tile = p_value + o_j.to(tl.int64)[:, None] * stride_value_token + o_v[None, :]
            b_value = tl.load(p_tile, mask=b_valid[:, None] & (o_v < value_width)[None, :], other=0.0)
            b_out = tl.dot(b_weight.to(b_value.dtype), b_value, b_out * b_decay[:, None], input_precision=PRECISION)

    o_own = (i_kv.to(tl.int64) * num_splits + i_split) * num_rows + o_row
    tl.store(p_maximum + o_own, b_maximum, mask=m_row)
    tl.store(p_sum + o_own, b_sum, mask=m_row)
    tl.store(p_partial + o_own[:, None] * DV + o_v[None, :], b_out, mask=m_row[:, None])


@triton.jit(do_not_specialize=["num_splits", "num_rows", "value_width"])
def decode_merge(
    p_partial, p_maximum, p_sum, p_out, num_splits, num_rows, value_width, SPLITS: tl.constexpr, DV: tl.constexpr
):
    """One program for one row: the shares weighed by their maxima and sums. A row that sees nothing is 0."""
    i_row = tl.program_id(0) % num_rows
    i_kv = (tl.program_id(0) // num_rows).to(tl.int64)
    o_v = tl.arange(0, DV)
    o_split = tl.arange(0, SPLITS)
    m_split = o_split < num_splits
    o_own = (i_kv * num_splits + o_split) * num_rows + i_row
    b_maximum = tl.load(p_maximum + o_own, mask=m_split, other=float("-inf"))
    b_largest = tl.max(b_maximum, 0)
    b_scale = tl.math.exp2(b_maximum - tl.where(b_largest == float("-inf"), 0.0, b_largest))
    b_total = tl.sum(b_scale * tl.load(p_sum + o_own, mask=m_split, other=0.0), 0)
    b_partial = tl.load(p_partial + o_own[:, None] * DV + o_v[None, :], mask=m_split[:, None], other=0.0)
    b_out = tl.sum(b_partial * b_scale[:, None], 0) / tl.where(b_total == 0.0, 1.0, b_total)
    p_out += (i_kv * num_rows + i_row) * value_width + o_v
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=o_v < value_width)
