"""Small kernels that run before the large ones: terms of the logits in units of log 2, ranges of valid tokens, and
random numbers for dropout.

logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

gaussian:  column[j,r] = log_prior[r] - scale[r] (|k_jr|^2 / 2 + (k_j - origin) . shift_r + |shift_r|^2 / 2)
           row[i,r]    = scale[r] (q_i - origin) . shift_r          minus scale[r] |q_i|^2 / 2 if variances differ
dot:       column[j,r] = log_prior[r]          row[i,r] = scale[r] q_i . shift_r
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.tiles import HEAD_NUMBERS, VARYING, finite, load_rows, mark_unfactored, place, safe_ratio


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=HEAD_NUMBERS)
def logit_terms(
    p_query, p_key, p_shift, p_prior, p_scale, p_origin, p_key_mask, p_query_range, p_key_range, p_row, p_row_second,
    p_column, p_column_second, p_unscaled, p_unfactored, p_level, stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_token, stride_prior_head, stride_prior_component,
    stride_prior_token, scale, limit, largest_level,
    num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_row_programs, blocks_together,
    width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, PRIOR_BY_SAMPLE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ORIGIN: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_RANGE: tl.constexpr, HAS_LEVEL: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, FROM_BIAS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    ONE_VARIANCE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The first programs make rows, the others columns: one launch, since both wait for memory. Each makes some blocks
    of them, since what is found from first tokens takes as long as a block.

    ``origin [B, Hkv, D]`` is what the first valid query and key have in common, as in MixtureProblem.origin, and
    ``level [B, Hkv]`` about what the first query and key have as a logit: columns are given without it.
    ``DEPENDENT_LAUNCH``: the next kernel may begin, since it waits for this one itself.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    i_program = tl.program_id(0)
    num_kv_heads = num_heads // group_size
    is_row = i_program < num_row_programs
    if not is_row:
        i_program -= num_row_programs
    num_blocks = (padded_queries if is_row else padded_keys) // BLOCK
    num_programs = (num_blocks + blocks_together - 1) // blocks_together
    i_first = i_program % num_programs * blocks_together
    i_head = i_program // num_programs % (num_heads if is_row else num_kv_heads)
    i_batch = i_program // num_programs // (num_heads if is_row else num_kv_heads)
    i_kv_head = i_head // group_size if is_row else i_head
    i_kv = i_batch * num_kv_heads + i_kv_head
    if PRIOR_BY_SAMPLE:
        p_prior += i_batch.to(tl.int64) * num_kv_heads * stride_prior_head
    b_origin = tl.zeros([D], tl.float32)
    b_level = 0.0
    if HAS_ORIGIN or HAS_LEVEL:
        first_query = tl.load(p_query_range + 2 * i_batch) if HAS_RANGE else 0
        first_key = tl.load(p_key_range + 2 * i_batch) if HAS_RANGE else 0
        b_first_query = load_rows(
            p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_kv_head * group_size,
            first_query, num_queries, width, 1, D,
        ).reshape(D).to(tl.float32)  # fmt: skip
        b_first_key = load_rows(
            p_key, stride_key_batch, stride_key_head, stride_key_token, i_batch,
            i_kv_head if SHARED_KEY else i_kv_head * M, first_key, num_keys, width, 1, D,
        ).reshape(D).to(tl.float32)  # fmt: skip
        if HAS_LEVEL:
            b_level = scale * tl.sum((b_first_query - 0.5 * b_first_key) * b_first_key, 0)
            if PRIOR_BY_SAMPLE:
                # Such a prior may take the norm of each key back, and is then as large.
                p_first = p_prior + i_kv_head * stride_prior_head + first_key * stride_prior_token
                b_level += tl.load(p_first) * 1.4426950408889634
            # No logit exceeds half the squared norm of its query: a first key far from everything says little.
            b_level = tl.maximum(b_level, 0.5 * scale * tl.sum(b_first_query * b_first_query, 0) - 40.0)
            # Columns are rounded once they hold it: a level so high that this would show is not taken.
            b_level = tl.where(tl.abs(b_level) <= largest_level, b_level, 0.0)
            if is_row == 0 and i_first == 0:
                tl.store(p_level + i_kv, b_level)
        if HAS_ORIGIN:
            b_smaller = tl.where(tl.abs(b_first_query) < tl.abs(b_first_key), b_first_query, b_first_key)
            # NaN and infinity have nothing in common with anything.
            b_agree = b_first_query * b_first_key > 0.0
            b_agree = b_agree & (tl.abs(b_first_query) < float("inf")) & (tl.abs(b_first_key) < float("inf"))
            b_origin = tl.where(b_agree, b_smaller, 0.0)
            if is_row == 0 and i_first == 0:
                tl.store(p_origin + i_kv.to(tl.int64) * D + tl.arange(0, D), b_origin)
    for i_block in range(i_first, tl.minimum(i_first + blocks_together, num_blocks)):
        o_first = i_block * BLOCK
        if is_row:
            if HAS_ROW:
                b_query = load_rows(
                    p_query, stride_query_batch, stride_query_head, stride_query_token, i_batch, i_head, o_first,
                    num_queries, width, BLOCK, D,
                )  # fmt: skip
                _row_terms(
                    b_query.to(tl.float32), b_origin, p_shift, p_scale, p_row, p_row_second, p_unfactored,
                    i_batch * num_heads + i_head,
                    i_kv_head, i_kv, o_first, scale, limit, padded_queries, width,
                    M, TWO_SHIFTS and not HARD, HAS_SHIFT, HAS_NORM, HAS_ORIGIN, ONE_VARIANCE, BLOCK, D,
                )  # fmt: skip
        elif HAS_COLUMN:
            _column_terms(
                p_key, b_origin, b_level, p_shift, p_prior, p_scale, p_key_mask, p_column, p_column_second, p_unscaled, p_unfactored,
                i_batch, i_kv_head, i_kv, o_first, stride_key_batch, stride_key_head, stride_key_token,
                stride_prior_head, stride_prior_component, stride_prior_token, scale, limit, num_keys, padded_keys,
                width,
                M, SHARED_KEY, TWO_SHIFTS, HARD, GAUSSIAN, HAS_SHIFT, HAS_PRIOR, HAS_KEY_MASK, FROM_BIAS, ONE_VARIANCE, BLOCK, D,
            )  # fmt: skip


@triton.jit
def _column_terms(
    p_key, b_origin, b_level, p_shift, p_prior, p_scale, p_key_mask, p_column, p_column_second, p_unscaled, p_unfactored, i_batch,
    i_kv_head, i_kv, o_first,
    stride_batch, stride_head, stride_token, stride_prior_head, stride_prior_component, stride_prior_token, scale,
    limit, num_keys, padded_keys, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_PRIOR: tl.constexpr, HAS_KEY_MASK: tl.constexpr, FROM_BIAS: tl.constexpr,
    ONE_VARIANCE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``column [B, Hkv, M, padded]``, -inf at masked keys and beyond the end, and ``rho`` of a pair: by what factor the
    second component weighs more, or how far the first lies above it if the choice is hard. ``FROM_BIAS``: and
    ``unscaled``, columns to which products may be added before they are scaled."""
    o_j = o_first + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    b_valid = o_j < num_keys
    if HAS_KEY_MASK:
        b_valid = b_valid & (tl.load(p_key_mask + i_batch.to(tl.int64) * num_keys + o_j, mask=b_valid, other=0) != 0)
    b_key = tl.zeros([BLOCK, D], tl.float32)
    b_norm = tl.zeros([BLOCK], tl.float32)
    b_first = tl.zeros([BLOCK], tl.float32)
    inverse = 1.0 / scale
    for r in tl.static_range(M):
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_kv_head * M + r)
        b_column = tl.zeros([BLOCK], tl.float32)
        if GAUSSIAN:
            if r == 0 or not SHARED_KEY:
                i_key_head = i_kv_head if SHARED_KEY else i_kv_head * M + r
                b_key = load_rows(
                    p_key, stride_batch, stride_head, stride_token, i_batch, i_key_head, o_first, num_keys, width,
                    BLOCK, D,
                ).to(tl.float32)  # fmt: skip
                b_norm = 0.5 * tl.sum(b_key * b_key, 1)
            b_column = b_norm
            if HAS_SHIFT:
                b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
                b_distance = 0.5 * b_shift - b_origin
                b_column += tl.sum(b_key * b_shift[None, :], 1) + tl.sum(b_distance * b_shift, 0)
            b_column = -b_scale * b_column
        if HAS_PRIOR:
            p_own = p_prior + i_kv_head * stride_prior_head + r * stride_prior_component
            b_prior = tl.load(p_own + o_j.to(tl.int64) * stride_prior_token, mask=o_j < num_keys, other=0.0)
            # Scaled terms are in units of log 2 already.
            b_column += b_prior * 1.4426950408889634
        b_column = tl.where(b_valid, b_column - b_level, float("-inf"))
        o_own = (i_kv.to(tl.int64) * M + r) * padded_keys + place(o_j)
        tl.store(p_column + o_own, b_column)
        if FROM_BIAS:
            # Many threads hold the same column: to divide each would take them long.
            tl.store(p_unscaled + o_own, b_column * inverse)
        if TWO_SHIFTS:
            if r == 0:
                b_first = b_column
            elif HARD:
                tl.store(p_column_second + i_kv.to(tl.int64) * padded_keys + place(o_j), finite(b_first) - finite(b_column))
            else:
                b_ratio = safe_ratio(b_column - b_first, limit)
                b_ratio = tl.where(b_column == float("-inf"), 0.0, b_ratio)
                tl.store(p_column_second + i_kv.to(tl.int64) * padded_keys + place(o_j), b_ratio)
                mark_unfactored(p_unfactored, i_kv, b_ratio)


@triton.jit
def _row_terms(
    b_query, b_origin, p_shift, p_scale, p_row, p_row_second, p_unfactored, i_head, i_kv_head, i_kv, o_first, scale, limit,
    padded_queries, width,
    M: tl.constexpr, FACTORED: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ORIGIN: tl.constexpr, ONE_VARIANCE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``row [B, H, M, padded]`` and ``alpha`` of a pair, which the forward kernel makes itself."""
    o_i = o_first + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    b_norm = tl.zeros([BLOCK], tl.float32)
    if HAS_NORM:
        b_norm = 0.5 * tl.sum(b_query * b_query, 1)
    b_first = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(M):
        b_scale = scale if ONE_VARIANCE else tl.load(p_scale + i_kv_head * M + r)
        b_row = -b_norm
        if HAS_SHIFT:
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_row += tl.sum(b_query * b_shift[None, :], 1)
            if HAS_ORIGIN:
                b_row -= tl.sum(b_origin * b_shift, 0)
        b_row *= b_scale
        tl.store(p_row + (i_head.to(tl.int64) * M + r) * padded_queries + place(o_i), b_row)
        if FACTORED:
            if r == 0:
                b_first = b_row
            else:
                b_ratio = safe_ratio(b_row - b_first, limit)
                tl.store(p_row_second + i_head.to(tl.int64) * padded_queries + place(o_i), b_ratio)
                mark_unfactored(p_unfactored, i_kv, b_ratio)


@triton.jit(do_not_specialize=["num_keys", "num_queries", "num_samples"])
def valid_ranges(
    p_key_mask, p_query_mask, p_ranges, num_keys, num_queries, num_samples,
    HAS_KEY_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for the keys of one sample and, after those, one for its queries: the first valid position and one
    past the last, ``int32 [2, B, 2]``; ``(0, 0)`` where nothing is valid."""
    i_sample = tl.program_id(0) % num_samples
    p_ranges += 2 * tl.program_id(0)
    if tl.program_id(0) < num_samples:
        _valid_range(p_key_mask, p_ranges, i_sample, num_keys, HAS_KEY_MASK, BLOCK)
    else:
        _valid_range(p_query_mask, p_ranges, i_sample, num_queries, HAS_QUERY_MASK, BLOCK)


@triton.jit
def _valid_range(p_mask, p_range, i_sample, length, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    if HAS_MASK:
        p_mask += i_sample.to(tl.int64) * length
        b_first = tl.full([BLOCK], 0, tl.int32) + length
        b_end = tl.zeros([BLOCK], tl.int32)
        for o_first in range(0, length, BLOCK):
            o_token = o_first + tl.arange(0, BLOCK)
            b_valid = tl.load(p_mask + o_token, mask=o_token < length, other=0) != 0
            b_first = tl.minimum(b_first, tl.where(b_valid, o_token, length))
            b_end = tl.maximum(b_end, tl.where(b_valid, o_token + 1, 0))
        end = tl.max(b_end, 0)
        tl.store(p_range, tl.minimum(tl.min(b_first, 0), end))
        tl.store(p_range + 1, end)
    else:
        tl.store(p_range, 0)
        tl.store(p_range + 1, length)


@triton.jit(do_not_specialize=["num_row_programs", "num_rows", "num_columns"])
def random_numbers(
    p_seed, p_row_random, p_column_random, num_row_programs, num_rows, num_columns, padded_queries, padded_keys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Random numbers for dropout, ``int32 [B, H, padded]`` for rows and ``[B, Hkv, padded / 2]`` for columns, of which
    two share one. A pure function of the seed.

    The product of a row's number and a column's is the pair's: the upper half for an odd column, the lower half for an
    even one.
    """
    i_program = tl.program_id(0)
    if i_program < num_row_programs:
        o = i_program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_row_random + o, _random_factor(p_seed, 0, o, padded_queries), mask=o < num_rows)
    else:
        o = (i_program - num_row_programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_column_random + o, _random_factor(p_seed, 1, o, padded_keys // 2), mask=o < num_columns)


@triton.jit
def _random_factor(p_seed, stream, o_number, numbers_per_head):
    """Odd random numbers. The lower half of a product knows the lower halves of its factors alone: of 2^14 numbers of
    a head these are all different, in an order that is drawn, so that no two rows or columns drop the same."""
    seed = tl.load(p_seed) + 2 * stream
    b_upper = tl.randint(seed, o_number).to(tl.int32, bitcast=True)
    o_token = (o_number % numbers_per_head).to(tl.int32)
    b_order = tl.randint(seed + 1, (o_number // numbers_per_head << 20) + (o_token >> 14)).to(tl.int32, bitcast=True)
    # Fourteen bits, mixed by steps each of which can be undone.
    b_lower = (o_token + b_order) & 0x3FFF
    for step in tl.static_range(3):
        b_lower = (b_lower * ((b_order >> (6 * step + 4)) | 1)) & 0x3FFF
        b_lower = b_lower ^ (b_lower >> 7)
        b_lower = (b_lower * 0x2C1B) & 0x3FFF
        b_lower = b_lower ^ (b_lower >> 5)
    return (b_upper & -32768) | (b_lower << 1) | 1
