"""Mixture attention, written like the equations. Materialises every pair; any dtype; twice differentiable.

    logit[i,j,r] = log_prior[r] + similarity(q_i, k_jr; variance[r])
    weight[i,j]  = softmax over j of ( soft: logsumexp_r logit    hard: max_r similarity )
    out[i]       = sum_j weight[i,j] v_j

Shapes: i runs over Nq queries, j over Nk keys, r over M components; ``[B, H, M, Nq, Nk]`` holds the logits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.problem import MixtureProblem


def unsupported(problem: MixtureProblem) -> str | None:
    """Return ``None``: this backend supports every call."""
    return None


def attention(problem: MixtureProblem) -> Tensor:
    """``out[i] = sum_j weight[i,j] v_j``, ``[B, H, Nq, Dv]``."""
    weight, _ = _unnormalised_weights(problem)
    value = problem.value.to(weight.dtype).repeat_interleave(problem.group_size, dim=1)
    # The normaliser is the sum over one more value column, the constant 1. Summed in the same order as the other
    # columns, it makes the rows sum to one exactly. (The width is a multiple of 16 because matrix kernels sum the
    # columns of an incomplete tile in another order.)
    sums = weight @ F.pad(value, (0, 16 - value.shape[-1] % 16), value=1.0)
    total = sums[..., -1:]
    weighted = sums[..., : value.shape[-1]] if problem.dropout_p == 0 else F.dropout(weight, problem.dropout_p) @ value
    return (weighted / total.masked_fill(total == 0, 1.0)).to(problem.query.dtype)


def weights(problem: MixtureProblem) -> Tensor:
    """``weight[i,j]``, ``[B, H, Nq, Nk]``. A row without a visible key is zero."""
    weight, _ = _unnormalised_weights(problem)
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def log_normaliser(problem: MixtureProblem) -> Tensor:
    """``log sum_j sum_r prior[r] exp(similarity)``, ``[B, H, Nq]``, -inf for a row without a visible key."""
    weight, maximum = _unnormalised_weights(problem)
    total = weight.sum(dim=-1)
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + maximum).masked_fill(empty, -math.inf)


def responsibility_sums(problem: MixtureProblem) -> Tensor:
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``: the E-step."""
    logit = _component_logits(problem)
    if problem.query_mask is not None:
        logit = logit.masked_fill(~problem.query_mask[:, None, None, :, None], -math.inf)
    seen = logit.amax(dim=2, keepdim=True) > -math.inf
    posterior = torch.softmax(logit.masked_fill(~seen, 0.0), dim=2).masked_fill(~seen, 0.0)
    return posterior.unflatten(1, (-1, problem.group_size)).sum(dim=(0, 2, 4, 5))


def _unnormalised_weights(problem: MixtureProblem) -> tuple[Tensor, Tensor]:
    """Return ``sum_r exp(logit - maximum)``, ``[B, H, Nq, Nk]``, and the row maximum, ``[B, H, Nq]``.

    The maximum is taken over keys and components together, because nesting log-sum-exp inside softmax would subtract
    -inf from -inf. It cancels in every result, so it is a constant for autograd.
    """
    logit = _component_logits(problem)
    if problem.assignment == "hard":
        logit = logit.amax(dim=2, keepdim=True)
    maximum = logit.detach().amax(dim=(2, 4))
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    return (logit - maximum[:, :, None, :, None]).exp().sum(dim=2), maximum


def _component_logits(problem: MixtureProblem) -> Tensor:
    """``logit[i,j,r]``, -inf where query i may not see key j, ``[B, H, M, Nq, Nk]``."""
    query, key = problem.centred()
    query = query[:, :, None]
    key = problem.component_keys(key).repeat_interleave(problem.group_size, dim=1)
    inverse_variance = problem.inverse_variance()
    if isinstance(inverse_variance, Tensor):
        inverse_variance = inverse_variance.repeat_interleave(problem.group_size, dim=0)

    product = query @ key.mT
    if problem.similarity == "dot":
        logit = product * inverse_variance
    else:
        squared_distance = query.square().sum(-1)[..., :, None] - 2 * product + key.square().sum(-1)[..., None, :]
        logit = -0.5 * squared_distance * inverse_variance
    if problem.log_prior is not None and problem.assignment == "soft":
        logit = logit + problem.log_prior.repeat_interleave(problem.group_size, dim=-3)[..., None, :]
    return logit.masked_fill(~_visible(problem)[:, :, None], -math.inf)


def _visible(problem: MixtureProblem) -> Tensor:
    """Mask of the keys that each query sees, bool, broadcastable to ``[B, H, Nq, Nk]``."""
    num_queries, num_keys = problem.query.shape[2], problem.key.shape[3]
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=problem.query.device)
    if problem.is_causal:
        visible = visible.tril(problem.causal_offset)
    if problem.key_mask is not None:
        visible = visible & problem.key_mask[:, None, None, :]
    if problem.attn_mask is not None:
        visible = visible & problem.attn_mask
    return visible
