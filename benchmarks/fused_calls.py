"""Forward and backward passes of the fused kernels without anything around them, for the tools that look at kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.triton import passes


class Preset(NamedTuple):
    """What kernels are told of a preset."""

    components: int
    is_shifted: bool
    is_gaussian: bool
    is_hard: bool = False
    dropout_p: float = 0.0


PRESETS = {
    "softmax": Preset(1, False, False),
    "gaussian": Preset(1, False, True),
    "smgk": Preset(2, True, True),
    "smgk-hard": Preset(2, True, True, is_hard=True),
    "smgk-dropout": Preset(2, True, True, dropout_p=0.1),
    "mgk": Preset(2, False, True),
    "mgk-hard": Preset(2, False, True, is_hard=True),
    "softmax-mgk": Preset(2, False, False),
}
KERNELS = ("forward", "key_value", "query")


def inputs(
    preset: str, batch: int, heads: int, tokens: int, head_dim: int, is_causal: bool, device: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and options of a pass, in bf16."""
    chosen = PRESETS[preset]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    query, value = (normal(batch, heads, tokens, head_dim) for _ in range(2))
    key = normal(batch, heads, 1 if chosen.is_shifted else chosen.components, tokens, head_dim)
    shift = torch.randn(heads, chosen.components, head_dim, device=device) if chosen.is_shifted else None
    has_prior = chosen.components > 1 and not chosen.is_hard
    prior = torch.full((heads, chosen.components, 1), -0.7, device=device) if has_prior else None
    seed = torch.zeros(1, dtype=torch.int64, device=device) if chosen.dropout_p else None
    options = (head_dim**-0.5, chosen.is_gaussian, is_causal, chosen.is_hard, chosen.dropout_p)
    return (query, key, value, shift, prior, None, None, None, None, seed, None, None), options


def passes_of(
    preset: str, batch: int, heads: int, tokens: int, head_dim: int, is_causal: bool, device: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward pass, and the backward pass after it."""
    tensors, options = inputs(preset, batch, heads, tokens, head_dim, is_causal, device)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return passes.forward_pass(*tensors, *options)

    results = forward()
    grad = torch.randn_like(results[0])
    return forward, lambda: passes.backward_pass(grad, None, *results, *tensors, *options)
