"""Mixture attention in fp64, one head at a time to save memory. It shares no code with ``mgk.ops``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.benchmark.inputs import Inputs


def attention(inputs: Inputs) -> Tensor:
    """Attention output in fp64, ``[B, H, N, D]``. Differentiable."""
    batch, heads, tokens, _ = inputs.query.shape
    rows = torch.arange(tokens, device=inputs.query.device)
    found = [attention_rows(inputs, b, h, rows) for b in range(batch) for h in range(heads)]
    return torch.stack(found).unflatten(0, (batch, heads))


def attention_rows(inputs: Inputs, batch: int, head: int, rows: Tensor) -> Tensor:
    """Output for some queries of one head, ``[R, D]`` for ``rows [R]``. Memory is R times the number of keys."""
    query = inputs.query[batch, head, rows].double()
    key, value = inputs.key[batch, head].double(), inputs.value[batch, head].double()
    key = key if key.ndim == 3 else key[None]  # [M, N, D]
    if inputs.shift is not None:
        key = key + inputs.shift[head].double()[:, None]
    if inputs.feature_map is not None:
        return _linear_rows(query, key, value, inputs.log_prior, head, rows, inputs.is_causal)
    variance = math.sqrt(query.shape[-1])

    logit = query @ key.mT / variance  # [M, R, N]
    if inputs.similarity == "gaussian":
        # In fp64 the expansion of |q - k|^2 is still more precise than any candidate.
        norms = query.square().sum(-1)[:, None] + key.square().sum(-1)[:, None, :]
        logit = logit - norms / (2 * variance)
    if inputs.assignment == "hard":
        logit = logit.amax(dim=0)
    else:
        if inputs.log_prior is not None:
            logit = logit + inputs.log_prior[head].double()[:, None, None]
        logit = logit.logsumexp(dim=0)
    if inputs.is_causal:
        position = torch.arange(value.shape[0], device=rows.device)
        logit = logit.masked_fill(position > rows[:, None], -math.inf)
    return logit.softmax(dim=-1) @ value


def _linear_rows(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, head: int, rows: Tensor, is_causal: bool
) -> Tensor:
    """The same for linear attention with the features ``elu + 1``; ``key [M, N, D]``."""
    features = torch.nn.functional.elu(key) + 1.0
    if log_prior is not None:
        features = features * log_prior[head].double().exp()[:, None, None]
    weight = (torch.nn.functional.elu(query) + 1.0) @ features.sum(dim=0).mT
    if is_causal:
        weight = weight.masked_fill(torch.arange(value.shape[0], device=rows.device) > rows[:, None], 0.0)
    return weight @ value / weight.sum(dim=-1, keepdim=True)
