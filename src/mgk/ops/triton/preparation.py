"""Small kernels that run before the large ones: padded terms in units of log 2, and random numbers for dropout."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pad_terms(
    p_terms, p_padded, p_ratio, stride_batch, stride_head, stride_component, stride_token, num_heads, length, padded,
    num_blocks, fill, limit, M: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy ``[B, H, M, length]`` to ``[B, H, M, padded]`` times log2(e), ``fill`` beyond the end.

    With ``RATIO`` also ``exp(term_1 - term_0) [B, H, padded]``: 0 where both are switched off, NaN where the ratio leaves
    ``2^-limit ... 2^limit``, which tells the kernels not to trust it.
    """
    i_block = tl.program_id(0) % num_blocks
    i_head = (tl.program_id(0) // num_blocks).to(tl.int64)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    inside = o < length
    p_terms += i_head // num_heads * stride_batch + i_head % num_heads * stride_head + o.to(tl.int64) * stride_token
    b_first = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(M):
        b_term = tl.load(p_terms + r * stride_component, mask=inside, other=0.0) * 1.4426950408889634
        b_term = tl.where(inside, b_term, fill)
        tl.store(p_padded + (i_head * M + r) * padded + o, b_term, mask=o < padded)
        if RATIO:
            if r == 0:
                b_first = b_term
            else:
                b_gap = b_term - b_first
                b_ratio = tl.where(tl.abs(b_gap) <= limit, tl.math.exp2(b_gap), float("nan"))
                b_ratio = tl.where((b_term == float("-inf")) | (inside == 0), 0.0, b_ratio)
                tl.store(p_ratio + i_head * padded + o, b_ratio, mask=o < padded)


@triton.jit
def random_keys(p_seed, p_keys, count, stream, BLOCK: tl.constexpr):
    """Odd random numbers ``int32 [count]``, a pure function of seed, stream and position."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_key = tl.randint(tl.load(p_seed) + stream, o).to(tl.int32, bitcast=True)
    tl.store(p_keys + o, b_key | 1, mask=o < count)
