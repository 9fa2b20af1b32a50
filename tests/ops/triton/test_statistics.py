"""Log density and responsibilities against the oracle (P12, P16's normaliser, P17, E1, E2)."""

import math

import oracle
import pytest
import torch
from cases import KINDS, padding, with_gradients
from triton_cases import (
    BRIEF_DTYPES,
    FLOAT32,
    INTERPRETED,
    ONE_DTYPE,
    error_of,
    exactly,
    log_density,
    make_inputs,
    responsibilities,
)

SETTINGS = [
    {},
    {"prior": None},
    {"prior": "position", "components": 3},
    {"variance": "component"},
    {"components": 1, "variance": "component"},
    {"similarity": "dot"},
    {"is_causal": True, "keys": 40},
    {"is_causal": True, "keys": 11},
    {"heads": 4, "kv_heads": 2},
]
QUERIES = 19 if INTERPRETED else 70

every_kind = pytest.mark.parametrize("kind", KINDS)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)
# Every mask with the plain setting, and one in turn with the others.
MASKS = ("padding", "pairs", "none")
SETTINGS_AND_MASKS = [(SETTINGS[0], mask) for mask in MASKS]
SETTINGS_AND_MASKS += [(settings, MASKS[number % 3]) for number, settings in enumerate(SETTINGS[1:])]
CASES = [(kind, *case) for kind in KINDS for case in SETTINGS_AND_MASKS]
if not INTERPRETED:
    compiled_anyway = [
        ({}, "none"), ({}, "padding"), ({"prior": None}, "padding"), ({"prior": "position", "components": 3}, "none"),
        ({"variance": "component"}, "none"), ({"similarity": "dot"}, "none"), ({"is_causal": True, "keys": 40}, "none"),
        ({"is_causal": True, "keys": 11}, "padding"), ({"heads": 4, "kv_heads": 2}, "padding"),
    ]  # fmt: skip
    CASES = [(kind, *case) for kind in KINDS for case in compiled_anyway]
    CASES += [("projected", {"components": 1, "prior": None}, "none")]
    CASES += [("projected", {"components": 3, "dim": 32, **prior}, "pairs") for prior in ({}, {"prior": None})]
    CASES += [("shifted", {"components": 1, "variance": "component", "dim": 64}, "none")]
    CASES += [("shifted", prior, "pairs") for prior in ({}, {"prior": None})]
every_setting = pytest.mark.parametrize(("kind", "settings", "mask"), CASES, ids=str)


def case(kind, settings, device, dtype=ONE_DTYPE, mask="none", **options):
    batch = 1 if INTERPRETED else 2
    inputs = make_inputs(
        kind=kind, dtype=dtype, device=device, batch=batch, queries=QUERIES, **{"dim": 16, **settings}, **options
    )
    inputs.pop("value")
    keys = inputs["key"].shape[-2]
    if mask == "padding":
        inputs["key_mask"] = padding(batch, keys, device, "left")
        inputs["query_mask"] = padding(batch, QUERIES, device)
    elif mask == "pairs":
        inputs["attn_mask"] = torch.rand(batch, 1, QUERIES, keys, device=device) > 0.3
        if INTERPRETED:
            inputs["key_mask"] = padding(batch, keys, device)
    return inputs


def expected_density(inputs, normalized=False):
    logit = oracle.logits(inputs)
    components, dim = logit.shape[2], inputs["query"].shape[-1]
    if inputs.get("log_prior") is None:
        logit = logit - math.log(components)
    if normalized:
        variance = torch.as_tensor(inputs.get("variance", math.sqrt(dim)), dtype=torch.float64, device=logit.device)
        heads = inputs["key"].shape[1]
        variance = variance.expand(heads, components).repeat_interleave(inputs["query"].shape[1] // heads, 0)
        logit = logit - 0.5 * dim * (2 * math.pi * variance)[:, :, None, None].log()
    seen = oracle.visible(inputs)
    logit = logit.masked_fill(~seen[:, :, None], -math.inf)
    return logit.transpose(2, 3).flatten(3).logsumexp(-1) - seen.sum(-1).clamp(min=1).double().log()


def expected_responsibilities(inputs):
    logit, seen = oracle.logits(inputs), oracle.visible(inputs)
    posterior = logit.masked_fill(~seen[:, :, None], 0.0).softmax(2) * seen[:, :, None]
    return posterior.unflatten(1, (inputs["key"].shape[1], -1)).sum((0, 2, 4, 5))


@brief_dtypes
@every_setting
def test_log_density(kind, dtype, settings, mask, device):
    """P17: fp32 whatever the inputs; -inf exactly where a query sees no key."""
    inputs = case(kind, settings, device, dtype, mask)
    got, expected = log_density(inputs), expected_density(inputs)
    seen = oracle.visible(inputs).any(-1)
    assert got.dtype == torch.float32
    assert torch.equal(got == -math.inf, ~seen)
    # A log is an exponent: what counts is its absolute error.
    assert (got.double() - expected)[seen].abs().max() <= (2e-5 if dtype == FLOAT32 else 1e-3)


@every_kind
@pytest.mark.parametrize("settings", [{}, {"variance": "component"}, {"prior": None}], ids=str)
def test_normalized_log_density(kind, settings, device):
    """P17: with the constants that attention drops."""
    inputs = case(kind, settings, device)
    got, expected = log_density(inputs, normalized=True), expected_density(inputs, normalized=True)
    assert (got.double() - expected).abs().max() <= 5e-5


@every_kind
@brief_dtypes
@pytest.mark.parametrize("scale", [10.0, 60.0])
def test_wide_log_density(kind, dtype, scale, device):
    """P6: logits far below zero, to the precision of fp32."""
    inputs = case(kind, {}, device, dtype, scale=scale)
    got, expected = log_density(inputs), expected_density(inputs)
    assert ((got.double() - expected).abs() <= 2e-6 * expected.abs() + 1e-6 * scale**2).all()


@every_kind
@brief_dtypes
@pytest.mark.parametrize(
    "settings", [{}, {"variance": "component"}, {"prior": "position"}, {"is_causal": True, "keys": 11}], ids=str
)
def test_gradients_of_the_log_density(kind, dtype, settings, device):
    """G1-G4 for the statistics: every gradient against the oracle; rows without a key have none."""
    inputs = case(kind, settings, device, dtype)
    grad = torch.randn(inputs["query"].shape[:3], device=device)
    seen = oracle.visible(inputs).any(-1)
    _, got = with_gradients(inputs, grad, function=log_density)

    def exact(inputs):
        return expected_density(inputs).masked_fill(~seen, 0.0)

    _, expected = with_gradients(exactly(inputs), grad, function=exact)
    for name, gradient in got.items():
        assert error_of(gradient, expected[name].nan_to_num(0.0)) <= (1e-4 if dtype == FLOAT32 else 2e-2), name
    assert (got["query"][~seen] == 0).all()


@brief_dtypes
@every_setting
def test_responsibilities(kind, dtype, settings, mask, device):
    """E1, E2: a distribution over components, from visible pairs only."""
    inputs = case(kind, settings, device, dtype, mask)
    expected = expected_responsibilities(inputs)
    sums = responsibilities(inputs, reduction="sum")
    assert error_of(sums, expected) <= (1e-5 if dtype == FLOAT32 else 1e-3)
    got = responsibilities(inputs)
    assert (got.sum(-1) - 1).abs().max() < 1e-5
    assert error_of(got, expected / expected.sum(-1, keepdim=True)) <= (1e-5 if dtype == FLOAT32 else 1e-3)


@every_kind
def test_responsibilities_of_wide_and_dead_components(kind, device):
    """E1: still a distribution when components lie far apart or have no prior."""
    inputs = case(kind, {"components": 3}, device, scale=10.0)
    inputs["log_prior"][:, 1] = -math.inf
    got = responsibilities(inputs)
    assert (got[:, 1] == 0).all()
    assert (got.sum(-1) - 1).abs().max() < 1e-5
    expected = expected_responsibilities(inputs)
    assert error_of(got, expected / expected.sum(-1, keepdim=True)) <= 1e-3


def test_responsibilities_take_no_gradient(device):
    """E3: the E-step is a statistic."""
    inputs = case("shifted", {}, device)
    inputs["query"].requires_grad_()
    assert not responsibilities(inputs).requires_grad


def test_statistics_of_nothing(device):
    """P17: no visible pair, no query, no key."""
    inputs = case("projected", {}, device)
    batch = inputs["query"].shape[0]
    inputs["key_mask"] = torch.zeros(batch, QUERIES, dtype=torch.bool, device=device)
    assert (responsibilities(inputs) == 0).all()
    assert (log_density(inputs) == -math.inf).all()
    empty = {**inputs, "query": inputs["query"][:, :, :0], "key_mask": None}
    assert (responsibilities(empty) == 0).all()
    assert log_density(empty).shape == (batch, 2, 0)
