"""Random inputs for mixture attention, and how to run and compare them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

import mgk

DEVICE = torch.device(os.environ.get("MGK_TEST_DEVICE", "cpu"))
"""The CPU, or whatever MGK_TEST_DEVICE names: the same tests run on a GPU."""

# On a CPU `auto` is the backend of that name wherever it serves the call.
BACKENDS = ("reference", "chunked", "sdpa", "auto")
KINDS = ("projected", "shifted")
GRADIENTS = ("query", "key", "value", "shift", "log_prior", "variance")

# Relative RMS error of the output against fp64 on the same rounded inputs.
OUTPUT_CAP = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def make_inputs(
    *,
    kind: str = "projected",
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 19,
    keys: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    components: int = 2,
    prior: str | None = "head",
    variance: str | float | None = None,
    offset: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    **options: object,
) -> dict:
    """Keyword arguments of ``mgk.mixture_attention``. Mixture parameters are in fp32 beside half-precision inputs."""
    kv_heads, keys, value_dim = kv_heads or heads, keys or queries, value_dim or dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    key_shape = (batch, kv_heads, keys, dim) if kind == "shifted" else (batch, kv_heads, components, keys, dim)
    inputs = {
        "query": (scale * normal(batch, heads, queries, dim) + offset).to(dtype),
        "key": (scale * normal(*key_shape) + offset).to(dtype),
        "value": normal(batch, kv_heads, keys, value_dim).to(dtype),
    }
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if kind == "shifted":
        inputs["shift"] = normal(kv_heads, components, dim).to(parameter_dtype)
    if prior is not None:
        shape = {
            "head": (kv_heads, components),
            "position": (kv_heads, components, keys),
            "sample": (batch, kv_heads, components, keys),
        }[prior]
        inputs["log_prior"] = normal(*shape).log_softmax(-1 if prior == "head" else -2).to(parameter_dtype)
    if variance == "component":
        inputs["variance"] = (dim**0.5 * (0.5 + torch.rand(kv_heads, components, device=device))).to(parameter_dtype)
    elif variance is not None:
        inputs["variance"] = variance
    return {**inputs, **options}


def attend(inputs: dict, backend: str = "auto", **options: object) -> Tensor:
    inputs = {**inputs, **options}
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    return mgk.mixture_attention(query, key, value, backend=backend, **inputs)


def with_gradients(inputs: dict, grad: Tensor, backend: str | None = None, function=None) -> tuple[Tensor, dict]:
    """Output, and the gradient of every tensor of ``GRADIENTS`` that is there."""
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in inputs.items()
        if name in GRADIENTS and isinstance(tensor, Tensor)
    }
    run = (lambda inputs: attend(inputs, backend or "auto")) if function is None else function
    out = run({**inputs, **leaves})
    out.backward(grad.to(out.dtype))
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative root mean square error; NaN never passes a comparison."""
    got, expected = got.detach().double(), expected.detach().double()
    scale = expected.square().mean().sqrt()
    error = (got - expected).square().mean().sqrt()
    return float(error / scale) if scale > 0 else float(error)


def padding(batch: int, length: int, device: torch.device | str = "cpu", side: str = "right") -> Tensor:
    """A keep-mask in which sequence b loses b + 1 tokens on one side, bool ``[B, N]``."""
    position = torch.arange(length, device=device)
    lost = torch.arange(1, batch + 1, device=device)[:, None]
    return position < length - lost if side == "right" else position >= lost
