"""What mixture attention must satisfy whatever computes it (P1-P18 of the test catalogue)."""

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import BACKENDS, KINDS, OUTPUT_CAP, attend, make_inputs, padding, relative_error, with_gradients

import mgk

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)
exact_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])

SETTINGS = [
    {},
    {"prior": None},
    {"prior": "position"},
    {"variance": "component"},
    {"similarity": "dot"},
    {"is_causal": True},
    {"keys": 23, "is_causal": True},
    {"keys": 11, "is_causal": True},
    {"heads": 4, "kv_heads": 2, "is_causal": True},
    {"heads": 4, "kv_heads": 1, "components": 3, "value_dim": 5},
    {"components": 1, "keys": 9},
]


@every_backend
@every_kind
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", list(OUTPUT_CAP), ids=str)
def test_matches_the_oracle(backend, kind, assignment, settings, dtype, device):
    inputs = make_inputs(kind=kind, assignment=assignment, dtype=dtype, device=device, **settings)
    if backend == "sdpa" and assignment == "hard" and settings.get("components") != 1:
        with pytest.raises(ValueError, match=r"'sdpa' cannot do assignment='hard'.*: use 'auto', 'chunked'"):
            attend(inputs, backend)
        return
    got = attend(inputs, backend)
    assert got.dtype == dtype
    assert relative_error(got, oracle.attention(inputs)) <= OUTPUT_CAP[dtype]


@every_backend
def test_unit_vectors_with_one_component_are_softmax_attention(backend, device):
    """P1: on the unit sphere a Gaussian is an exponential of the dot product."""
    inputs = make_inputs(components=1, prior=None, device=device)
    for name in ("query", "key"):
        inputs[name] = F.normalize(inputs[name], dim=-1)
    expected = F.scaled_dot_product_attention(inputs["query"], inputs["key"][:, :, 0], inputs["value"])
    assert relative_error(attend(inputs, backend), expected) < 1e-12


@every_backend
@every_kind
def test_soft_mixture_is_softmax_over_flattened_keys(backend, kind, device):
    """P2: the bias is log prior - |k|^2 / 2 variance, each value appears M times."""
    inputs = make_inputs(kind=kind, components=3, device=device)
    key = inputs["key"] if kind == "projected" else inputs["key"][:, :, None] + inputs["shift"][:, :, None]
    variance = math.sqrt(8)
    bias = inputs["log_prior"][:, :, None] - key.square().sum(-1) / (2 * variance)
    expected = F.scaled_dot_product_attention(
        inputs["query"], key.flatten(2, 3), inputs["value"].repeat(1, 1, 3, 1),
        attn_mask=bias.flatten(2)[:, :, None].expand(-1, -1, 19, -1), scale=1 / variance,
    )  # fmt: skip
    assert relative_error(attend(inputs, backend), expected) < 1e-12


@every_backend
def test_unequal_variances_need_the_norm_of_the_query(backend, device):
    """P2b: append |q|^2 to q and -1 / 2 variance to k / variance."""
    inputs = make_inputs(variance="component", device=device)
    variance = inputs["variance"][:, :, None, None].double()
    query, key = inputs["query"], inputs["key"]
    bias = inputs["log_prior"][:, :, None, None] - key.square().sum(-1, keepdim=True) / (2 * variance)
    norm_factor = (-1 / (2 * variance)).expand_as(bias)
    query = torch.cat([query, query.square().sum(-1, keepdim=True), torch.ones_like(query[..., :1])], -1)
    key = torch.cat([key / variance, norm_factor, bias], -1)
    expected = F.scaled_dot_product_attention(
        query, key.flatten(2, 3), F.pad(inputs["value"], (0, 2)).repeat(1, 1, 2, 1), scale=1.0
    )[..., :8]
    assert relative_error(attend(inputs, backend), expected) < 1e-12


@every_backend
@every_kind
@pytest.mark.parametrize("variance", [None, "component"])
def test_order_of_components_is_irrelevant(backend, kind, variance, device):
    """P3"""
    inputs = make_inputs(kind=kind, components=3, variance=variance, device=device)
    order = [2, 0, 1]
    permuted = dict(inputs, log_prior=inputs["log_prior"][:, order])
    if kind == "projected":
        permuted["key"] = inputs["key"][:, :, order]
    else:
        permuted["shift"] = inputs["shift"][:, order]
    if variance:
        permuted["variance"] = inputs["variance"][:, order]
    assert relative_error(attend(permuted, backend), attend(inputs, backend)) < 1e-12


@every_backend
def test_equal_components_are_one_component(backend, device):
    """P4"""
    one = make_inputs(components=1, prior=None, device=device)
    three = dict(
        one, key=one["key"].expand(-1, -1, 3, -1, -1), log_prior=torch.tensor([0.2, 0.3, 0.5]).log().to(one["key"])
    )
    assert relative_error(attend(three, backend), attend(one, backend)) < 1e-12


@every_backend
@every_kind
def test_one_hot_prior_is_that_component_alone(backend, kind, device):
    """P5"""
    inputs = make_inputs(kind=kind, prior=None, device=device)
    one_hot = dict(inputs, log_prior=torch.tensor([-math.inf, 0.0], device=device, dtype=torch.float64))
    if kind == "projected":
        alone = dict(inputs, key=inputs["key"][:, :, 1])
    else:
        alone = dict(inputs, key=inputs["key"] + inputs["shift"][:, 1:2], shift=None)
    grad = torch.randn_like(inputs["value"])
    out, gradients = with_gradients(one_hot, grad, backend)
    assert relative_error(out, attend(alone, backend)) < 1e-12
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert gradients["log_prior"].abs().max() < 1e-12


@every_backend
@every_kind
@exact_dtypes
@pytest.mark.parametrize("deviations", [1, 16, 64])
def test_moving_query_and_key_together_changes_nothing(backend, kind, dtype, deviations, device):
    """P6: the strongest detector of cancellation."""
    inputs = make_inputs(kind=kind, dtype=torch.float64, device=device)
    # An offset that is exact in fp32 beside inputs with few bits, so that the moved problem is the same problem.
    for name in ("query", "key"):
        inputs[name] = (inputs[name] * 64).round() / 64
    moved = {**inputs, "query": inputs["query"] + deviations, "key": inputs["key"] + deviations}
    moved, inputs = ({k: v.to(dtype) for k, v in each.items()} for each in (moved, inputs))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative_error(attend(moved, backend), attend(inputs, backend)) < tolerance


@every_backend
@every_kind
def test_rotation_changes_nothing(backend, kind, device):
    """P7"""
    inputs = make_inputs(kind=kind, device=device)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, device=device))[0]
    rotated = {name: inputs[name] @ rotation for name in ("query", "key", "shift") if name in inputs}
    assert relative_error(attend({**inputs, **rotated}, backend), attend(inputs, backend)) < 1e-12


@every_backend
@every_kind
def test_scaling_with_the_variance_changes_nothing(backend, kind, device):
    """P8"""
    inputs = make_inputs(kind=kind, variance=3.0, device=device)
    scaled = {name: 2.5 * inputs[name] for name in ("query", "key", "shift") if name in inputs}
    expected = attend(inputs, backend)
    assert relative_error(attend({**inputs, **scaled, "variance": 3.0 * 2.5**2}, backend), expected) < 1e-12


@every_backend
@every_kind
def test_prior_need_not_be_normalised(backend, kind, device):
    """P9"""
    inputs = make_inputs(kind=kind, device=device)
    assert relative_error(attend(inputs, backend, log_prior=inputs["log_prior"] + 3.0), attend(inputs, backend)) < 1e-12


@every_backend
@every_kind
@pytest.mark.parametrize("constant", [1e4, -1e8, 1e30])
def test_a_prior_far_from_one_leaves_the_digits_of_distances(backend, kind, constant, device):
    """In fp32 1e8 + |q - k|^2 is 1e8, but only ratios of priors count."""
    inputs = make_inputs(kind=kind, prior=None, dtype=torch.float32, device=device)
    # In one head both components are equally likely, and in the other only the first is possible.
    log_prior = torch.tensor([[constant, constant], [constant, -torch.inf]], device=device)
    usual = torch.where(log_prior == constant, 0.0, log_prior)
    assert relative_error(attend(inputs, backend, log_prior=log_prior), attend(inputs, backend, log_prior=usual)) < 1e-6
    given = {name: inputs.get(name) for name in ("query", "key", "shift")}
    for function in (mgk.mixture_weights, mgk.mixture_responsibilities):
        assert relative_error(function(**given, log_prior=log_prior), function(**given, log_prior=usual)) < 1e-6


@every_backend
@every_kind
@pytest.mark.parametrize("dtype", list(OUTPUT_CAP), ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_is_an_average_of_the_values(backend, kind, dtype, is_causal, device):
    """P10: rows sum to one within 2 ulp; a constant comes back within 4 ulp, and every channel stays in range."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, is_causal=is_causal, queries=300, scale=2.0)
    ulp = torch.finfo(dtype).eps
    ones = torch.ones_like(inputs["value"])
    assert (attend(inputs, backend, value=ones).double() - 1).abs().max() <= 2 * ulp
    # A constant is taken out before the sum; beside a channel of zeros and ones it cannot hide weights that do not sum.
    ones[:, :, ::2] = 0
    halves = attend(inputs, backend, value=ones) + attend(inputs, backend, value=1 - ones)
    assert (halves.double() - 1).abs().max() <= 16 * ulp
    constant = torch.full_like(inputs["value"], 0.3)
    assert (attend(inputs, backend, value=constant).double() / constant.double() - 1).abs().max() <= 4 * ulp
    out, value = attend(inputs, backend).double(), inputs["value"].double()
    slack = 4 * ulp * value.abs().max()
    assert (out <= value.amax(2, keepdim=True) + slack).all()
    assert (out >= value.amin(2, keepdim=True) - slack).all()


@every_backend
@every_kind
def test_linear_in_the_value(backend, kind, device):
    """P11"""
    inputs = make_inputs(kind=kind, device=device)
    other = torch.randn_like(inputs["value"])
    combined = attend(inputs, backend, value=2 * inputs["value"] - 3 * other)
    separate = 2 * attend(inputs, backend) - 3 * attend(inputs, backend, value=other)
    assert relative_error(combined, separate) < 1e-12


@every_kind
def test_hard_and_soft_weights_bound_each_other(kind, device):
    """P12: under a uniform prior the ratio of normalised weights lies in [1/M, M]."""
    inputs = make_inputs(kind=kind, components=3, prior=None, device=device)
    inputs.pop("value")
    ratio = mgk.mixture_weights(**inputs) / mgk.mixture_weights(**inputs, assignment="hard")
    assert ratio.max() <= 3 + 1e-9
    assert ratio.min() >= 1 / 3 - 1e-9


@every_kind
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_hard_and_soft_normalisers_bound_each_other(kind, backend, device):
    """P12 on logits, seen through one visible key: hard <= soft <= hard + log M with priors of one."""
    inputs = make_inputs(kind=kind, components=3, prior=None, device=device)
    inputs.pop("value")
    hard = oracle.logits(inputs).amax(2)
    for j in range(19):
        one = torch.zeros(2, 19, dtype=torch.bool, device=device)
        one[:, j] = True
        ones = torch.zeros(3, dtype=torch.float64, device=device)
        soft = mgk.mixture_log_density(**inputs, log_prior=ones, key_mask=one, backend=backend)
        assert (soft >= hard[..., j] - 1e-9).all()
        assert (soft <= hard[..., j] + math.log(3) + 1e-9).all()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_soft_becomes_hard_as_the_variance_shrinks(backend, device):
    """P12: with a gap between the nearest keys, so that no tie stays open."""
    grid = 4.0 * torch.arange(24, device=device, dtype=torch.float64)[torch.randperm(24, device=device)]
    inputs = make_inputs(batch=1, heads=1, queries=12, dim=1, variance=0.05, device=device)
    inputs["key"] = grid.view(1, 1, 2, 12, 1)
    inputs["query"] = inputs["key"][:, :, 0] + 0.1
    assert relative_error(attend(inputs, backend), attend(inputs, backend, assignment="hard")) < 1e-9


@every_backend
@every_kind
@pytest.mark.parametrize("components", [1, 2, 3])
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_causal_rows_do_not_know_the_future(backend, kind, components, assignment, dtype, device):
    """P13: changing later tokens leaves a row equal in every bit; row 0 is value 0."""
    inputs = make_inputs(
        kind=kind, components=components, assignment=assignment, dtype=dtype, device=device, is_causal=True, queries=600
    )
    inputs["key_mask"] = torch.rand(2, 600, device=device) > 0.1
    inputs["key_mask"][:, 0] = True
    if backend == "sdpa" and assignment == "hard" and components > 1:
        pytest.skip("sdpa has no hard assignment")
    changed = {name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in inputs.items()}
    for name in ("query", "key", "value"):
        changed[name][..., 300:, :] = 7.0 * torch.randn_like(changed[name][..., 300:, :])
    before, after = attend(inputs, backend), attend(changed, backend)
    assert torch.equal(before[:, :, :300], after[:, :, :300])
    assert not torch.equal(before, after)
    first, value = before[:, :, 0].double(), inputs["value"][:, :, 0].double()
    assert (first - value).abs().max() <= 4 * torch.finfo(dtype).eps * value.abs().max()


@every_backend
@every_kind
def test_permuting_keys_batch_or_heads_permutes_along(backend, kind, device):
    """P15"""
    inputs = make_inputs(kind=kind, heads=3, device=device)
    expected = attend(inputs, backend)
    keys = torch.randperm(19, device=device)
    shuffled = dict(inputs, key=inputs["key"][..., keys, :], value=inputs["value"][..., keys, :])
    assert relative_error(attend(shuffled, backend), expected) < 1e-12
    flipped = dict(inputs, **{name: inputs[name].flip(0, 1) for name in ("query", "key", "value")})
    flipped.update({name: inputs[name].flip(0) for name in ("shift", "log_prior") if name in inputs})
    assert relative_error(attend(flipped, backend).flip(0, 1), expected) < 1e-12


@every_backend
@every_kind
@pytest.mark.parametrize("dtype", list(OUTPUT_CAP), ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"is_causal": True}, {"prior": "position"}, {"variance": "component"}], ids=str
)
@pytest.mark.parametrize("side", ["left", "right", "all"])
def test_rows_without_a_key_are_zero(backend, kind, dtype, settings, side, device):
    """P17: output 0, gradient 0, log density -inf, no NaN; the other rows are right."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **settings)
    if side == "all":
        mask = torch.zeros(2, 19, dtype=torch.bool, device=device)
        mask[1] = True
    else:
        mask = padding(2, 19, device, side)
    inputs["key_mask"] = mask
    seen = oracle.visible(inputs).any(-1)
    grad = torch.randn_like(inputs["value"])
    out, gradients = with_gradients(inputs, grad, backend)
    assert relative_error(out, oracle.attention(inputs)) <= OUTPUT_CAP[dtype]
    assert (out[~seen] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (gradients["query"][~seen] == 0).all()
    assert (gradients["value"].transpose(1, 2)[~mask] == 0).all()
    options = {k: v for k, v in inputs.items() if k not in ("query", "key", "value")}
    density = mgk.mixture_log_density(inputs["query"], inputs["key"], **options)
    assert (density[~seen] == -math.inf).all()
    assert density[seen].isfinite().all()


@every_backend
@pytest.mark.parametrize("low", [-1e12, torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tiny_priors_beside_masked_keys(backend, low, dtype, device):
    """A masked key stays below every key that counts, however little that key counts."""
    inputs = make_inputs(prior="position", dtype=dtype, device=device)
    inputs["log_prior"] = torch.full_like(inputs["log_prior"], low)
    inputs["log_prior"][:, :, :3] = 0.0
    inputs["key_mask"] = torch.arange(19, device=device).expand(2, 19) >= 3
    inputs["value"] = torch.ones_like(inputs["value"])
    out = attend(inputs, backend)
    expected = 1.0 if low == -1e12 else out.float().round()
    assert (out - expected).abs().max() < 1e-2
    if low == -math.inf:
        assert (out == 0).all()


@every_backend
@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_attn_mask_matches_the_oracle(backend, kind, is_causal, device):
    inputs = make_inputs(kind=kind, heads=4, kv_heads=2, device=device, is_causal=is_causal, keys=23)
    full = torch.rand(2, 4, 19, 23, device=device) > 0.5
    full[:, :, 4] = False
    grad = torch.randn(2, 4, 19, 8, dtype=torch.float64, device=device)
    masks = {"full": full, "batch": full[:, :1], "head": full[:1], "pairs": full[0, 0], "keys": full[:, :1, :1]}
    masks["queries"] = full[..., :1]
    for mask in masks.values():
        masked = {**inputs, "attn_mask": mask, "key_mask": padding(2, 23, device)}
        out, gradients = with_gradients(masked, grad, backend)
        expected, expected_gradients = with_gradients(masked, grad, function=oracle.attention)
        assert relative_error(out, expected) < 1e-12
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected_gradients[name]) < 1e-9, name


@every_backend
@every_kind
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
def test_empty_inputs(backend, kind, shape, device):
    """P17: an empty batch or sequence gives an empty or zero output and zero gradients."""
    batch, queries, keys = shape
    inputs = make_inputs(kind=kind, device=device)
    inputs["query"] = torch.randn(batch, 2, queries, 8, device=device, dtype=torch.float64)
    inputs["key"] = inputs["key"][:batch, ..., :keys, :]
    inputs["value"] = inputs["value"][:batch, :, :keys]
    grad = torch.randn(batch, 2, queries, 8, dtype=torch.float64, device=device)
    out, gradients = with_gradients(inputs, grad, backend)
    assert out.shape == (batch, 2, queries, 8)
    assert (out == 0).all()
    assert set(gradients) == {name for name, value in inputs.items() if value is not None}
    assert all((gradient == 0).all() for gradient in gradients.values())


@every_backend
@every_kind
@pytest.mark.parametrize("dtype", list(OUTPUT_CAP), ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_padding_reaches_nothing(backend, kind, dtype, side, poison, device):
    """P18: what stands in padded queries, keys and values changes no bit of an output or gradient."""
    mask = padding(2, 19, device, side)
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, key_mask=mask, query_mask=mask)
    clean, poisoned = dict(inputs), dict(inputs)
    for name in ("query", "key", "value"):
        hidden = ~(mask[:, None, :, None] if inputs[name].ndim == 4 else mask[:, None, None, :, None])
        poisoned[name] = inputs[name].masked_fill(hidden, poison)
    grad = torch.randn_like(inputs["value"])
    out, gradients = with_gradients(poisoned, grad, backend)
    clean_out, clean_gradients = with_gradients(clean, grad, backend)
    assert torch.equal(out, clean_out)
    assert (out.transpose(1, 2)[~mask] == 0).all()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, clean_gradients[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_shifted_dot_products_are_plain_softmax(dtype, device):
    """softmax-smgk IS softmax: q . b_r is the same for every key. The paper reports 79.81 and 77.90 for the pair."""
    inputs = make_inputs(kind="shifted", similarity="dot", dtype=dtype, device=device)
    plain = F.scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"])
    grad = torch.randn_like(plain)
    for backend in BACKENDS:
        out, gradients = with_gradients(inputs, grad, backend)
        assert relative_error(out, plain) <= 2 * OUTPUT_CAP[dtype]
        for name in ("shift", "log_prior"):
            assert gradients[name].abs().max() <= 1e-2 * gradients["query"].abs().max(), name
    reduced, gradients = with_gradients(inputs, grad, "sdpa")
    assert torch.equal(reduced, plain)
    assert (gradients["shift"] == 0).all()
    assert (gradients["log_prior"] == 0).all()
