"""Small kernels that run before the large ones: terms of the logits in units of log 2, and random numbers for dropout.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

    gaussian:  column[j,r] = log_prior[r] - scale[r] (|k_jr|^2 / 2 + (k_j - origin) . shift_r + |shift_r|^2 / 2)
               row[i,r]    = scale[r] (q_i - origin) . shift_r              minus scale[r] |q_i|^2 / 2 if variances differ
    dot:       column[j,r] = log_prior[r]          row[i,r] = scale[r] q_i . shift_r
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.tiles import load_tile


@triton.jit
def find_origin(
    p_query, p_key, p_origin, p_first_query, p_first_key, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_token, num_kv_heads, group_size, width, HAS_FIRST: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """What the first valid query and key have in common, fp32 ``[B, Hkv, width]``: see MixtureProblem.origin."""
    i_kv = tl.program_id(0).to(tl.int64)
    i_batch = i_kv // num_kv_heads
    i_head = i_kv % num_kv_heads
    o_d = tl.arange(0, D)
    first_query = tl.load(p_first_query + 2 * i_batch).to(tl.int64) if HAS_FIRST else 0
    first_key = tl.load(p_first_key + 2 * i_batch).to(tl.int64) if HAS_FIRST else 0
    p_query += i_batch * stride_query_batch + i_head * group_size * stride_query_head
    p_key += i_batch * stride_key_batch + i_head * stride_key_head
    b_query = tl.load(p_query + first_query * stride_query_token + o_d, mask=o_d < width, other=0.0).to(tl.float32)
    b_key = tl.load(p_key + first_key * stride_key_token + o_d, mask=o_d < width, other=0.0).to(tl.float32)
    b_smaller = tl.where(tl.abs(b_query) < tl.abs(b_key), b_query, b_key)
    # NaN and infinity have nothing in common with anything.
    b_agree = (b_query * b_key > 0.0) & (tl.abs(b_query) < float("inf")) & (tl.abs(b_key) < float("inf"))
    tl.store(p_origin + i_kv * D + o_d, tl.where(b_agree, b_smaller, 0.0))


@triton.jit
def logit_terms(
    d_query, d_key, p_shift, p_prior, p_scale, p_origin, p_key_mask, p_row, p_alpha, p_column, p_rho,
    stride_prior_head, stride_prior_component, stride_prior_token, scale, limit, num_heads, group_size, num_keys,
    padded_queries, padded_keys, num_row_programs, width,
    M: tl.constexpr, SHARED: tl.constexpr, FACTORED: tl.constexpr, GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_PRIOR: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The first programs make rows, the others columns: one launch, since both wait for memory."""
    i_program = tl.program_id(0)
    if i_program < num_row_programs:
        if HAS_ROW:
            _row_terms(
                d_query, p_shift, p_scale, p_origin, p_row, p_alpha, i_program, scale, limit, num_heads, group_size,
                padded_queries, padded_queries // BLOCK, width,
                M, FACTORED, HAS_SHIFT, HAS_NORM, HAS_ORIGIN, EQUAL, BLOCK, D,
            )  # fmt: skip
    elif HAS_COLUMN:
        _column_terms(
            d_key, p_shift, p_prior, p_scale, p_origin, p_key_mask, p_column, p_rho, i_program - num_row_programs,
            stride_prior_head, stride_prior_component, stride_prior_token, scale, limit, num_heads // group_size,
            num_keys, padded_keys, padded_keys // BLOCK, width,
            M, SHARED, FACTORED, GAUSSIAN, HAS_SHIFT, HAS_PRIOR, HAS_ORIGIN, HAS_KEY_MASK, EQUAL, BLOCK, D,
        )  # fmt: skip


@triton.jit
def _column_terms(
    d_key, p_shift, p_prior, p_scale, p_origin, p_key_mask, p_column, p_rho, i_program, stride_prior_head,
    stride_prior_component, stride_prior_token, scale, limit, num_kv_heads, num_keys, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED: tl.constexpr, FACTORED: tl.constexpr, GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_PRIOR: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_KEY_MASK: tl.constexpr, EQUAL: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``column [B, Hkv, M, padded]``, -inf at masked keys and beyond the end, and ``rho`` of a factored pair."""
    i_block = i_program % num_blocks
    i_kv = i_program // num_blocks
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    o_first = i_block * BLOCK_J
    o_j = o_first + tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, D)
    b_valid = o_j < num_keys
    if HAS_KEY_MASK:
        b_valid = b_valid & (tl.load(p_key_mask + i_batch.to(tl.int64) * num_keys + o_j, mask=b_valid, other=0) != 0)
    b_key = tl.zeros([BLOCK_J, D], tl.float32)
    b_norm = tl.zeros([BLOCK_J], tl.float32)
    b_first = tl.zeros([BLOCK_J], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if EQUAL else tl.load(p_scale + i_kv_head * M + r)
        b_column = tl.zeros([BLOCK_J], tl.float32)
        if GAUSSIAN:
            if r == 0 or not SHARED:
                i_key_head = i_kv_head if SHARED else i_kv_head * M + r
                b_key = load_tile(d_key, i_batch, i_key_head, o_first, BLOCK_J, D).to(tl.float32)
                b_norm = 0.5 * tl.sum(b_key * b_key, 1)
            b_column = b_norm
            if HAS_SHIFT:
                b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
                b_distance = 0.5 * b_shift
                if HAS_ORIGIN:
                    b_distance -= tl.load(p_origin + i_kv.to(tl.int64) * D + o_d)
                b_column += tl.sum(b_key * b_shift[None, :], 1) + tl.sum(b_distance * b_shift, 0)
            b_column = -b_scale * b_column
        if HAS_PRIOR:
            p_own = p_prior + i_kv_head * stride_prior_head + r * stride_prior_component
            b_prior = tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=o_j < num_keys, other=0.0)
            # Scaled terms are in units of log 2 already.
            b_column += b_prior * 1.4426950408889634
        b_column = tl.where(b_valid, b_column, float("-inf"))
        tl.store(p_column + (i_kv.to(tl.int64) * M + r) * padded_keys + o_j, b_column, mask=o_j < padded_keys)
        if FACTORED:
            if r == 0:
                b_first = b_column
            else:
                b_ratio = _safe_ratio(b_column - b_first, limit)
                b_ratio = tl.where(b_column == float("-inf"), 0.0, b_ratio)
                tl.store(p_rho + i_kv.to(tl.int64) * padded_keys + o_j, b_ratio, mask=o_j < padded_keys)


@triton.jit
def _row_terms(
    d_query, p_shift, p_scale, p_origin, p_row, p_alpha, i_program, scale, limit, num_heads, group_size,
    padded_queries, num_blocks, width,
    M: tl.constexpr, FACTORED: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ORIGIN: tl.constexpr, EQUAL: tl.constexpr, BLOCK_I: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``row [B, H, M, padded]`` and ``alpha`` of a factored pair."""
    i_block = i_program % num_blocks
    i_head = i_program // num_blocks
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    o_d = tl.arange(0, D)
    b_query = load_tile(d_query, i_batch, i_query_head, o_first, BLOCK_I, D).to(tl.float32)
    b_norm = tl.zeros([BLOCK_I], tl.float32)
    if HAS_NORM:
        b_norm = 0.5 * tl.sum(b_query * b_query, 1)
    b_first = tl.zeros([BLOCK_I], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if EQUAL else tl.load(p_scale + i_kv_head * M + r)
        b_row = -b_norm
        if HAS_SHIFT:
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_row += tl.sum(b_query * b_shift[None, :], 1)
            if HAS_ORIGIN:
                b_row -= tl.sum(tl.load(p_origin + i_kv.to(tl.int64) * D + o_d) * b_shift, 0)
        b_row *= b_scale
        tl.store(p_row + (i_head.to(tl.int64) * M + r) * padded_queries + o_i, b_row, mask=o_i < padded_queries)
        if FACTORED:
            if r == 0:
                b_first = b_row
            else:
                b_ratio = _safe_ratio(b_row - b_first, limit)
                tl.store(p_alpha + i_head.to(tl.int64) * padded_queries + o_i, b_ratio, mask=o_i < padded_queries)


@triton.jit
def _safe_ratio(b_gap, limit):
    """``2^gap``, or NaN where it leaves ``2^-limit ... 2^limit``: the kernels do not trust such a row."""
    return tl.where(tl.abs(b_gap) <= limit, tl.math.exp2(b_gap), float("nan"))


@triton.jit
def random_keys(p_seed, p_keys, count, stream, BLOCK: tl.constexpr):
    """Odd random numbers ``int32 [count]``, a pure function of seed, stream and position."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_key = tl.randint(tl.load(p_seed) + stream, o).to(tl.int32, bitcast=True)
    tl.store(p_keys + o, b_key | 1, mask=o < count)
