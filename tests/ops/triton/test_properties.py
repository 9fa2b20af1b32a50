"""What mixture attention must satisfy whatever computes it (P1-P13, P15, P17, P18 of the test catalogue)."""

import itertools
import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import KINDS, OUTPUT_CAP, padding
from triton_cases import (
    BRIEF_DTYPES,
    CONFIGURATIONS,
    DTYPES,
    FLOAT16,
    FLOAT32,
    INTERPRETED,
    ONE_DTYPE,
    PLAIN,
    attend,
    error_of,
    gradients_of,
    log_density,
    make_case,
    make_inputs,
    name_of,
    random_grad,
)  # fmt: skip

# Several blocks, the last one incomplete.
TOKENS = 35 if INTERPRETED else 150
SIZES = {"queries": TOKENS, "dim": 16, "batch": 2, "heads": 1 if INTERPRETED else 2}
SMALL = {"queries": 35, "dim": 16, "batch": 1, "heads": 2}
CHANGES = ("assignment", "components", "dtype", "kind")

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)
with_and_without_causality = pytest.mark.parametrize("is_causal", [False, True])


def assert_equal(got, expected):
    """Equal but for the rounding of both."""
    assert error_of(got, expected.double()) <= 2 * OUTPUT_CAP[got.dtype]


@brief_dtypes
def test_unit_vectors_with_one_component_are_softmax_attention(dtype, device):
    """P1: on the unit sphere a Gaussian is an exponential of the dot product."""
    inputs = make_inputs(components=1, prior=None, device=device, **SMALL)
    for name in ("query", "key"):
        inputs[name] = F.normalize(inputs[name], dim=-1)
    expected = F.scaled_dot_product_attention(inputs["query"], inputs["key"][:, :, 0], inputs["value"])
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    # Rounding alone takes half-precision vectors off the sphere.
    assert error_of(attend(inputs), expected) <= (1e-5 if dtype == FLOAT32 else 1e-2)


@brief_dtypes
@every_kind
def test_soft_mixture_is_softmax_over_flattened_keys(dtype, kind, device):
    """P2: the bias is log prior - |k|^2 / 2 variance, each value appears M times."""
    inputs = make_inputs(kind=kind, components=3, dtype=dtype, device=device, **SMALL)
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    key = key if kind == "projected" else key[:, :, None] + inputs["shift"].double()[:, :, None]
    variance = math.sqrt(16)
    bias = inputs["log_prior"].double()[:, :, None] - key.square().sum(-1) / (2 * variance)
    expected = F.scaled_dot_product_attention(
        query, key.flatten(2, 3), value.repeat(1, 1, 3, 1),
        attn_mask=bias.flatten(2)[:, :, None].expand(-1, -1, 35, -1), scale=1 / variance,
    )  # fmt: skip
    assert error_of(attend(inputs), expected) <= OUTPUT_CAP[dtype]


@brief_dtypes
@every_kind
def test_unequal_variances_need_the_norm_of_the_query(dtype, kind, device):
    """P2b: append |q|^2 to q and -1 / 2 variance to k / variance."""
    inputs = make_inputs(kind=kind, variance="component", dtype=dtype, device=device, **SMALL)
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    key = key if kind == "projected" else key[:, :, None] + inputs["shift"].double()[:, :, None]
    variance = inputs["variance"].double()[:, :, None, None]
    bias = inputs["log_prior"].double()[:, :, None, None] - key.square().sum(-1, keepdim=True) / (2 * variance)
    norm_factor = (-1 / (2 * variance)).expand_as(bias)
    query = torch.cat([query, query.square().sum(-1, keepdim=True), torch.ones_like(query[..., :1])], -1)
    key = torch.cat([key / variance, norm_factor, bias], -1)
    expected = F.scaled_dot_product_attention(
        query, key.flatten(2, 3), F.pad(value, (0, 2)).repeat(1, 1, 2, 1), scale=1.0
    )[..., :16]
    assert error_of(attend(inputs), expected) <= OUTPUT_CAP[dtype]


@every_kind
@brief_dtypes
@pytest.mark.parametrize("variance", [None, "component"])
def test_order_of_components_is_irrelevant(kind, dtype, variance, device):
    """P3"""
    inputs = make_inputs(kind=kind, variance=variance, dtype=dtype, device=device, **SMALL)
    swapped = dict(inputs, log_prior=inputs["log_prior"].flip(1))
    if kind == "projected":
        swapped["key"] = inputs["key"].flip(2)
    else:
        swapped["shift"] = inputs["shift"].flip(1)
    if variance:
        swapped["variance"] = inputs["variance"].flip(1)
    assert_equal(attend(swapped), attend(inputs))


@brief_dtypes
def test_equal_components_are_one_component(dtype, device):
    """P4: with priors that sum to one."""
    one = make_inputs(components=1, prior=None, dtype=dtype, device=device, **SMALL)
    prior = torch.tensor([0.2, 0.3, 0.5], device=device).log()
    three = dict(one, key=one["key"].expand(-1, -1, 3, -1, -1), log_prior=prior)
    assert_equal(attend(three), attend(one))
    shifts = torch.zeros(2, 3, 16, device=device)
    assert_equal(attend(dict(one, key=one["key"][:, :, 0], shift=shifts, log_prior=prior)), attend(one))


@every_kind
@brief_dtypes
def test_one_hot_prior_is_that_component_alone(kind, dtype, device):
    """P5: and the switched-off component gets no gradient."""
    inputs = make_inputs(kind=kind, prior=None, dtype=dtype, device=device, **SMALL)
    if kind == "shifted":
        # Of few bits, so that any dtype holds their sum.
        inputs |= {name: (8 * inputs[name]).round().clamp(-30, 30) / 8 for name in ("key", "shift")}
    one_hot = dict(inputs, log_prior=torch.tensor([-math.inf, 0.0], device=device))
    if kind == "projected":
        alone = dict(inputs, key=inputs["key"][:, :, 1])
    else:
        alone = dict(inputs, key=inputs["key"] + inputs["shift"][:, 1:].to(dtype))
        alone.pop("shift")
    out, gradients = gradients_of(one_hot, random_grad(inputs))
    assert_equal(out, attend(alone))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    off = gradients["key"][:, :, 0] if kind == "projected" else gradients["shift"][:, 0]
    assert (off == 0).all()


@every_kind
@every_dtype
@pytest.mark.parametrize("deviations", [1, 16, 64])
def test_moving_query_and_key_together_changes_nothing(kind, dtype, deviations, device):
    """P6: the strongest detector of cancellation."""
    inputs = make_inputs(kind=kind, device=device, **SMALL)
    # Few bits beside the offset, so that the moved problem is the same problem in every dtype.
    step = {FLOAT32: 1 / 64, FLOAT16: 1 / 8}.get(dtype, 1 / 2)
    for name in ("query", "key"):
        inputs[name] = (inputs[name] / step).round() * step
    moved = {**inputs, "query": inputs["query"] + deviations, "key": inputs["key"] + deviations}
    convert = {"query": dtype, "key": dtype, "value": dtype}
    moved, inputs = ({k: v.to(convert.get(k, FLOAT32)) for k, v in each.items()} for each in (moved, inputs))
    assert error_of(attend(moved), attend(inputs).double()) <= OUTPUT_CAP[dtype]


@every_kind
def test_rotation_changes_nothing(kind, device):
    """P7: in fp32, since half precision would round the rotated problem to another."""
    inputs = make_inputs(kind=kind, dtype=FLOAT32, device=device, **SMALL)
    rotation = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, device=device))[0]
    rotated = {name: (inputs[name].double() @ rotation).float() for name in ("query", "key", "shift") if name in inputs}
    assert_equal(attend({**inputs, **rotated}), attend(inputs))


@every_kind
@brief_dtypes
def test_scaling_with_the_variance_changes_nothing(kind, dtype, device):
    """P8: by a power of two, which rounds nothing."""
    inputs = make_inputs(kind=kind, variance=3.0, dtype=dtype, device=device, **SMALL)
    scaled = {name: 4 * inputs[name] for name in ("query", "key", "shift") if name in inputs}
    assert_equal(attend({**inputs, **scaled, "variance": 3.0 * 16}), attend(inputs))


@every_kind
@brief_dtypes
@pytest.mark.parametrize("constant", [3.0, 80.0, -500.0])
def test_prior_need_not_be_normalised(kind, dtype, constant, device):
    """P9: log priors near 500 lose four of their own digits."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SMALL)
    moved = attend(inputs, log_prior=inputs["log_prior"] + constant)
    assert error_of(moved, attend(inputs).double()) <= max(2 * OUTPUT_CAP[dtype], 1e-7 * abs(constant))


@every_kind
@brief_dtypes
@with_and_without_causality
def test_output_is_an_average_of_the_values(kind, dtype, is_causal, device):
    """P10: rows sum to one within 2 ulp; a constant comes back within 4 ulp, and every channel stays in range."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, is_causal=is_causal, scale=2.0, **SIZES)
    ulp = torch.finfo(dtype).eps
    ones = torch.ones_like(inputs["value"])
    assert (attend(inputs, value=ones).double() - 1).abs().max() <= 2 * ulp
    # A constant may be taken out before the sum; beside zeros it cannot hide weights that do not sum to one.
    ones[:, :, ::2] = 0
    halves = attend(inputs, value=ones) + attend(inputs, value=1 - ones)
    assert (halves.double() - 1).abs().max() <= 16 * ulp
    constant = torch.full_like(inputs["value"], 0.3)
    assert (attend(inputs, value=constant).double() / constant.double() - 1).abs().max() <= 4 * ulp
    out, value = attend(inputs).double(), inputs["value"].double()
    slack = 4 * ulp * value.abs().max()
    assert (out <= value.amax(2, keepdim=True) + slack).all()
    assert (out >= value.amin(2, keepdim=True) - slack).all()


@every_kind
@brief_dtypes
def test_linear_in_the_value(kind, dtype, device):
    """P11: with weights and values that half precision can add exactly."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SMALL)
    one, other = (torch.randn_like(inputs["value"]).mul(4).round().div(4) for _ in range(2))
    combined = attend(inputs, value=2 * one - other).double()
    separate = 2 * attend(inputs, value=one).double() - attend(inputs, value=other).double()
    assert error_of(combined, separate) <= 3 * OUTPUT_CAP[dtype]


@every_kind
@brief_dtypes
def test_hard_and_soft_weights_bound_each_other(kind, dtype, device):
    """P12: under a uniform prior the ratio of normalised weights lies in [1/M, M]."""
    inputs = make_inputs(kind=kind, prior=None, dtype=dtype, device=device, value_dim=16, **{**SMALL, "queries": 16})
    inputs["value"] = torch.eye(16, dtype=dtype, device=device).expand(1, 2, 16, 16)
    soft, hard = attend(inputs).double(), attend(inputs, assignment="hard").double()
    slack = 4 * torch.finfo(dtype).eps
    seen = hard > 1e-4
    assert (soft[seen] / hard[seen]).max() <= 2 * (1 + slack)
    assert (soft[seen] / hard[seen]).min() >= 0.5 * (1 - slack)


def test_hard_and_soft_normalisers_bound_each_other(device):
    """P12 on logits, seen through one visible key each: hard <= soft <= hard + log M with priors of one."""
    inputs = make_inputs(prior=None, dtype=FLOAT32, device=device, **{**SMALL, "queries": 20})
    inputs.pop("value")
    hard = oracle.logits(inputs).amax(2)
    ones = torch.zeros(2, device=device)
    for j in (0, 7, 19):
        only = {**inputs, "key": inputs["key"][..., j : j + 1, :], "log_prior": ones}
        soft = log_density(only)
        assert (soft >= hard[..., j] - 1e-4).all()
        assert (soft <= hard[..., j] + math.log(2) + 1e-4).all()


@brief_dtypes
def test_soft_becomes_hard_as_the_variance_shrinks(dtype, device):
    """P12: with a gap between the nearest keys, so that no tie stays open."""
    grid = 4.0 * torch.arange(40, device=device)[torch.randperm(40, device=device)]
    inputs = make_inputs(batch=1, heads=1, queries=20, dim=1, variance=0.05, dtype=dtype, device=device)
    inputs["key"] = grid.view(1, 1, 2, 20, 1).to(dtype)
    inputs["query"] = inputs["key"][:, :, 0]
    assert_equal(attend(inputs), attend(inputs, assignment="hard"))


if INTERPRETED:
    CAUSALITIES = [
        {**PLAIN, "is_causal": True, "masks": "padding", **dict(zip(CHANGES, levels, strict=True))}
        for levels in itertools.product(("soft", "hard"), (1, 2), BRIEF_DTYPES, KINDS)
    ]
else:
    CAUSALITIES = [each for each in CONFIGURATIONS if each["is_causal"] and each["masks"] != "pairs"]


@pytest.mark.parametrize("configuration", CAUSALITIES, ids=name_of)
def test_causal_rows_do_not_know_the_future(configuration, device):
    """P13: changing later tokens leaves a row equal in every bit; row 0 is value 0."""
    inputs = make_case(configuration, queries=TOKENS, batch=2)
    inputs.pop("query_mask", None)
    if configuration["masks"] == "padding":
        inputs["key_mask"] = torch.rand(2, TOKENS, device=device) > 0.1
        inputs["key_mask"][:, 0] = True
    changed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    now = TOKENS // 2
    for name in ("query", "key", "value"):
        changed[name][..., now:, :] = 7.0 * torch.randn_like(changed[name][..., now:, :])
    before, after = attend(inputs), attend(changed)
    assert torch.equal(before[:, :, :now], after[:, :, :now])
    assert not torch.equal(before, after)
    first, value = before[:, :, 0].double(), inputs["value"][:, :, 0].double()
    assert (first - value).abs().max() <= 4 * torch.finfo(before.dtype).eps * value.abs().max()


@every_kind
@brief_dtypes
def test_causal_gradients_do_not_know_the_future(kind, dtype, device):
    """P13: with no gradient coming into later rows, their tokens get none; they may change a path, not a result."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, is_causal=True, **SMALL)
    changed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    for name in ("query", "key", "value"):
        changed[name][..., 20:, :] = 30.0 * torch.randn_like(changed[name][..., 20:, :])
    grad = random_grad(inputs)
    grad[:, :, 20:] = 0
    _, before = gradients_of(inputs, grad)
    _, after = gradients_of(changed, grad)
    for name, gradient in after.items():
        if name in ("query", "key", "value"):
            assert (gradient[..., 20:, :] == 0).all(), name
        assert error_of(gradient, before[name].double()) <= (1e-5 if dtype == FLOAT32 else 5e-3), name


@every_kind
@brief_dtypes
def test_permuting_keys_batch_or_heads_permutes_along(kind, dtype, device):
    """P15"""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, "queries": 35})
    expected = attend(inputs)
    order = torch.randperm(35, device=device)
    shuffled = dict(inputs, key=inputs["key"][..., order, :], value=inputs["value"][..., order, :])
    assert_equal(attend(shuffled), expected)
    flipped = dict(inputs, **{name: inputs[name].flip(0, 1) for name in ("query", "key", "value")})
    flipped.update({name: inputs[name].flip(0) for name in ("shift", "log_prior") if name in inputs})
    assert_equal(attend(flipped).flip(0, 1), expected)


@every_kind
@brief_dtypes
def test_a_sample_does_not_depend_on_its_batch(kind, dtype, device):
    """P15: batch and heads are only more of the same; only matrix products around the kernel may round otherwise."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, "queries": 35, "batch": 3})
    alone = dict(inputs, **{name: inputs[name][1:2] for name in ("query", "key", "value")})
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    out_alone, gradients_alone = gradients_of(alone, grad[1:2])
    tolerance = 2e-6 if dtype == FLOAT32 else OUTPUT_CAP[dtype]
    assert error_of(out[1:2], out_alone.double()) <= tolerance
    for name in ("query", "key", "value"):
        assert error_of(gradients[name][1:2], gradients_alone[name].double()) <= 2 * tolerance, name


@every_kind
@brief_dtypes
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "all"])
def test_rows_without_a_key_are_zero(kind, dtype, settings, side, device):
    """P17: output 0, gradient 0, log density -inf, no NaN; the other rows are right."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, "queries": 19, **settings})
    mask = padding(2, 19, device, "left" if side == "all" else side)
    if side == "all":
        mask[0] = False
    inputs["key_mask"] = mask
    seen = oracle.visible(inputs).any(-1)
    out, gradients = gradients_of(inputs, random_grad(inputs))
    assert error_of(out, oracle.attention(inputs)) <= OUTPUT_CAP[dtype]
    assert (out[~seen] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (gradients["query"][~seen] == 0).all()
    assert (gradients["value"].transpose(1, 2)[~mask] == 0).all()
    inputs.pop("value")
    density = log_density(inputs)
    assert (density[~seen] == -math.inf).all()
    assert density[seen].isfinite().all()


@every_kind
@pytest.mark.parametrize("lengths", [(35, 16), (40, 1), (17, 2)], ids=str)
def test_rows_before_the_first_key_are_zero(kind, lengths, device):
    """P17: causal with more queries than keys: whole blocks of rows see nothing."""
    queries, keys = lengths
    inputs = make_inputs(
        kind=kind, queries=queries, keys=keys, dim=16, batch=1, dtype=ONE_DTYPE, device=device, is_causal=True
    )
    out, gradients = gradients_of(inputs, random_grad(inputs))
    assert (out[:, :, : queries - keys] == 0).all()
    assert (out[:, :, queries - keys :] != 0).all()
    assert (gradients["query"][:, :, : queries - keys] == 0).all()
    assert error_of(out, oracle.attention(inputs)) <= OUTPUT_CAP[ONE_DTYPE]


@every_kind
@pytest.mark.parametrize("low", [-1e12, -1e30, torch.finfo(torch.float32).min, -math.inf])
def test_tiny_priors_beside_masked_keys(kind, low, device):
    """P17: a masked key stays below every key that counts, however little that key counts."""
    inputs = make_inputs(kind=kind, prior="position", dtype=ONE_DTYPE, device=device, **{**SIZES, "queries": 19})
    inputs["log_prior"] = torch.full_like(inputs["log_prior"], low)
    inputs["log_prior"][:, :, :3] = 0.0
    inputs["key_mask"] = torch.arange(19, device=device).expand(2, 19) >= 3
    inputs["value"] = torch.ones_like(inputs["value"])
    out = attend(inputs)
    expected = 1.0 if low == -1e12 else out.round()
    assert (out - expected).abs().max() <= 2 * torch.finfo(ONE_DTYPE).eps
    if low == -math.inf:
        assert (out == 0).all()


@every_kind
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
def test_empty_inputs(kind, shape, device):
    """P17: an empty batch or sequence gives an empty or zero output and zero gradients."""
    batch, queries, keys = shape
    inputs = make_inputs(kind=kind, dtype=FLOAT32, device=device)
    inputs["query"] = torch.randn(batch, 2, queries, 8, device=device)
    inputs["key"] = inputs["key"][:batch, ..., :keys, :]
    inputs["value"] = inputs["value"][:batch, :, :keys]
    out, gradients = gradients_of(inputs, torch.randn(batch, 2, queries, 8, device=device))
    assert out.shape == (batch, 2, queries, 8)
    assert (out == 0).all()
    assert all((gradient == 0).all() for gradient in gradients.values())


@every_kind
@brief_dtypes
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_padding_reaches_nothing(kind, dtype, side, poison, device):
    """P18: what stands in padded queries, keys and values changes no bit of an output or gradient."""
    mask = padding(2, 19, device, side)
    inputs = make_inputs(
        kind=kind, dtype=dtype, device=device, key_mask=mask, query_mask=mask, **{**SIZES, "queries": 19}
    )
    poisoned = dict(inputs)
    for name in ("query", "key", "value"):
        hidden = ~(mask[:, None, :, None] if inputs[name].ndim == 4 else mask[:, None, None, :, None])
        poisoned[name] = inputs[name].masked_fill(hidden, poison)
    grad = random_grad(inputs)
    out, gradients = gradients_of(poisoned, grad)
    clean_out, clean_gradients = gradients_of(inputs, grad)
    assert torch.equal(out, clean_out)
    assert (out.transpose(1, 2)[~mask] == 0).all()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, clean_gradients[name]), name


@every_kind
@brief_dtypes
@pytest.mark.parametrize("dim", [8, 16])
def test_poison_around_the_tensors_reaches_nothing(kind, dtype, dim, device):
    """P18: tails of tiles lie in a larger allocation that is NaN all around, in length and in head dimension."""
    inputs = make_inputs(kind=kind, queries=21, keys=19, dim=dim, batch=1, dtype=dtype, device=device)
    grad = random_grad(inputs)
    expected_out, expected = gradients_of(inputs, grad)

    def inside(tensor):
        shape = [*tensor.shape[:-2], tensor.shape[-2] + 64, tensor.shape[-1] + 64]
        return torch.full(shape, math.nan, dtype=tensor.dtype, device=device)[..., 20:-44, 24:-40].copy_(tensor)

    leaves = {name: inside(inputs[name]).requires_grad_() for name in ("query", "key", "value")}
    out = attend({**inputs, **leaves})
    out.backward(inside(grad))
    assert torch.equal(out, expected_out)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[name]), name


@brief_dtypes
def test_shifted_dot_products_are_plain_softmax(dtype, device):
    """P2: softmax-smgk IS softmax: q . b_r is the same for every key, whatever the prior."""
    inputs = make_inputs(kind="shifted", similarity="dot", dtype=dtype, device=device, **SMALL)
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    expected = F.scaled_dot_product_attention(*(inputs[name].double() for name in ("query", "key", "value")))
    assert error_of(out, expected) <= OUTPUT_CAP[dtype]
    for name in ("shift", "log_prior"):
        assert gradients[name].abs().max() <= 1e-2 * gradients["query"].abs().max(), name
