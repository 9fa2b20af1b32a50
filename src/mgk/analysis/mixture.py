"""The learned parameters of a mixture: priors, variances, shifts, key projections, and distances of components."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.record import AttentionCall, AttentionRecord

# Number of tokens whose keys are shown, as in figure 14 of the paper.
NUM_TOKENS = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedMixture:
    """The mixture of one layer with ``Hkv`` key/value heads and M components of width D, in fp64 on the CPU."""

    layer: str
    """Its name in the record."""
    prior: Tensor
    """``[Hkv, M]``, whose rows sum to 1; uniform if the layer has no prior."""
    variance: Tensor | None
    """``[Hkv, M]``; ``None`` for linear attention."""
    shift: Tensor | None
    """``[Hkv, M, D]``; ``None`` if each component has a projection of its own."""
    projection: Tensor
    """``[Hkv, 1 or M, D, embed_dim]``: the weights of the key projections, M if each component has its own."""
    keys: Tensor
    """``[Hkv, M, n, D]``: keys of the first n tokens of the first sample, after shifts, norms and positions."""
    distance: Tensor
    """``[Hkv, M, M]``: distance of two components of a position, ``|k_jr - k_js|``, averaged over tokens."""
    spread: Tensor
    """``[Hkv]``: distance of a position's mean key from the mean key of the sample, averaged over tokens. It is the
    scale for ``distance``: components that are much closer than this act as one key."""
    projection_distance: Tensor | None
    """``[Hkv, M, M]``: ``|W_r - W_s| / sqrt(|W_r| |W_s|)`` in the Frobenius norm, about 1.4 for unrelated projections;
    ``None`` if components are shifts of one projection."""
    num_tokens: int
    """Number of tokens in the means."""


def learned_mixture(record: AttentionRecord, *, num_tokens: int = NUM_TOKENS) -> list[LearnedMixture]:
    """Read the mixtures of each layer.

    Args:
        record: record of a model on a batch.
        num_tokens: number of tokens whose keys are kept; distances use all tokens that are not padding.
    """
    return [_of_call(call, num_tokens) for call in record.calls]


def _of_call(call: AttentionCall, num_tokens: int) -> LearnedMixture:
    attention, heads, components = call.attention, call.num_kv_heads, call.num_components
    keys = call.component_keys(0)[:, :, :num_tokens].double().cpu()
    apart = torch.zeros(heads, components, components, dtype=torch.float64)
    spread, count = torch.zeros(heads, dtype=torch.float64), 0
    for sample in range(call.num_samples):
        every = call.component_keys(sample).double().cpu()
        count += every.shape[2]
        for r in range(components):
            for s in range(r):
                apart[:, r, s] += (every[:, r] - every[:, s]).norm(dim=-1).sum(dim=-1)
        position = every.mean(dim=1)
        spread += (position - position.mean(dim=1, keepdim=True)).norm(dim=-1).sum(dim=-1)
    distance = (apart + apart.mT) / max(count, 1)

    variance = None
    if not call.is_linear:
        variance = torch.as_tensor(attention.variance(), dtype=torch.float64).detach().cpu().expand(heads, components)
    log_prior = attention.prior()
    if log_prior is None:
        prior = torch.full((heads, components), 1.0 / components, dtype=torch.float64)
    else:
        prior = log_prior.detach().double().cpu().softmax(dim=-1)
    shift = attention.keys.shift
    weight = attention.k_proj.weight.detach().double().cpu()
    projection = weight.unflatten(0, (heads, -1, attention.head_dim))
    return LearnedMixture(
        layer=call.name,
        prior=prior,
        variance=variance,
        shift=None if shift is None else shift.detach().double().cpu(),
        projection=projection,
        keys=keys,
        distance=distance,
        spread=spread / max(count, 1),
        projection_distance=_projection_distance(projection) if shift is None else None,
        num_tokens=count,
    )


def _projection_distance(projection: Tensor) -> Tensor:
    flat = projection.flatten(2)
    norm = flat.norm(dim=-1)
    scale = (norm[:, :, None] * norm[:, None, :]).sqrt()
    apart = (flat[:, :, None] - flat[:, None, :]).norm(dim=-1)
    return apart / scale.masked_fill(scale == 0, 1.0)
