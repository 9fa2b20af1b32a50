"""Small kernels that run before the large ones: terms of the logits in units of log 2, ranges of valid tokens, and
random numbers for dropout.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

    gaussian:  column[j,r] = log_prior[r] - scale[r] (|k_jr|^2 / 2 + (k_j - origin) . shift_r + |shift_r|^2 / 2)
               row[i,r]    = scale[r] (q_i - origin) . shift_r          less scale[r] |q_i|^2 / 2 if variances differ
    dot:       column[j,r] = log_prior[r]          row[i,r] = scale[r] q_i . shift_r
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.heads import Head
from mgk.ops.triton.kernels.terms import (
    Prior,
    Shifts,
    Terms,
    finite,
    load_shift,
    mark_unfactored,
    of_head,
    place,
    safe_ratio,
)
from mgk.ops.triton.kernels.tiles import HEAD_NUMBERS, LOG2_E, VARYING, Case, Tokens, load_tokens


class First(NamedTuple):
    """What is found from the first valid query and key of a head."""

    b_origin: tl.tensor
    """what the two have in common, as in MixtureProblem.origin, ``[D]``"""
    b_level: tl.tensor
    """about their logit; columns are given without it"""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=HEAD_NUMBERS)
def logit_terms(
    # what is read
    p_query, p_key, p_shift, p_prior, p_inverse_variance, p_origin, p_key_mask, p_query_range, p_key_range,
    # what is written; the origin is, too
    p_row, p_row_second, p_column, p_column_second, p_unscaled, p_unfactored, p_level,
    # strides
    stride_query_batch, stride_query_head, stride_query_token, stride_key_batch, stride_key_head, stride_key_token,
    stride_prior_head, stride_prior_component, stride_prior_token,
    # numbers
    scale, largest_ratio, largest_level, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys,
    num_row_programs, blocks_together, width,
    M: tl.constexpr, SHARED_KEY: tl.constexpr, TWO_SHIFTS: tl.constexpr, HARD: tl.constexpr, GAUSSIAN: tl.constexpr,
    PRIOR_BY_SAMPLE: tl.constexpr, HAS_ROW: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The first programs make rows, the others columns: one launch, since both wait for memory. Each makes some blocks
    of them, since what is found from first tokens takes as long as a block.

    ``origin [B, Hkv, D]`` and ``level [B, Hkv]`` are those of :class:`First`. ``HAS_ROW``: rows are made here, not by
    the forward kernel. ``DEPENDENT_LAUNCH``: the next kernel may begin (programmatic dependent launch), since it waits
    for this one itself.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    case: tl.constexpr = Case(M, SHARED_KEY, HARD, BLOCK, BLOCK, D, D, TWO_SHIFTS=TWO_SHIFTS, GAUSSIAN=GAUSSIAN)
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
    queries = Tokens(p_query, stride_query_batch, stride_query_head, stride_query_token, num_queries, width)
    keys = Tokens(p_key, stride_key_batch, stride_key_head, stride_key_token, num_keys, width)
    shifts = Shifts(p_shift, p_origin, width)
    prior = Prior(p_prior, stride_prior_head, stride_prior_component, stride_prior_token)
    # These are the terms of all heads.
    terms = Terms(p_row, p_column, p_inverse_variance, scale, padded_queries, padded_keys, p_column_second, p_unscaled)
    b_origin = tl.zeros([D], tl.float32)
    b_level = 0.0
    if p_origin is not None or p_level is not None:
        first_query = tl.load(p_query_range + 2 * i_batch) if p_query_range is not None else 0
        first_key = tl.load(p_key_range + 2 * i_batch) if p_key_range is not None else 0
        b_first_query = load_tokens(queries, i_batch, i_kv_head * group_size, first_query, 1, D)
        b_first_query = b_first_query.reshape(D).to(tl.float32)
        b_first_key = load_tokens(keys, i_batch, i_kv_head if SHARED_KEY else i_kv_head * M, first_key, 1, D)
        b_first_key = b_first_key.reshape(D).to(tl.float32)
        if p_level is not None:
            b_level = scale * tl.sum((b_first_query - 0.5 * b_first_key) * b_first_key, 0)
            if PRIOR_BY_SAMPLE:
                # Such a prior may take the norm of each key back, and is then as large.
                p_first = p_prior + i_kv_head * stride_prior_head + first_key * stride_prior_token
                b_level += tl.load(p_first) * LOG2_E
            # No logit exceeds half the squared norm of its query: a first key far from everything says little.
            b_level = tl.maximum(b_level, 0.5 * scale * tl.sum(b_first_query * b_first_query, 0) - 40.0)
            # Columns are rounded once they hold it: a level so high that this would show is not taken.
            b_level = tl.where(tl.abs(b_level) <= largest_level, b_level, 0.0)
            if is_row == 0 and i_first == 0:
                tl.store(p_level + i_kv, b_level)
        if p_origin is not None:
            b_smaller = tl.where(tl.abs(b_first_query) < tl.abs(b_first_key), b_first_query, b_first_key)
            # NaN and infinity have nothing in common with anything.
            m_agree = b_first_query * b_first_key > 0.0
            m_agree = m_agree & (tl.abs(b_first_query) < float("inf")) & (tl.abs(b_first_key) < float("inf"))
            b_origin = tl.where(m_agree, b_smaller, 0.0)
            if is_row == 0 and i_first == 0:
                tl.store(p_origin + i_kv.to(tl.int64) * D + tl.arange(0, D), b_origin)
    first = First(b_origin, b_level)
    for i_block in range(i_first, tl.minimum(i_first + blocks_together, num_blocks)):
        o_first = i_block * BLOCK
        if is_row:
            if HAS_ROW:
                b_query = load_tokens(queries, i_batch, i_head, o_first, BLOCK, D).to(tl.float32)
                _row_terms(
                    b_query, first, shifts, terms, p_row_second, p_unfactored,
                    Head(i_batch, i_head, i_kv_head, i_batch * num_heads + i_head, i_kv), o_first, largest_ratio, case,
                )  # fmt: skip
        elif p_column is not None:
            _column_terms(
                keys, first, shifts, prior, terms, p_key_mask, p_unfactored,
                Head(i_batch, i_head, i_kv_head, i_kv, i_kv), o_first, largest_ratio, case,
            )  # fmt: skip


@triton.jit
def _column_terms(
    keys, first, shifts, prior, terms, p_key_mask, p_unfactored, head, o_first, largest_ratio, case: tl.constexpr
):
    """Write ``column [B, Hkv, M, padded]``, -inf at masked keys and beyond the end; for two shifted keys also
    ``column_second [B, Hkv, padded]`` and, where products are added before they are scaled, ``unscaled``."""
    o_j = o_first + tl.arange(0, case.BLOCK_J)
    m_valid = o_j < keys.length
    if p_key_mask is not None:
        p_own_mask = p_key_mask + head.i_batch.to(tl.int64) * keys.length + o_j
        m_valid = m_valid & (tl.load(p_own_mask, mask=m_valid, other=0) != 0)
    b_key = tl.zeros([case.BLOCK_J, case.D], tl.float32)
    b_norm = tl.zeros([case.BLOCK_J], tl.float32)
    b_first = tl.zeros([case.BLOCK_J], tl.float32)
    inverse = 1.0 / terms.scale
    for r in tl.static_range(case.M):
        b_scale = _scale_of(terms, head.i_kv_head, r, case.M)
        b_column = tl.zeros([case.BLOCK_J], tl.float32)
        if case.GAUSSIAN:
            if r == 0 or not case.SHARED_KEY:
                i_key_head = head.i_kv_head if case.SHARED_KEY else head.i_kv_head * case.M + r
                b_key = load_tokens(keys, head.i_batch, i_key_head, o_first, case.BLOCK_J, case.D).to(tl.float32)
                b_norm = 0.5 * tl.sum(b_key * b_key, 1)
            b_column = b_norm
            if shifts.p_shift is not None:
                b_shift = load_shift(shifts, head.i_kv_head, r, case.M, case.D)
                b_distance = 0.5 * b_shift - first.b_origin
                b_column += tl.sum(b_key * b_shift[None, :], 1) + tl.sum(b_distance * b_shift, 0)
            b_column = -b_scale * b_column
        if prior.p_prior is not None:
            p_own = prior.p_prior + head.i_kv_head * prior.stride_head + r * prior.stride_component
            b_prior = tl.load(p_own + o_j.to(tl.int64) * prior.stride_token, mask=o_j < keys.length, other=0.0)
            # Scaled terms are in units of log 2 already.
            b_column += b_prior * LOG2_E
        b_column = tl.where(m_valid, b_column - first.b_level, float("-inf"))  # [BLOCK]
        o_own = (head.i_kv.to(tl.int64) * case.M + r) * terms.padded_keys + place(o_j)
        tl.store(terms.p_column + o_own, b_column)
        if terms.p_unscaled is not None:
            # Many threads hold the same column: to divide each would take them long.
            tl.store(terms.p_unscaled + o_own, b_column * inverse)
        if case.TWO_SHIFTS:
            if r == 0:
                b_first = b_column
            elif case.HARD:
                p_second = of_head(terms.p_column_second, head.i_kv, terms.padded_keys)
                tl.store(p_second + place(o_j), finite(b_first) - finite(b_column))
            else:
                b_ratio = safe_ratio(b_column - b_first, largest_ratio)
                b_ratio = tl.where(b_column == float("-inf"), 0.0, b_ratio)
                p_second = of_head(terms.p_column_second, head.i_kv, terms.padded_keys)
                tl.store(p_second + place(o_j), b_ratio)
                mark_unfactored(p_unfactored, head.i_kv, b_ratio)


@triton.jit
def _row_terms(
    b_query, first, shifts, terms, p_row_second, p_unfactored, head, o_first, largest_ratio, case: tl.constexpr
):
    """Write ``row [B, H, M, padded]`` and, for two shifted keys, the soft ``row_second [B, H, padded]``. (The forward
    kernel makes those of two shifted keys itself.)"""
    o_i = o_first + tl.arange(0, case.BLOCK_I)
    b_norm = tl.zeros([case.BLOCK_I], tl.float32)
    if case.GAUSSIAN and case.M > 1 and terms.p_inverse_variance is not None:
        b_norm = 0.5 * tl.sum(b_query * b_query, 1)
    b_first = tl.zeros([case.BLOCK_I], tl.float32)
    for r in tl.static_range(case.M):
        b_scale = _scale_of(terms, head.i_kv_head, r, case.M)
        b_row = -b_norm
        if shifts.p_shift is not None:
            b_shift = load_shift(shifts, head.i_kv_head, r, case.M, case.D)
            b_row += tl.sum(b_query * b_shift[None, :], 1)
            if shifts.p_origin is not None:
                b_row -= tl.sum(first.b_origin * b_shift, 0)
        b_row *= b_scale
        tl.store(terms.p_row + (head.i_head.to(tl.int64) * case.M + r) * terms.padded_queries + place(o_i), b_row)
        if case.TWO_SHIFTS and not case.HARD:
            if r == 0:
                b_first = b_row
            else:
                b_ratio = safe_ratio(b_row - b_first, largest_ratio)
                tl.store(of_head(p_row_second, head.i_head, terms.padded_queries) + place(o_i), b_ratio)
                mark_unfactored(p_unfactored, head.i_kv, b_ratio)


@triton.jit
def _scale_of(terms, i_kv_head, i_component, M: tl.constexpr):
    """What the terms of one component of one head are multiplied by."""
    p_scale = terms.p_inverse_variance
    return terms.scale if p_scale is None else tl.load(p_scale + i_kv_head * M + i_component)


@triton.jit(do_not_specialize=["num_keys", "num_queries", "num_samples"])
def valid_ranges(p_key_mask, p_query_mask, p_ranges, num_keys, num_queries, num_samples, BLOCK: tl.constexpr):
    """Find the first valid position and one past the last, ``int32 [2, B, 2]``, ``(0, 0)`` where nothing is valid. One
    program does it for the keys of one sample and, after those, one for its queries."""
    i_sample = tl.program_id(0) % num_samples
    p_ranges += 2 * tl.program_id(0)
    if tl.program_id(0) < num_samples:
        _valid_range(p_key_mask, p_ranges, i_sample, num_keys, BLOCK)
    else:
        _valid_range(p_query_mask, p_ranges, i_sample, num_queries, BLOCK)


@triton.jit
def _valid_range(p_mask, p_range, i_sample, length, BLOCK: tl.constexpr):
    if p_mask is not None:
        p_mask += i_sample.to(tl.int64) * length
        b_first = tl.full([BLOCK], 0, tl.int32) + length
        b_end = tl.zeros([BLOCK], tl.int32)
        for o_first in range(0, length, BLOCK):
            o_token = o_first + tl.arange(0, BLOCK)
            m_valid = tl.load(p_mask + o_token, mask=o_token < length, other=0) != 0
            b_first = tl.minimum(b_first, tl.where(m_valid, o_token, length))
            b_end = tl.maximum(b_end, tl.where(m_valid, o_token + 1, 0))
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
    """Draw random numbers for dropout, ``int32 [B, H, padded]`` for rows and ``[B, Hkv, padded / 2]`` for columns, of
    which two share one. They are a pure function of the seed.

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
    """Draw odd random numbers. The lower half of a product depends on the lower halves of its factors alone: these are
    all different among 2^14 numbers of a head, in an order that is drawn, so that no two rows or columns drop the
    same."""
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
