"""Random inputs of one attention call, with parameters like those of :class:`mgk.MixtureAttention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mgk.nn.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of one call of :func:`mgk.mixture_attention`. The variance is the default, ``sqrt(D)``."""

    query: Tensor
    """``[B, H, N, D]``, or ``[B, H, 1, D]`` for a step of generation"""
    key: Tensor
    """``[B, H, M, N, D]``, or ``[B, H, N, D]`` for one component or shifted keys."""
    value: Tensor
    """``[B, H, N, D]``"""
    shift: Tensor | None
    """``[H, M, D]`` in fp32"""
    log_prior: Tensor | None
    """``[H, M]`` in fp32"""
    similarity: str
    assignment: str
    is_causal: bool
    feature_map: str | None = None
    """Feature map of linear attention."""

    @property
    def num_components(self) -> int:
        if self.shift is not None:
            return self.shift.shape[1]
        return self.key.shape[2] if self.key.ndim == 5 else 1

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that require a gradient."""
        names = ("query", "key", "value", "shift", "log_prior")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.requires_grad}

    def in_float64(self) -> Inputs:
        """Return a copy in fp64, whose tensors are new leaves."""
        copies: dict[str, Any] = {
            name: tensor.detach().double().requires_grad_() for name, tensor in self.leaves().items()
        }
        return replace(self, **copies)


def draw(
    preset: str,
    *,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    is_causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    queries: int | None = None,
    needs_gradients: bool = True,
) -> Inputs:
    """Draw standard normal query, key, value and shifts as leaves, and priors as a softmax of normal numbers.

    ``queries`` defaults to ``tokens``.
    """
    options = PRESETS[preset]
    components, is_shifted = options.num_components, options.keys == "shifted"

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    own_keys = (components,) if components > 1 and not is_shifted else ()
    log_prior = None
    if options.prior != "uniform":
        log_prior = normal(heads, components, dtype=torch.float32).log_softmax(dim=-1)
        # A prior that EM sets is no parameter.
        log_prior.requires_grad_(needs_gradients and options.prior == "learned")
    query = normal(batch, heads, tokens if queries is None else queries, head_dim)
    key, value = normal(batch, heads, *own_keys, tokens, head_dim), normal(batch, heads, tokens, head_dim)
    shift = normal(heads, components, head_dim, dtype=torch.float32) if is_shifted else None
    return Inputs(
        query=query.requires_grad_(needs_gradients),
        key=key.requires_grad_(needs_gradients),
        value=value.requires_grad_(needs_gradients),
        shift=None if shift is None else shift.requires_grad_(needs_gradients),
        log_prior=log_prior,
        similarity=options.similarity,
        assignment=options.assignment,
        is_causal=is_causal,
        feature_map=options.feature_map,
    )
