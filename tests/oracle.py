"""Mixture attention in fp64 by direct differences: shares no line with the library."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logits(inputs: dict) -> Tensor:
    """``[B, H, M, Nq, Nk]`` in fp64, -inf where query i may not see key j."""
    query, key = inputs["query"].double(), inputs["key"].double()
    group = query.shape[1] // key.shape[1]
    if key.ndim == 4:
        key = key[:, :, None]
    if inputs.get("shift") is not None:
        key = key + inputs["shift"].double()[None, :, :, None, :]
    key = key.repeat_interleave(group, dim=1)
    heads, components, dim = key.shape[1], key.shape[2], key.shape[-1]

    variance = inputs.get("variance")
    if variance is None:
        variance = math.sqrt(dim)
    variance = torch.as_tensor(variance, dtype=torch.float64, device=query.device)
    variance = variance.expand(heads // group, components).repeat_interleave(group, dim=0)[:, :, None, None]
    if inputs.get("similarity", "gaussian") == "gaussian":
        difference = query[:, :, None, :, None, :] - key[:, :, :, None, :, :]
        logit = -difference.square().sum(-1) / (2 * variance)
    else:
        logit = torch.einsum("bhid,bhrjd->bhrij", query, key) / variance

    log_prior = inputs.get("log_prior")
    if log_prior is not None and inputs.get("assignment", "soft") == "soft":
        log_prior = log_prior.double()
        if log_prior.ndim < 3:
            log_prior = log_prior.expand(heads // group, components)[:, :, None]
        logit = logit + log_prior.repeat_interleave(group, dim=-3)[..., None, :]
    return logit.masked_fill(~visible(inputs)[:, :, None], -math.inf)


def visible(inputs: dict) -> Tensor:
    """bool ``[B, H, Nq, Nk]``"""
    batch, heads, num_queries, _ = inputs["query"].shape
    num_keys = inputs["key"].shape[-2]
    seen = torch.ones(batch, heads, num_queries, num_keys, dtype=torch.bool, device=inputs["query"].device)
    if inputs.get("is_causal"):
        i = torch.arange(num_queries, device=seen.device)[:, None] + num_keys - num_queries
        seen = seen & (torch.arange(num_keys, device=seen.device) <= i)
    if inputs.get("key_mask") is not None:
        seen = seen & inputs["key_mask"][:, None, None]
    if inputs.get("attn_mask") is not None:
        seen = seen & inputs["attn_mask"]
    if inputs.get("query_mask") is not None:
        seen = seen & inputs["query_mask"][:, None, :, None]
    return seen


def weights(inputs: dict) -> Tensor:
    """``[B, H, Nq, Nk]``"""
    logit = logits(inputs)
    logit = logit.amax(2) if inputs.get("assignment") == "hard" else logit.logsumexp(2)
    empty = ~visible(inputs).any(-1, keepdim=True)
    return logit.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def attention(inputs: dict) -> Tensor:
    """``[B, H, Nq, Dv]``"""
    value = inputs["value"].double()
    return weights(inputs) @ value.repeat_interleave(inputs["query"].shape[1] // value.shape[1], dim=1)
