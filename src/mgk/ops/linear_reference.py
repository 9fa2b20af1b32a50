"""Linear attention with a mixture of keys, written like the equations. Materialises every pair.

weight[i,j] = phi(q_i) . sum_r prior[r] phi(k_jr)
out[i]      = sum_j weight[i,j] v_j / sum_j weight[i,j]
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.linear_problem import LinearProblem


def weights(problem: LinearProblem) -> Tensor:
    """Unnormalised ``weight[i,j]``, ``[B, H, Nq, Nk]``."""
    mixture = problem.mixture
    keys = problem.key_features().repeat_interleave(mixture.group_size, dim=1)
    weight = problem.query_features() @ keys.mT
    if mixture.is_causal:
        rows, columns = (torch.arange(count, device=weight.device) for count in weight.shape[-2:])
        weight = weight.masked_fill(columns > rows[:, None] + mixture.causal_offset, 0.0)
    return weight


def sums(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """``sum_j weight[i,j] (v_j, 1)``, ``[B, H, Nq, Dv + 1]``, and the state after the last key."""
    mixture = problem.mixture
    features = problem.key_features()
    values = problem.extended_values(features)
    state = features.mT @ values
    found = weights(problem) @ values.repeat_interleave(mixture.group_size, dim=1)
    if problem.state is not None:
        state = state + problem.state
        found = found + problem.query_features() @ problem.state.repeat_interleave(mixture.group_size, dim=1)
    return found, state
