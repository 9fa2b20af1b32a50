"""Memory that grows with the length, and products that are counted as they are done (L7, L2, goal of the issue)."""

import gc

import pytest
import torch
from cases import KINDS
from torch.utils.flop_counter import FlopCounterMode
from triton_cases import (
    BACKEND,
    BFLOAT16,
    FLOAT32,
    INTERPRETED,
    ONE_DTYPE,
    attend,
    gradients_of,
    log_density,
    make_inputs,
    responsibilities,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
PADDED_BLOCK = 16 if INTERPRETED else 128
"""As many rows as any block has."""

SHAPES = [
    {},
    {"components": 3},
    {"queries": 21, "keys": 33, "value_dim": 12, "heads": 4, "kv_heads": 2},
    {"is_causal": True},
    {"is_causal": True, "keys": 40, "kv_heads": 1},
    {"is_causal": True, "keys": 7},
]


def visible_pairs(inputs):
    """Pairs on and below the diagonal, which ends in the last corner; all pairs without causality."""
    batch, heads, queries, _ = inputs["query"].shape
    keys = inputs["key"].shape[-2]
    if not inputs.get("is_causal"):
        return batch * heads * queries * keys
    return batch * heads * sum(max(0, i + keys - queries + 1) for i in range(queries))


@pytest.mark.skipif(BACKEND != "triton", reason="counts the products of the fused kernels")
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flops_are_counted(kind, shape, device):
    """L7: q.k for each key tensor and p.v forward; logits and dP twice, dk, dq and dv backward."""
    inputs = make_inputs(
        kind=kind, **{"batch": 1, "heads": 2, "queries": 19, "dim": 16, **shape}, dtype=ONE_DTYPE, device=device
    )
    key_tensors = 1 if kind == "shifted" else inputs["key"].shape[2]
    query_key = 2 * visible_pairs(inputs) * key_tensors * inputs["query"].shape[-1]
    weight_value = 2 * visible_pairs(inputs) * inputs["value"].shape[-1]
    with FlopCounterMode(display=False) as counter:
        gradients_of(inputs, torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], device=device))
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.mgk.fused_attention] == query_key + weight_value
    assert counts[torch.ops.mgk.fused_attention_backward] == 4 * query_key + 3 * weight_value


@pytest.mark.skipif(BACKEND != "triton", reason="counts the products of the fused kernels")
def test_flops_need_no_data():
    """L7: on the meta device, as a planner counts a model that fits nowhere."""
    inputs = make_inputs(kind="shifted", heads=2, queries=1024, dim=64, dtype=FLOAT32)
    inputs = {name: value.to("meta") for name, value in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        attend(inputs)
    assert counter.get_flop_counts()["Global"][torch.ops.mgk.fused_attention] == 2 * 2 * 2 * 1024**2 * 128


@pytest.mark.skipif(BACKEND != "triton", reason="looks at what the fused kernels leave to be repaired")
@every_kind
def test_padding_is_not_repaired(kind, device, monkeypatch):
    from mgk.ops.triton import passes
    from mgk.ops.triton.kernels import repair

    left, launch = [], passes.launch

    def look_and_launch(kernel, programs, values, *rest):
        if kernel is repair.attention_repair:
            left.append(int(values["p_normaliser"].isnan().sum()))
        return launch(kernel, programs, values, *rest)

    monkeypatch.setattr(passes, "launch", look_and_launch)
    length = 3 * PADDED_BLOCK
    inputs = make_inputs(kind=kind, batch=2, heads=2, queries=length, dim=16, dtype=ONE_DTYPE, device=device)
    valid = torch.arange(length, device=device) < torch.tensor([[PADDED_BLOCK // 3], [length]], device=device)
    attend({**inputs, "key_mask": valid, "query_mask": valid})
    assert left == [0]


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize(("is_causal", "dtype"), [(False, BFLOAT16), (True, BFLOAT16), (False, FLOAT32)], ids=str)
def test_peak_memory_is_linear(kind, is_causal, dtype):
    """L7: at lengths that divide by nothing, forward and backward."""
    peaks = {}
    for length in (8195, 16387, 32771):
        inputs = make_inputs(
            kind=kind, batch=1, heads=1, queries=length, dim=16, dtype=dtype, device="cuda", is_causal=is_causal
        )
        grad = torch.randn_like(inputs["value"])
        gc.collect()  # what another test has left must not be freed in between
        torch.cuda.reset_peak_memory_stats()
        # What was asked for: what is given is rounded up, differently at different sizes.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        gradients_of(inputs, grad)
        peaks[length] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peaks[16387] < 2.2 * peaks[8195], peaks
    assert peaks[32771] < 2.2 * peaks[16387], peaks
    assert peaks[8195] < 100e6, peaks


@pytest.mark.gpu
@every_kind
def test_very_long_sequences(kind):
    """L2: 131,072 tokens, with everything that training asks for, in 64 bytes for each number of a key."""
    length, dim = 131_072, 16
    inputs = make_inputs(
        kind=kind, batch=1, heads=1, queries=length, dim=dim, dtype=BFLOAT16, device="cuda", is_causal=True
    )
    grad = torch.randn_like(inputs["value"])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, gradients = gradients_of(inputs, grad)
    inputs.pop("value")
    log_density(inputs), responsibilities(inputs)
    assert torch.cuda.max_memory_allocated() - before < 64 * length * dim
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
