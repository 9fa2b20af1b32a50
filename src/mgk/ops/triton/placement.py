"""Packed sequences as the kernels take them: each begins at the first row of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.boundaries import sequence_of_tokens
from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import call


class _Layout(NamedTuple):
    """Where tokens lie so that no block of a kernel holds those of two sequences."""

    starts: Tensor
    """int64 ``[S]``: the first place of each sequence, a multiple of the padding."""
    lengths: Tensor
    """int64 ``[S]``"""
    places: Tensor
    """int64 ``[T]``, of every token"""
    total: int
    """Places, used or not: known without asking the device."""


def _lay_out(boundaries: Tensor, num_tokens: int, padding: int) -> _Layout:
    boundaries = boundaries.long()
    lengths = boundaries.diff()
    room = (lengths + padding - 1) // padding * padding
    starts = room.cumsum(0) - room
    token = torch.arange(num_tokens, device=boundaries.device)
    places = token + (starts - boundaries[:-1])[sequence_of_tokens(boundaries, num_tokens)]
    # Every sequence may leave all but one of its last places empty.
    total = -(-(num_tokens + len(lengths) * (padding - 1)) // padding) * padding
    return _Layout(starts, lengths, places, total)


def _spans(own: _Layout, other: _Layout, causal_offset: Tensor, padding: int) -> Tensor:
    """int32 ``[total / padding, 3]``: what the tokens of each block see of the ``other`` side of their sequence."""
    ends = own.starts + (own.lengths + padding - 1) // padding * padding
    block = torch.arange(0, own.total, padding, device=ends.device)
    sequence = torch.searchsorted(ends, block, right=True)
    table = torch.stack([other.starts, other.starts + other.lengths, causal_offset], dim=-1)
    # Blocks behind the last sequence see nothing.
    table = torch.cat([table, table.new_zeros(1, 3)])
    return table[sequence].to(torch.int32)


class Placed(NamedTuple):
    """A call whose tokens lie in places, and what the kernels must know of their sequences."""

    problem: MixtureProblem
    queries: _Layout
    spans: tuple[Tensor, Tensor]
    """what each block of queries sees, and what each block of keys is seen by"""

    def take(self, out: Tensor) -> Tensor:
        """Places of queries ``[1, H, total, Dv]`` to tokens ``[1, H, Tq, Dv]``, which lie token by token in memory."""
        return out[0].transpose(0, 1).index_select(0, self.queries.places).transpose(0, 1)[None]


def place(problem: MixtureProblem) -> Placed:
    """Lay out the tokens of packed sequences. The placed problem is one padded row."""
    cu_seqlens_q, cu_seqlens_k, padding = problem.cu_seqlens_q, problem.cu_seqlens_k, call.PADDING
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    queries = _lay_out(cu_seqlens_q, problem.query.shape[2], padding)
    if cu_seqlens_k is cu_seqlens_q and problem.query.shape[2] == problem.key.shape[3]:
        keys, spans = queries, (_spans(queries, queries, torch.zeros_like(queries.starts), padding),) * 2
    else:
        keys = _lay_out(cu_seqlens_k, problem.key.shape[3], padding)
        # It is counted in places, not in tokens: the last query of a sequence sees its last key.
        causal_offset = keys.starts + keys.lengths - queries.starts - queries.lengths
        spans = (_spans(queries, keys, causal_offset, padding), _spans(keys, queries, causal_offset, padding))
    prior = problem.log_prior
    if prior is not None and problem.has_prior_by_key:
        prior = _spread(prior, keys, dim=2)
    placed = problem._replace(
        query=_spread(problem.query, queries, dim=2),
        key=_spread(problem.key, keys, dim=3),
        value=_spread(problem.value, keys, dim=2),
        log_prior=prior,
        key_mask=_valid_places(problem.key_mask, keys),
        query_mask=_valid_places(problem.query_mask, queries),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
    )
    return Placed(placed, queries, spans)


def _valid_places(mask: Tensor | None, layout: _Layout) -> Tensor:
    """bool ``[1, total]``"""
    valid = torch.zeros(layout.total, dtype=torch.bool, device=layout.places.device)
    if mask is None:
        # To assign True would copy it from the host, which a CUDA graph cannot record.
        return valid.index_fill_(0, layout.places, True)[None]
    return valid.index_copy_(0, layout.places, mask[0])[None]


def _spread(tensor: Tensor, layout: _Layout, dim: int) -> Tensor:
    """Move tokens to their places, token by token in memory; zeros in between."""
    by_token = tensor.movedim(dim, 0)
    room = tensor.new_zeros(layout.total, *by_token.shape[1:])
    return room.index_copy(0, layout.places, by_token).movedim(0, dim)
