"""P21: odd widths, lengths and component counts; views of every kind. Pairwise over the lists of the catalogue."""

import itertools
import random

import pytest
import torch
from cases import BACKENDS, KINDS, OUTPUT_CAP, attend, make_inputs, relative_error, with_gradients

DIMS = (1, 8, 16, 24, 33, 64, 80, 96, 111, 128, 256)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1023, 1025, 4097)
COMPONENTS = (1, 2, 3, 4, 8)
FACTORS = {
    "queries": LENGTHS,
    "keys": LENGTHS,
    "dim": DIMS,
    "value_dim": DIMS,
    "components": COMPONENTS,
    "kind": KINDS,
    "is_causal": (False, True),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
}
# fp64 logits of the reference, with the copies it makes on the way.
REFERENCE_BYTES = 2e9 / 6


def affordable(case: dict) -> bool:
    return case["queries"] * case["keys"] * case["components"] * 8 <= REFERENCE_BYTES


def affordable_pairs() -> set:
    """Every pair of levels that some affordable case can meet."""
    cheapest = {name: min(levels) for name, levels in FACTORS.items() if name in ("queries", "keys", "components")}
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
        if affordable({**cheapest, a: x, b: y})
    }


def pairs_of(case: dict) -> set:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(FACTORS, 2)}


def pairwise_cases() -> list[dict]:
    """Cases that together meet every affordable pair of levels: each time the best of twelve random candidates."""
    rng = random.Random(0)
    cases, unmet = [], affordable_pairs()
    while unmet:
        candidates = []
        for a, x, b, y in rng.sample(sorted(unmet, key=str), min(12, len(unmet))):
            case = {name: rng.choice(levels) for name, levels in FACTORS.items()} | {a: x, b: y}
            for name in ("components", "queries", "keys"):
                if not affordable(case) and name not in (a, b):
                    case[name] = min(FACTORS[name])
            candidates.append(case)
        cases.append(max(candidates, key=lambda case: len(pairs_of(case) & unmet)))
        unmet -= pairs_of(cases[-1])
    return cases


CASES = pairwise_cases()


def test_cases_meet_every_affordable_pair_of_levels():
    assert all(affordable(case) for case in CASES)
    assert affordable_pairs() <= set().union(*map(pairs_of, CASES))
    assert ("queries", 4097, "keys", 4097) in affordable_pairs()


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_odd_shapes(backend, index, device):
    inputs = make_inputs(batch=1, heads=1, device=device, **CASES[index])
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    got, expected = attend(inputs, backend).double(), attend(exact, "reference")
    # A single output may cancel to nearly zero: the honest scale is that of the sum of magnitudes.
    scale = torch.maximum(
        expected.square().mean(), 0.1 * attend({**exact, "value": exact["value"].abs()}).square().mean()
    )
    assert (got - expected).square().mean().sqrt() <= OUTPUT_CAP[inputs["query"].dtype] * scale.sqrt()


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case["queries"] * case["keys"] <= 2**17])
def test_odd_shapes_backward(backend, index, device):
    inputs = make_inputs(batch=1, heads=2, kv_heads=1, device=device, **{**CASES[index], "dtype": torch.float32})
    grad = torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], device=device)
    _, got = with_gradients(inputs, grad, backend)
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    _, expected = with_gradients(exact, grad.double(), "reference")
    largest = max(expected[name].abs().max() for name in ("query", "key", "value"))
    for name in ("query", "key", "value"):
        assert (got[name] - expected[name]).abs().max() <= 5e-5 * largest, name


def storage_offset(tensor):
    return torch.cat([tensor.new_full((3,), 9.0), tensor.flatten()])[3:].view(tensor.shape)


def sequence_first(tensor):
    """As projections deliver it: [.., N, D] a view of [N, .., D]."""
    order = [tensor.ndim - 2, *range(tensor.ndim - 2), tensor.ndim - 1]
    back = [*range(1, tensor.ndim - 1), 0, tensor.ndim - 1]
    return tensor.permute(order).contiguous().permute(back)


def strided_features(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 9.0)], dim=-1).flatten(-2)[..., ::2]


VIEWS = {"offset": storage_offset, "sequence_first": sequence_first, "strided": strided_features}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", list(VIEWS))
def test_memory_layout_is_irrelevant(backend, kind, view, device):
    inputs = make_inputs(kind=kind, device=device, is_causal=True)
    viewed = dict(inputs, **{name: VIEWS[view](inputs[name]) for name in ("query", "key", "value")})
    assert view != "strided" or not viewed["key"].is_contiguous()
    assert relative_error(attend(viewed, backend), attend(inputs, backend)) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_expanded_inputs(backend, kind, device):
    """Stride 0 in batch and head, forward and backward."""
    inputs = make_inputs(kind=kind, batch=1, heads=1, device=device)
    for name in ("shift", "log_prior"):
        if name in inputs:
            inputs[name] = inputs[name].expand(2, *inputs[name].shape[1:])
    expanded = {name: inputs[name].expand(3, 2, *inputs[name].shape[2:]) for name in ("query", "key", "value")}
    copied = {name: tensor.contiguous() for name, tensor in expanded.items()}
    grad = torch.randn(3, 2, 19, 8, dtype=torch.float64, device=device)

    leaves = {name: inputs[name].clone().requires_grad_() for name in expanded}
    views = {name: leaf.expand(3, 2, *leaf.shape[2:]) for name, leaf in leaves.items()}
    out = attend({**inputs, **views}, backend)
    out.backward(grad)
    expected, gradients = with_gradients({**inputs, **copied}, grad, backend)
    assert relative_error(out, expected) < 1e-13
    for name, leaf in leaves.items():
        assert relative_error(leaf.grad, gradients[name].sum((0, 1), keepdim=True)) < 1e-12
