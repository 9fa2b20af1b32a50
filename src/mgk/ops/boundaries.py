"""Where packed sequences begin and end: ``cu_seqlens``, int32 ``[S + 1]``, from 0 to the number of tokens T.

Nothing here asks the device for a number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_of_tokens(boundaries: Tensor, num_tokens: int) -> Tensor:
    """int64 ``[T]``: which sequence each token belongs to."""
    token = torch.arange(num_tokens, device=boundaries.device)
    # All boundaries, not those behind the first: the compiler of PyTorch 2.11 cannot search in a part of a tensor.
    return torch.searchsorted(boundaries.long(), token, right=True) - 1


def pairs_within_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, num_keys: int, is_causal: bool
) -> Tensor:
    """bool ``[1, 1, Tq, Tk]``, True where a query sees a key: for whoever writes out every pair."""
    own, others = sequence_of_tokens(cu_seqlens_q, num_queries), sequence_of_tokens(cu_seqlens_k, num_keys)
    pairs = own[:, None] == others[None, :]
    if is_causal:
        # How many tokens of its sequence come after each: the last query sees the last key.
        later, later_keys = (
            bounds[1:].long()[sequence] - torch.arange(len(sequence), device=sequence.device)
            for bounds, sequence in ((cu_seqlens_q, own), (cu_seqlens_k, others))
        )
        pairs = pairs & (later_keys[None, :] >= later[:, None])
    return pairs[None, None]


def nth_valid(number: int, boundaries: Tensor, num_tokens: int, mask: Tensor | None) -> Tensor:
    """int64 ``[S]``: the token of each sequence that is its ``number``-th under ``mask [T]``.

    A sequence with fewer gives its last one, and any token where it has none.
    """
    valid_before = _valid_before(num_tokens, mask, boundaries)
    starts, ends = (valid_before[bounds] for bounds in (boundaries[:-1].long(), boundaries[1:].long()))
    wanted = torch.minimum(starts + number, ends)
    # The first token up to which so many are valid.
    return (torch.searchsorted(valid_before, wanted) - 1).clamp(0, num_tokens - 1)


def count_visible(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, key_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """int64 ``[Tq]``: how many valid keys of its sequence each query sees; causality is aligned bottom-right."""
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
    """int64 ``[T + 1]``: how many valid tokens stand before each place."""
    if mask is None:
        return torch.arange(num_tokens + 1, device=boundaries.device)
    return F.pad(mask.cumsum(dim=0), (1, 0))
