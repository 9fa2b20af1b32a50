"""Inputs of linear attention, and an oracle that shares no line with it: fp64, pair by pair."""

from __future__ import annotations

import math

import torch
from cases import DEVICE
from torch import Tensor

KINDS = ("projected", "shifted")


def make_linear(
    *, kind="projected", batch=2, heads=2, kv_heads=None, queries=19, keys=None, dim=8, value_dim=None, components=2,
    prior="head", dtype=torch.float64, device=DEVICE, masked=False, **options,
) -> dict:  # fmt: skip
    kv_heads = heads if kv_heads is None else kv_heads
    keys = queries if keys is None else keys
    value_dim = dim if value_dim is None else value_dim

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device).to(dtype)

    own = (components,) if kind == "projected" and components > 1 else ()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "query": normal(batch, heads, queries, dim),
        "key": normal(batch, kv_heads, *own, keys, dim),
        "value": normal(batch, kv_heads, keys, value_dim),
        **options,
    }
    if kind == "shifted":
        inputs["shift"] = normal(kv_heads, components, dim, dtype=wide)
    if prior is not None and components > 1:
        shape = (kv_heads, components) if prior == "head" else (kv_heads, components, keys)
        inputs["log_prior"] = normal(*shape, dtype=wide).log_softmax(dim=1)
    if masked:
        inputs["key_mask"] = torch.rand(batch, keys, device=device) > 0.3
        inputs["query_mask"] = torch.rand(batch, queries, device=device) > 0.2
    return inputs


def phi(name: str, x: Tensor) -> Tensor:
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "relu":
        return x.clamp(min=0)
    assert name == "dpfp"
    both = torch.cat([x, -x]).clamp(min=0)
    return torch.cat([both * torch.cat([both[-n:], both[:-n]]) for n in (1, 2, 3)])


def oracle(inputs: dict) -> Tensor:
    """``[B, H, Nq, Dv]``"""
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    shift, prior = inputs.get("shift"), inputs.get("log_prior")
    name, normalization = inputs.get("feature_map", "elu"), inputs.get("normalization", "sum")
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[-2]
    components = shift.shape[1] if shift is not None else key.shape[2] if key.ndim == 5 else 1
    rows = []
    for b in range(batch):
        for h in range(heads):
            kv = h * kv_heads // heads
            for i in range(queries):
                total, weight, count = torch.zeros(value.shape[-1], dtype=torch.float64, device=value.device), 0.0, 0
                for j in range(keys):
                    if inputs.get("is_causal") and j > i + keys - queries:
                        continue
                    if inputs.get("key_mask") is not None and not inputs["key_mask"][b, j]:
                        continue
                    count += 1
                    for r in range(components):
                        if shift is not None:
                            own = key[b, kv, j] + shift[kv, r].double()
                        else:
                            own = key[b, kv, r, j] if key.ndim == 5 else key[b, kv, j]
                        chance = torch.tensor(1.0 / components, dtype=torch.float64, device=value.device)
                        if prior is not None:
                            chance = (prior[kv, r] if prior.ndim == 2 else prior[kv, r, j]).double().exp()
                        own_weight = chance * (phi(name, query[b, h, i]) @ phi(name, own))
                        total = total + own_weight * value[b, kv, j]
                        weight = weight + own_weight
                scale = math.sqrt(count) if normalization == "length" else weight
                out = total / scale if bool(scale != 0) else torch.zeros_like(total)
                if inputs.get("query_mask") is not None and not inputs["query_mask"][b, i]:
                    out = out * 0.0
                rows.append(out)
    return torch.stack(rows).reshape(batch, heads, queries, -1)
