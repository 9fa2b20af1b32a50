"""Which keys a query sees: sequences of a batch, causality, and masks of pairs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Sequences(NamedTuple):
    """Where the tokens of a sample lie: all of them, those of a range (padding), or several sequences (packed)."""

    num_queries: tl.tensor
    num_keys: tl.tensor
    p_key_range: tl.tensor | None
    """``[B, 2]``: the first valid key of a sample and one past its last; ``None``: all are valid"""
    p_query_range: tl.tensor | None
    """the same for queries"""
    p_spans: tl.tensor | None
    """``[length / rows_per_span, 3]``: for every so many tokens the first token of the other side that they may see,
    one past the last, and the causal offset; ``None``: not packed"""
    rows_per_span: tl.tensor


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


@triton.jit
def visible_keys(sequences, i_batch, o_first, CAUSAL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """The :class:`Span` of keys that the block of queries from ``o_first`` on sees; up to ``full`` each sees all."""
    first_key = 0
    end_key = sequences.num_keys
    causal_offset = sequences.num_keys - sequences.num_queries
    if sequences.p_key_range is not None:
        first_key = tl.load(sequences.p_key_range + 2 * i_batch) // BLOCK_J * BLOCK_J
        end_key = tl.load(sequences.p_key_range + 2 * i_batch + 1)
        first_query = tl.load(sequences.p_query_range + 2 * i_batch)
        end_query = tl.load(sequences.p_query_range + 2 * i_batch + 1)
        if (o_first >= end_query) | (o_first + BLOCK_I <= first_query):
            end_key = 0
    if sequences.p_spans is not None:
        # No block holds tokens of two sequences.
        p_span = sequences.p_spans + 3 * (o_first // sequences.rows_per_span)
        first_key = tl.load(p_span)
        end_key = tl.load(p_span + 1)
        causal_offset = tl.load(p_span + 2)
    end_full = end_key
    if CAUSAL:
        end_key = tl.maximum(tl.minimum(end_key, o_first + BLOCK_I + causal_offset), 0)
        end_full = tl.maximum(o_first + causal_offset + 1, 0) // BLOCK_J * BLOCK_J
        end_full = tl.maximum(tl.minimum(end_full, end_key // BLOCK_J * BLOCK_J), first_key)
    return Span(first_key, end_full, end_key, causal_offset)


@triton.jit
def visible_queries(sequences, i_batch, o_first, CAUSAL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """The :class:`Span` of queries that see the block of keys from ``o_first`` on; from ``full`` on each sees all."""
    first_query = 0
    end_query = sequences.num_queries
    causal_offset = sequences.num_keys - sequences.num_queries
    if sequences.p_key_range is not None:
        first_query = tl.load(sequences.p_query_range + 2 * i_batch) // BLOCK_I * BLOCK_I
        end_query = tl.load(sequences.p_query_range + 2 * i_batch + 1)
        first_key = tl.load(sequences.p_key_range + 2 * i_batch)
        end_key = tl.load(sequences.p_key_range + 2 * i_batch + 1)
        if (o_first >= end_key) | (o_first + BLOCK_J <= first_key):
            end_query = 0
    if sequences.p_spans is not None:
        p_span = sequences.p_spans + 3 * (o_first // sequences.rows_per_span)
        first_query = tl.load(p_span)
        end_query = tl.load(p_span + 1)
        causal_offset = tl.load(p_span + 2)
    first_full = first_query
    if CAUSAL:
        diagonal = tl.maximum(o_first - causal_offset, 0)
        first_query = tl.maximum(first_query, diagonal // BLOCK_I * BLOCK_I)
        first_full = tl.maximum(o_first + BLOCK_J - 1 - causal_offset, 0)
        first_full = tl.maximum((first_full + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query)
        first_full = tl.minimum(first_full, tl.maximum((end_query + BLOCK_I - 1) // BLOCK_I * BLOCK_I, first_query))
    return Span(first_query, first_full, end_query, causal_offset)
