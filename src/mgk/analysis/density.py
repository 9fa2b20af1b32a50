"""Negative log-likelihood of the queries under the mixture, and under one Gaussian per position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk.analysis.record import AttentionCall, AttentionRecord
from mgk.ops import mixture_log_density


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryDensity:
    """Negative log-likelihoods of one layer's queries in nats, averaged over all valid queries of the batch."""

    layer: str
    """Its name in the record."""
    mixture: Tensor
    """``[H]``: the paper's NLL, ``-log mean_j sum_r prior_r exp(-|q_i - k_jr|^2 / 2 variance_r)``, which like attention
    leaves out the constants of the Gaussians."""
    components: Tensor
    """``[M, H]``: the same for component r alone."""
    merged: Tensor
    """``[H]``: the same with one Gaussian per position, whose mean and variance are the means of the position's keys
    and variances, weighted by the prior."""
    normalized_mixture: Tensor
    """``[H]``: the NLL of the mixture with the constants ``(2 pi variance)^(-D/2)``, a proper density that can be
    compared between variances."""
    normalized_merged: Tensor
    """``[H]``: the same for one Gaussian per position."""
    num_queries: int
    """Number of queries in the means."""


@torch.no_grad()
def query_density(record: AttentionRecord) -> list[QueryDensity]:
    """Compute the NLL of the queries of each layer and head, in memory linear in the length.

    The paper compares a trained mixture with another model that was trained with one Gaussian. Here both numbers come
    from one model, whose keys are merged afterwards. Their difference shows what the mixture does for these queries,
    not what training without it would have given; for that, compare the ``mixture`` of two models.

    With ``assignment="hard"`` the prior is uniform, since hard attention has none.

    Args:
        record: record of a model on a batch, with Gaussian similarity.
    """
    return [_of_call(call) for call in record.calls]


def _of_call(call: AttentionCall) -> QueryDensity:
    if call.is_linear:
        raise ValueError(f"a density needs Gaussian keys, got linear attention in {call.name}")
    if call.attention.similarity != "gaussian":
        raise ValueError(
            f"a density needs Gaussian keys, got similarity={call.attention.similarity!r} in {call.name}: "
            f"a dot product is no density"
        )
    heads, components = call.num_heads, call.num_components
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    sums = torch.zeros(4 + components, heads, dtype=torch.float64)
    count = 0
    for sample in range(call.num_samples):
        queries = call.queries(sample)
        count += len(queries)
        for head in range(heads):
            options = call.problem(sample, head, queries, dtype)
            merged = _merged(options, components)
            alone = [_alone(options, number) for number in range(components)]
            plain = [_total(each) for each in (options, merged, *alone)]
            sums[: 2 + components, head] += torch.tensor(plain, dtype=torch.float64)
            for row, each in ((0, options), (1, merged)):
                sums[2 + components + row, head] += _normalized_total(each, plain[row], len(queries))
    mean = sums / max(count, 1)
    return QueryDensity(
        layer=call.name, mixture=mean[0], merged=mean[1], components=mean[2:-2], normalized_mixture=mean[-2],
        normalized_merged=mean[-1], num_queries=count,
    )  # fmt: skip


def _total(options: dict[str, Any], *, normalized: bool = False) -> float:
    """Sum the NLL over the queries."""
    return -float(mixture_log_density(**options, normalized=normalized).double().sum())


def _normalized_total(options: dict[str, Any], plain: float, num_queries: int) -> float:
    """Sum the NLL with the constants of the Gaussians, given the sum ``plain`` without them."""
    variance = options["variance"]
    if isinstance(variance, Tensor):
        return _total(options, normalized=True)
    # All components have the same constant, which can be taken out of the sum.
    return plain + num_queries * 0.5 * options["query"].shape[-1] * math.log(2 * math.pi * variance)


def _keys(options: dict[str, Any]) -> Tensor:
    """Return the keys with shifts added, ``[1, 1, M, Nk, D]``."""
    key, shift = options["key"], options["shift"]
    key = key[:, :, None] if key.ndim == 4 else key
    return key if shift is None else key + shift[:, :, None, :]


def _alone(options: dict[str, Any], component: int) -> dict[str, Any]:
    """Return the options with a single component of the keys."""
    variance = options["variance"]
    if isinstance(variance, Tensor):
        variance = variance[..., component : component + 1]
    key = _keys(options)[:, :, component : component + 1]
    return {**options, "key": key, "shift": None, "log_prior": None, "variance": variance}


def _merged(options: dict[str, Any], components: int) -> dict[str, Any]:
    """Return the options with the mean of the keys at each position."""
    key, log_prior, variance = _keys(options), options["log_prior"], options["variance"]
    if log_prior is None:
        prior = key.new_full((1, components), 1.0 / components)
    else:
        prior = log_prior.softmax(dim=-1)
    if isinstance(variance, Tensor):
        variance = (prior * variance).sum(dim=-1, keepdim=True)
    mean = (prior[:, :, None, None] * key).sum(dim=2, keepdim=True)
    return {**options, "key": mean, "shift": None, "log_prior": None, "variance": variance}
