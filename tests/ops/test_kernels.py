"""The `sdpa` backend really runs on the fused kernels: never on the one that materialises every pair."""

import pytest
import torch
from cases import KINDS, attend, make_inputs, padding, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = {"cpu": ("flash_attention_for_cpu",), "cuda": ("flash_attention", "efficient_attention", "cudnn_attention")}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


SETTINGS = [
    {},
    {"components": 1, "prior": None},
    {"components": 1, "prior": None, "similarity": "dot"},
    {"similarity": "dot"},
    {"variance": "component"},
    {"value_dim": 20},
    {"value_dim": 5, "dim": 33},
    {"is_causal": True},
    {"is_causal": True, "keys": 300},
    {"is_causal": True, "heads": 4, "kv_heads": 2},
    {"heads": 4, "kv_heads": 1},
    {"components": 3, "prior": "position"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_fused_kernels_are_taken(kind, dtype, settings, masked, device):
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{"queries": 270, "dim": 16, **settings})
    if masked:
        inputs["key_mask"] = padding(2, inputs["key"].shape[-2], device)
    with Recorder() as forward:
        attend(inputs, "sdpa")
    fused = [name for name in forward.names if any(kernel in name for kernel in FUSED[device.type])]
    assert fused
    assert not [name for name in forward.names if "softmax" in name and "log_softmax" not in name]
    with Recorder() as both:
        grad = torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], device=device).to(dtype)
        with_gradients(inputs, grad, "sdpa")
    assert any("backward" in name and any(kernel in name for kernel in FUSED[device.type]) for name in both.names)
