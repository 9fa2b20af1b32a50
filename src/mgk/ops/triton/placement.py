"""Packed sequences as the kernels take them: each begins at the first row of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import call
from mgk.ops.triton.movement import to_places, to_tokens


class _Layout(NamedTuple):
    """Where tokens lie so that no block of a kernel holds those of two sequences."""

    starts: Tensor
    """int64 ``[S]``: the first place of each sequence, a multiple of the padding."""
    lengths: Tensor
    """int64 ``[S]``"""
    sequence: Tensor
    """int64 ``[blocks]``: which sequence each block of places is for; S behind the last one."""
    blocks: Tensor
    """int32 ``[blocks, 2]``: the first token in each block, and how many tokens it holds."""
    num_tokens: int


def _lay_out(boundaries: Tensor, num_tokens: int) -> _Layout:
    boundaries = boundaries.long()
    lengths = boundaries.diff()
    room = (lengths + call.PADDING - 1) // call.PADDING * call.PADDING
    ends = room.cumsum(0)
    starts = ends - room
    # Every sequence may leave all but one of its last places empty: known without asking the device.
    num_blocks = -(-(num_tokens + len(lengths) * (call.PADDING - 1)) // call.PADDING)
    first_place = torch.arange(num_blocks, device=boundaries.device) * call.PADDING
    sequence = torch.searchsorted(ends, first_place, right=True)
    before = first_place - F.pad(starts, (0, 1))[sequence]
    held = (F.pad(lengths, (0, 1))[sequence] - before).clamp(0, call.PADDING)
    blocks = torch.stack([boundaries[sequence] + before, held], dim=-1).to(torch.int32)
    return _Layout(starts, lengths, sequence, blocks, num_tokens)


def _spans(own: _Layout, other: _Layout, causal_offset: Tensor) -> Tensor:
    """int32 ``[blocks, 3]``: what the tokens of each block see of the ``other`` side of their sequence."""
    table = torch.stack([other.starts, other.starts + other.lengths, causal_offset], dim=-1)
    # Blocks behind the last sequence see nothing.
    table = torch.cat([table, table.new_zeros(1, 3)])
    return table[own.sequence].to(torch.int32)


class Placed(NamedTuple):
    """A call whose tokens lie in places, and what the kernels must know of their sequences."""

    problem: MixtureProblem
    queries: _Layout
    spans: tuple[Tensor, Tensor]
    """what each block of queries sees, and what each block of keys is seen by"""

    def take(self, out: Tensor) -> Tensor:
        """Places of queries ``[1, H, places, Dv]`` to tokens ``[1, H, Tq, Dv]``, which lie token by token in memory."""
        by_place = out[0].transpose(0, 1)
        return to_tokens(by_place, self.queries.blocks, self.queries.num_tokens).transpose(0, 1)[None]


def place(problem: MixtureProblem) -> Placed:
    """Lay out the tokens of packed sequences. The placed problem is one padded row."""
    cu_seqlens_q, cu_seqlens_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    queries = _lay_out(cu_seqlens_q, problem.query.shape[2])
    if cu_seqlens_k is cu_seqlens_q and problem.query.shape[2] == problem.key.shape[3]:
        keys, spans = queries, (_spans(queries, queries, torch.zeros_like(queries.starts)),) * 2
    else:
        keys = _lay_out(cu_seqlens_k, problem.key.shape[3])
        # It is counted in places, not in tokens: the last query of a sequence sees its last key.
        causal_offset = keys.starts + keys.lengths - queries.starts - queries.lengths
        spans = (_spans(queries, keys, causal_offset), _spans(keys, queries, causal_offset))
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
    """bool ``[1, places]``"""
    row = torch.arange(call.PADDING, device=layout.blocks.device)
    first, held = layout.blocks[:, :1], layout.blocks[:, 1:]
    valid = row < held
    if mask is not None and layout.num_tokens > 0:
        valid = valid & mask[0][(first + row).clamp(max=layout.num_tokens - 1)]
    return valid.flatten()[None]


def _spread(tensor: Tensor, layout: _Layout, dim: int) -> Tensor:
    """Move tokens to their places, token by token in memory; zeros in between."""
    return to_places(tensor.movedim(dim, 0), layout.blocks).movedim(0, dim)
