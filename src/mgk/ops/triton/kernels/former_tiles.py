"""What the forward and backward kernels share: tiles of keys, logits, masks and dropout.

Names in all kernels: ``i_`` index of a program or head, ``o_`` offsets, ``p_`` pointers, ``d_`` tensor descriptors,
``b_`` blocks of values. Logits are in units of log 2, since the hardware exponentiates to base two.
"""

from __future__ import annotations

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


@triton.jit
def load_tile(d_tensor, i_batch, i_head, o_first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``o_first ...`` of one head, ``[ROWS, WIDTH]``; zeros beyond the end."""
    return d_tensor.load([i_batch, i_head, o_first, 0]).reshape(ROWS, WIDTH)


@triton.jit
def load_rows(
    p_tensor, stride_batch, stride_head, stride_token, i_batch, i_head, o_first, length, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same without a descriptor, for kernels that are small or rarely run: a descriptor costs the host time."""
    # Rows start at multiples of 16 bytes: `layout.aligned` has seen to it, and this tells the compiler. (The stride
    # of an axis of length one may be anything, times zero.)
    STEP: tl.constexpr = 128 // p_tensor.dtype.element_ty.primitive_bitwidth
    stride_batch = stride_batch // STEP * STEP
    stride_head = stride_head // STEP * STEP
    stride_token = stride_token // STEP * STEP
    o_row = o_first + tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, WIDTH)[None, :]
    p_tensor += i_batch.to(tl.int64) * stride_batch + i_head.to(tl.int64) * stride_head
    return tl.load(p_tensor + o_row.to(tl.int64) * stride_token + o_d, mask=(o_row < length) & (o_d < width), other=0.0)


@triton.jit
def place(o_token):
    """Where the term of a token lies, of rows, columns, references, deltas and random numbers alike.

    Of every sixteen columns of a product a thread holds four: 0, 1, 8 and 9, or 2, 3, 10 and 11, and so on. Their terms
    lie side by side, so that a thread reads them at once.
    """
    return (o_token // 16 * 16) | ((o_token & 6) << 1) | ((o_token & 8) >> 2) | (o_token & 1)


@triton.jit
def load_terms(p_terms, o_first, COUNT: tl.constexpr):
    """Terms of ``COUNT`` tokens from ``o_first`` on, for the columns of a product: see :func:`place`."""
    return in_order(tl.load(p_terms + o_first + tl.arange(0, COUNT)))


@triton.jit
def in_order(b_terms):
    """Token by token what has been read in the order in which it lies."""
    return b_terms.reshape(b_terms.shape[0] // 16, 4, 2, 2).permute(0, 2, 1, 3).reshape(b_terms.shape[0])


_FOUR_TERMS = tl.constexpr(
    "{ .reg .u64 address; cvt.u64.u32 address, $4; add.u64 address, address, $8;"
    " ld.global.nc.v4.f32 {$0, $1, $2, $3}, [address]; }"
)


@triton.jit
def terms_at(p_terms, o_terms):
    """What :func:`load_terms` reads, from addresses straight into the registers of the threads that hold the columns:
    no copy by way of shared memory, for which all threads would wait for each other.

    Args:
        p_terms: where they begin, 16 bytes aligned.
        o_terms: where each column lies from there on, as :func:`place` says. Of a product of half precision on Hopper,
            of which these are the columns, a thread holds them in this order, four at a time.
    """
    o_bytes = (o_terms & -4) * 4
    b_first = tl.broadcast_to(p_terms.to(tl.int64, bitcast=True), o_terms.shape)
    return tl.inline_asm_elementwise(
        _FOUR_TERMS, "=f,=f,=f,=f,r,r,r,r,l,l,l,l", [o_bytes, b_first], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def awaited(b_sum):
    """``b_sum``, a product that is added up in a loop, when it is done.

    By itself a product may still run while the next block's begins. Then its operands stay in registers, and where
    those do not last, the compiler has every instruction of the matrix units wait for the one before.
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
def component_bias(
    p_row, p_column, i_component, o_row, o_column, b_reference, num_rows,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, ROWS_FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    FINITE: tl.constexpr = False,
):  # fmt: skip
    """``row[i, r] + column[j, r] - reference[i]``, ``[rows, columns]``, or transposed unless ``ROWS_FIRST``.

    Args:
        p_row: this head's ``[M, num_rows]``, padded.
        p_column: this head's ``[M, num_columns]``, padded with -inf.
        o_row: offsets of the rows; transposed, the first of them.
        o_column: the first of the ``COLUMNS`` columns; transposed, the offsets of all.
        FINITE: see :func:`finite`.
    """
    b_row = finite(-b_reference) if FINITE else -b_reference
    if HAS_ROW:
        p_row += i_component * num_rows
        b_row += tl.load(p_row + place(o_row)) if ROWS_FIRST else load_terms(p_row, o_row, b_reference.shape[0])
    b_bias = b_row[:, None] if ROWS_FIRST else b_row[None, :]
    if HAS_COLUMN:
        b_column = load_terms(p_column, o_column, COLUMNS) if ROWS_FIRST else tl.load(p_column + place(o_column))
        b_column = finite(b_column) if FINITE else b_column
        b_bias = b_bias + (b_column[None, :] if ROWS_FIRST else b_column[:, None])
    return b_bias


@triton.jit
def is_visible(
    o_rows, o_columns, p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Whether query ``o_rows`` sees key ``o_columns``; the two broadcast against each other."""
    b_visible = o_columns < num_keys
    if CAUSAL:
        b_visible = b_visible & (o_columns <= o_rows + causal_offset)
    if HAS_MASK:
        o_mask = o_rows.to(tl.int64) * stride_mask_row + o_columns.to(tl.int64) * stride_mask_column
        b_visible = b_visible & (tl.load(p_mask + o_mask, mask=(o_rows < num_queries) & b_visible, other=0) != 0)
    return b_visible


@triton.jit
def row_term(
    b_query, p_shift, p_origin, i_kv_head, i_kv, i_component, width,
    M: tl.constexpr, HAS_ORIGIN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``(q_i - origin) . shift_r``, ``[rows]``."""
    o_d = tl.arange(0, D)
    b_shift = tl.load(p_shift + (i_kv_head * M + i_component) * width + o_d, mask=o_d < width, other=0.0)
    b_row = tl.sum(b_query.to(tl.float32) * b_shift[None, :], 1)
    if HAS_ORIGIN:
        b_row -= tl.sum(tl.load(p_origin + i_kv.to(tl.int64) * D + o_d) * b_shift, 0)
    return b_row


@triton.jit
def safe_ratio(b_gap, limit):
    """``2^gap``, or NaN where it leaves ``2^-limit ... 2^limit``: the kernels do not trust such a row or column."""
    return tl.where(tl.abs(b_gap) <= limit, tl.math.exp2(b_gap), float("nan"))


@triton.jit
def mark_unfactored(p_unfactored, i_kv, b_ratio):
    """Tell backward that some ratio of this key/value head cannot be trusted. All who write write the same."""
    if tl.max((b_ratio != b_ratio).to(tl.int32), 0) > 0:
        tl.store(p_unfactored + i_kv, 1.0)


@triton.jit
def visible_keys(
    p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL: tl.constexpr,
    HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """``first, full, end, offset``: a block of queries sees keys ``first ... end``; up to ``full`` every row sees all.
    Under causality query i sees keys up to ``i + offset``."""
    first_key = 0
    end_key = num_keys
    causal_offset = num_keys - num_queries
    if HAS_RANGE:
        first_key = tl.load(p_key_range + 2 * i_batch) // BLOCK_J * BLOCK_J
        end_key = tl.load(p_key_range + 2 * i_batch + 1)
        first_query = tl.load(p_query_range + 2 * i_batch)
        end_query = tl.load(p_query_range + 2 * i_batch + 1)
        if (o_first >= end_query) | (o_first + BLOCK_I <= first_query):
            end_key = 0
    if PACKED:
        # No block holds tokens of two sequences.
        p_spans += 3 * (o_first // rows_per_span)
        first_key = tl.load(p_spans)
        end_key = tl.load(p_spans + 1)
        causal_offset = tl.load(p_spans + 2)
    end_full = end_key
    if CAUSAL:
        end_key = tl.maximum(tl.minimum(end_key, o_first + BLOCK_I + causal_offset), 0)
        end_full = tl.maximum(o_first + causal_offset + 1, 0) // BLOCK_J * BLOCK_J
        end_full = tl.maximum(tl.minimum(end_full, end_key // BLOCK_J * BLOCK_J), first_key)
    return first_key, end_full, end_key, causal_offset


@triton.jit
def visible_queries(
    p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL: tl.constexpr,
    HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """``first, full, end, offset``: queries ``first ... end`` see something of a block of keys; from ``full`` on, all.
    Under causality query i sees keys up to ``i + offset``."""
    first_query = 0
    end_query = num_queries
    causal_offset = num_keys - num_queries
    if HAS_RANGE:
        first_query = tl.load(p_query_range + 2 * i_batch) // BLOCK_I * BLOCK_I
        end_query = tl.load(p_query_range + 2 * i_batch + 1)
        first_key = tl.load(p_key_range + 2 * i_batch)
        end_key = tl.load(p_key_range + 2 * i_batch + 1)
        if (o_first >= end_key) | (o_first + BLOCK_J <= first_key):
            end_query = 0
    if PACKED:
        p_spans += 3 * (o_first // rows_per_span)
        first_query = tl.load(p_spans)
        end_query = tl.load(p_spans + 1)
        causal_offset = tl.load(p_spans + 2)
    first_full = first_query
    if CAUSAL:
        diagonal = tl.maximum(o_first - causal_offset, 0)
        first_query = tl.maximum(first_query, diagonal // BLOCK_I * BLOCK_I)
        first_full = tl.maximum(o_first + BLOCK_J - 1 - causal_offset, 0)
        first_full = tl.maximum((first_full + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query)
        first_full = tl.minimum(first_full, tl.maximum((end_query + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query))
    return first_query, first_full, end_query, causal_offset


@triton.jit
def hard_share(b_lead):
    """Of a hard choice, what one has that exceeds the other by ``lead``: 1 or 0, and of a tie half. One instruction: a
    product, a sum and a cut at 0 and 1."""
    return tl.clamp(b_lead * 1e30 + 0.5, 0.0, 1.0)


@triton.jit
def finite(b_term):
    """A term of a logit; instead of -inf so low that weights are 0 all the same, but differences are numbers."""
    return tl.maximum(b_term, -1e38)


@triton.jit
def weight_of(b_logit, b_tokens):
    """``2 ** logit`` of a logit less the row's normaliser, so at most 1.

    Of logits of a billion, which backward and forward round differently, it could be infinite. In fp32, where such
    inputs occur, the bound is kept; half precision does without the comparison.
    """
    if b_tokens.dtype == tl.float32:
        b_logit = tl.minimum(b_logit, 0.0)
    return tl.math.exp2(b_logit)


# Read once, as Triton does when it meets a kernel.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def fast_exp(b_x):
    """``exp``, 0 where fp32 has but few bits for it: what looks after those takes longer than the exponential. And the
    compiler hardly repeats it, as it repeats others where a block is needed in two layouts."""
    if _INTERPRETED:
        return tl.exp(b_x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x * 1.4426950408889634], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def as_product(b_x, D: tl.constexpr):
    """``b_x [rows, D]`` of half precision times 1: the same numbers, in fp32, lying as the matrix units leave products.

    What is computed of a block before it meets a product would else be computed twice, as it was read and as products
    lie. Exact where a row is finite.
    """
    if _INTERPRETED or b_x.dtype == tl.float32 or D > 64:
        return b_x.to(tl.float32)
    o_d = tl.arange(0, D)
    return tl.dot(b_x, tl.where(o_d[:, None] == o_d[None, :], 1.0, 0.0).to(b_x.dtype))


@triton.jit
def where_at_least(b_value, o_first, o_second):
    """``value`` where ``first >= second``, else 0; both, int32, are broadcast."""
    b_first, b_second = tl.broadcast_to(o_first, b_value.shape), tl.broadcast_to(o_second, b_value.shape)
    if _INTERPRETED:
        return tl.where(b_first >= b_second, b_value, 0.0)
    # Without a comparison, whose answers compilers gather into words and take apart again: see `unless_dropped`.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 less; sub.s32 less, $2, $3; shr.s32 less, less, 31; not.b32 less, less; and.b32 $0, $1, less; }",
        "=r,r,r,r", [b_value, b_first, b_second], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


# A pair is dropped if its random number, read as one of fp32 without its sign, lies below the threshold. As that goes
# by the upper sixteen bits alone, two neighbours fit into a word, which is read as two numbers of fp16.
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
def column_randoms(p_column_random, o_column):
    """The random number of each column: two neighbours have one, of which the even one takes the lower half."""
    o_both = o_column // 2
    o_place = (o_both // 16 * 16) | ((o_both & 3) << 2) | ((o_both & 12) >> 2)
    return tl.load(p_column_random + o_place) << tl.where(o_column % 2 == 0, 16, 0)


@triton.jit
def shared_column_randoms(p_column_random, o_first, COUNT: tl.constexpr):
    """Of ``COUNT`` columns of a product from ``o_first`` on, what two neighbours share."""
    b_key = tl.load(p_column_random + o_first // 2 + tl.arange(0, COUNT // 2))
    b_key = b_key.reshape(COUNT // 32, 4, 4).permute(0, 2, 1).reshape(COUNT // 2)
    return tl.broadcast_to(b_key[:, None], (COUNT // 2, 2)).reshape(COUNT)


@triton.jit
def unless_dropped(b_value, b_row_random, b_column_random, threshold):
    """Dropout: ``value`` where a pair is kept, else 0, from the random numbers of its row and of its column.

    The upper half of their product modulo 2^32 decides, so one multiplication makes the random number of a pair, the
    same one in forward and in both backward kernels. All is written out, since LLVM gathers comparisons sixteen at a
    time into words, and then takes them apart again bit by bit, which is more work than the comparisons.
    """
    if _INTERPRETED:
        return tl.where(((b_row_random * b_column_random) & 0x7FFFFFFF) >= threshold, b_value, 0.0)
    return tl.inline_asm_elementwise(
        _IS_KEPT, "=f,f,r,r,r", [b_value, b_row_random, b_column_random, threshold], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rows_unless_dropped(b_value, b_row_random, p_column_random, o_first, threshold, AS_PRODUCT: tl.constexpr):
    """The same for ``value [rows, columns]``, the first column being ``o_first``.

    ``AS_PRODUCT``: it lies as the matrix units leave a product of half precision. Then a thread holds two neighbours,
    which one multiplication and one comparison decide about. (Where a mask of pairs is read, it may lie as that does.)
    """
    COUNT: tl.constexpr = b_value.shape[1]
    if _INTERPRETED or not AS_PRODUCT:
        b_column_random = column_randoms(p_column_random, o_first + tl.arange(0, COUNT))
        b_kept = unless_dropped(b_value.to(tl.float32), b_row_random[:, None], b_column_random[None, :], threshold)
        return b_kept.to(b_value.dtype)
    b_column_random = shared_column_randoms(p_column_random, o_first, COUNT)[None, :]
    limits = threshold | (threshold >> 16)
    if b_value.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            _ARE_KEPT, "=f,=f,f,f,r,r,r,r,r,r", [b_value, b_row_random[:, None], b_column_random, limits], dtype=tl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        _HALVES_ARE_KEPT, "=r,r,r,r,r,r,r,r", [b_value, b_row_random[:, None], b_column_random, limits], dtype=b_value.dtype,
        is_pure=True, pack=2,
    )  # fmt: skip
