"""Computations with the boundaries of packed sequences: ``cu_seqlens``, int32 ``[S + 1]``, from 0 to the T tokens.

None of them reads a value from the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_of_tokens(boundaries: Tensor, num_tokens: int) -> Tensor:
    """Index of the sequence that each token belongs to, int64 ``[T]``."""
    token = torch.arange(num_tokens, device=boundaries.device)
    # Searching boundaries[1:] would save the subtraction, but torch.compile in PyTorch 2.11 cannot search in a slice.
    return torch.searchsorted(boundaries.long(), token, right=True) - 1


def pairs_within_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, num_keys: int, is_causal: bool
) -> Tensor:
    """Mask of visible pairs, bool ``[1, 1, Tq, Tk]``, for code that materialises every pair."""
    own, others = sequence_of_tokens(cu_seqlens_q, num_queries), sequence_of_tokens(cu_seqlens_k, num_keys)
    pairs = own[:, None] == others[None, :]
    if is_causal:
        # Number of later tokens in the same sequence: causality aligns the last query with the last key.
        later, later_keys = (
            bounds[1:].long()[sequence] - torch.arange(len(sequence), device=sequence.device)
            for bounds, sequence in ((cu_seqlens_q, own), (cu_seqlens_k, others))
        )
        pairs = pairs & (later_keys[None, :] >= later[:, None])
    return pairs[None, None]


def nth_valid(number: int, boundaries: Tensor, num_tokens: int, mask: Tensor | None) -> Tensor:
    """Index of the ``number``-th valid token of each sequence, counted from 1 under ``mask [T]``, int64 ``[S]``.

    A sequence with fewer valid tokens gives its last one, and one with none gives an arbitrary token.
    """
    valid_before = _valid_before(num_tokens, mask, boundaries)
    starts, ends = (valid_before[bounds] for bounds in (boundaries[:-1].long(), boundaries[1:].long()))
    wanted = torch.minimum(starts + number, ends)
    # The wanted token is the first one up to which so many tokens are valid.
    return (torch.searchsorted(valid_before, wanted) - 1).clamp(0, num_tokens - 1)


def count_visible(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, key_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Number of valid keys that each query sees in its sequence, int64 ``[Tq]``; causality is aligned bottom-right."""
    sequence = sequence_of_tokens(cu_seqlens_q, num_queries)
    first, end = (bounds.long()[sequence] for bounds in (cu_seqlens_k[:-1], cu_seqlens_k[1:]))
    if is_causal:
        to_last = cu_seqlens_q[1:].long()[sequence] - 1 - torch.arange(num_queries, device=sequence.device)
        end = torch.maximum(end - to_last, first)
    if key_mask is None:
        return end - first
    valid_before = _valid_before(len(key_mask), key_mask, cu_seqlens_k)
    return valid_before[end] - valid_before[first]


def _valid_before(num_tokens: int, mask: Tensor | None, boundaries: Tensor) -> Tensor:
    """Number of valid tokens before each position, int64 ``[T + 1]``."""
    if mask is None:
        return torch.arange(num_tokens + 1, device=boundaries.device)
    return F.pad(mask.cumsum(dim=0), (1, 0))
