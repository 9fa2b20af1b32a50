"""Which keys a query sees: sequences of a batch, causality, and masks of pairs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Span(NamedTuple):
    """The keys that a block of queries sees, or the queries that see a block of keys."""

    first: tl.tensor
    full: tl.tensor
    """where blocks of keys stop, or blocks of queries start, of which every pair is visible"""
    end: tl.tensor
    causal_offset: tl.tensor
    """under causality query i sees the keys up to ``i + causal_offset``"""


class Visibility(NamedTuple):
    """What decides about one pair of a query and a key."""

    num_queries: tl.tensor
    num_keys: tl.tensor
    causal_offset: tl.tensor
    p_mask: tl.tensor | None
    """this head's mask of pairs; ``None``: there is none"""
    stride_row: tl.tensor
    stride_column: tl.tensor


@triton.jit
def is_visible(o_rows, o_columns, visibility, CAUSAL: tl.constexpr):
    """Whether query ``o_rows`` sees key ``o_columns``; the two broadcast against each other."""
    m_seen = o_columns < visibility.num_keys
    if CAUSAL:
        m_seen = m_seen & (o_columns <= o_rows + visibility.causal_offset)
    if visibility.p_mask is not None:
        o_mask = o_rows.to(tl.int64) * visibility.stride_row + o_columns.to(tl.int64) * visibility.stride_column
        m_read = (o_rows < visibility.num_queries) & m_seen
        m_seen = m_seen & (tl.load(visibility.p_mask + o_mask, mask=m_read, other=0) != 0)
    return m_seen


@triton.jit  # noqa: RET503 (as `of_head` in terms.py)
def mask_of_head(p_mask, i_batch, i_query_head, stride_batch, stride_head):
    """Where the mask of pairs of one head begins; ``None`` stays ``None``."""
    if p_mask is not None:
        return p_mask + (i_batch.to(tl.int64) * stride_batch + i_query_head.to(tl.int64) * stride_head)


@triton.jit
def visible_keys(
    num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first,
    CAUSAL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The :class:`Span` of keys that the block of queries from ``o_first`` on sees; up to ``full`` each sees all.

    Args:
        p_key_range: ``[B, 2]``, the first valid key of a sample and one past its last (padding); ``None``: all are.
        p_query_range: the same for queries.
        p_spans: of packed sequences, ``[length / rows_per_span, 3]``: for every so many tokens the first token of the
            other side that they may see, one past the last, and the causal offset; ``None``: not packed.
    """
    first_key, end_key, causal_offset = _tokens_of_sequence(
        num_keys, num_keys - num_queries, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first,
        BLOCK_I, BLOCK_J,
    )  # fmt: skip
    end_full = end_key
    if CAUSAL:
        end_key = tl.maximum(tl.minimum(end_key, o_first + BLOCK_I + causal_offset), 0)
        end_full = tl.maximum(o_first + causal_offset + 1, 0) // BLOCK_J * BLOCK_J
        end_full = tl.maximum(tl.minimum(end_full, end_key // BLOCK_J * BLOCK_J), first_key)
    return Span(first_key, end_full, end_key, causal_offset)


@triton.jit
def visible_queries(
    num_queries, num_keys, p_key_range, p_query_range, p_spans, rows_per_span, i_batch, o_first,
    CAUSAL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The :class:`Span` of queries that see the block of keys from ``o_first`` on; from ``full`` on each sees all."""
    first_query, end_query, causal_offset = _tokens_of_sequence(
        num_queries, num_keys - num_queries, p_query_range, p_key_range, p_spans, rows_per_span, i_batch, o_first,
        BLOCK_J, BLOCK_I,
    )  # fmt: skip
    first_full = first_query
    if CAUSAL:
        diagonal = tl.maximum(o_first - causal_offset, 0)
        first_query = tl.maximum(first_query, diagonal // BLOCK_I * BLOCK_I)
        first_full = tl.maximum(o_first + BLOCK_J - 1 - causal_offset, 0)
        first_full = tl.maximum((first_full + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query)
        first_full = tl.minimum(first_full, tl.maximum((end_query + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query))
    return Span(first_query, first_full, end_query, causal_offset)


@triton.jit
def _tokens_of_sequence(
    num_others, causal_offset, p_range, p_own_range, p_spans, rows_per_span, i_batch, o_first,
    BLOCK_OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens of the other side, in blocks of ``BLOCK``, that the block of own ones from ``o_first`` on may see without
    causality: the first, one past the last, and the causal offset."""
    first = 0
    end = num_others
    if p_range is not None:
        first = tl.load(p_range + 2 * i_batch) // BLOCK * BLOCK
        end = tl.load(p_range + 2 * i_batch + 1)
        first_own = tl.load(p_own_range + 2 * i_batch)
        end_own = tl.load(p_own_range + 2 * i_batch + 1)
        if (o_first >= end_own) | (o_first + BLOCK_OWN <= first_own):
            end = 0
    if p_spans is not None:
        # No block holds tokens of two sequences.
        p_span = p_spans + 3 * (o_first // rows_per_span)
        first = tl.load(p_span)
        end = tl.load(p_span + 1)
        causal_offset = tl.load(p_span + 2)
    return first, end, causal_offset
