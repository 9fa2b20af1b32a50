"""The share of each component of the mixture in an attention weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mgk.analysis.record import AttentionCall, record_attention
from mgk.nn import MixtureAttention


def component_shares(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    """Compute the share of each component in each weight, ``[layers][B, H, M, Nq, Nk]``, in fp32 on the CPU.

    The shares sum to 1 over the components for every pair, including masked ones. Multiplied by the weights of
    :func:`mgk.analysis.attention_maps`, they are the contribution of each component to attention. With soft assignment
    a share is the responsibility ``p(r | i, j)``. With hard assignment it is 1 for the nearest component, and
    components that tie share it. In linear attention, which has no density, it is the component's part of ``sum_r
    prior_r phi(q_i) . phi(k_jr)``, or ``1 / M`` where that sum is zero.

    The model is evaluated without dropout and gradients. For a model of pairs the shares are those of the first
    sequence, and for a decoder those of its self-attention.

    Args:
        model: any model of :mod:`mgk.models` with one stack of layers.
        inputs: arguments of its ``forward``.
    """
    calls = record_attention(model, **inputs).calls
    return [_of_call(call) for call in calls if not getattr(call.attention, "is_cross", False)]


def _of_call(call: AttentionCall) -> Tensor:
    group = call.num_heads // call.num_kv_heads
    found = []
    for sample in range(call.num_samples):
        keys = double_keys(call, sample)
        heads = [
            shares_of_head(call.attention, head // group, query, keys[head // group])
            for head, query in enumerate(call.query[sample])
        ]
        found.append(torch.stack(heads).to("cpu", torch.float32))
    return torch.stack(found)


@torch.no_grad()
def double_keys(call: AttentionCall, sample: int) -> Tensor:
    """Return every key of a sample with padding and with shifts added, ``[Hkv, M, Nk, D]``, in fp64."""
    key = call.key[sample].double()
    key = key if key.ndim == 4 else key[:, None]
    return key if call.shift is None else key + call.shift.double()[:, :, None]


@torch.no_grad()
def shares_of_head(attention: MixtureAttention, own: int, query: Tensor, key: Tensor) -> Tensor:
    """Compute the shares of one head, ``[M, n, Nk]``, in fp64, in which the plain formula is accurate enough.

    Args:
        attention: the layer.
        own: index of the head's key/value head, which has its prior and variance.
        query: ``[n, D]``.
        key: ``[M, Nk, D]``, with shifts added.
    """
    query, key = query.double(), key.double()
    log_prior = key.new_zeros(len(key), 1, 1)
    if (given := attention.prior()) is not None and attention.assignment == "soft":
        log_prior = given[own].double()[:, None, None]
    if attention.feature_map is not None:
        parts = attention.feature_map.query(query) @ attention.feature_map.key(key).mT * log_prior.exp()
        total = parts.sum(dim=0)
        return torch.where(total > 0, parts / total.masked_fill(total == 0, 1.0), 1.0 / len(parts))
    variance = attention.variance()
    if isinstance(variance, Tensor):
        variance = variance.double().expand(attention.num_kv_heads, -1)[own][:, None, None]
    if attention.similarity == "dot":
        similarity = query @ key.mT / variance
    else:
        distance = torch.cdist(query.expand(len(key), -1, -1), key, compute_mode="donot_use_mm_for_euclid_dist")
        similarity = distance.square() / (-2 * variance)
    if attention.assignment == "hard":
        is_best = (similarity == similarity.amax(dim=0)).double()
        return is_best / is_best.sum(dim=0)
    return torch.softmax(similarity + log_prior, dim=0)
