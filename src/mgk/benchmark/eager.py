"""The formula of the authors' code, which materialises every pair and component in fp32.

Distances come from one product with ``D + 2`` columns. Exponentials are summed without subtracting a maximum, and
divided by their sum. This is what mixtures cost without a fused kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.benchmark.inputs import Inputs


def attention(inputs: Inputs) -> Tensor:
    """Attention output, ``[B, H, N, D]``."""
    query, key, value = (tensor.float() for tensor in (inputs.query, inputs.key, inputs.value))
    if inputs.shift is not None:
        components = [key + shift[:, None] for shift in inputs.shift.unbind(1)]
    else:
        components = list(key.unbind(2)) if key.ndim == 5 else [key]
    scale = 1.0 / math.sqrt(query.shape[-1])
    if inputs.similarity == "gaussian":
        logits = [-0.5 * scale * _squared_distance(query, each) for each in components]
    else:
        logits = [scale * (query @ each.mT) for each in components]

    hidden = None
    if inputs.is_causal:
        tokens = query.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    if inputs.assignment == "hard" or len(logits) == 1:
        best = logits[0] if len(logits) == 1 else torch.stack(logits).amax(dim=0)
        best = best if hidden is None else best.masked_fill(hidden, -math.inf)
        return (best.softmax(dim=-1) @ value).to(inputs.query.dtype)

    assert inputs.log_prior is not None, "every soft mixture among the presets has a prior"
    priors = inputs.log_prior.exp()[..., None, None].unbind(1)  # M times [H, 1, 1]
    score = priors[0] * logits[0].exp()
    for prior, logit in zip(priors[1:], logits[1:], strict=True):
        score = score + prior * logit.exp()
    score = score if hidden is None else score.masked_fill(hidden, 0.0)
    return (score / score.sum(dim=-1, keepdim=True) @ value).to(inputs.query.dtype)


def peak_bytes(inputs: Inputs) -> int:
    """Estimate the memory of forward and backward: logits and exponentials of all pairs and components, and sums."""
    batch, heads, tokens, _ = inputs.query.shape
    return 4 * batch * heads * tokens**2 * (2 * inputs.num_components + 3)


def _squared_distance(query: Tensor, key: Tensor) -> Tensor:
    """``|q_i - k_j|^2``, ``[B, H, N, N]``."""
    ones = torch.ones_like(query[..., :1])
    left = torch.cat([-2.0 * query, query.square().sum(-1, keepdim=True), ones], dim=-1)
    right = torch.cat([key, torch.ones_like(key[..., :1]), key.square().sum(-1, keepdim=True)], dim=-1)
    return (left @ right.mT).clamp(min=0.0)
