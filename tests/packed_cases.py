"""Sequences of different lengths, packed and padded."""

from __future__ import annotations

import torch
from torch import Tensor

import mgk

LENGTHS = (5, 0, 40, 33, 1, 17)
KEY_LENGTHS = (9, 3, 31, 40, 1, 2)
LEAVES = ("query", "key", "value", "shift", "log_prior", "variance")


def boundaries(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device
    )


def make_packed(
    *,
    lengths: tuple[int, ...] = LENGTHS,
    key_lengths: tuple[int, ...] | None = None,
    kind: str = "projected",
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    value_dim: int = 8,
    components: int = 2,
    prior: str | None = "head",
    variance: str | float | None = None,
    masked: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    **options: object,
) -> dict:
    """Keyword arguments of ``mgk.mixture_attention_varlen``."""
    key_lengths = lengths if key_lengths is None else key_lengths
    queries, keys = sum(lengths), sum(key_lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "query": normal(queries, heads, dim).to(dtype),
        "key": normal(keys, kv_heads, *(() if kind == "shifted" else (components,)), dim).to(dtype),
        "value": normal(keys, kv_heads, value_dim).to(dtype),
        "cu_seqlens_q": boundaries(lengths, device),
        "cu_seqlens_k": boundaries(key_lengths, device),
    }
    if kind == "shifted":
        inputs["shift"] = normal(kv_heads, components, dim).to(parameter_dtype)
    if prior is not None:
        shape = (kv_heads, components, keys) if prior == "position" else (kv_heads, components)
        inputs["log_prior"] = normal(*shape).log_softmax(1).to(parameter_dtype)
    if variance == "component":
        inputs["variance"] = (dim**0.5 * (0.5 + torch.rand(kv_heads, components, device=device))).to(parameter_dtype)
    elif variance is not None:
        inputs["variance"] = variance
    if masked:
        inputs["key_mask"] = torch.rand(keys, device=device) > 0.3
        inputs["query_mask"] = torch.rand(queries, device=device) > 0.2
    return {**inputs, **options}


def attend_packed(inputs: dict, backend: str) -> Tensor:
    inputs = dict(inputs)
    query, key, value = (inputs.pop(name) for name in LEAVES[:3])
    return mgk.mixture_attention_varlen(query, key, value, backend=backend, **inputs)


def attend_padded(inputs: dict, backend: str) -> Tensor:
    """The same through ``mgk.mixture_attention``: padded to the longest, and the padding taken out again."""
    inputs = dict(inputs)
    bounds, key_bounds = inputs.pop("cu_seqlens_q").tolist(), inputs.pop("cu_seqlens_k").tolist()
    query, key, value = (inputs.pop(name) for name in LEAVES[:3])
    prior, key_mask, query_mask = (inputs.pop(name, None) for name in ("log_prior", "key_mask", "query_mask"))
    outputs = []
    for first, end, first_key, end_key in zip(bounds[:-1], bounds[1:], key_bounds[:-1], key_bounds[1:], strict=True):
        pad, key_pad = max(bounds) - (end - first), max(key_bounds) - (end_key - first_key)
        own = {**inputs, "log_prior": prior}
        if prior is not None and prior.ndim == 3:
            own["log_prior"] = torch.nn.functional.pad(prior[:, :, first_key:end_key], (key_pad, 0))
        out = mgk.mixture_attention(
            pad_left(query[first:end], pad), pad_left(key[first_key:end_key], key_pad),
            pad_left(value[first_key:end_key], key_pad),
            key_mask=mask_left(key_mask, first_key, end_key, key_pad, key.device),
            query_mask=mask_left(query_mask, first, end, pad, query.device), backend=backend, **own,
        )  # fmt: skip
        outputs.append(out[0].transpose(0, 1)[pad:])
    return torch.cat(outputs)


def pad_left(tokens: Tensor, count: int) -> Tensor:
    """``[T, H, ..., D]`` as ``[1, H, ..., count + T, D]``; garbage in the padding."""
    garbage = tokens.new_full((count, *tokens.shape[1:]), 3.0)
    return torch.cat([garbage, tokens]).movedim(0, -2)[None]


def mask_left(mask: Tensor | None, first: int, end: int, count: int, device: torch.device) -> Tensor:
    own = torch.ones(end - first, dtype=torch.bool, device=device) if mask is None else mask[first:end]
    return torch.cat([torch.zeros(count, dtype=torch.bool, device=device), own])[None]


def with_gradients(function, inputs: dict, backend: str, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {
        name: inputs[name].detach().clone().requires_grad_() for name in LEAVES if isinstance(inputs.get(name), Tensor)
    }
    out = function({**inputs, **leaves}, backend)
    out.backward(grad.to(out.dtype))
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}
