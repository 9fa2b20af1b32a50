"""Linear attention in linear time: what keys have left, ``sum_j phi(k_j) (v_j, 1)``, is all that a query needs of them.

Without causality that is one state for all queries. With it, keys are taken in chunks: within a chunk every pair is
formed, and from chunk to chunk the state goes on.
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
        # Keys that all queries see.
        state = state + features[:, :, :offset].mT @ values[:, :, :offset]
        features, values = features[:, :, offset:], values[:, :, offset:]
    early = query[:, :, :, : max(-offset, 0)] @ state[:, :, None]
    found, state = _causal(query[:, :, :, max(-offset, 0) :], features, values, state)
    return torch.cat([early, found], dim=3).flatten(1, 2), state


def _causal(query: Tensor, features: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As many queries ``[B, Hkv, G, N, F]`` as keys ``[B, Hkv, N, F]``; query i sees ``state`` and keys up to i."""
    length = features.shape[2]
    missing = -length % CHUNK
    query, features, values = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (query, features, values))
    query, features, values = (tensor.unflatten(-2, (-1, CHUNK)) for tensor in (query, features, values))
    own = features.mT @ values  # [B, Hkv, chunks, F, Dv + 1]
    after = state[:, :, None] + own.cumsum(dim=2)
    before = torch.cat([state[:, :, None], after[:, :, :-1]], dim=2)
    pairs = (query @ features[:, :, None].mT).tril()
    found = pairs @ values[:, :, None] + query @ before[:, :, None]
    return found.flatten(3, 4)[:, :, :, :length], after[:, :, -1] if after.shape[2] else state
