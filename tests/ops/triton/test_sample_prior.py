"""A prior of each sample and key position in the fused kernels, forward, backward, in a step and in statistics."""

import oracle
import pytest
import torch
from cases import KINDS, OUTPUT_CAP, padding
from triton_cases import (
    BACKEND,
    HALF,
    INTERPRETED,
    ONE_DTYPE,
    attend,
    check,
    error_of,
    gradients_of,
    log_density,
    make_inputs,
    random_grad,
    responsibilities,
)  # fmt: skip

import mgk

SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 20 if INTERPRETED else 130, "dim": 16, "prior": "sample"}
SETTINGS = {
    "plain": {"kv_heads": 2},
    "causal": {"is_causal": True},
    "padding": {"masked": True, "is_causal": True},
    "pairs": {"pairs": True},
    "grouped": {"heads": 4, "kv_heads": 2, "is_causal": True},
    "one component": {"components": 1},
    "three components": {"components": 3},
    "unequal variances": {"variance": "component"},
    "dot": {"similarity": "dot"},
    "one key": {"keys": 1, "queries": 17},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, device, masked=False, pairs=False, **settings):
    inputs = make_inputs(kind=kind, device=device, **{**SIZES, "dtype": ONE_DTYPE, **settings})
    batch, heads, queries, _ = inputs["query"].shape
    keys = inputs["key"].shape[-2]
    if masked:
        inputs["key_mask"] = padding(batch, keys, device)
    if pairs:
        inputs["attn_mask"] = torch.rand(batch, heads, queries, keys, device=device) > 0.3
        inputs["attn_mask"][..., 3, :] = False
    return inputs


def statistics_of(inputs):
    return {name: value for name, value in inputs.items() if name != "value"}


@every_kind
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_output_and_gradients(kind, setting, device):
    inputs = make(kind, device, **SETTINGS[setting])
    _, got = check(inputs)
    assert got["log_prior"].shape == inputs["log_prior"].shape


@every_kind
def test_half_precision(kind, device):
    check(make(kind, device, dtype=HALF, is_causal=True))


@every_kind
def test_any_layout(kind, device):
    """Samples may lie anywhere, as slices and transposed tensors do, and one may stand for all."""
    inputs = make(kind, device, kv_heads=2)
    prior = inputs["log_prior"]
    by_token, by_head = prior.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), prior.transpose(0, 1).contiguous()
    for strided in (by_token, by_head.transpose(0, 1), torch.stack([prior, prior], dim=-1)[..., 0]):
        assert strided.stride() != prior.stride()
        assert torch.equal(attend({**inputs, "log_prior": strided}), attend(inputs))
    one = prior[:1].expand_as(prior)
    out, got = gradients_of({**inputs, "log_prior": one}, grad := random_grad(inputs))
    shared_out, shared = gradients_of({**inputs, "log_prior": prior[0]}, grad)
    # A level of all logits is found from other numbers, so bits may differ.
    torch.testing.assert_close(out, shared_out, rtol=1e-4, atol=1e-5 if torch.float32 == ONE_DTYPE else 1e-2)
    assert error_of(got["log_prior"].sum(0), shared["log_prior"].double()) < 1e-3


@pytest.mark.parametrize("dtype", [ONE_DTYPE, HALF] if INTERPRETED else [HALF], ids=str)
def test_a_bias_takes_the_distance_back(dtype, device):
    """With ``|k_j|^2 / (2 variance)`` the distance is the dot product, however long the keys are."""
    inputs = make("projected", device, components=1, prior=None, dtype=dtype, is_causal=True)
    inputs["key"] = inputs["key"] * 4
    bias = inputs["key"].double().square().sum(-1) / (2 * inputs["key"].shape[-1] ** 0.5)
    out = attend({**inputs, "log_prior": bias.float()})
    expected = oracle.attention({**inputs, "similarity": "dot"})
    assert error_of(out, expected) <= 2 * OUTPUT_CAP[dtype]


@every_kind
def test_a_hidden_sample(kind, device):
    """Where no key of a sample has a prior above zero its rows are 0, and so are its gradients."""
    inputs = make(kind, device, is_causal=True)
    inputs["log_prior"][1] = -torch.inf
    inputs["log_prior"][0, :, :, 0] = -torch.inf
    out, got = gradients_of(inputs, random_grad(inputs))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[0, :, 0], torch.zeros_like(out[0, :, 0]))
    assert out[0, :, 1:].abs().min() > 0
    for name in ("query", "key", "value", "log_prior"):
        assert torch.equal(got[name][1], torch.zeros_like(got[name][1])), name
        assert got[name].isfinite().all(), name


@every_kind
@pytest.mark.parametrize(
    "settings",
    [{}, {"masked": True}, {"queries": 3, "is_causal": True, "heads": 4}, {"components": 3}, {"similarity": "dot"}],
    ids=str,
)
def test_a_step(kind, settings, device):
    inputs = make(kind, device, **{"queries": 1, "keys": 70, "kv_heads": 2, "dtype": HALF, **settings})
    assert error_of(attend(inputs), oracle.attention(inputs)) <= OUTPUT_CAP[HALF]


@every_kind
@pytest.mark.parametrize("settings", [{"is_causal": True}, {"masked": True}], ids=str)
def test_statistics(kind, settings, device):
    inputs = statistics_of(make(kind, device, **settings))
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    expected = mgk.mixture_log_density(**exact, backend="reference")
    assert error_of(log_density(inputs), expected) < 1e-3
    expected = mgk.mixture_responsibilities(**exact, backend="reference")
    assert error_of(responsibilities(inputs), expected) < 1e-3


@pytest.mark.skipif(BACKEND != "triton", reason="of the fused operation")
@every_kind
def test_as_an_operation(kind, device):
    """Shapes and layouts that the compiler is told are those that come, forward and backward."""
    inputs = make(kind, device, is_causal=True)
    key = inputs["key"] if inputs["key"].ndim == 5 else inputs["key"][:, :, None]
    tensors = [inputs["query"], key, inputs["value"], inputs.get("shift"), inputs["log_prior"]]
    tensors = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
    arguments = (*tensors, *[None] * 7, 0.25, True, True, False, 0.0)
    torch.library.opcheck(torch.ops.mgk.fused_attention.default, arguments, test_utils="test_faketensor")
    out, normaliser, terms = torch.ops.mgk.fused_attention(*arguments)
    saved = tuple(None if t is None else t.detach() for t in (torch.ones_like(out), None, out, normaliser, terms))
    plain = tuple(None if t is None else t.detach() for t in tensors)
    torch.library.opcheck(
        torch.ops.mgk.fused_attention_backward.default,
        (*saved, *plain, *arguments[5:]),
        test_utils="test_faketensor",
    )


@pytest.mark.skipif(BACKEND != "triton", reason="of the fused kernels of linear attention")
def test_linear_attention_refuses_it(device):
    query, key, value = (torch.randn(2, 1, 20, 16, device=device, dtype=HALF) for _ in range(3))
    with pytest.raises(ValueError, match="backend='triton' cannot do a log_prior of each sample: use 'auto'"):
        mgk.linear_mixture_attention(
            query, key, value, log_prior=torch.zeros(2, 1, 1, 20, device=device), backend="triton"
        )
