"""Weights, log density and responsibilities against the oracle."""

import math

import oracle
import pytest
import torch
from cases import KINDS, make_inputs, padding, relative_error

import mgk

backends = pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
every_kind = pytest.mark.parametrize("kind", KINDS)
SETTINGS = [
    {},
    {"prior": None},
    {"prior": "position"},
    {"variance": "component"},
    {"components": 1, "variance": "component"},
    {"similarity": "dot"},
    {"is_causal": True, "keys": 23},
    {"is_causal": True, "keys": 11},
    {"heads": 4, "kv_heads": 2},
]


def case(kind, settings, masked, device):
    inputs = make_inputs(kind=kind, device=device, **settings)
    inputs.pop("value")
    if masked:
        inputs["key_mask"] = padding(2, inputs["key"].shape[-2], device, "left")
        inputs["query_mask"] = padding(2, 19, device)
    return inputs


@backends
@every_kind
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "pairs"])
@pytest.mark.parametrize("normalized", [False, True])
def test_log_density(backend, kind, settings, mask, normalized, device):
    inputs = case(kind, settings, mask == "padding", device)
    if mask == "pairs":
        inputs["attn_mask"] = torch.rand(2, 1, 19, inputs["key"].shape[-2], device=device) > 0.3
        inputs["key_mask"] = padding(2, inputs["key"].shape[-2], device)
    if normalized and settings.get("similarity") == "dot":
        with pytest.raises(ValueError, match="normalized=True needs similarity='gaussian'"):
            mgk.mixture_log_density(**inputs, normalized=True, backend=backend)
        return
    got = mgk.mixture_log_density(**inputs, normalized=normalized, backend=backend)

    logit = oracle.logits(inputs)
    components = logit.shape[2]
    if settings.get("prior", "head") is None:
        logit = logit - math.log(components)
    if normalized:
        variance = torch.as_tensor(inputs.get("variance", math.sqrt(8)), dtype=torch.float64, device=device)
        heads = inputs["key"].shape[1]
        variance = variance.expand(heads, components).repeat_interleave(inputs["query"].shape[1] // heads, 0)
        logit = logit - 4 * (2 * math.pi * variance)[:, :, None, None].log()
    seen = oracle.visible(inputs)
    logit = logit.masked_fill(~seen[:, :, None], -math.inf)
    expected = logit.transpose(2, 3).flatten(3).logsumexp(-1) - seen.sum(-1).clamp(min=1).double().log()
    assert got.shape == expected.shape
    assert torch.equal(got == -math.inf, ~seen.any(-1))
    assert relative_error(got[seen.any(-1)], expected[seen.any(-1)]) < 1e-12


@backends
def test_log_density_is_differentiable(backend, device):
    inputs = case("shifted", {"variance": "component", "is_causal": True}, False, device)
    names = ("query", "key", "shift", "log_prior", "variance")
    leaves = [inputs[name][:1, :, :5].double().requires_grad_() for name in names[:2]]
    leaves += [inputs[name].double().requires_grad_() for name in names[2:]]

    def function(*tensors):
        return mgk.mixture_log_density(**{**inputs, **dict(zip(names, tensors, strict=True))}, backend=backend)

    assert torch.autograd.gradcheck(function, leaves)


@backends
@pytest.mark.parametrize("settings", [{}, {"variance": "component"}, {"is_causal": True, "keys": 11}], ids=str)
def test_log_density_of_rows_without_a_key_has_no_gradient(backend, settings, device):
    inputs = case("shifted", settings, False, device)
    if "is_causal" not in settings:
        inputs["key_mask"] = torch.zeros(2, 19, dtype=torch.bool, device=device)
        inputs["key_mask"][1, :5] = True
    inputs["query"].requires_grad_()
    density = mgk.mixture_log_density(**inputs, backend=backend)
    density.masked_fill(density == -math.inf, 0.0).sum().backward()
    empty = (density == -math.inf).detach()
    assert empty.any()
    assert (inputs["query"].grad[empty] == 0).all()
    assert (inputs["query"].grad[~empty] != 0).any()
    inputs["query"].grad = None
    mgk.mixture_log_density(**inputs, backend=backend).backward(torch.ones_like(density))
    assert (inputs["query"].grad[empty] == 0).all()


def test_paper_negative_log_likelihood_is_the_mean_log_kernel(device):
    """One query, one key: log kernel; the constants come back with normalized=True and integrate to one."""
    grid = torch.linspace(-30, 30, 6001, dtype=torch.float64, device=device)[None, None, :, None]
    key = torch.tensor([[-1.0, 2.0], [0.5, 3.0]], dtype=torch.float64, device=device)[None, None, :, :, None]
    log_prior = torch.tensor([0.3, 0.7], dtype=torch.float64, device=device).log()
    variance = torch.tensor([0.5, 2.0], dtype=torch.float64, device=device)
    density = mgk.mixture_log_density(grid, key, log_prior=log_prior, variance=variance, normalized=True).exp()
    assert abs(float(density.sum()) * 0.01 - 1) < 1e-9


@backends
@every_kind
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_responsibilities(backend, kind, settings, masked, device):
    """E1, E2: a distribution over components, from visible pairs only."""
    inputs = case(kind, settings, masked, device)
    logit, seen = oracle.logits(inputs), oracle.visible(inputs)
    posterior = logit.masked_fill(~seen[:, :, None], 0.0).softmax(2) * seen[:, :, None]
    posterior = posterior.unflatten(1, (inputs["key"].shape[1], -1))
    expected = posterior.sum((0, 2, 4, 5)) / posterior.sum((0, 2, 3, 4, 5))[:, None]
    got = mgk.mixture_responsibilities(**inputs, backend=backend)
    assert relative_error(got, expected) < 1e-12
    assert (got.sum(-1) - 1).abs().max() < 1e-12
    sums = mgk.mixture_responsibilities(**inputs, backend=backend, reduction="sum")
    assert relative_error(sums.sum(), seen.sum()) < 1e-12


@backends
def test_statistics_of_nothing(backend, device):
    inputs = case("projected", {}, False, device)
    inputs["key_mask"] = torch.zeros(2, 19, dtype=torch.bool, device=device)
    assert (mgk.mixture_responsibilities(**inputs, backend=backend) == 0).all()
    assert (mgk.mixture_log_density(**inputs, backend=backend) == -math.inf).all()
    empty = {**inputs, "query": inputs["query"][:, :, :0], "key_mask": None}
    assert (mgk.mixture_responsibilities(**empty, backend=backend) == 0).all()
    assert mgk.mixture_log_density(**empty, backend=backend).shape == (2, 2, 0)
    assert mgk.mixture_weights(**empty).shape == (2, 2, 0, 19)


@pytest.mark.parametrize("leaf", ["shift", "log_prior", "variance"])
def test_every_parameter_gets_a_gradient(leaf, device):
    """Of zeros where there is nothing to compute, or where hard assignment ignores it."""
    inputs = case("shifted", {}, False, device)
    inputs["variance"] = torch.ones(2, 2, dtype=torch.float64, device=device)
    tensor = inputs[leaf] = inputs[leaf].detach().clone().requires_grad_()
    empty = {**inputs, "query": inputs["query"][:, :, :0]}
    outputs = [mgk.mixture_log_density(**empty), mgk.mixture_weights(**empty)]
    outputs.append(mgk.mixture_weights(**inputs, assignment="hard"))
    for out in outputs:
        assert torch.autograd.grad(out.sum(), tensor)[0].isfinite().all()


@every_kind
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_weights(kind, assignment, settings, masked, device):
    inputs = {**case(kind, settings, masked, device), "assignment": assignment}
    got = mgk.mixture_weights(**inputs)
    assert relative_error(got, oracle.weights(inputs)) < 1e-12
    rows = got.sum(-1)
    seen = oracle.visible(inputs).any(-1)
    assert (rows[seen] - 1).abs().max() < 1e-12
    assert (rows[~seen] == 0).all()
