"""Gradients: against fp64, and the identities they must satisfy whatever computes them (G1-G5)."""

import oracle
import pytest
import torch
from cases import BACKENDS, DEVICE, GRADIENTS, KINDS, attend, make_inputs, padding, relative_error, with_gradients

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)

SETTINGS = [
    {},
    {"prior": "position", "components": 3},
    {"variance": "component", "components": 4},
    {"similarity": "dot", "variance": "component"},
    {"components": 1, "variance": "component"},
    {"is_causal": True, "keys": 23},
    {"is_causal": True, "keys": 11},
    {"is_causal": True, "heads": 4, "kv_heads": 2, "value_dim": 5},
    {"heads": 4, "kv_heads": 1},
]


def run(inputs: dict, backend: str):
    grad = torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], device=inputs["query"].device)
    return with_gradients(inputs, grad, backend), with_gradients(inputs, grad.double(), function=oracle.attention)


@every_backend
@every_kind
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_match_the_oracle_in_fp64(backend, kind, assignment, settings, masked, device):
    inputs = make_inputs(kind=kind, assignment=assignment, device=device, **settings)
    if backend == "sdpa" and assignment == "hard" and settings.get("components") != 1:
        pytest.skip("sdpa has no hard assignment")
    if masked:
        inputs["key_mask"] = padding(2, inputs["key"].shape[-2], device)
        inputs["query_mask"] = padding(2, 19, device)
    (_, got), (_, expected) = run(inputs, backend)
    assert set(got) == {name for name in GRADIENTS if isinstance(inputs.get(name), torch.Tensor)}
    for name, gradient in got.items():
        if expected[name] is None or (name == "log_prior" and settings.get("components") == 1):
            assert gradient.abs().max() < 1e-12, name
        else:
            assert relative_error(gradient, expected[name]) < 1e-9, name


@every_backend
@every_kind
@pytest.mark.parametrize(
    "settings", [{}, {"variance": "component"}, {"is_causal": True}, {"heads": 4, "kv_heads": 2}], ids=str
)
@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_gradients_obey_the_symmetries(backend, kind, settings, assignment, device):
    """G1-G4: shift, rotation, scale and prior invariance, each as an identity between gradients."""
    if backend == "sdpa" and assignment == "hard":
        pytest.skip("sdpa has no hard assignment")
    variance = torch.full((2, 2), 3.0, device=device, dtype=torch.float64) * torch.tensor([1.0, 1.5], device=device)
    inputs = make_inputs(kind=kind, assignment=assignment, device=device, **settings)
    inputs["variance"] = variance
    grad = torch.randn_like(inputs["query"])
    _, got = with_gradients(inputs, grad, backend)
    kv_heads = inputs["key"].shape[1]
    scale = grad.abs().sum()

    def per_head(tensor: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, everything else, D]"""
        heads = tensor.shape[1] // kv_heads
        return tensor.unflatten(1, (kv_heads, heads)).flatten(2, -2)

    moved = per_head(got["query"]).sum(2) + per_head(got["key"]).sum(2)
    assert moved.abs().max() < 1e-12 * scale

    vectors = [name for name in ("query", "key") if name in got]
    torque = sum(per_head(inputs[name]).mT @ per_head(got[name]) for name in vectors)
    stretch = sum((inputs[name] * got[name]).sum() for name in vectors)
    if kind == "shifted":
        torque = torque.sum(0) + inputs["shift"].mT @ got["shift"]
        stretch = stretch + (inputs["shift"] * got["shift"]).sum()
    assert (torque - torque.mT).abs().max() < 1e-12 * scale
    stretch = stretch + 2 * (inputs["variance"] * got["variance"]).sum()
    assert stretch.abs() < 1e-12 * scale
    assert got["log_prior"].sum(-1).abs().max() < 1e-12 * scale
    assert (got["log_prior"].abs().max() > 0) == (assignment == "soft")


@every_backend
@every_kind
@pytest.mark.parametrize("components", [1, 2, 4])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"prior": "position"}], ids=str)
def test_gradcheck(backend, kind, components, settings, device):
    """G5: every input, by finite differences in fp64."""
    inputs = make_inputs(
        kind=kind, batch=1, heads=2, kv_heads=1, queries=4, keys=5, dim=3, value_dim=2, components=components,
        variance="component", device=device, **settings,
    )  # fmt: skip
    inputs["key_mask"] = torch.tensor([[False, True, True, True, True]], device=device)
    names = [name for name in GRADIENTS if name in inputs]
    leaves = [inputs[name].double().requires_grad_() for name in names]

    def function(*tensors):
        return attend({**inputs, **dict(zip(names, tensors, strict=True))}, backend)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@every_kind
def test_gradcheck_hard(backend, kind, device):
    inputs = make_inputs(
        kind=kind, batch=1, queries=4, dim=3, components=3, variance="component", assignment="hard", device=device
    )
    names = [name for name in GRADIENTS if name in inputs]
    leaves = [inputs[name].double().requires_grad_() for name in names]

    def function(*tensors):
        return attend({**inputs, **dict(zip(names, tensors, strict=True))}, backend)

    assert torch.autograd.gradcheck(function, leaves)


@every_kind
def test_gradgradcheck_of_the_reference(kind, device):
    inputs = make_inputs(kind=kind, batch=1, heads=1, queries=3, dim=2, variance="component", device=device)
    names = [name for name in GRADIENTS if name in inputs]
    leaves = [inputs[name].double().requires_grad_() for name in names]

    def function(*tensors):
        return attend({**inputs, **dict(zip(names, tensors, strict=True))}, "reference")

    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
@pytest.mark.parametrize("leaf", GRADIENTS)
def test_double_backward_is_refused(backend, leaf, device):
    """Bad input 18."""
    inputs = make_inputs(kind="shifted", variance="component", device=device)
    inputs[leaf].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(inputs, backend).square().sum(), inputs[leaf], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        gradient.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_tied_components_share_the_gradient_evenly(backend, device):
    inputs = make_inputs(components=3, prior=None, assignment="hard", device=device)
    inputs["key"] = inputs["key"][:, :, :1].expand(-1, -1, 3, -1, -1).contiguous()
    _, gradients = with_gradients(inputs, torch.randn_like(inputs["value"]), backend)
    first, second, third = gradients["key"].unbind(2)
    assert first.abs().max() > 0
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the stock GPU kernels promise no order of summation")
@every_backend
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_equal_to_the_bit(backend, kind, dtype):
    inputs = make_inputs(kind=kind, queries=300, dim=16, dtype=dtype, is_causal=True)
    grad = torch.randn_like(inputs["value"])
    out, gradients = with_gradients(inputs, grad, backend)
    for _ in range(5):
        again, again_gradients = with_gradients(inputs, grad, backend)
        assert torch.equal(again, out)
        assert all(torch.equal(again_gradients[name], gradients[name]) for name in gradients)


@every_backend
def test_every_parameter_gets_a_gradient(backend, device):
    """Zeros where an identity makes a parameter irrelevant, never None."""
    for settings in ({"components": 1}, {"similarity": "dot"}, {"assignment": "hard"}):
        inputs = make_inputs(kind="shifted", device=device, **settings)
        if backend == "sdpa" and "assignment" in settings:
            continue
        _, gradients = with_gradients(inputs, torch.randn_like(inputs["value"]), backend)
        assert all(gradient is not None for gradient in gradients.values())
