"""Forward and backward passes of the fused kernels without anything around them, for the tools that look at kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mgk.benchmark.inputs import draw
from mgk.benchmark.shape import Shape
from mgk.ops.triton import passes
from mgk.ops.triton.inputs import Options, Tensors


def passes_of(
    preset: str, shape: Shape, device: torch.device, dropout_p: float = 0.0
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward pass, and the backward pass after it, in bf16. All heads of ``shape`` are the preset's."""
    drawn = draw(
        preset, batch=shape.batch, heads=shape.heads, tokens=shape.tokens, head_dim=shape.head_dim,
        is_causal=shape.is_causal, dtype=torch.bfloat16, device=device, needs_gradients=False,
    )  # fmt: skip
    key = drawn.key if drawn.key.ndim == 5 else drawn.key[:, :, None]
    prior = drawn.log_prior[..., None] if drawn.log_prior is not None and drawn.num_components > 1 else None
    seed = torch.zeros(1, dtype=torch.int64, device=device) if dropout_p else None
    tensors = Tensors(drawn.query, key, drawn.value, drawn.shift, prior, seed=seed)
    is_gaussian, is_hard = drawn.similarity == "gaussian", drawn.assignment == "hard"
    options = Options(shape.head_dim**-0.5, is_gaussian, shape.is_causal, is_hard, dropout_p)
    results = passes.forward_pass(tensors, options)
    grad = torch.randn_like(results.out)
    return (
        partial(passes.forward_pass, tensors, options),
        partial(passes.backward_pass, grad, None, results, tensors, options),
    )
