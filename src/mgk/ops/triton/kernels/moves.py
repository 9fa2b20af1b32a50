"""Moving the tokens of packed sequences to where blocks of a kernel begin, and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_chunks"])
def move_tokens(
    p_from, p_to, p_blocks, stride_from, width, num_chunks,
    TO_PLACES: tl.constexpr, PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows of ``width`` numbers between tokens and places, of which each sequence has whole blocks.

    ``blocks [blocks, 2]``: the first token in a block of ``PADDING`` places, and how many tokens the block holds.
    Places without a token become 0, since no weight, however small, makes a NaN vanish.
    """
    i_chunk = tl.program_id(0) % num_chunks
    i_part = tl.program_id(0) // num_chunks
    i_block = i_part // (PADDING // ROWS)
    o_row = i_part % (PADDING // ROWS) * ROWS + tl.arange(0, ROWS)
    o_column = i_chunk * COLUMNS + tl.arange(0, COLUMNS)
    o_token = tl.load(p_blocks + 2 * i_block).to(tl.int64) + o_row
    o_place = i_block.to(tl.int64) * PADDING + o_row
    m_row = o_row < tl.load(p_blocks + 2 * i_block + 1)
    m_column = (o_column < width)[None, :]
    m_both = m_row[:, None] & m_column  # [ROWS, COLUMNS]
    if TO_PLACES:
        b_rows = tl.load(p_from + o_token[:, None] * stride_from + o_column[None, :], mask=m_both, other=0)
        tl.store(p_to + o_place[:, None] * width + o_column[None, :], b_rows, mask=m_column)
    else:
        b_rows = tl.load(p_from + o_place[:, None] * stride_from + o_column[None, :], mask=m_both)
        tl.store(p_to + o_token[:, None] * width + o_column[None, :], b_rows, mask=m_both)
