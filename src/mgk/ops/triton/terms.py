"""Everything in a logit but the product of query and key: row terms, column terms, scales.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

Linear in the sequence, under autograd: the kernels return gradients of ``row``, ``column`` and ``scale``, from which
those of shifts, priors, variances and norms follow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.problem import MixtureProblem


class LogitTerms(NamedTuple):
    query: Tensor
    """``[B, H, Nq, D]``"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, 1, Nk, D]`` where all components share one product."""
    row: Tensor | None
    """fp32 ``[B, H, M, Nq]``"""
    column: Tensor | None
    """fp32 ``[B, Hkv, M, Nk]``, -inf at masked keys"""
    scale: float | Tensor
    """A number, or fp32 ``[Hkv, M]``."""
    num_components: int


def logit_terms(problem: MixtureProblem) -> LogitTerms:
    """Split the logits of ``problem``, whose prior may be -inf but holds no NaN."""
    gaussian = problem.similarity == "gaussian"
    # Half-precision products are exact in fp32 from the numbers as they came; fp32 ones lose digits far from zero.
    query, key = problem.centred() if problem.query.dtype == torch.float32 else (problem.query, problem.key)
    scale: float | Tensor
    scale = 1.0 / problem.variance if isinstance(problem.variance, float) else problem.variance.float().reciprocal()
    factor = scale if isinstance(scale, float) else scale[:, :, None]  # against [Hkv, M, N]

    row = column = None
    if gaussian:
        column = -0.5 * key.float().square().sum(-1) * factor  # [B, Hkv, 1 or M, Nk]
    if problem.shift is not None:
        shift = problem.shift.float()
        origin = problem.origin().float() if gaussian and problem.query.dtype != torch.float32 else None
        row = _products(query, shift, origin, problem.group_size) * _per_query_head(factor, problem.group_size)
        if gaussian:
            assert column is not None
            crossed = _products(key[:, :, 0], shift, origin, 1) + 0.5 * shift.square().sum(-1)[:, :, None]
            column = column - crossed * factor
    if gaussian and not problem.shares_variance:
        norm = -0.5 * query.float().square().sum(-1)[:, :, None] * _per_query_head(factor, problem.group_size)
        row = norm if row is None else row + norm
    if problem.log_prior is not None:
        column = problem.log_prior[None] if column is None else column + problem.log_prior
    if problem.key_mask is not None:
        hidden = ~problem.key_mask[:, None, None, :]
        column = torch.zeros(hidden.shape, device=query.device) if column is None else column
        column = column.masked_fill(hidden, -math.inf)
    if column is not None:
        column = column.expand(key.shape[0], key.shape[1], problem.num_components, key.shape[3])
    return LogitTerms(query, key, row, column, scale, problem.num_components)


def _products(tokens: Tensor, shift: Tensor, origin: Tensor | None, group_size: int) -> Tensor:
    """``(x_i - origin) . shift_r`` in fp32, ``[B, H, N, D]`` and ``[Hkv, M, D]`` to ``[B, H, M, N]``."""
    grouped = tokens.float().unflatten(1, (-1, group_size))
    product = torch.einsum("bhgnd,hrd->bhgrn", grouped, shift)
    if origin is not None:
        product = product - torch.einsum("bhnd,hrd->bhrn", origin, shift)[:, :, None]
    return product.flatten(1, 2)


def _per_query_head(factor: float | Tensor, group_size: int) -> float | Tensor:
    return factor if isinstance(factor, float) else factor.repeat_interleave(group_size, dim=0)
