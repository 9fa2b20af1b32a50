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
    PLAIN,
    POOL,
    SHORT_FACTORS,
    SHORT_LENGTHS,
    UNUSUAL,
    WIDTHS,
    check,
    in_one_version,
    is_softmax,
    make_case,
    make_inputs,
    name_of,
    pairs_of,
)  # fmt: skip

# Of a usual configuration every other length, and not with heads of a single number, which round unluckily.
CASES = [
    (configuration, number, lengths if INTERPRETED else in_one_version(configuration, *lengths))
    for index, configuration in enumerate(CONFIGURATIONS)
    for number, lengths in enumerate(SHORT_LENGTHS if INTERPRETED else LENGTHS)
    if (
        (index + number) % 3 == 0
        if INTERPRETED
        else configuration in UNUSUAL or ((index + number) % 2 == 0 and number % 3 != 2)
    )
]

FORM = ("kind", "variance", "assignment", "similarity")
if INTERPRETED:
    EVERY_FORM = [
        {**PLAIN, "components": components, "dtype": dtype, **dict(zip(FORM, form, strict=True))}
        for components, dtype in ((2, HALF), (1, FLOAT32), (2, FLOAT32), (3, FLOAT32))
        for form in itertools.product(*(FACTORS[name] for name in FORM))
    ]
else:
    # The last of a form stays: two components where there are any.
    several = [configuration for configuration in CONFIGURATIONS if configuration["components"] > 1]
    several.sort(key=lambda configuration: (configuration["components"] == 2, configuration["dtype"] == HALF))
    EVERY_FORM = list({tuple(each[name] for name in FORM): each for each in several}.values())

# Head dimensions are tested where their width is compiled.
HEAD_DIMENSIONS = {32: {"kind": "projected"}, 64: {"kind": "shifted", "is_causal": True}}

# A handful of numbers in half precision may all be rounded unluckily.
FEW_NUMBERS = 1.0 if INTERPRETED else 3.0


def test_configurations_meet_every_pair_of_options():
    """P21: and are few enough to be compiled, each into a kernel of its own."""
    for configurations, factors in ((CONFIGURATIONS, SHORT_FACTORS if INTERPRETED else FACTORS), (POOL, FACTORS)):
        met = set().union(*map(pairs_of, configurations))
        for (a, levels_a), (b, levels_b) in itertools.combinations(factors.items(), 2):
            assert all((a, x, b, y) in met for x in levels_a for y in levels_b)
    assert len(POOL) <= 51
    assert not any(map(is_softmax, POOL))


@pytest.mark.parametrize(
    ("configuration", "number", "lengths"), CASES, ids=[f"{name_of(case[0])}-{case[2]}" for case in CASES]
)
def test_outputs_and_gradients(configuration, number, lengths):
    """P21: lengths on both sides of a tile, grouped heads, masks of every shape, rows without a key."""
    queries, keys = lengths
    _, gradients = check(make_case(configuration, number, queries=queries, keys=keys))
    assert set(gradients) <= set(GRADIENTS)


@pytest.mark.parametrize("kind", KINDS if INTERPRETED else ["shifted"])
@pytest.mark.parametrize(
    ("width", "dim"), [(width, dim) for width in ((16, 32, 64) if INTERPRETED else WIDTHS) for dim in WIDTHS[width]]
)
def test_head_dimensions(kind, width, dim, device):
    """P21: tails of the head dimension are masked, in key and value."""
    settings = {"kind": kind, **({} if INTERPRETED else HEAD_DIMENSIONS.get(width, {}))}
    check(
        make_inputs(dtype=ONE_DTYPE, device=device, dim=dim, queries=18, keys=21, heads=2, kv_heads=1, **settings),
        2.0 if dim == 1 else 1.0,
    )


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [
        (16 if INTERPRETED or width == 16 else other, value_dim)
        for width in (16, 32, 64)
        for value_dim, other in zip(WIDTHS[width], reversed(WIDTHS[width]), strict=True)
    ],
)
def test_value_dimensions(dim, value_dim, device):
    """P21: Dv != D, each with its own tail."""
    check(make_inputs(dtype=HALF, device=device, dim=dim, value_dim=value_dim, queries=18, keys=21, batch=1))


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


@pytest.mark.parametrize("configuration", EVERY_FORM, ids=name_of)
def test_every_form_of_a_logit(configuration):
    """P2: each combination may have a kernel path of its own: shared, joined or factored products, with row terms."""
    assert len({tuple(each[name] for name in FORM) for each in EVERY_FORM}) == 16
    check(make_case(configuration, queries=17, keys=18))


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
