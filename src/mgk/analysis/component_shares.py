"""Which component of the mixture answers a query at a key."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mgk.evaluation.inference import evaluation_mode
from mgk.nn import MixtureAttention


def component_shares(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    """What part of each weight comes from each component, ``[layers][B, H, M, Nq, Nk]``, in fp32 on the CPU.

    Over the components they sum to 1, for every pair, also for those that a mask hides. Times the weights of
    :func:`mgk.analysis.attention_maps` they are what each component contributes to attention. With soft assignment a
    share is the responsibility ``p(r | i, j)``; with hard assignment it is 1 for the component that is nearest (equally
    near ones share it); of linear attention, which has no density, it is the component's part of
    ``sum_r prior_r phi(q_i) . phi(k_jr)``, and equal parts where that is zero.

    Evaluated without dropout and gradients. Of a model for pairs these are the shares of the first sequence.

    Args:
        model: any model of :mod:`mgk.models` with one stack of layers.
        inputs: what its ``forward`` takes.
    """
    found: dict[MixtureAttention, Tensor] = {}
    with evaluation_mode(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MixtureAttention):
                stack.enter_context(_watching(module, found))
        model(**inputs)
    if not found:
        raise ValueError(f"model must attend with mgk.MixtureAttention, got {type(model).__name__}, which does not")
    return list(found.values())


@contextmanager
def _watching(module: MixtureAttention, found: dict[MixtureAttention, Tensor]) -> Iterator[None]:
    # Only here are queries and keys complete: normalised and rotated.
    attend = module.attend

    @functools.wraps(attend)
    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        if module not in found:
            found[module] = _shares(module, q, k, options["shift"]).to("cpu", torch.float32)
        return attend(q, k, v, **options)

    module.attend = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.attend


def _shares(module: MixtureAttention, q: Tensor, k: Tensor, shift: Tensor | None) -> Tensor:
    """In fp64, where the plain formula needs no care. q ``[B, H, Nq, D]``, k ``[B, G, Nk, D]`` or
    ``[B, G, M, Nk, D]``, shift ``[G, M, D]``."""
    query = q.double()[:, :, None]
    keys = (k if k.ndim == 5 else k[:, :, None]).double()
    if shift is not None:
        keys = keys + shift.double()[:, :, None]
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    log_prior: Tensor | float = 0.0
    if (given := module.prior()) is not None and module.assignment == "soft":
        log_prior = given.double().repeat_interleave(group, dim=0)[:, :, None, None]
    if module.feature_map is not None:
        features = module.feature_map.query(query) @ module.feature_map.key(keys).mT
        parts = features * (log_prior.exp() if isinstance(log_prior, Tensor) else 1.0)
        total = parts.sum(dim=2, keepdim=True)
        return torch.where(total > 0, parts / total.masked_fill(total == 0, 1.0), 1.0 / parts.shape[2])
    variance = module.variance()
    if isinstance(variance, Tensor):
        variance = variance.double().expand(module.num_kv_heads, -1).repeat_interleave(group, dim=0)[:, :, None, None]
    if module.similarity == "dot":
        similarity = query @ keys.mT / variance
    else:
        similarity = torch.cdist(query, keys, compute_mode="donot_use_mm_for_euclid_dist").square() / (-2 * variance)
    if module.assignment == "hard":
        is_nearest = (similarity == similarity.amax(dim=2, keepdim=True)).double()
        return is_nearest / is_nearest.sum(dim=2, keepdim=True)
    return torch.softmax(similarity + log_prior, dim=2)
