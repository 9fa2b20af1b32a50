"""The fused kernels of linear attention against fp64: outputs and every gradient, masks, lengths around a chunk."""

import math

import pytest
import torch
from linear_cases import KINDS, make_linear
from triton_cases import BACKEND, DTYPES, INTERPRETED, ONE_DTYPE, error_of, rms

import mgk

OPTIONS = [
    {},
    {"is_causal": True},
    {"masked": True, "is_causal": True},
    {"masked": True},
    {"heads": 4, "kv_heads": 2, "components": 3, "is_causal": True},
    {"heads": 4, "kv_heads": 1},
    {"queries": 13, "keys": 50},
    {"components": 1, "is_causal": True},
    {"prior": "position", "is_causal": True},
    {"prior": None},
    {"value_dim": 3, "dim": 24, "is_causal": True},
    {"normalization": "length", "is_causal": True, "masked": True},
    {"feature_map": "relu", "is_causal": True},
]
CASES = [(ONE_DTYPE, options) for options in OPTIONS]
CASES += [(dtype, OPTIONS[2]) for dtype in DTYPES if dtype != ONE_DTYPE]
CASES += [
    pytest.param(dtype, {"dim": width, "queries": 150, "is_causal": is_causal}, marks=pytest.mark.gpu)
    for dtype in (torch.bfloat16, torch.float16)
    for width in (16, 32, 64, 128)
    for is_causal in (True, False)
]
OUTPUT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
GRADIENT = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
PARAMETER = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}

every_kind = pytest.mark.parametrize("kind", KINDS)


def attend(inputs, backend=BACKEND):
    return mgk.linear_mixture_attention(**inputs, backend=backend)


def exactly(inputs):
    return {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in inputs.items()}


def with_gradients(inputs, backend, grad):
    leaves = {
        name: t.clone().requires_grad_() for name, t in inputs.items() if torch.is_tensor(t) and t.is_floating_point()
    }
    out = attend({**inputs, **leaves}, backend)
    return out, dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype)), strict=True))


@every_kind
@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_outputs_and_gradients(kind, dtype, options, device):
    inputs = make_linear(kind=kind, dtype=dtype, device=device, **{"queries": 37, **options})
    grad = torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], device=device).to(dtype)
    out, gradients = with_gradients(inputs, BACKEND, grad)
    expected, exact = with_gradients(exactly(inputs), "reference", grad.double())
    assert error_of(out, expected) <= OUTPUT[dtype]
    floor = 0.1 * rms(exact["value"])
    for name, gradient in gradients.items():
        cap = GRADIENT[dtype] if name in ("query", "key", "value") else PARAMETER[dtype]
        # A parameter's gradient is a sum of many that may cancel; their rounding does not.
        own = floor if name in ("query", "key", "value") else exact["key"].norm() / exact[name].numel() ** 0.5
        assert error_of(gradient, exact[name], torch.maximum(own, floor)) <= cap, name


@every_kind
@pytest.mark.parametrize("constant", [200.0, -200.0])
def test_prior_need_not_be_normalised(kind, constant, device):
    """Its exponential alone would overflow, or vanish."""
    inputs = make_linear(kind=kind, dtype=ONE_DTYPE, queries=37, device=device)
    moved = {**inputs, "log_prior": inputs["log_prior"] + constant}
    assert error_of(attend(moved), attend(exactly(inputs), "reference")) <= max(1e-4, OUTPUT[ONE_DTYPE])


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_around_a_chunk(tokens, is_causal, device):
    inputs = make_linear(queries=tokens, dtype=ONE_DTYPE, device=device, is_causal=is_causal, kind="shifted")
    assert error_of(attend(inputs), attend(exactly(inputs), "reference")) <= 2 * OUTPUT[ONE_DTYPE]


@every_kind
def test_nothing_at_masked_keys_is_read(kind, device):
    """P18: NaN there changes no bit of output and gradients, and gets a gradient of 0."""
    inputs = make_linear(kind=kind, dtype=ONE_DTYPE, device=device, queries=40, is_causal=True)
    inputs["key_mask"] = torch.arange(40, device=device).expand(2, -1) < torch.tensor([[23], [0]], device=device)
    grad = torch.randn_like(inputs["value"])
    out, gradients = with_gradients(inputs, BACKEND, grad)
    assert (out[1] == 0).all()
    poisoned = dict(inputs)
    for name in ("key", "value"):
        poisoned[name] = inputs[name].clone()
        for row, first in ((0, 23), (1, 0)):
            poisoned[name][row][..., first:, :] = math.nan
    got, got_gradients = with_gradients(poisoned, BACKEND, grad)
    assert torch.equal(got, out)
    for name, gradient in gradients.items():
        assert torch.equal(got_gradients[name], gradient), name


def test_later_tokens_change_no_bit(device):
    """P13"""
    inputs = make_linear(queries=70, dtype=ONE_DTYPE, device=device, is_causal=True)
    before = attend(inputs)
    for name in ("key", "value"):
        inputs[name] = inputs[name].clone()
        inputs[name][..., 40:, :] = 3.0
    assert torch.equal(attend(inputs)[:, :, :40], before[:, :, :40])


@every_kind
def test_a_sequence_may_be_cut_anywhere(kind, device):
    """P19: with the state of the fused kernels in between, which is that of the others."""
    inputs = make_linear(
        kind=kind, queries=40, dtype=ONE_DTYPE, device=device, is_causal=True, dim=13, heads=4, kv_heads=2
    )
    whole = attend(exactly(inputs), "reference")
    for cut in (1, 16, 23):
        pieces, state = [], None
        for part in (slice(0, cut), slice(cut, None)):
            own = {**inputs, **{name: inputs[name][..., part, :] for name in ("query", "key", "value")}}
            other, expected = mgk.linear_mixture_step(**own, state=state, backend="chunked")
            piece, state = mgk.linear_mixture_step(**own, state=state, backend=BACKEND)
            assert error_of(state, expected.double()) <= 2 * OUTPUT[ONE_DTYPE]
            assert error_of(piece, other.double()) <= 2 * OUTPUT[ONE_DTYPE]
            pieces.append(piece)
        assert error_of(torch.cat(pieces, dim=2), whole) <= 2 * OUTPUT[ONE_DTYPE]
    inputs["query"].requires_grad_()
    with pytest.raises(ValueError, match="backend='triton' cannot do a state with gradients"):
        mgk.linear_mixture_step(**inputs, backend="triton")


def test_strides_and_expanded_tensors(device):
    """P21"""
    inputs = make_linear(queries=20, dtype=ONE_DTYPE, device=device, dim=13, is_causal=True)
    expected = attend(inputs)
    turned = {name: inputs[name].mT.contiguous().mT for name in ("query", "key", "value")}
    assert error_of(attend({**inputs, **turned}), expected.double()) <= 1e-6
    wide = {**inputs, "value": inputs["value"][:1].expand(2, -1, -1, -1)}
    assert error_of(attend(wide), attend({**wide, "value": wide["value"].contiguous()}).double()) <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_map": "favor"}, "backend='triton' cannot do feature maps other than 'elu' and 'relu'"),
        ({"query": torch.zeros(2, 2, 3, 8), "is_causal": True}, "causality with another number of keys than queries"),
    ],
)
def test_what_is_left_to_others(change, message, device):
    inputs = make_linear(dtype=torch.float32, device=device)
    change = {name: value.to(device) if torch.is_tensor(value) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        attend({**inputs, **change}, "triton")


def test_without_keys_there_is_a_gradient_of_zero(device):
    inputs = make_linear(dtype=ONE_DTYPE, device=device, queries=3, keys=0)
    inputs["query"].requires_grad_()
    assert (torch.autograd.grad(attend(inputs).sum(), inputs["query"])[0] == 0).all()


def test_second_order_is_refused(device):
    inputs = make_linear(dtype=ONE_DTYPE, device=device)
    inputs["query"].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(inputs).sum(), inputs["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        gradient.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
def test_compiled_is_eager(device):
    inputs = make_linear(dtype=ONE_DTYPE, device=device, queries=100, is_causal=True)
    compiled = torch.compile(attend, fullgraph=True)
    assert torch.equal(compiled(inputs), attend(inputs))


@pytest.mark.gpu
def test_a_million_tokens(device):
    """Pitfall 13, and memory that grows with the length alone."""
    peaks = []
    for tokens in (1 << 18, 1 << 20):
        inputs = make_linear(
            batch=1, heads=2, queries=tokens, dim=64, dtype=torch.bfloat16, device=device, is_causal=True
        )
        inputs["value"][:] = 1.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert torch.allclose(attend(inputs).float(), torch.ones((), device=device), rtol=4e-3)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 4.5 * peaks[0]
