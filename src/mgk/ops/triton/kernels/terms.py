"""Terms of the logits: all that belongs to a query alone (row) or to a key alone (column).

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

in units of log 2, since the hardware exponentiates to base two. ``scale[r]`` is the inverse variance of a component, or
one number for all. :mod:`mgk.ops.triton.kernels.preparation` says what the terms are made of and writes them.

Two shifted keys of one variance differ in their terms alone, so that their weights have a common factor::

    2^logit[i,j,0] + 2^logit[i,j,1] = 2^logit[i,j,0] (1 + row_second[i] column_second[j])

where ``row_second = 2^(row[i,1] - row[i,0])`` and ``column_second = 2^(column[j,1] - column[j,0])``. If the choice is
hard, the two are differences instead: ``row_second = row[i,1] - row[i,0]``, but ``column_second = column[j,0] -
column[j,1]``, so that the second component leads by ``row_second - column_second``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Terms(NamedTuple):
    """Where the terms of one head begin, all fp32 and padded; ``None``: this call has no such term."""

    p_row: tl.tensor | None
    """``[M, padded_queries]``"""
    p_column: tl.tensor | None
    """``[M, padded_keys]``, -inf at masked keys and in the padding"""
    p_inverse_variance: tl.tensor | None
    """``[M]``; ``None``: ``scale`` for all components"""
    scale: tl.tensor
    padded_queries: tl.tensor
    padded_keys: tl.tensor
    p_column_second: tl.tensor | None = None
    """``[padded_keys]``, of two shifted keys"""
    p_unscaled: tl.tensor | None = None
    """``[2, padded_keys]``: the columns of two shifted keys, to which products may be added before they are scaled"""


class Shifts(NamedTuple):
    """Where the shifts of all heads begin."""

    p_shift: tl.tensor | None
    """``[Hkv, M, width]``"""
    p_origin: tl.tensor | None
    """``[B, Hkv, D]``: what query and key are measured from before they meet a shift; ``None``: from 0"""
    width: tl.tensor


class Prior(NamedTuple):
    """Where the logarithms of the priors begin, in natural units; a stride is 0 where all share one."""

    p_prior: tl.tensor | None
    stride_head: tl.tensor
    stride_component: tl.tensor
    stride_token: tl.tensor


@triton.jit
def place(o_token):
    """Where the term of a token lies. Rows, columns, references, deltas and random numbers all lie so.

    Of every sixteen columns of a product a thread holds four: 0, 1, 8 and 9, or 2, 3, 10 and 11, and so on. Their terms
    lie side by side, so that a thread reads them at once.
    """
    return (o_token // 16 * 16) | ((o_token & 6) << 1) | ((o_token & 8) >> 2) | (o_token & 1)


@triton.jit
def in_order(b_terms):
    """Bring terms that were read in the order in which they lie into the order of their tokens."""
    return b_terms.reshape(b_terms.shape[0] // 16, 4, 2, 2).permute(0, 2, 1, 3).reshape(b_terms.shape[0])


@triton.jit
def load_terms(p_terms, o_first, COUNT: tl.constexpr):
    """Terms of ``COUNT`` tokens from ``o_first`` on, for the columns of a product, ``[COUNT]``."""
    return in_order(tl.load(p_terms + o_first + tl.arange(0, COUNT)))


@triton.jit
def own_terms(p_terms, i_head, length, o_own):
    """Terms of the program's own tokens, which are tokens of the head that is number ``i_head`` of all."""
    return tl.load(p_terms + i_head.to(tl.int64) * length + place(o_own))


@triton.jit  # noqa: RET503 (to fall off the end is the one way to return None in Triton)
def of_head(p_terms, i_head, length, M: tl.constexpr = 1):
    """Where the terms of head ``i_head`` of all begin, ``[M, length]``; ``None`` stays ``None``."""
    if p_terms is not None:
        return p_terms + i_head.to(tl.int64) * M * length


_FOUR_TERMS = tl.constexpr(
    "{ .reg .u64 address; cvt.u64.u32 address, $4; add.u64 address, address, $8;"
    " ld.global.nc.v4.f32 {$0, $1, $2, $3}, [address]; }"
)


@triton.jit
def terms_at(p_terms, o_terms):
    """What :func:`load_terms` reads, straight into the registers of the threads that hold the columns: there is no copy
    by way of shared memory, for which all threads would wait for each other.

    Args:
        p_terms: where they begin, 16 bytes aligned.
        o_terms: where each column lies from there on, as :func:`place` says. In a product of half precision on Hopper,
            which these are the columns of, a thread holds them in this order, four at a time.
    """
    o_bytes = (o_terms & -4) * 4
    b_first = tl.broadcast_to(p_terms.to(tl.int64, bitcast=True), o_terms.shape)
    return tl.inline_asm_elementwise(
        _FOUR_TERMS, "=f,=f,=f,=f,r,r,r,r,l,l,l,l", [o_bytes, b_first], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def component_scale(terms, i_component):
    """What the products of a component are multiplied by."""
    return terms.scale if terms.p_inverse_variance is None else tl.load(terms.p_inverse_variance + i_component)


@triton.jit
def component_bias(
    terms, i_component, o_row, o_column, b_reference, COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr = False, FINITE: tl.constexpr = False,
):  # fmt: skip
    """``row[i, r] + column[j, r] - reference[i]``, ``[rows, columns]`` or transposed.

    Args:
        o_row: offsets of the rows; transposed, the first of them.
        o_column: the first of the ``COLUMNS`` columns; transposed, the offsets of all.
        FINITE: see :func:`finite`.
    """
    p_column = terms.p_column
    if p_column is not None:
        p_column += i_component * terms.padded_keys
    b_row = finite(-b_reference) if FINITE else -b_reference
    if terms.p_row is not None:
        p_row = terms.p_row + i_component * terms.padded_queries
        b_row += load_terms(p_row, o_row, b_reference.shape[0]) if TRANSPOSED else tl.load(p_row + place(o_row))
    b_bias = b_row[None, :] if TRANSPOSED else b_row[:, None]
    if p_column is not None:
        b_column = tl.load(p_column + place(o_column)) if TRANSPOSED else load_terms(p_column, o_column, COLUMNS)
        b_column = finite(b_column) if FINITE else b_column
        b_bias = b_bias + (b_column[:, None] if TRANSPOSED else b_column[None, :])
    return b_bias


@triton.jit
def component_logit(
    b_product, terms, i_component, o_row, o_column, b_reference, b_tokens,
    TRANSPOSED: tl.constexpr = False, FINITE: tl.constexpr = False,
):  # fmt: skip
    """``scale[r] product + row[i, r] + column[j, r] - reference[i]``, see :func:`component_bias`."""
    b_scaled = b_product * component_scale(terms, i_component)
    if b_tokens.dtype != tl.float32:
        return b_scaled + component_bias(
            terms, i_component, o_row, o_column, b_reference, b_product.shape[1], TRANSPOSED, FINITE
        )
    b_bias = component_bias(
        terms, i_component, o_row, o_column, tl.zeros_like(b_reference), b_product.shape[1], TRANSPOSED, FINITE
    )
    return less_reference(b_scaled + b_bias, b_reference, TRANSPOSED, FINITE)


@triton.jit
def less_reference(b_logit, b_reference, TRANSPOSED: tl.constexpr = False, FINITE: tl.constexpr = False):
    """``logit[i, j] - reference[i]`` in fp32, where the reference is taken off last.

    So forward and backward, whose references differ, round a logit alike. If they did not, the gradients of a row's
    logits would add up to that rounding instead of zero, and the gradient of a query would show what its keys have in
    common, times that. (In half precision the gradients of logits are rounded themselves, and the sum with a row or a
    column saves work.)
    """
    b_row = finite(-b_reference) if FINITE else -b_reference
    return b_logit + (b_row[None, :] if TRANSPOSED else b_row[:, None])


@triton.jit
def load_shift(shifts, i_kv_head, i_component, M: tl.constexpr, D: tl.constexpr):
    """The shift of one component, ``[D]``, zeros beyond its width."""
    o_d = tl.arange(0, D)
    width = shifts.width
    return tl.load(shifts.p_shift + (i_kv_head * M + i_component) * width + o_d, mask=o_d < width, other=0.0)


@triton.jit
def load_origin(shifts, i_kv, D: tl.constexpr):
    """What the queries and keys of one head are measured from, ``[D]``."""
    return tl.load(shifts.p_origin + i_kv.to(tl.int64) * D + tl.arange(0, D))


@triton.jit
def shift_product(b_query, shifts, i_kv_head, i_kv, i_component, M: tl.constexpr, D: tl.constexpr):
    """``(q_i - origin) . shift_r``, ``[rows]``, which is the row term but for the scale."""
    b_shift = load_shift(shifts, i_kv_head, i_component, M, D)
    b_row = tl.sum(b_query.to(tl.float32) * b_shift[None, :], 1)
    if shifts.p_origin is not None:
        b_row -= tl.sum(load_origin(shifts, i_kv, D) * b_shift, 0)
    return b_row


@triton.jit
def safe_ratio(b_gap, limit):
    """``2^gap``, or NaN where it leaves ``2^-limit ... 2^limit``: the kernels do not trust such a row or column."""
    return tl.where(tl.abs(b_gap) <= limit, tl.math.exp2(b_gap), float("nan"))


@triton.jit
def mark_unfactored(p_unfactored, i_kv, b_ratio):
    """Tell backward if some ratio of this key/value head cannot be trusted. All programs that write, write the same."""
    if tl.max((b_ratio != b_ratio).to(tl.int32), 0) > 0:
        tl.store(p_unfactored + i_kv, 1.0)


@triton.jit
def second_logit(b_product, terms, o_row, o_column, COLUMNS: tl.constexpr):
    """The logit of the second of two shifted keys without the row term of the first, ``[rows, COLUMNS]``."""
    b_gap = tl.load(terms.p_row + terms.padded_queries + place(o_row)) - tl.load(terms.p_row + place(o_row))
    b_column = load_terms(terms.p_column + terms.padded_keys, o_column, COLUMNS)
    return b_product * terms.scale + (b_gap[:, None] + b_column[None, :])


@triton.jit
def second_weight(b_first, b_ratio, b_own):
    """The weight of the second of two shifted keys in fp32: that of the first times their ratio, or its ``own`` where
    the ratio cannot be trusted, as :func:`safe_ratio` says. A row that is attended again so has the weights in forward
    that it has in backward, where some of the pairs may be factored."""
    return tl.where(b_ratio == b_ratio, b_first * b_ratio, b_own)


@triton.jit
def finite(b_term):
    """A term of a logit, where -inf becomes a number so low that weights are 0 all the same, but differences exist."""
    return tl.maximum(b_term, -1e38)


@triton.jit
def hard_responsibility(b_lead):
    """The part of a hard choice that goes to the one who leads by ``lead``: 1 or 0, and half of a tie. It is a single
    instruction: a product, a sum and a cut at 0 and 1."""
    return tl.clamp(b_lead * 1e30 + 0.5, 0.0, 1.0)


@triton.jit
def weight_of(b_logit, b_tokens):
    """``2 ** logit`` of a logit less the row's normaliser, so at most 1.

    Logits of a billion are rounded differently backward and forward, and their weights could be infinite. In fp32,
    where such inputs occur, the bound is kept; half precision does without the comparison.
    """
    if b_tokens.dtype == tl.float32:
        b_logit = tl.minimum(b_logit, 0.0)
    return tl.math.exp2(b_logit)
