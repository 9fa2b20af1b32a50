"""Rows that the fast path cannot serve: each is done again exactly, and no other row notices (DESIGN 1.4)."""

import itertools
import math
import statistics

import oracle
import pytest
import torch
from cases import KINDS, OUTPUT_CAP, with_gradients
from cases import attend as attend_with
from triton_cases import (
    BRIEF_DTYPES,
    CONFIGURATIONS,
    DTYPES,
    FLOAT16,
    FLOAT32,
    INTERPRETED,
    PLAIN,
    attend,
    check,
    error_of,
    expected_with_gradients,
    gradient_errors,
    gradients_of,
    make_case,
    make_inputs,
    name_of,
    random_grad,
)  # fmt: skip

# Two and more blocks of keys, the last one incomplete.
TOKENS = 37 if INTERPRETED else 300
# Where the last block begins, or a later one at least.
LATE = 32 if INTERPRETED else 256
HEADS = 1 if INTERPRETED else 2
SIZES = {"batch": 1, "heads": HEADS, "dim": 16, "queries": TOKENS}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)
with_and_without_causality = pytest.mark.parametrize("is_causal", [False, True])


def check_rows(inputs, tolerance=0.0):
    """No row may be wrong, wide or not; logits of size x are known to 1e-7 x in fp32, whoever computes them."""
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    expected, baseline = oracle.attention(inputs), attend_with(as_fp32(inputs), "reference").double()
    cap = max(OUTPUT_CAP[out.dtype], tolerance)
    honest = error_of(baseline, expected)
    assert error_of(out, expected) <= max(cap, 3 * honest)
    largest = (baseline - expected).abs().max()
    assert (out.double() - expected).abs().max() <= max(20 * cap * inputs["value"].abs().max(), 5 * largest)
    for name, gradient in gradients.items():
        if inputs["query"].dtype == FLOAT16 and name in ("query", "key"):
            assert not gradient.isnan().any(), name
        else:
            assert gradient.isfinite().all(), name
    return out, gradients


def as_fp32(inputs):
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@every_kind
@every_dtype
@pytest.mark.parametrize("scale", [3.0, 10.0, 60.0, 200.0])
def test_wide_queries_and_keys(kind, dtype, scale, device):
    """P6: where A_ir and B_jr of the factored form are tiny in different components, it must not be used."""
    check_rows(make_inputs(kind=kind, scale=scale, dtype=dtype, device=device, **SIZES), 1e-6 * scale**2)


@every_kind
@brief_dtypes
@pytest.mark.parametrize("scale", [3.0, 10.0, 60.0, 200.0])
def test_wide_causal_queries_and_keys(kind, dtype, scale, device):
    """P6: early rows see few keys, which all may lie far away."""
    inputs = make_inputs(kind=kind, scale=scale, dtype=dtype, device=device, is_causal=True, **SIZES)
    check_rows(inputs, 1e-6 * scale**2)


@brief_dtypes
@pytest.mark.parametrize("components", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 10.0, 60.0])
def test_wide_shifts(dtype, components, scale, device):
    """P6: components that lie far apart: standard deviation 30 and a different nearest one for every query."""
    inputs = make_inputs(kind="shifted", components=components, scale=scale, dtype=dtype, device=device, **SIZES)
    inputs["shift"] *= 30.0
    check_rows(inputs, 1e-6 * max(scale, 30.0) ** 2)


PATHS = [(False, "soft"), (False, "hard"), (True, "soft")]
CASES_OF_PATHS = [(kind, "gaussian", *path) for kind in KINDS for path in PATHS]
CASES_OF_PATHS += [
    ("projected", "dot", *path) for path in (PATHS if INTERPRETED else [(False, "soft"), (True, "hard")])
]


@pytest.mark.parametrize(("kind", "similarity", "is_causal", "assignment"), CASES_OF_PATHS)
@brief_dtypes
def test_the_maximum_comes_with_the_last_block(kind, similarity, dtype, is_causal, assignment, device):
    """P6: e^200 above everything in the first block, which must not have set the scale of the row for good."""
    inputs = make_inputs(
        kind=kind, dtype=dtype, device=device, is_causal=is_causal, assignment=assignment, similarity=similarity,
        **SIZES,
    )  # fmt: skip
    late = torch.arange(TOKENS, device=device) >= LATE
    if similarity == "gaussian":
        inputs["key"][..., ~late, :] += 12.0
    else:
        inputs["query"] = inputs["query"].abs() + 1.0
        inputs["key"][..., late, :] += 60.0
    logit = oracle.logits(inputs).amax(2)
    assert (logit[..., -1, late].amax(-1) - logit[..., -1, ~late].amax(-1)).min() > 200
    if similarity == "gaussian" and dtype == FLOAT32:
        # Rows that see far keys alone have logits near -300, of which fp32 keeps five digits behind the point.
        check(inputs, scale=5)
    else:
        # Many keys have 12 or 60 in common, which half precision cannot keep out of the gradients.
        check_rows(inputs, 1e-4)


@every_kind
@brief_dtypes
def test_the_maximum_comes_with_the_first_key(kind, dtype, device):
    """P6: the opposite: everything after the first key is e^200 below it, and rows still sum to one."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SIZES)
    inputs["key"][..., 1:, :] += 12.0
    if dtype == FLOAT32:
        check(inputs, scale=3)
    else:
        check_rows(inputs, 1e-4)
    inputs["value"] = torch.ones_like(inputs["value"])
    assert (attend(inputs).double() - 1).abs().max() <= 2 * torch.finfo(dtype).eps


@every_kind
@brief_dtypes
@with_and_without_causality
def test_some_rows_of_a_tile_are_wide(kind, dtype, is_causal, device):
    """P6: a few far queries change no bit of the others, and are right themselves."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, is_causal=is_causal, **SIZES)
    wide = [3, 4, 15, TOKENS - 2]
    near = [i for i in range(TOKENS) if i not in wide]
    before = attend(inputs)
    inputs["query"][:, :, wide] *= 60.0
    out, gradients = check_rows(inputs, 5e-3)
    assert torch.equal(out[:, :, near], before[:, :, near])
    expected = oracle.attention(inputs)
    assert error_of(out[:, :, near], expected[:, :, near]) <= OUTPUT_CAP[dtype]
    assert (gradients["query"][:, :, near] != 0).any()


@every_kind
@brief_dtypes
def test_wide_rows_leave_the_gradients_of_others_alone(kind, dtype, device):
    """P6: with no gradient coming into the wide rows, the rest is what it is without them."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SIZES)
    grad = random_grad(inputs)
    grad[:, :, 3:6] = 0
    _, before = gradients_of(inputs, grad)
    inputs["query"][:, :, 3:6] *= 60.0
    _, after = gradients_of(inputs, grad)
    before["query"][:, :, 3:6] = 0
    for name, gradient in after.items():
        assert error_of(gradient, before[name].double()) <= (1e-5 if dtype == FLOAT32 else 1e-3), name


@every_kind
@brief_dtypes
@pytest.mark.parametrize("components", [2, 3])
@pytest.mark.parametrize("low", [-math.inf, -100.0] if INTERPRETED else [-math.inf, -1e4, -100.0, -30.0])
@pytest.mark.parametrize("dead", [0, -1])
def test_dead_components(kind, dtype, components, low, dead, device):
    """P5: the first component may be the one without a prior, and so may the last."""
    inputs = make_inputs(kind=kind, components=components, dtype=dtype, device=device, **SIZES)
    inputs["log_prior"][:, dead] = low
    check(inputs)


@every_kind
@brief_dtypes
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_one_hot_priors(kind, dtype, scale, device):
    """P5: a different single component for every head, near and far."""
    inputs = make_inputs(kind=kind, components=3, scale=scale, dtype=dtype, device=device, **SIZES)
    inputs["log_prior"] = torch.eye(3, device=device)[-HEADS:].log()
    _, gradients = check_rows(inputs, 1e-6 * scale**2)
    assert (gradients["log_prior"].abs() <= 1e-2 * gradients["key"].double().norm()).all()


@every_kind
@brief_dtypes
@with_and_without_causality
def test_priors_by_position_with_holes(kind, dtype, is_causal, device):
    """P5: half of the components are switched off at random, in some positions all of them."""
    inputs = make_inputs(kind=kind, prior="position", dtype=dtype, device=device, is_causal=is_causal, **SIZES)
    inputs["log_prior"][torch.rand_like(inputs["log_prior"]) < 0.5] = -math.inf
    inputs["log_prior"][:, :, 5:8] = -math.inf
    inputs["log_prior"][:, 0, 0] = 0.0
    check(inputs)


@every_kind
@brief_dtypes
@pytest.mark.parametrize("spread", [50.0, 200.0, 2000.0])
def test_priors_far_apart(kind, dtype, spread, device):
    """P9: log priors that differ by hundreds from position to position, rising and falling."""
    inputs = make_inputs(kind=kind, prior="position", dtype=dtype, device=device, **SIZES)
    for ramp in (torch.linspace(0, spread, TOKENS), torch.linspace(0, -spread, TOKENS)):
        inputs["log_prior"] = ramp.to(device).expand(HEADS, 2, TOKENS).clone()
        inputs["log_prior"][:, 1] = inputs["log_prior"][:, 1].flip(-1)
        # Log priors near 2000 leave fp32 four digits behind the point.
        check(inputs, scale=max(5, spread / 100) if dtype == FLOAT32 else 5)


@every_kind
@brief_dtypes
@pytest.mark.parametrize(
    ("how", "is_causal"),
    [("key_mask", False), ("key_mask", True), ("attn_mask", False), ("prior", False), ("prior", True)],
)
def test_the_first_block_of_keys_is_hidden(kind, dtype, how, is_causal, device):
    """P17: a row's first maximum is -inf; the ones that see nothing at all are zero."""
    # Masks of pairs are compiled for two shifted keys, and for three projected ones.
    form = {"components": 3, "dim": 32, "value_dim": 16} if kind == "projected" and how == "attn_mask" else {}
    inputs = make_inputs(
        kind=kind, dtype=dtype, device=device, is_causal=is_causal, prior="position" if how == "prior" else "head",
        **{**SIZES, **({} if INTERPRETED else form)},
    )  # fmt: skip
    hidden = LATE // 2 + 3
    if how == "key_mask":
        inputs["key_mask"] = torch.arange(TOKENS, device=device).expand(1, -1) >= hidden
    elif how == "attn_mask":
        inputs["attn_mask"] = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device)
        inputs["attn_mask"][1::2, :hidden] = False
    else:
        inputs["log_prior"][:, :, :hidden] = -math.inf
    out, gradients = check(inputs)
    empty = oracle.logits(inputs).amax((2, 4)) == -math.inf
    assert (out[empty] == 0).all()
    assert (gradients["query"][empty] == 0).all()


@every_kind
@brief_dtypes
@pytest.mark.parametrize("components", [1, 2] if INTERPRETED else [2])
@pytest.mark.parametrize("huge", [30.0, 1e3])
def test_huge_later_tokens_stay_in_the_future(kind, dtype, components, huge, device):
    """P13: what comes later, however far, changes no bit of an earlier row, though it may change a tile's path."""
    huge = min(huge, 200.0) if dtype == FLOAT16 else huge
    inputs = make_inputs(kind=kind, components=components, dtype=dtype, device=device, is_causal=True, **SIZES)
    changed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    now = TOKENS - 12
    for name in ("query", "key", "value"):
        changed[name][..., now:, :] = huge * torch.randn_like(changed[name][..., now:, :])
    before, after = attend(inputs), attend(changed)
    assert torch.equal(before[:, :, :now], after[:, :, :now])
    assert not torch.equal(before, after)
    assert after.isfinite().all()


def alternating(**settings):
    """Inputs of which every sixteen tokens lie at another height, the queries in the opposite order of the keys."""
    inputs = make_inputs(**settings, **SIZES)
    height = 8 * torch.arange(TOKENS, device=inputs["key"].device).div(16, rounding_mode="floor").remainder(3)
    inputs["key"] += height[:, None].to(inputs["key"].dtype)
    inputs["query"] += height.flip(0)[:, None].to(inputs["query"].dtype)
    return inputs


@every_kind
@brief_dtypes
def test_far_blocks_and_near_blocks_alternate(kind, dtype, device):
    """P6: the running maximum rises, falls and rises again; rows disagree about which block is near."""
    inputs = alternating(kind=kind, dtype=dtype, device=device)
    if dtype == FLOAT32:
        # Logits near 500 leave fp32 four digits behind the point.
        check(inputs, scale=20)
    else:
        check_rows(inputs, 1e-4)


FAR = [("projected", False, "soft"), ("shifted", False, "soft")]
if INTERPRETED:
    FAR += [("projected", False, "hard"), ("shifted", False, "hard"), ("projected", True, "soft")]


@pytest.mark.parametrize(("kind", "is_causal", "assignment"), FAR)
def test_gradients_of_far_tokens_are_as_exact_as_the_reference(kind, is_causal, assignment, device):
    """P6: backward rounds logits as forward does, or what keys have in common would show in the queries' gradients."""
    draws = []
    for _ in range(3):
        inputs = alternating(kind=kind, dtype=FLOAT32, device=device, is_causal=is_causal, assignment=assignment)
        grad = random_grad(inputs)
        _, expected = expected_with_gradients(inputs, grad)
        _, ours = gradients_of(inputs, grad)
        _, theirs = with_gradients(inputs, grad, "reference")
        draws.append((gradient_errors(ours, expected), gradient_errors(theirs, expected)))
    for name in expected.keys() & {"query", "key", "value", "shift"}:
        # The median, since a tie that rounding breaks may come up in a draw.
        ours, theirs = (statistics.median(errors[name] for errors in each) for each in zip(*draws, strict=True))
        assert ours <= 3 * theirs, (name, ours, theirs)


@every_kind
def test_wide_gradients_match_the_oracle(kind, device):
    """P6: where the weights are nearly one-hot, in fp32, on the scale of the largest gradient."""
    inputs = make_inputs(kind=kind, scale=10.0, dtype=FLOAT32, device=device, **SIZES)
    grad = random_grad(inputs)
    _, got = gradients_of(inputs, grad)
    _, expected = expected_with_gradients(inputs, grad)
    for name, gradient in got.items():
        assert (gradient - expected[name]).abs().max() <= 2e-3 * expected[name].abs().max(), name


EQUAL_IN_FP32 = {"similarity": "gaussian", "variance": None, "masks": "none", "dtype": FLOAT32}
BEYOND = [each for each in CONFIGURATIONS if EQUAL_IN_FP32.items() <= each.items()]
if INTERPRETED:
    forms = itertools.product(KINDS, ("soft", "hard"))
    BEYOND = [{**PLAIN, "dtype": FLOAT32, "kind": kind, "assignment": assignment} for kind, assignment in forms]


@pytest.mark.parametrize("configuration", BEYOND, ids=name_of)
@pytest.mark.parametrize("size", [1e7, 1e16])
def test_beyond_what_fp32_can_tell_apart_there_is_no_gradient(configuration, size):
    """P17: logits that forward and backward round to different numbers would make weights of any size of them."""
    inputs = make_case(configuration, queries=20)
    for name in ("query", "key"):
        inputs[name] = inputs[name] * size
    out, gradients = gradients_of(inputs, random_grad(inputs))
    assert out.isfinite().all()
    for name, gradient in gradients.items():
        assert gradient is None or not gradient.any(), name
