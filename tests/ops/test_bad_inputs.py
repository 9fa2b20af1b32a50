"""Every bad input raises before any work, and says what was expected and what came (1-14, 16 of the catalogue)."""

import re

import pytest
import torch
from cases import make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import mgk

T = torch.zeros
INF, NAN = float("inf"), float("nan")


def call(function=mgk.mixture_attention, **changes):
    """Valid inputs (B 2, H 4, Hkv 2, M 2, Nq 5, Nk 7, D 8, Dv 6) with some replaced."""
    inputs = make_inputs(heads=4, kv_heads=2, queries=5, keys=7, dim=8, value_dim=6, dtype=torch.float32)
    inputs = {**inputs, **changes}
    if function is not mgk.mixture_attention:
        inputs.pop("value")
    return function(**inputs)


BAD = [
    # 1 ranks
    ({"query": T(4, 5, 8)}, ValueError, "query must have shape [B, H, Nq, D], got [4, 5, 8]"),
    ({"key": T(2, 7, 8)}, ValueError, "key must have shape [B, Hkv, M, Nk, D] or [B, Hkv, Nk, D], got [2, 7, 8]"),
    ({"value": T(2, 7, 6)}, ValueError, "value must have shape [B, Hkv, Nk, Dv], got [2, 7, 6]"),
    ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
    ({"value": 3}, TypeError, "value must be a tensor, got int"),
    # 2 batch, heads, lengths
    ({"key": T(3, 2, 2, 7, 8)}, ValueError, "key must have the batch size of query, 2, got 3"),
    ({"value": T(1, 2, 7, 6)}, ValueError, "value must have the batch size of query, 2, got 1"),
    ({"value": T(2, 4, 7, 6)}, ValueError, "value must have as many heads as key, 2, got 4"),
    ({"value": T(2, 2, 5, 6)}, ValueError, "value must have as many positions as key, 7, got 5"),
    # 3 head dimension
    ({"key": T(2, 2, 2, 7, 9)}, ValueError, "key must have the head dimension of query, 8, got 9"),
    # 4 no component axis
    ({"key": T(2, 2, 7, 8)}, ValueError, "as many components as key, 1, got 2: key needs a component axis, [B, Hkv, M"),
    # 5 components
    ({"key": T(2, 2, 0, 7, 8)}, ValueError, "key must have at least one component, got M = 0"),
    ({"log_prior": T(2, 3)}, ValueError, "log_prior must have as many components as key, 2, got 3"),
    ({"log_prior": T(3)}, ValueError, "log_prior must have as many components as key, 2, got 3"),
    ({"shift": T(2, 2, 8)}, ValueError, "key must have shape [B, Hkv, Nk, D] when shift is given, got 2 components"),
    ({"key": T(2, 2, 7, 8), "shift": T(2, 8)}, ValueError, "shift must have shape [Hkv, M, D] = [2, M, 8], got [2, 8]"),
    ({"key": T(2, 2, 7, 8), "shift": T(4, 2, 8)}, ValueError, "= [2, M, 8], got [4, 2, 8]"),
    ({"key": T(2, 2, 7, 8), "shift": T(2, 0, 8)}, ValueError, "= [2, M, 8], got [2, 0, 8]"),
    # 6 grouped heads
    ({"query": T(2, 3, 5, 8)}, ValueError, "the heads of query must be a multiple of those of key, got 3 and 2"),
    # 7 no width
    ({"query": T(2, 4, 5, 0)}, ValueError, "query must have a head dimension of at least 1, got 0"),
    # 8 mixed dtypes and devices
    ({"key": T(2, 2, 2, 7, 8).half()}, TypeError, "key must have the dtype of query, torch.float32, got torch.float16"),
    (
        {"value": T(2, 2, 7, 6).double()},
        TypeError,
        "value must have the dtype of query, torch.float32, got torch.float64",
    ),
    ({"key": T(2, 2, 2, 7, 8, device="meta")}, ValueError, "key must be on the device of query, cpu, got meta"),
    ({"log_prior": T(2, 2, device="meta")}, ValueError, "log_prior must be on the device of query, cpu, got meta"),
    ({"variance": T(2, device="meta")}, ValueError, "variance must be on the device of query, cpu, got meta"),
    # 9 dtypes
    ({"query": T(2, 4, 5, 8).int()}, TypeError, "query must be float64, float32, bfloat16 or float16, got torch.int32"),
    ({"key": T(2, 2, 2, 7, 8) + 0j}, TypeError, "bfloat16 or float16, got torch.complex64"),
    (
        {"log_prior": T(2, 2).long()},
        TypeError,
        "log_prior must be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    # 10 variance
    ({"variance": 0}, ValueError, "variance must be positive and finite, got 0"),
    ({"variance": -1.5}, ValueError, "variance must be positive and finite, got -1.5"),
    ({"variance": NAN}, ValueError, "variance must be positive and finite, got nan"),
    ({"variance": INF}, ValueError, "variance must be positive and finite, got inf"),
    (
        {"variance": torch.tensor([1.0, 0.0])},
        ValueError,
        "variance must be positive and finite, got values from 0 to 1",
    ),
    ({"variance": torch.tensor([1.0, NAN])}, ValueError, "variance must be positive and finite, got values from nan"),
    (
        {"variance": torch.tensor([1.0, 1e-60], dtype=torch.float64)},
        ValueError,
        "variance must be positive and finite, got values from 0 to 1",
    ),
    ({"variance": torch.ones(3)}, ValueError, "shape [M] = [2] or [Hkv, M] = [2, 2], got [3]"),
    ({"variance": torch.ones(4, 2)}, ValueError, "shape [M] = [2] or [Hkv, M] = [2, 2], got [4, 2]"),
    ({"variance": True}, TypeError, "variance must be a number or a tensor, got bool"),
    ({"variance": "1"}, TypeError, "variance must be a number or a tensor, got str"),
    # 11 prior
    ({"log_prior": torch.tensor([0.0, NAN])}, ValueError, "log_prior must hold numbers below infinity, got NaN or inf"),
    ({"log_prior": T(2).double() + 1e300}, ValueError, "log_prior must hold numbers below infinity, got NaN or inf"),
    ({"log_prior": torch.tensor([0.0, INF])}, ValueError, "log_prior must hold numbers below infinity, got NaN or inf"),
    ({"log_prior": torch.tensor([-INF, -INF])}, ValueError, "a component with a prior above zero, got all -inf"),
    ({"log_prior": T(1, 2)}, ValueError, "log_prior must have as many heads as key, 2, got 1"),
    (
        {"log_prior": T(1, 2, 2, 2, 7)},
        ValueError,
        "log_prior must have shape [M], [Hkv, M], [Hkv, M, Nk] or [B, Hkv, M, Nk], got [1, 2, 2, 2, 7]",
    ),
    ({"log_prior": T(3, 2, 2, 7)}, ValueError, "log_prior must have the batch size of query, 2, got 3"),
    ({"log_prior": T(2, 1, 2, 7)}, ValueError, "log_prior must have as many heads as key, 2, got 1"),
    ({"log_prior": T(2, 2, 3, 7)}, ValueError, "log_prior must have as many components as key, 2, got 3"),
    ({"log_prior": T(2, 2, 2, 5)}, ValueError, "log_prior must cover all 7 key positions, got 5"),
    ({"log_prior": torch.full((2, 2, 2, 7), NAN)}, ValueError, "log_prior must hold numbers below infinity, got NaN"),
    # 12 prior by position
    ({"log_prior": T(2, 2, 5)}, ValueError, "log_prior must cover all 7 key positions, got 5"),
    # 13 masks
    ({"key_mask": T(2, 7)}, TypeError, "key_mask must be a bool tensor, True = attend, got torch.float32"),
    ({"query_mask": T(2, 5).int()}, TypeError, "query_mask must be a bool tensor, True = attend, got torch.int32"),
    ({"attn_mask": T(5, 7)}, TypeError, "attn_mask must be a bool tensor, True = attend, got torch.float32"),
    ({"attn_mask": T(5, 7).fill_(INF)}, TypeError, "attn_mask must be a bool tensor, True = attend, got torch.float32"),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a bool tensor, True = attend, got list"),
    ({"key_mask": T(2, 5).bool()}, ValueError, "key_mask must have shape [2, 7], got [2, 5]"),
    ({"key_mask": T(7).bool()}, ValueError, "key_mask must have shape [2, 7], got [7]"),
    ({"query_mask": T(2, 7).bool()}, ValueError, "query_mask must have shape [2, 5], got [2, 7]"),
    ({"attn_mask": T(7, 5).bool()}, ValueError, "broadcastable to [B, H, Nq, Nk] = [2, 4, 5, 7], got [7, 5]"),
    ({"attn_mask": T(1, 1, 1, 5, 7).bool()}, ValueError, "= [2, 4, 5, 7], got [1, 1, 1, 5, 7]"),
    ({"key_mask": T(2, 7, device="meta").bool()}, ValueError, "key_mask must be on the device of query, cpu, got meta"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    # 16 dropout
    ({"dropout_p": 1.0}, ValueError, "dropout_p must lie in [0, 1), got 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must lie in [0, 1), got -0.1"),
    ({"dropout_p": "a"}, TypeError, "dropout_p must be a number, got str"),
    ({"dropout_p": NAN}, ValueError, "dropout_p must lie in [0, 1), got nan"),
    # names
    ({"similarity": "cosine"}, ValueError, "similarity must be one of 'gaussian', 'dot', got 'cosine'"),
    ({"assignment": "both"}, ValueError, "assignment must be one of 'soft', 'hard', got 'both'"),
    (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', 'reference', 'chunked', 'cpu', 'sdpa', 'triton', got 'cuda'",
    ),
    # 9 and 19: the fused kernels take no fp64, and no CPU tensor outside the interpreter
    ({"backend": "triton"}, ValueError, "backend='triton' cannot do "),
    ({"backend": "sdpa", "assignment": "hard"}, ValueError, "backend='sdpa' cannot do assignment='hard' with several"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message[:60] for _, _, message in BAD])
def test_bad_input_is_refused(changes, error, message, monkeypatch):
    for backend in ("reference", "chunked", "sdpa"):
        monkeypatch.setattr(mgk.ops.dispatch._BACKENDS[backend], "attention", lambda _: pytest.fail("work began"))
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


def test_valid_input_passes():
    """The base of every case above is itself accepted."""
    assert call().shape == (2, 4, 5, 6)


def test_causal_with_more_queries_than_keys_is_defined():
    """14: aligned bottom-right, the rows before the first key are empty."""
    out = call(query=torch.randn(2, 4, 9, 8), is_causal=True)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).all()


def test_statistics_refuse_unknown_names():
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'reference', 'chunked', 'triton', got 'sdpa'"):
        call(mgk.mixture_log_density, backend="sdpa")
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', got 'none'"):
        call(mgk.mixture_responsibilities, reduction="none")


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert call(dropout_p=numpy.float32(0.5)).shape == (2, 4, 5, 6)
    assert torch.equal(call(variance=numpy.float32(3.0)).isfinite(), torch.ones(2, 4, 5, 6, dtype=torch.bool))


def test_values_on_other_devices_are_inspected_only_when_asked(device):
    """Reading a number from a GPU waits for it; from a traced or fake tensor there is none to read."""
    bad = torch.tensor([1.0, -1.0], device=device)
    inputs = {name: tensor.to(device) for name, tensor in make_inputs(dtype=torch.float32).items()}
    if device.type != "cpu":
        mgk.mixture_attention(**inputs, variance=bad)
    mgk.debug_checks(True)
    try:
        with pytest.raises(ValueError, match="variance must be positive and finite, got values from -1 to 1"):
            mgk.mixture_attention(**inputs, variance=bad)
    finally:
        mgk.debug_checks(False)


@pytest.mark.parametrize("kind", ["projected", "shifted"])
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
def test_shapes_without_data(kind, backend):
    """On the meta device and with fake tensors, as shape inference and FLOP counting use them."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(kind=kind, dtype=dtype, is_causal=True, value_dim=5, variance="component")
        meta = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        out = mgk.mixture_attention(**meta, backend=backend)
        assert (out.shape, out.dtype, out.device.type) == ((2, 2, 19, 5), dtype, "meta")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {name: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
            assert mgk.mixture_attention(**fake, backend=backend).shape == (2, 2, 19, 5)
            fake.pop("variance")
            assert mgk.mixture_attention(**fake, backend=backend).shape == (2, 2, 19, 5)
