"""Identities that gradients must satisfy, whatever computes them (G1-G4), and what a backward pass may not do."""

import pytest
import torch
from cases import GRADIENTS, KINDS
from triton_cases import (
    BRIEF_DTYPES,
    CONFIGURATIONS,
    FLOAT32,
    INTERPRETED,
    ONE_DTYPE,
    PARAMETER_CAP,
    PLAIN,
    attend,
    error_of,
    expected_with_gradients,
    gradient_errors,
    gradients_of,
    make_case,
    make_inputs,
    name_of,
    random_grad,
)  # fmt: skip

SIZES = {"queries": 35 if INTERPRETED else 130, "dim": 16, "batch": 2 if not INTERPRETED else 1}
SMALL = {"queries": 18, "dim": 16, "batch": 1}
SETTINGS = [{}, {"is_causal": True}, {"heads": 4, "kv_heads": 2}, {"is_causal": True, "keys": 18, "kv_heads": 1}]
TOLERANCE = {FLOAT32: 2e-6}
# Of hard choices between components of unequal variances these are compiled.
HARD = {
    "projected": {"assignment": "hard", "components": 4, "dim": 32, "value_dim": 16},
    "shifted": {"assignment": "hard", "components": 8, "dim": 64, "value_dim": 16},
}

every_kind = pytest.mark.parametrize("kind", KINDS)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)


@every_kind
@brief_dtypes
@pytest.mark.parametrize("settings", SETTINGS[::3] if INTERPRETED else SETTINGS[::2], ids=str)
@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_gradients_obey_the_symmetries(kind, dtype, settings, assignment, device):
    """G1-G4: shift, rotation, scale and prior invariance: sign, scale and missing-block faults show at any size."""
    form = HARD[kind] if assignment == "hard" and not INTERPRETED else {"assignment": assignment}
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, **settings, **form})
    kv_heads, components = inputs["log_prior"].shape
    inputs["variance"] = torch.linspace(3.0, 4.5, components, device=device).repeat(kv_heads, 1)
    _, got = gradients_of(inputs, random_grad(inputs))
    got = {name: gradient.double() for name, gradient in got.items()}
    inputs = {name: value.double() if name in got else value for name, value in inputs.items()}
    # Sums over all tokens of rounded numbers: their errors add up in quadrature.
    noise = TOLERANCE.get(dtype, 5e-3) * sum(got[name].norm() for name in ("query", "key"))

    def per_head(tensor: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, everything else, D]"""
        return tensor.unflatten(1, (kv_heads, -1)).flatten(2, -2)

    moved = per_head(got["query"]).sum(2) + per_head(got["key"]).sum(2)
    assert moved.abs().max() < noise

    torque = sum(per_head(inputs[name]).mT @ per_head(got[name]) for name in ("query", "key"))
    stretch = sum((inputs[name] * got[name]).sum() for name in ("query", "key"))
    if kind == "shifted":
        torque = torque.sum(0) + inputs["shift"].mT @ got["shift"]
        stretch = stretch + (inputs["shift"] * got["shift"]).sum()
    assert (torque - torque.mT).abs().max() < 4 * noise
    assert (stretch + 2 * (inputs["variance"] * got["variance"]).sum()).abs() < 16 * noise
    assert got["log_prior"].sum(-1).abs().max() < noise
    assert (got["log_prior"].abs().max() > 0) == (assignment == "soft")


def hard_case(kind, components, dtype, device, **options):
    """Of more than two components, on a GPU, with the kernels for unequal variances, though all are equal."""
    is_usual = INTERPRETED or components == 2
    form = {"assignment": "hard", "components": components} if is_usual else HARD[kind]
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, **form, **options})
    if not is_usual:
        inputs["variance"] = torch.full((2, form["components"]), 4.0, device=device)
    return inputs


@every_kind
@brief_dtypes
def test_tied_components_share_the_gradient_evenly(kind, dtype, device):
    """G3: the rule for ties of the reference, to the bit."""
    inputs = hard_case(kind, 3, dtype, device, prior=None)
    name, axis = ("key", 2) if kind == "projected" else ("shift", 1)
    inputs[name] = inputs[name].narrow(axis, 0, 1).expand_as(inputs[name]).contiguous()
    _, gradients = gradients_of(inputs, random_grad(inputs))
    first, *others = gradients[name].unbind(axis)
    assert first.abs().max() > 0
    assert len(others) >= 2
    assert all(torch.equal(first, other) for other in others)


@every_kind
@pytest.mark.parametrize("components", [1, 2, 3] if INTERPRETED else [1, 2])
def test_some_components_tie(kind, components, device):
    """G3: two components coincide, at some positions the best ones and at some not; or there are no others."""
    inputs = hard_case(kind, components + 1, ONE_DTYPE, device)
    name, axis = ("key", 2) if kind == "projected" else ("shift", 1)
    inputs[name].select(axis, 0).copy_(inputs[name].select(axis, components))
    grad = random_grad(inputs)
    _, got = gradients_of(inputs, grad)
    _, expected = expected_with_gradients(inputs, grad)
    assert max(gradient_errors(got, expected).values()) <= PARAMETER_CAP[ONE_DTYPE]


@pytest.mark.parametrize(("distance", "cap"), [(3.0, 1e-5), (10.0, 5e-5), (30.0, 5e-4)])
@pytest.mark.parametrize("far", [0, 1])
def test_a_component_far_away_gets_no_noise(far, distance, cap, device):
    """What never wins has no gradient, and the rounding of the other's does not pass for one."""
    inputs = hard_case("shifted", 2, FLOAT32, device)
    inputs["shift"][:, far] += distance
    grad = random_grad(inputs)
    _, got = gradients_of(inputs, grad)
    _, expected = expected_with_gradients(inputs, grad)
    assert error_of(got["query"], expected["query"]) <= cap
    if distance > 3 and far == 0:
        assert (expected["shift"][:, far] == 0).all()
        assert (got["shift"][:, far] == 0).all()


SHIFTED = {"kind": "shifted", "variance": "component"}
WITH_ALL = [
    {**PLAIN, **SHIFTED, "dtype": ONE_DTYPE, **change}
    for change in ({"components": 1}, {"similarity": "dot"}, {"assignment": "hard"})
]
if not INTERPRETED:
    WITH_ALL = [each for each in CONFIGURATIONS if SHIFTED.items() <= each.items() and each["prior"] is not None]


@pytest.mark.parametrize("configuration", WITH_ALL, ids=name_of)
def test_every_parameter_gets_a_gradient(configuration):
    """G4: zeros where an identity makes a parameter irrelevant, never None."""
    inputs = make_case(configuration, queries=SIZES["queries"])
    _, gradients = gradients_of(inputs, random_grad(inputs))
    assert set(gradients) == set(GRADIENTS)
    assert all(gradient is not None for gradient in gradients.values())
    if configuration["assignment"] == "hard":
        assert (gradients["log_prior"] == 0).all()


@pytest.mark.parametrize(
    ("kind", "leaf"), [(kind, leaf) for kind in KINDS for leaf in GRADIENTS if (kind, leaf) != ("projected", "shift")]
)
def test_each_gradient_alone(kind, leaf, device):
    """G1: asking for one gradient gives the bits of asking for all."""
    inputs = make_inputs(kind=kind, variance="component", dtype=ONE_DTYPE, device=device, **SMALL)
    grad = random_grad(inputs)
    _, together = gradients_of(inputs, grad)
    inputs[leaf].requires_grad_()
    (alone,) = torch.autograd.grad(attend(inputs), inputs[leaf], grad)
    assert torch.equal(alone, together[leaf])


@every_kind
def test_the_output_needs_no_gradients(kind, device):
    """G1: the same bits with and without a graph."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **SIZES)
    out, _ = gradients_of(inputs, random_grad(inputs))
    assert torch.equal(attend(inputs), out)
    with torch.no_grad():
        assert torch.equal(attend(inputs), out)


@pytest.mark.parametrize("leaf", GRADIENTS)
def test_double_backward_is_refused(leaf, device):
    """Bad input 18."""
    inputs = make_inputs(kind="shifted", variance="component", dtype=ONE_DTYPE, device=device, batch=1, dim=16)
    inputs[leaf].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(inputs).square().sum(), inputs[leaf], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        gradient.sum().backward()
