"""Linear attention in linear time: a query needs nothing of the keys but the state ``sum_j phi(k_j) (v_j, 1)``.

Without causality all queries share one state. With causality the keys are split into chunks: every pair within a chunk
is formed, and the state is carried from chunk to chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.linear_problem import LinearProblem

CHUNK = 64


def sums(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """``sum_j weight[i,j] (v_j, 1)``, ``[B, H, Nq, Dv + 1]``, and the state after the last key."""
    mixture = problem.mixture
    features = problem.key_features()
    values = problem.extended_values(features)
    query = problem.query_features().unflatten(1, (-1, mixture.group_size))
    if not mixture.is_causal:
        state = features.mT @ values
        if problem.state is not None:
            state = state + problem.state
        return (query @ state[:, :, None]).flatten(1, 2), state
    offset = mixture.causal_offset
    state = features.new_zeros(*features.shape[:2], features.shape[-1], values.shape[-1])
    if problem.state is not None:
        state = state + problem.state
    if offset > 0:
        # The first keys are visible to all queries.
        state = state + features[:, :, :offset].mT @ values[:, :, :offset]
        features, values = features[:, :, offset:], values[:, :, offset:]
    early = query[:, :, :, : max(-offset, 0)] @ state[:, :, None]
    found, state = _causal(query[:, :, :, max(-offset, 0) :], features, values, state)
    return torch.cat([early, found], dim=3).flatten(1, 2), state


def _causal(query: Tensor, features: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Causal sums for N queries ``[B, Hkv, G, N, F]`` and N keys ``[B, Hkv, N, F]``, and the state after the last key.

    Query i sees the keys up to i and the ones before, which are in ``state``.
    """
    length = features.shape[2]
    query, features, values = _in_chunks(query), _in_chunks(features), _in_chunks(values)
    own = features.mT @ values  # [B, Hkv, chunks, F, Dv + 1]
    states = torch.cat([state[:, :, None], own], dim=2).cumsum(dim=2)
    pairs = (query @ features[:, :, None].mT).tril()
    found = (pairs @ values[:, :, None] + query @ states[:, :, None, :-1]).flatten(3, 4)
    if torch.compiler.is_exporting():
        found = found.index_select(3, torch.arange(length, device=found.device))
    return found[:, :, :, :length], states[:, :, -1]


def _in_chunks(tensor: Tensor) -> Tensor:
    """Split ``[..., N, X]`` into ``[..., chunks, CHUNK, X]``, padded with zeros.

    An exported graph must work for every length, so it may contain nothing that PyTorch cannot prove for all of them.
    There it has at least two chunks, because broadcasting treats a size of 1 as a special case, and it gathers rows by
    index, because a view would have to know that CHUNK divides the length.
    """
    length = tensor.shape[-2]
    if not torch.compiler.is_exporting():
        return F.pad(tensor, (0, 0, 0, -length % CHUNK)).unflatten(-2, (-1, CHUNK))
    chunks = length // CHUNK + 2
    first = torch.arange(chunks, device=tensor.device)[:, None] * CHUNK
    place = first + torch.arange(CHUNK, device=tensor.device)
    return F.pad(tensor, (0, 0, 0, chunks * CHUNK - length))[..., place, :]
