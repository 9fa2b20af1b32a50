"""Tiles of tokens: what the compiler is told of a call, how tiles are read, and how products lie in registers.

Names in all kernels: ``i_`` index of a program, head or component, ``o_`` offsets, ``p_`` pointers, ``d_`` tensor
descriptors (for TMA), ``m_`` masks, ``b_`` blocks of values. Rows are queries, columns are keys; ``BLOCK_I`` and
``BLOCK_J`` are how many of them a program works on at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# Whole numbers of which the compiler learns nothing: no kernel is compiled anew for another length, number of heads or
# layout. (Padded lengths are always multiples of 16, which is all that it wants to know of them.)
_TENSORS = ("query", "key", "value", "out", "grad")
VARYING = [
    "num_queries", "num_keys", "num_blocks", "num_row_programs", "blocks_together", "num_heads", "group_size",
    "rows_per_span",
    "threshold",
    *(f"stride_{tensor}_{axis}" for tensor in _TENSORS for axis in ("batch", "head", "token")),
    *(f"stride_prior_{axis}" for axis in ("head", "component", "token")),
    *(f"stride_mask_{axis}" for axis in ("batch", "head", "row", "column")),
]  # fmt: skip
# A number or two for each head or sample: where they start depends on how many there are.
HEAD_NUMBERS = ["p_unfactored", "p_level", "p_key_range", "p_query_range"]
# Kernels that read through descriptors, or rarely, need not know whether a row ends with a word of 16 bytes either.
VARYING_WITH_WIDTH = [*VARYING, "width", "value_width"]

# Read once, as Triton does when it meets a kernel.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


class Case(NamedTuple):
    """What the compiler knows of a call. A kernel makes it of its constants and hands it to its helpers."""

    M: tl.constexpr
    """components"""
    SHARED_KEY: tl.constexpr
    """one key for all components: there is one component, or keys are shifted"""
    HARD: tl.constexpr
    """the best component answers alone"""
    BLOCK_I: tl.constexpr
    BLOCK_J: tl.constexpr
    D: tl.constexpr
    """the width of queries and keys, rounded up to a power of two"""
    DV: tl.constexpr
    """the same for values"""
    TWO_SHIFTS: tl.constexpr = False
    """two shifted keys of one variance"""
    TWO_KEYS: tl.constexpr = False
    """two projected keys of one variance, multiplied side by side"""
    UNFACTORED: tl.constexpr = False
    """two shifted keys too far apart for a common factor: one exponential for each"""
    GAUSSIAN: tl.constexpr = False
    """the similarity is a distance"""
    HAS_LEVEL: tl.constexpr = False
    """columns hold the level of the logits, so that forward needs no reference"""
    AWAIT_PRODUCTS: tl.constexpr = False
    """see :func:`awaited`"""
    DIRECT: tl.constexpr = False
    """see :func:`mgk.ops.triton.kernels.terms.terms_at`"""


class Keys(NamedTuple):
    """The keys and values of one head, which are read block by block."""

    d_key: tl.tensor
    d_value: tl.tensor
    i_batch: tl.tensor
    i_kv_head: tl.tensor


class Tokens(NamedTuple):
    """A tensor ``[B, H, length, width]`` that is read without a descriptor."""

    p_tokens: tl.tensor
    stride_batch: tl.tensor
    stride_head: tl.tensor
    stride_token: tl.tensor
    length: tl.tensor
    width: tl.tensor


@triton.jit
def load_tile(d_tensor, i_batch, i_head, o_first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``o_first ...`` of one head, ``[ROWS, WIDTH]``; zeros beyond the end."""
    return d_tensor.load([i_batch, i_head, o_first, 0]).reshape(ROWS, WIDTH)


@triton.jit
def load_key(keys, i_component, o_j, case: tl.constexpr):
    """Keys ``o_j ...`` of one component, ``[BLOCK_J, D]``."""
    i_head = keys.i_kv_head if case.SHARED_KEY else keys.i_kv_head * case.M + i_component
    return load_tile(keys.d_key, keys.i_batch, i_head, o_j, case.BLOCK_J, case.D)


@triton.jit
def load_value(keys, o_j, case: tl.constexpr):
    """Values ``o_j ...``, ``[BLOCK_J, DV]``."""
    return load_tile(keys.d_value, keys.i_batch, keys.i_kv_head, o_j, case.BLOCK_J, case.DV)


@triton.jit
def store_tile(d_tensor, i_batch, i_head, o_first, b_tile):
    """Write rows ``o_first ...`` of one head; nothing beyond the end."""
    d_tensor.store([i_batch, i_head, o_first, 0], b_tile.reshape(1, 1, b_tile.shape[0], b_tile.shape[1]))


@triton.jit
def apart(stride, p_tokens):
    """A stride of which the compiler knows that rows start at multiples of 16 bytes: ``layout.aligned`` has seen to it.
    (The stride of an axis of length one may be anything, times zero.)"""
    STEP: tl.constexpr = 128 // p_tokens.dtype.element_ty.primitive_bitwidth
    return stride // STEP * STEP


@triton.jit
def load_tokens(tokens, i_batch, i_head, o_first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What :func:`load_tile` reads, without a descriptor: for kernels that are small or rarely run, since a descriptor
    costs the host time."""
    p_tokens, stride_batch, stride_head, stride_token, length, width = tokens
    stride_batch = apart(stride_batch, p_tokens)
    stride_head = apart(stride_head, p_tokens)
    stride_token = apart(stride_token, p_tokens)
    o_row = o_first + tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, WIDTH)[None, :]
    p_tokens += i_batch.to(tl.int64) * stride_batch + i_head.to(tl.int64) * stride_head
    return tl.load(p_tokens + o_row.to(tl.int64) * stride_token + o_d, mask=(o_row < length) & (o_d < width), other=0.0)


@triton.jit
def product(b_left, b_right, b_sum=None):
    """``left right`` in fp32, added to ``sum`` if there is one. Products of fp32 are exact (no TF32)."""
    return tl.dot(b_left, b_right, b_sum, input_precision="ieee")


@triton.jit
def awaited(b_sum):
    """``b_sum``, a product that is added up in a loop, when it is done.

    By itself a product may still run while the next block's begins. Then its operands stay in registers, and where
    there are too few of these, the compiler makes every instruction of the matrix units wait for the one before.
    """
    return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [b_sum], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def partial_sums(b_pairs):
    """``[rows, 4]`` sums of ``[rows, columns]``: four threads hold a row, and ask each other only when all is done."""
    return tl.sum(tl.sum(b_pairs.reshape(b_pairs.shape[0], b_pairs.shape[1] // 8, 4, 2), 3), 1)


@triton.jit
def partial_products(b_pairs, b_factors):
    """:func:`partial_sums` of ``pairs * factors``, added up one by one: a product and a sum are one instruction."""
    ROWS: tl.constexpr = b_pairs.shape[0]
    b_products = (b_pairs * b_factors).reshape(ROWS, b_pairs.shape[1] // 8, 4, 2).permute(0, 2, 1, 3)
    return tl.sum(b_products.reshape(ROWS, 4, b_pairs.shape[1] // 4), 2)


@triton.jit
def as_product(b_x, D: tl.constexpr):
    """``b_x [rows, D]`` of half precision times 1: the same numbers, in fp32, lying as the matrix units leave products.

    What is computed of a block before it meets a product would otherwise be computed twice, as it was read and as
    products lie. It is exact where a row is finite.
    """
    if INTERPRETED or b_x.dtype == tl.float32 or D > 64:
        return b_x.to(tl.float32)
    o_d = tl.arange(0, D)
    return tl.dot(b_x, tl.where(o_d[:, None] == o_d[None, :], 1.0, 0.0).to(b_x.dtype))


@triton.jit
def stand_in(b_maximum):
    """A running maximum, or 0 where nothing has been seen: any finite number keeps exp(-inf - number) = 0."""
    return tl.where(b_maximum == float("-inf"), 0.0, b_maximum)


@triton.jit
def fast_exp(b_x):
    """``exp``, 0 where fp32 has but few bits for it: to look after those takes longer than the exponential. Nor does
    the compiler repeat it much, as it repeats others where a block is needed in two layouts."""
    if INTERPRETED:
        return tl.exp(b_x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x * LOG2_E], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def where_at_least(b_value, o_first, o_second):
    """``value`` where ``first >= second``, else 0; both, int32, are broadcast."""
    b_first, b_second = tl.broadcast_to(o_first, b_value.shape), tl.broadcast_to(o_second, b_value.shape)
    if INTERPRETED:
        return tl.where(b_first >= b_second, b_value, 0.0)
    # It is written without a comparison: see :mod:`mgk.ops.triton.kernels.dropout` for what LLVM makes of those.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 less; sub.s32 less, $2, $3; shr.s32 less, less, 31; not.b32 less, less; and.b32 $0, $1, less; }",
        "=r,r,r,r", [b_value, b_first, b_second], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
