"""Dropout of pairs. The random number of a pair is the product of one of its row and one of its column.

Only fifteen bits of the product are compared: a pair is dropped if they, read as a floating-point number without its
sign, lie below the threshold. As the upper sixteen bits of a word hold them, two neighbouring columns fit into one
word, which is read as two numbers of fp16. It is written in PTX, since LLVM gathers comparisons sixteen at a time into
words and then takes them apart again bit by bit, which is more work than the comparisons.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mgk.ops.triton.kernels.terms import own_terms
from mgk.ops.triton.kernels.tiles import INTERPRETED


class Dropout(NamedTuple):
    """The random numbers of one head, int32, as :func:`mgk.ops.triton.kernels.preparation.random_numbers` makes them.

    A program loads those of the tokens of its own block once; of the tokens that pass by it has the pointer.
    """

    row_random: tl.tensor
    column_random: tl.tensor
    threshold: tl.tensor


_IS_KEPT = tl.constexpr(
    "{ .reg .pred kept; .reg .b32 word; .reg .f32 number, limit;"
    " mul.lo.s32 word, $2, $3; mov.b32 number, word; abs.f32 number, number; mov.b32 limit, $4;"
    " setp.geu.f32 kept, number, limit; selp.f32 $0, $1, 0f00000000, kept; }"
)
_ARE_KEPT = tl.constexpr(
    "{ .reg .pred first, second; .reg .b32 words;"
    " mul.lo.s32 words, $4, $6; abs.f16x2 words, words; setp.geu.f16x2 first|second, words, $8;"
    " selp.f32 $0, $2, 0f00000000, first; selp.f32 $1, $3, 0f00000000, second; }"
)
_HALVES_ARE_KEPT = tl.constexpr(
    "{ .reg .b32 words;"
    " mul.lo.s32 words, $2, $4; abs.f16x2 words, words; set.geu.u32.f16x2 words, words, $6; and.b32 $0, $1, words; }"
)


@triton.jit
def dropout_of_rows(p_row_random, p_column_random, threshold, head, terms, o_i):
    """The random numbers of one head, for a program that has a block of queries."""
    b_row_random = own_terms(p_row_random, head.i_head, terms.padded_queries, o_i)
    return Dropout(b_row_random, p_column_random + head.i_kv.to(tl.int64) * (terms.padded_keys // 2), threshold)


@triton.jit
def column_randoms(p_column_random, o_column):
    """The random number of each column. Two neighbours share one, of which the even column takes the lower half."""
    o_both = o_column // 2
    o_place = (o_both // 16 * 16) | ((o_both & 3) << 2) | ((o_both & 12) >> 2)
    return tl.load(p_column_random + o_place) << tl.where(o_column % 2 == 0, 16, 0)


@triton.jit
def shared_column_randoms(p_column_random, o_first, COUNT: tl.constexpr):
    """What each of the ``COUNT`` columns of a product from ``o_first`` on shares with its neighbour, ``[COUNT]``."""
    b_random = tl.load(p_column_random + o_first // 2 + tl.arange(0, COUNT // 2))
    b_random = b_random.reshape(COUNT // 32, 4, 4).permute(0, 2, 1).reshape(COUNT // 2)
    return tl.broadcast_to(b_random[:, None], (COUNT // 2, 2)).reshape(COUNT)


@triton.jit
def unless_dropped(b_value, b_row_random, b_column_random, threshold):
    """``value`` where a pair is kept, else 0, in fp32. The random numbers broadcast against each other.

    The upper half of their product modulo 2^32 decides, so one multiplication makes the random number of a pair, the
    same one in forward and in both backward kernels.
    """
    if INTERPRETED:
        return tl.where(((b_row_random * b_column_random) & 0x7FFFFFFF) >= threshold, b_value, 0.0)
    return tl.inline_asm_elementwise(
        _IS_KEPT, "=f,f,r,r,r", [b_value, b_row_random, b_column_random, threshold],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def rows_unless_dropped(b_value, dropout, o_first, AS_PRODUCT: tl.constexpr):
    """The same for ``value [rows, columns]``: rows are the program's own, columns begin at ``o_first``.

    ``AS_PRODUCT``: the values lie as the matrix units leave a product of half precision. Then a thread holds two
    neighbours, about which one multiplication and one comparison decide. (Where a mask of pairs is read, the values may
    lie as the mask does.)
    """
    COUNT: tl.constexpr = b_value.shape[1]
    if INTERPRETED or not AS_PRODUCT:
        b_column_random = column_randoms(dropout.column_random, o_first + tl.arange(0, COUNT))
        b_kept = unless_dropped(
            b_value.to(tl.float32), dropout.row_random[:, None], b_column_random[None, :], dropout.threshold
        )
        return b_kept.to(b_value.dtype)
    b_column_random = shared_column_randoms(dropout.column_random, o_first, COUNT)[None, :]
    limits = dropout.threshold | (dropout.threshold >> 16)
    if b_value.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            _ARE_KEPT, "=f,=f,f,f,r,r,r,r,r,r", [b_value, dropout.row_random[:, None], b_column_random, limits],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        _HALVES_ARE_KEPT, "=r,r,r,r,r,r,r,r", [b_value, dropout.row_random[:, None], b_column_random, limits],
        dtype=b_value.dtype, is_pure=True, pack=2,
    )  # fmt: skip
