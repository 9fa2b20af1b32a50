"""Few queries, many keys: a step of generation.

One program for each block of queries would leave most of a GPU idle while it walks through the cache. So the keys of a
head are split between programs, each of which reads its share once and leaves an average, a maximum and a sum; a second
kernel merges them by their log-sum-exp. Query heads that share a key head are rows of one block.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + constant[r] + column[j,r]

in units of log 2. What belongs to a key alone is computed as the key passes by, so that nothing is read twice.

A step waits for memory, so everything is arranged for that: keys and values go by descriptor into shared memory, where
the matrix units read them, as the larger operand of their products (pairs are transposed, ``[keys, rows]``). Rows that
no query needs hold the shifts, as sums of two halves each, whose products with the keys so cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.tiles import VARYING

DECODE_VARYING = [*VARYING, "keys_per_split", "num_splits", "stride_key_component", "stride_mask_key"]

MASKS_TOGETHER = tl.constexpr(1024)
"""Entries of a mask that are looked at together."""


@triton.jit(do_not_specialize=DECODE_VARYING)
def decode_split(
    d_key, d_value, p_query, p_key, p_value, p_shift, p_prior, p_scale, p_key_mask, p_partial, p_maximum, p_sum,
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head, stride_key_component,
    stride_key_token, stride_value_batch, stride_value_head, stride_value_token, stride_prior_head,
    stride_prior_component, stride_prior_token, stride_mask_batch, stride_mask_key, scale, num_heads, group_size,
    num_queries, num_keys, keys_per_split, num_splits, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr, ONE_VARIANCE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, PRIOR_BY_SAMPLE: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, CAUSAL: tl.constexpr, INPUT_PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
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
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    if PRIOR_BY_SAMPLE:
        p_prior += i_batch.to(tl.int64) * num_kv_heads * stride_prior_head
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

    # Of each component what no key changes: a column for each.
    b_rows = tl.zeros([8, ROWS], tl.float32)
    b_constant = tl.zeros([8], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_kv_head * M + r)
        b_row = tl.zeros([ROWS], tl.float32)
        b_one = 0.0
        if HAS_SHIFT:
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_row += tl.sum(b_query.to(tl.float32) * b_shift[None, :], 1)
            if GAUSSIAN:
                b_one -= 0.5 * tl.sum(b_shift * b_shift, 0)
        if GAUSSIAN and not ONE_VARIANCE:
            b_row -= 0.5 * tl.sum(b_query.to(tl.float32) * b_query.to(tl.float32), 1)
        b_rows += tl.where(o_r[:, None] == r, (b_row * b_scale)[None, :], 0.0)
        b_one *= b_scale
        if HAS_PRIOR and not PRIOR_BY_KEY:
            b_prior = tl.load(p_prior + i_kv_head * stride_prior_head + r * stride_prior_component)
            b_one += b_prior * 1.4426950408889634
        b_constant += tl.where(o_r == r, b_one, 0.0)
    # Two rows for the shift of each component: the number that the tokens' format holds, and what is missing from it.
    o_half = o_row - num_rows
    if GAUSSIAN and HAS_SHIFT:
        m_half = (o_half >= 0) & (o_half < 2 * M)
        p_own = p_shift + (i_kv_head * M + o_half // 2)[:, None] * width + o_d[None, :]
        b_shift = tl.load(p_own, mask=m_half[:, None] & (o_d < width)[None, :], other=0.0)
        b_high = b_shift.to(b_query.dtype)
        b_low = (b_shift - b_high.to(tl.float32)).to(b_query.dtype)
        b_query += tl.where(o_half[:, None] % 2 == 0, b_high, b_low)

    first_key = i_split * keys_per_split
    end_key = tl.minimum(first_key + keys_per_split, num_keys)
    first_full = first_key
    end_full = end_key
    if HAS_KEY_MASK:
        first_key, first_full, end_full, end_key = _seen_range(
            p_key_mask + i_batch.to(tl.int64) * stride_mask_batch, first_key, end_key, stride_mask_key, BLOCK_J
        )
    p_key += i_batch.to(tl.int64) * stride_key_batch + i_kv_head.to(tl.int64) * stride_key_head
    p_value += i_batch.to(tl.int64) * stride_value_batch + i_kv_head.to(tl.int64) * stride_value_head
    b_out = tl.zeros([DV, ROWS], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for o_first in tl.range(first_full, end_full, BLOCK_J):
        b_out, b_sum, b_maximum = _attend_to_cache(
            b_out, b_sum, b_maximum, b_query, b_rows, b_constant, d_key, d_value, p_key, p_value, p_shift, p_prior,
            p_scale, p_key_mask, i_batch, i_kv_head, i_query, m_row, o_half, o_first, end_full, stride_key_component,
            stride_key_token, stride_value_token, stride_prior_head, stride_prior_component, stride_prior_token,
            stride_mask_batch, stride_mask_key, scale, num_queries, num_keys, width, value_width,
            M, SHARED_KEY, HARD, GAUSSIAN, ONE_VARIANCE, HAS_SHIFT, PRIOR_BY_KEY, False, CAUSAL, INPUT_PRECISION, BLOCK_J, D, DV,
        )  # fmt: skip
    if HAS_KEY_MASK:
        # Blocks of which some keys are masked: those before the others and those after them, or all if there are gaps.
        # So small that they are no work for a warp group: of products of one, whose operands come through registers,
        # Triton 3.6 made reads outside of shared memory here.
        PART: tl.constexpr = min(BLOCK_J, 32)
        before = (first_full - first_key) // PART
        after = (end_key - end_full + PART - 1) // PART
        for i in range(before + after):
            o_first = tl.where(i < before, first_key + i * PART, end_full + (i - before) * PART)
            b_out, b_sum, b_maximum = _attend_to_cache(
                b_out, b_sum, b_maximum, b_query, b_rows, b_constant, d_key, d_value, p_key, p_value, p_shift, p_prior,
                p_scale, p_key_mask, i_batch, i_kv_head, i_query, m_row, o_half, o_first, end_key,
                stride_key_component, stride_key_token, stride_value_token, stride_prior_head, stride_prior_component,
                stride_prior_token, stride_mask_batch, stride_mask_key, scale, num_queries, num_keys, width,
                value_width,
                M, SHARED_KEY, HARD, GAUSSIAN, ONE_VARIANCE, HAS_SHIFT, PRIOR_BY_KEY, True, CAUSAL, INPUT_PRECISION, PART, D, DV,
            )  # fmt: skip

    o_own = (i_kv.to(tl.int64) * num_splits + i_split) * num_rows + o_row
    tl.store(p_maximum + o_own, b_maximum, mask=m_row)
    tl.store(p_sum + o_own, b_sum, mask=m_row)
    tl.store(p_partial + o_own[None, :] * DV + o_v[:, None], b_out, mask=m_row[None, :])


@triton.jit
def _seen_range(p_key_mask, first_key, end_key, stride_mask_key, BLOCK_J: tl.constexpr):
    """``first, first_full, end_full, end``: keys ``first ... end`` hold all that is seen of a share; of blocks
    ``first_full ... end_full`` every key is. The cache of a padded prompt is seen in one piece."""
    first = end_key
    end = first_key
    count = 0
    for o_first in range(first_key, end_key, MASKS_TOGETHER):
        o_j = o_first + tl.arange(0, MASKS_TOGETHER)
        b_seen = tl.load(p_key_mask + o_j.to(tl.int64) * stride_mask_key, mask=o_j < end_key, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(b_seen, o_j, end_key), 0))
        end = tl.maximum(end, tl.max(tl.where(b_seen, o_j + 1, first_key), 0))
        count += tl.sum(b_seen.to(tl.int32), 0)
    is_whole = count == end - first
    first_full = (first + BLOCK_J - 1) // BLOCK_J * BLOCK_J
    end_full = end // BLOCK_J * BLOCK_J
    first = first // BLOCK_J * BLOCK_J
    if (is_whole == 0) | (first_full >= end_full):
        first_full = first
        end_full = first
    return first, first_full, end_full, end


@triton.jit
def _attend_to_cache(
    b_out, b_sum, b_maximum, b_query, b_rows, b_constant, d_key, d_value, p_key, p_value, p_shift, p_prior, p_scale,
    p_key_mask, i_batch, i_kv_head, i_query, m_row, o_half, o_first, end_key, stride_key_component, stride_key_token,
    stride_value_token, stride_prior_head, stride_prior_component, stride_prior_token, stride_mask_batch,
    stride_mask_key, scale, num_queries, num_keys, width, value_width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr, ONE_VARIANCE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, PRIOR_BY_KEY: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add one block of keys under a running maximum. ``MASKED``: what stands at masked keys is not read."""
    o_j = o_first + tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    o_r = tl.arange(0, 8)
    b_valid = o_j < end_key
    if MASKED:
        p_mask = p_key_mask + i_batch.to(tl.int64) * stride_mask_batch + o_j.to(tl.int64) * stride_mask_key
        b_valid = b_valid & (tl.load(p_mask, mask=b_valid, other=0) != 0)
    b_seen = b_valid[:, None] & m_row[None, :]
    if CAUSAL:
        b_seen = b_seen & (o_j[:, None] <= (i_query + num_keys - num_queries)[None, :])
    b_norm = tl.zeros([BLOCK_J], tl.float32)
    b_product = tl.zeros([BLOCK_J, b_query.shape[0]], tl.float32)
    b_weight = tl.zeros([BLOCK_J, b_query.shape[0]], tl.float32)
    b_best = tl.full([BLOCK_J, b_query.shape[0]], float("-inf"), tl.float32)
    b_before = b_maximum
    for r in tl.static_range(M):
        if r == 0 or not SHARED_KEY:
            if MASKED:
                p_tile = p_key + r * stride_key_component + o_j.to(tl.int64)[:, None] * stride_key_token
                m_tile = b_valid[:, None] & (o_d < width)[None, :]
                b_key = tl.load(p_tile + o_d[None, :], mask=m_tile, other=0.0)
            else:
                b_key = d_key.load([i_batch, i_kv_head, r, o_first, 0]).reshape(BLOCK_J, D)
            b_product = tl.dot(b_key, b_query.T, input_precision=INPUT_PRECISION)
            if GAUSSIAN:
                b_norm = 0.5 * tl.sum(b_key.to(tl.float32) * b_key.to(tl.float32), 1)
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_kv_head * M + r)
        b_column = b_norm
        if GAUSSIAN and HAS_SHIFT:
            m_own = (o_half == 2 * r) | (o_half == 2 * r + 1)
            b_column += tl.sum(tl.where(m_own[None, :], b_product, 0.0), 1)
        b_column = tl.sum(tl.where(o_r == r, b_constant, 0.0), 0) - b_scale * b_column
        if PRIOR_BY_KEY:
            p_own = p_prior + i_kv_head * stride_prior_head + r * stride_prior_component
            b_prior = tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=b_valid, other=0.0)
            b_column += b_prior * 1.4426950408889634
        b_row = tl.sum(tl.where(o_r[:, None] == r, b_rows, 0.0), 0)
        b_logit = b_product * b_scale + (b_row[None, :] + b_column[:, None])
        b_logit = tl.where(b_seen, b_logit, float("-inf"))
        if HARD:
            b_best = tl.maximum(b_best, b_logit)
            b_logit = b_best
        if not HARD or r == M - 1:
            b_new = tl.maximum(b_maximum, tl.max(b_logit, 0))
            # Nothing seen so far: any finite stand-in keeps exp(-inf - stand-in) = 0.
            b_stand_in = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = b_weight * tl.math.exp2(b_maximum - b_stand_in)[None, :]
            b_weight += tl.math.exp2(b_logit - b_stand_in[None, :])
            b_maximum = b_new
    b_stand_in = tl.where(b_maximum == float("-inf"), 0.0, b_maximum)
    b_decay = tl.math.exp2(b_before - b_stand_in)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
    if MASKED:
        p_tile = p_value + o_j.to(tl.int64)[:, None] * stride_value_token + o_v[None, :]
        b_value = tl.load(p_tile, mask=b_valid[:, None] & (o_v < value_width)[None, :], other=0.0)
    else:
        b_value = d_value.load([i_batch, i_kv_head, o_first, 0]).reshape(BLOCK_J, DV)
    b_weight = b_weight.to(b_value.dtype)
    b_out *= b_decay[None, :]
    if MASKED:
        # The other way round it is no work for a warp group, see `decode_split`.
        b_out += tl.dot(b_weight.T, b_value, input_precision=INPUT_PRECISION).T
    else:
        b_out = tl.dot(b_value.T, b_weight, b_out, input_precision=INPUT_PRECISION)
    return b_out, b_sum, b_maximum


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
