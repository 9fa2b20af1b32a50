"""The attention layer: against the formula, its options, its errors."""

import copy
import math
import re

import oracle
import pytest
import torch
from cases import relative_error

import mgk
from mgk.nn import FixedVariance, LearnedVariance, ProjectedKeys, ShiftedKeys
from mgk.nn.presets import SOFTMAX_PRESETS

PRESET_NAMES = list(SOFTMAX_PRESETS)


def build(name="mgk", **options):
    settings = {"embed_dim": 24, "num_heads": 4, "head_dim": 8, **options}
    return mgk.build_attention(name, settings.pop("embed_dim"), settings.pop("num_heads"), **settings).double()


def by_hand(layer: mgk.MixtureAttention, x: torch.Tensor, context: torch.Tensor, **masks) -> torch.Tensor:
    """The layer from its parameters, through the oracle."""

    def heads(projected: torch.Tensor, count: int) -> torch.Tensor:
        return projected.unflatten(-1, (count, -1)).transpose(1, 2)

    kv = layer.num_kv_heads
    key = layer.k_proj(context)
    if isinstance(layer.keys, ProjectedKeys):
        key = key.unflatten(-1, (kv, layer.num_components, layer.head_dim)).permute(0, 2, 3, 1, 4)
    else:
        key = heads(key, kv)[:, :, None] + layer.keys.shift[:, :, None]
    query = heads(layer.q_proj(x), layer.num_heads)
    if layer.q_norm is not None:
        query, key = layer.q_norm(query), layer.k_norm(key)
    prior = layer.prior()
    inputs = {
        "query": query, "key": key, "value": heads(layer.v_proj(context), kv), "log_prior": prior,
        "variance": layer.variance(), "similarity": layer.similarity, "assignment": layer.assignment,
        "is_causal": layer.is_causal, **masks,
    }  # fmt: skip
    return layer.out_proj(oracle.attention(inputs).transpose(1, 2).flatten(2))


def disturb(layer: torch.nn.Module) -> None:
    """Move every parameter and prior off its special initial value."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if isinstance(layer.prior, mgk.nn.EMPrior):
            layer.prior.log_prior.copy_(torch.randn_like(layer.prior.log_prior).log_softmax(-1))


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "is_causal": True},
        {"num_kv_heads": 1, "bias": False},
        {"qk_norm": True},
        {"learn_variance": True, "variance_scale": 1.5},
        {"num_components": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_layer_is_the_formula(name, options, backend):
    layer = build(name, backend=backend, **options).eval()
    disturb(layer)
    x, context = torch.randn(2, 9, 24).double(), torch.randn(2, 13, 24).double()
    mask = torch.rand(2, 13) > 0.3
    assert relative_error(layer(x), by_hand(layer, x, x)) < 1e-12
    assert relative_error(layer(x, context, key_mask=mask), by_hand(layer, x, context, key_mask=mask)) < 1e-12


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_parameter_gets_a_gradient(name):
    for options in ({}, {"learn_variance": True}, {"num_components": 1}):
        layer = build(name, **options)
        layer(torch.randn(2, 9, 24).double()).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_attention_weights_are_those_of_forward(name):
    layer = build(name, is_causal=True, num_kv_heads=2).eval()
    x = torch.randn(2, 9, 24).double()
    value = layer.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1)
    out = layer.out_proj((layer.attention_weights(x) @ value).transpose(1, 2).flatten(2))
    assert relative_error(out, layer(x)) < 1e-12


def test_value_can_differ_from_key():
    layer = build("smgk")
    query, key, value = torch.randn(3, 2, 9, 24).double()
    assert not torch.equal(layer(query, key, value), layer(query, key))
    assert torch.equal(layer(query, key, key), layer(query, key))


def test_causality_of_one_call():
    layer = build("mgk")
    x = torch.randn(2, 9, 24).double()
    causal = copy.deepcopy(layer)
    causal.is_causal = True
    assert torch.equal(layer(x, is_causal=True), causal(x))
    assert torch.equal(causal(x, is_causal=False), layer(x))
    assert torch.equal(layer.attention_weights(x, is_causal=True), causal.attention_weights(x))


def test_dropout_acts_in_training_only():
    layer = build("smgk", dropout=0.5)
    x = torch.randn(2, 9, 24).double()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_qk_norm_normalises_every_component():
    layer = build("smgk", qk_norm=True)
    key, shift = layer.project_key(torch.randn(2, 9, 24).double())
    assert shift is None
    assert key.shape == (2, 4, 2, 9, 8)
    assert (key.square().mean(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("name", ["softmax", "gaussian", "mgk", "smgk", "smgk-em"])
def test_half_precision_layers_and_autocast(dtype, qk_norm, name):
    layer = build(name, qk_norm=qk_norm).float()
    x = torch.randn(2, 9, 24)
    expected = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
    assert out.dtype == dtype
    assert relative_error(out, expected) < 2e-2
    out.float().sum().backward()
    half = copy.deepcopy(layer).to(dtype)
    assert relative_error(half(x.to(dtype)), expected) < 4e-2


def test_variances():
    assert FixedVariance(16, 2)() == 4.0
    assert FixedVariance(16, 2, 2.0)() == 8.0
    assert FixedVariance(16, 2, (1, 3))().tolist() == [4.0, 12.0]
    assert LearnedVariance(2, 16, 2, (1, 3))().tolist() == [[4.0, pytest.approx(12.0)]] * 2
    layer = build("mgk", variance_scale=(1, 3)).to(torch.float64)
    assert layer.variance().dtype == torch.float64
    assert layer.variance()[1].item() == 3 * math.sqrt(8)  # all the digits of fp64
    assert layer.bfloat16().variance()[1].item() == pytest.approx(3 * math.sqrt(8), rel=1e-7)
    learned = build("mgk", learn_variance=True)
    with torch.no_grad():
        learned.variance.log_variance.fill_(-50.0)
    assert (learned.variance() > 0).all()
    fixed = FixedVariance(16, 2, (1, 3))
    fixed.per_component.fill_(0.0)
    fixed.reset_parameters()
    assert fixed().tolist() == [4.0, 12.0]


def test_shifts_start_apart():
    keys = ShiftedKeys(2, 64, 3, init_std=0.5)
    assert keys.shift.std().item() == pytest.approx(0.5, rel=0.2)
    assert (keys.shift[:, 0] - keys.shift[:, 1]).norm() > 1


def test_the_first_shift_may_start_at_zero():
    """The released code: mu_1 = 0 and mu_2 from N(0, 0.25). The others are those that would have been drawn anyway."""
    torch.manual_seed(0)
    plain = ShiftedKeys(8, 16, 3, init_std=0.5).shift
    torch.manual_seed(0)
    keys = ShiftedKeys(8, 16, 3, init_std=0.5, init="first-zero")
    assert torch.equal(keys.shift[:, 0], torch.zeros(8, 16))
    assert torch.equal(keys.shift[:, 1:], plain[:, 1:])
    layer = mgk.build_attention("smgk", 24, 2, head_dim=8, shift_init="first-zero", shift_init_std=0.5)
    assert layer.keys.shift.requires_grad
    assert not layer.keys.shift[:, 0].any()
    assert layer.keys.shift[:, 1].all()
    layer(torch.randn(2, 5, 24)).sum().backward()
    assert layer.keys.shift.grad[:, 0].any()


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_shifts_that_start_at_zero_never_come_apart(backend):
    """Equal components get equal gradients, and so do their priors: they stay one Gaussian, to the last bit."""
    torch.manual_seed(0)
    layer = mgk.build_attention("smgk", 24, 2, head_dim=8, shift_init_std=0.0, backend=backend)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        layer(torch.randn(2, 9, 24)).square().sum().backward()
        optimizer.step()
    assert layer.keys.shift.abs().min() > 1e-3
    assert torch.equal(layer.keys.shift[:, 0], layer.keys.shift[:, 1])
    assert torch.equal(layer.prior.logits[:, 0], layer.prior.logits[:, 1])


def test_compiled_layer_is_the_eager_layer():
    torch.compiler.reset()
    layer = build("smgk-em", is_causal=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 12):
        x = torch.randn(2, length, 24).double()
        assert relative_error(compiled(x), layer(x)) < 1e-12


def test_meta_device_and_reset():
    with torch.device("meta"):
        layer = mgk.build_attention("smgk-em", 24, 4, head_dim=8, variance_scale=(1, 3))
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer(torch.randn(2, 9, 24)).isfinite().all()
    assert layer.prior._probe.device.type == "cpu"


def test_state_dict_round_trip():
    for name in PRESET_NAMES:
        layer, other = build(name), build(name)
        disturb(layer)
        other.load_state_dict(layer.state_dict())
        x = torch.randn(2, 9, 24).double()
        assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("name", ["smgk", "mgk-em", "mlk"])
def test_a_layer_from_the_meta_device_takes_the_tensors_of_a_checkpoint(name):
    """As in PyTorch's recipe for loading without allocating twice; what no checkpoint has must come along."""
    options = {} if name == "mlk" else {"variance_scale": (1, 3)}
    layer = mgk.build_attention(name, 24, 4, head_dim=8, **options)
    with torch.device("meta"):
        other = mgk.build_attention(name, 24, 4, head_dim=8, **options)
    other.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 9, 24)
    assert torch.equal(other(x), layer(x))
    other(x).sum().backward()
    mgk.update_priors(other)


def test_projections_are_plain_linears():
    layer = build("mgk")
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert type(getattr(layer, name)) is torch.nn.Linear


def test_repr_says_what_matters():
    text = repr(build("smgk-em", num_kv_heads=2, dropout=0.1, is_causal=True, learn_variance=True, num_heads=4))
    for part in (
        "num_kv_heads=2",
        "similarity='gaussian'",
        "ShiftedKeys",
        "EMPrior",
        "LearnedVariance",
        "is_causal=True",
    ):
        assert part in text
    assert "2.82843" in repr(build("mgk"))
    assert "num_components=2" in repr(build("mgk").keys)
    assert "num_components=2" in repr(build("mgk").prior)


BAD = [
    ({"keys": "both"}, "keys must be one of 'projected', 'shifted', got 'both'"),
    ({"prior": "flat"}, "prior must be one of 'learned', 'uniform', 'em', got 'flat'"),
    ({"similarity": "rbf"}, "similarity must be one of 'gaussian', 'dot', got 'rbf'"),
    ({"assignment": "x"}, "assignment must be one of 'soft', 'hard', got 'x'"),
    ({"backend": "x"}, "backend must be one of"),
    ({"normalization": "length"}, "normalization must be 'sum' without a feature_map, got 'length'"),
    ({"feature_map": "elu", "normalization": "mean"}, "normalization must be one of 'sum', 'length', got 'mean'"),
    ({"feature_map": "gelu"}, "feature_map must be one of 'elu', 'relu', 'dpfp', 'favor', got 'gelu'"),
    ({"feature_map": "elu", "dropout": 0.1}, "linear attention has no dropout, got that and feature_map='elu'"),
    ({"feature_map": "elu", "prior": "em"}, "linear attention has no prior='em', got that and feature_map='elu'"),
    ({"feature_map": "elu", "assignment": "hard"}, "linear attention has no assignment='hard', got that and"),
    ({"feature_map": "elu", "learn_variance": True}, "linear attention has no learn_variance, got that and"),
    ({"feature_map": "elu", "backend": "sdpa"}, "backend must be one of 'auto', 'reference', 'chunked', 'triton', got"),
    ({"head_dim": None, "num_heads": 5}, "embed_dim must be a multiple of num_heads, or head_dim given, got 24 and 5"),
    ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"num_components": 0}, "num_components must be at least 1, got 0"),
    ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ({"dropout": 1.0}, "dropout must lie in [0, 1), got 1.0"),
    ({"variance_scale": (1, 2, 3)}, "variance_scale must be one number or 2, one per component, got 3"),
    ({"variance_scale": -1.0}, "variance_scale must be positive and finite, got -1.0"),
    ({"variance_scale": math.inf, "learn_variance": True}, "variance_scale must be positive and finite, got inf"),
    ({"shift_init_std": -1.0}, "shift_init_std must be finite and not negative, got -1.0"),
    ({"shift_init_std": math.inf}, "shift_init_std must be finite and not negative, got inf"),
    ({"shift_init": "zero"}, "shift_init must be one of 'normal', 'first-zero', got 'zero'"),
    ({"prior_momentum": 1.0}, "prior_momentum must lie in [0, 1), got 1.0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build("mgk", **options)


WRONG_TYPES = [
    ({"num_heads": 8 / 2}, "num_heads must be an integer, got 4.0"),
    ({"num_kv_heads": "1"}, "num_kv_heads must be an integer, got '1'"),
    ({"num_components": True}, "num_components must be an integer, got True"),
    ({"head_dim": 8.5}, "head_dim must be an integer, got 8.5"),
    ({"dropout": None}, "dropout must be a number, got None"),
    ({"shift_init_std": "1"}, "shift_init_std must be a number, got '1'"),
    ({"prior_momentum": "0.9"}, "prior_momentum must be a number, got '0.9'"),
    ({"variance_scale": "wide"}, "variance_scale must be one number or one per component, got 'wide'"),
    ({"is_causal": 1}, "is_causal must be a bool, got int"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_TYPES, ids=[message[:50] for _, message in WRONG_TYPES])
def test_options_of_another_type_are_refused(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        build("mgk", **options)


def test_bad_inputs_are_refused():
    layer = build()
    with pytest.raises(TypeError, match="query must be a tensor, got list"):
        layer([1.0])
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed sequences need the boundaries of their queries, got those of the key"):
        layer(torch.zeros(1, 9, 24).double(), cu_seqlens_k=bounds)
    with pytest.raises(ValueError, match=re.escape("query must have shape [B, N, 24], got [2, 9, 23]")):
        layer(torch.zeros(2, 9, 23).double())
    with pytest.raises(ValueError, match=re.escape("key must have shape [B, N, 24], got [9, 24]")):
        layer(torch.zeros(2, 9, 24).double(), torch.zeros(9, 24).double())
    x = torch.zeros(2, 9, 24).double()
    with pytest.raises(ValueError, match=re.escape("value must have shape [B, N, 24], got [2, 9, 7]")):
        layer(x, x, torch.zeros(2, 9, 7).double())


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match=r"name must be one of softmax, gaussian, mgk, .*, got 'gmk'"):
        mgk.build_attention("gmk", 24, 4)


def count(name: str, num_heads: int, **options) -> int:
    """Parameters of one Long Range Arena attention layer: width 64, heads of 32."""
    layer = mgk.build_attention(name, 64, num_heads, head_dim=32, **options)
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(("heads", "expected"), [(1, 8352), (2, 16640), (4, 33216), (8, 66368), (12, 99520)])
def test_parameters_of_softmax(heads, expected):
    """The published code's shapes, with biases."""
    assert count("softmax", heads) == count("gaussian", heads) == expected


@pytest.mark.parametrize(("heads", "expected"), [(1, 10434), (2, 20802), (4, 41538), (6, 62274)])
def test_parameters_of_mgk(heads, expected):
    """The published code has one pair of priors for the whole layer; ours, as the paper says, a pair for each head."""
    assert count("mgk", heads) == expected - 2 + 2 * heads
    assert count("mgk-hard", heads) == count("mgk-em", heads) == expected - 2


@pytest.mark.parametrize(("heads", "expected"), [(1, 8418), (2, 16770), (4, 33474), (6, 50178)])
def test_parameters_of_smgk(heads, expected):
    assert count("smgk", heads) == expected - 2 + 2 * heads
    assert count("smgk-hard", heads) == count("smgk-em", heads) == expected - 2


def test_parameters_of_the_appendix():
    """Without biases and with W_O back to the model's width: 65,536 against 40,968."""
    assert count("softmax", 8, bias=False) == 65_536
    assert count("mgk", 4, bias=False) == 40_968


def test_weight_decay_leaves_mixture_parameters_alone():
    model = torch.nn.Sequential(build("smgk", learn_variance=True), torch.nn.LayerNorm(24), build("softmax"))
    decayed, others = mgk.nn.parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p].split(".")[-2] for p in decayed["params"]} == {"q_proj", "k_proj", "v_proj", "out_proj"}
    mixture = {names[p] for p in mgk.nn.mixture_parameters(model)}
    assert mixture == {"0.keys.shift", "0.prior.logits", "0.variance.log_variance"}
    assert mixture <= {names[p] for p in others["params"]}
    assert len(decayed["params"]) + len(others["params"]) == len(names)
