"""Outputs and all gradients against fp64, over every pair of options, odd lengths and odd head dimensions (P21)."""

import itertools

import pytest
import torch
from cases import GRADIENTS, KINDS
from triton_cases import (
    CONFIGURATIONS,
    FACTORS,
    FLOAT32,
    HALF,
    INTERPRETED,
    LENGTHS,
    ONE_DTYPE,
    SHORT_LENGTHS,
    WIDTHS,
    check,
    make_case,
    make_inputs,
    name_of,
    pairs_of,
)  # fmt: skip

CASES = [
    (configuration, number, lengths)
    for index, configuration in enumerate(CONFIGURATIONS)
    for number, lengths in enumerate(SHORT_LENGTHS if INTERPRETED else LENGTHS)
    if not INTERPRETED or (index + number) % 3 == 0
]


FORMS = [{"components": 2, "dtype": HALF}]
if INTERPRETED:
    FORMS += [{"components": components, "dtype": FLOAT32} for components in (1, 2, 3)]


# A handful of numbers in half precision may all be rounded unluckily.
FEW_NUMBERS = 1.0 if INTERPRETED else 3.0


def test_configurations_meet_every_pair_of_options():
    """P21: and are few enough to be compiled."""
    met = set().union(*map(pairs_of, CONFIGURATIONS))
    for (a, levels_a), (b, levels_b) in itertools.combinations(FACTORS.items(), 2):
        assert all((a, x, b, y) in met for x in levels_a for y in levels_b)
    assert len(CONFIGURATIONS) <= 35


@pytest.mark.parametrize(
    ("configuration", "number", "lengths"), CASES, ids=[f"{name_of(case[0])}-{case[2]}" for case in CASES]
)
def test_outputs_and_gradients(configuration, number, lengths):
    """P21: lengths on both sides of a tile, grouped heads, masks of every shape, rows without a key."""
    queries, keys = lengths
    _, gradients = check(make_case(configuration, number, queries=queries, keys=keys))
    assert set(gradients) <= set(GRADIENTS)


@pytest.mark.parametrize("kind", KINDS if INTERPRETED else ["shifted"])
@pytest.mark.parametrize("dim", [dim for width in FACTORS["width"] for dim in WIDTHS[width]])
def test_head_dimensions(kind, dim, device):
    """P21: tails of the head dimension are masked, in key and value."""
    check(
        make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, dim=dim, queries=18, keys=21, heads=2, kv_heads=1),
        2.0 if dim == 1 else 1.0,
    )


@pytest.mark.parametrize("dim", [dim for width in (16, 32, 64) for dim in WIDTHS[width]])
def test_value_dimensions(dim, device):
    """P21: Dv != D, each with its own tail; in half precision some widths have the weights added up by a product."""
    check(make_inputs(dtype=HALF, device=device, dim=16, value_dim=dim, queries=18, keys=21, batch=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (5, 8), (8, 5)], ids=str)
def test_single_tokens_of_single_heads(kind, lengths, dims, device):
    """P21: axes of length one, whose strides say nothing, beside rows that are not aligned."""
    inputs = make_inputs(
        kind=kind, batch=1, heads=1, queries=lengths[0], keys=lengths[1], dim=dims[0], value_dim=dims[1],
        dtype=ONE_DTYPE, device=device,
    )  # fmt: skip
    check(inputs, FEW_NUMBERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (6, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(kind, heads, is_causal, device):
    """P21: multi-query and grouped-query; the gradients of shared keys are sums over their queries."""
    inputs = make_inputs(
        kind=kind, heads=heads[0], kv_heads=heads[1], batch=1, queries=20, keys=33, dim=16, dtype=ONE_DTYPE,
        device=device, is_causal=is_causal,
    )  # fmt: skip
    check(inputs)


@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("variance", [None, "component"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_a_logit(form, kind, variance, assignment, similarity, device):
    """P2: each combination may have a kernel path of its own: shared, joined or factored products, with row terms."""
    inputs = make_inputs(
        kind=kind, variance=variance, assignment=assignment, similarity=similarity, batch=1, heads=1, queries=17,
        keys=18, dim=16, device=device, **form,
    )  # fmt: skip
    check(inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [0.7, 30.0, "equal tensor", "component"])
def test_variances(kind, variance, device):
    """P2b: numbers, a tensor of equal values and unequal ones, with the gradient of each tensor."""
    inputs = make_inputs(kind=kind, batch=1, queries=20, dim=16, dtype=ONE_DTYPE, device=device)
    if variance == "component":
        inputs["variance"] = torch.tensor([2.0, 9.0], device=device)
    elif variance == "equal tensor":
        inputs["variance"] = torch.full((2, 2), 3.0, device=device)
    else:
        inputs["variance"] = variance
    check(inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [None, "head", "position", "shared"])
@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
def test_priors(kind, prior, similarity, device):
    """P9: uniform, by head, by position, and one for all heads."""
    inputs = make_inputs(
        kind=kind, batch=1, queries=20, dim=16, dtype=ONE_DTYPE, device=device, similarity=similarity,
        prior="head" if prior == "shared" else prior,
    )  # fmt: skip
    if prior == "shared":
        inputs["log_prior"] = inputs["log_prior"][0].clone()
    check(inputs)
