"""How likely the queries are: their negative log-likelihood under the mixture, and under one Gaussian to a key."""

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
    """Negative log-likelihoods of one layer's queries in nats: means over all valid queries of the batch."""

    layer: str
    """Its name in the record."""
    mixture: Tensor
    """``[H]``: ``-log mean_j sum_r prior_r exp(-|q_i - k_jr|^2 / 2 variance_r)``, which is the paper's NLL: the
    constants of the Gaussians are left out, as attention leaves them out."""
    components: Tensor
    """``[M, H]``: the same with component r alone."""
    merged: Tensor
    """``[H]``: the same with one Gaussian to a position, at the prior's mean of its keys, with the prior's mean of
    their variances."""
    normalized_mixture: Tensor
    """``[H]``: with the constants ``(2 pi variance)^(-D/2)``: a true density, which may be compared between
    variances."""
    normalized_merged: Tensor
    """``[H]``: that of one Gaussian to a position."""
    num_queries: int
    """How many the means are over."""


@torch.no_grad()
def query_density(record: AttentionRecord) -> list[QueryDensity]:
    """The NLL of the queries of each layer and head, in memory linear in the length.

    The paper sets a trained mixture beside another model, trained with one Gaussian. Here the model is the same one,
    its keys merged afterwards: the difference says what the mixture does for these queries, not what training would
    have done without it. For that, compare the ``mixture`` of two models.

    With ``assignment="hard"`` the mixture has a uniform prior, since hard attention has none.

    Args:
        record: of a model and a batch, with Gaussian similarity.
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
    """Sum of the NLL over the queries."""
    return -float(mixture_log_density(**options, normalized=normalized).double().sum())


def _normalized_total(options: dict[str, Any], plain: float, num_queries: int) -> float:
    """The same with the constants of the Gaussians, where ``plain`` is known without."""
    variance = options["variance"]
    if isinstance(variance, Tensor):
        return _total(options, normalized=True)
    # All components have the same, which comes before the sum.
    return plain + num_queries * 0.5 * options["query"].shape[-1] * math.log(2 * math.pi * variance)


def _keys(options: dict[str, Any]) -> Tensor:
    """``[1, 1, M, Nk, D]``, shifts added."""
    key, shift = options["key"], options["shift"]
    key = key[:, :, None] if key.ndim == 4 else key
    return key if shift is None else key + shift[:, :, None, :]


def _alone(options: dict[str, Any], component: int) -> dict[str, Any]:
    """The same queries and one component of the keys."""
    variance = options["variance"]
    if isinstance(variance, Tensor):
        variance = variance[..., component : component + 1]
    key = _keys(options)[:, :, component : component + 1]
    return {**options, "key": key, "shift": None, "log_prior": None, "variance": variance}


def _merged(options: dict[str, Any], components: int) -> dict[str, Any]:
    """The same queries and the mean of the keys of each position."""
    key, log_prior, variance = _keys(options), options["log_prior"], options["variance"]
    if log_prior is None:
        prior = key.new_full((1, components), 1.0 / components)
    else:
        prior = log_prior.softmax(dim=-1)
    if isinstance(variance, Tensor):
        variance = (prior * variance).sum(dim=-1, keepdim=True)
    mean = (prior[:, :, None, None] * key).sum(dim=2, keepdim=True)
    return {**options, "key": mean, "shift": None, "log_prior": None, "variance": variance}
