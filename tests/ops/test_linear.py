"""Linear attention with a mixture of keys: P13, P17-P21, splits, padding, accuracy and bad input."""

import math

import pytest
import torch
from cases import relative_error
from linear_cases import KINDS, make_linear, oracle
from torch._subclasses.fake_tensor import FakeTensorMode

import mgk
from mgk.ops import feature_maps, linear_chunked

BACKENDS = ("reference", "chunked")
MAPS = ("elu", "relu", "dpfp", "favor")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_map = pytest.mark.parametrize("feature_map", MAPS)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])

OPTIONS = [
    {},
    {"is_causal": True},
    {"masked": True, "is_causal": True},
    {"masked": True},
    {"heads": 4, "kv_heads": 2, "components": 3, "is_causal": True},
    {"heads": 4, "kv_heads": 1},
    {"queries": 5, "keys": 13, "is_causal": True},
    {"queries": 13, "keys": 5, "is_causal": True},
    {"queries": 13, "keys": 5},
    {"components": 1},
    {"prior": "position", "is_causal": True},
    {"prior": None},
    {"value_dim": 3, "dim": 5, "is_causal": True},
    {"normalization": "length"},
    {"normalization": "length", "is_causal": True, "masked": True},
    {"feature_map": "relu", "is_causal": True},
    {"feature_map": "dpfp"},
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """So that short sequences cross several."""
    monkeypatch.setattr(linear_chunked, "CHUNK", 4)


def attend(inputs, backend="chunked", **changes):
    return mgk.linear_mixture_attention(**{**inputs, **changes}, backend=backend)


@every_backend
@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_formula(backend, kind, options):
    """P19"""
    inputs = make_linear(kind=kind, **{"queries": 11, **options})
    assert relative_error(attend(inputs, backend), oracle(inputs)) <= 1e-12


@every_backend
@every_kind
@pytest.mark.parametrize("constant", [200.0, -200.0])
def test_prior_need_not_be_normalised(backend, kind, constant):
    """Its exponential alone would overflow, or vanish."""
    inputs = make_linear(kind=kind, dtype=torch.float32)
    expected = attend(inputs, backend)
    assert relative_error(attend(inputs, backend, log_prior=inputs["log_prior"] + constant), expected) <= 1e-4
    given = {name: inputs.get(name) for name in ("query", "key", "shift")}
    weight = mgk.linear_mixture_weights(**given, log_prior=inputs["log_prior"] + constant)
    assert relative_error(weight, mgk.linear_mixture_weights(**given, log_prior=inputs["log_prior"])) <= 1e-4


@every_map
@every_kind
@CAUSAL
def test_backends_agree_with_gradients(feature_map, kind, is_causal):
    inputs = make_linear(kind=kind, masked=True, is_causal=is_causal, feature_map=feature_map, heads=4, kv_heads=2)
    results = []
    for backend in BACKENDS:
        leaves = {
            name: tensor.clone().requires_grad_()
            for name, tensor in inputs.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }
        out = attend({**inputs, **leaves}, backend)
        torch.manual_seed(0)
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))])
    for got, expected in zip(*results, strict=True):
        assert relative_error(got, expected) <= 1e-11


@every_kind
@CAUSAL
@pytest.mark.parametrize("normalization", ["sum", "length"])
def test_gradients_are_those_of_the_formula(kind, is_causal, normalization):
    inputs = make_linear(kind=kind, queries=6, dim=3, heads=2, kv_heads=1, is_causal=is_causal, batch=1, masked=True)
    names = [name for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]

    def call(*tensors):
        return attend({**inputs, **dict(zip(names, tensors, strict=True))}, normalization=normalization)

    assert torch.autograd.gradcheck(call, [inputs[name].clone().requires_grad_() for name in names])


@every_kind
def test_a_mixture_is_one_merged_feature(kind):
    """P19: linear attention over ``sum_r prior_r phi(k_r)``."""
    inputs = make_linear(kind=kind, is_causal=True)
    keys = inputs["key"] if kind == "projected" else inputs["key"][:, :, None] + inputs["shift"][:, :, None]
    merged = (inputs["log_prior"].exp()[:, :, None, None] * feature_maps.elu(keys)).sum(2)
    both = mgk.FeatureMap(query=feature_maps.elu, key=lambda features: features)
    plain = mgk.linear_mixture_attention(
        inputs["query"], merged, inputs["value"], is_causal=True, feature_map=both
    )  # fmt: skip
    assert relative_error(attend(inputs), plain) <= 1e-12


@every_map
@CAUSAL
def test_weights_are_a_distribution(feature_map, is_causal):
    """P19"""
    inputs = make_linear(feature_map=feature_map, is_causal=is_causal, queries=9, keys=9)
    value = inputs.pop("value")
    weights = mgk.linear_mixture_weights(**inputs)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(-1), torch.ones((), dtype=weights.dtype, device=weights.device))
    assert relative_error(weights @ value, attend({**inputs, "value": value})) <= 1e-12
    if is_causal:
        assert (weights.triu(1) == 0).all()


@every_backend
@every_kind
@every_map
def test_a_sequence_may_be_cut_anywhere(backend, kind, feature_map):
    """P19: two calls with the state in between are one, at every split point."""
    inputs = make_linear(kind=kind, queries=13, is_causal=True, feature_map=feature_map, heads=4, kv_heads=2)
    whole = attend(inputs, backend)
    tokens = ("query", "key", "value")
    for cut in range(14):
        first = {**inputs, **{name: inputs[name][..., :cut, :] for name in tokens}}
        second = {**inputs, **{name: inputs[name][..., cut:, :] for name in tokens}}
        early, state = mgk.linear_mixture_step(**first, backend=backend)
        late, state = mgk.linear_mixture_step(**second, state=state, backend=backend)
        assert relative_error(torch.cat([early, late], dim=2), whole) <= 1e-11
    assert state.shape[:2] == (2, 2)
    assert state.shape[-1] == 9


def test_token_by_token_in_half_precision():
    """The state is in fp32: 600 tokens of bf16 lose nothing."""
    inputs = make_linear(kind="shifted", queries=600, is_causal=True, dtype=torch.bfloat16, batch=1)
    expected = attend({name: t.double() if torch.is_tensor(t) else t for name, t in inputs.items()})
    state, rows = None, []
    for i in range(600):
        now = {**inputs, **{name: inputs[name][..., i : i + 1, :] for name in ("query", "key", "value")}}
        row, state = mgk.linear_mixture_step(**now, state=state)
        rows.append(row)
    assert state.dtype == torch.float32
    assert relative_error(torch.cat(rows, dim=2), expected) <= 4e-3


@pytest.mark.parametrize(
    ("dtype", "cap"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str
)
@every_map
@CAUSAL
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_accuracy(dtype, cap, feature_map, is_causal, offset):
    inputs = make_linear(queries=300, dim=16, dtype=dtype, is_causal=is_causal, feature_map=feature_map)
    inputs["key"] = inputs["key"] + offset
    exact = {name: t.double() if torch.is_tensor(t) else t for name, t in inputs.items()}
    assert relative_error(attend(inputs), attend(exact, "reference")) <= cap


def test_a_long_sum_does_not_stall():
    """Pitfall 13: in bf16 a sum of equal numbers would stop at 256."""
    tokens = 1 << 15
    ones = torch.ones(1, 1, tokens, 4, dtype=torch.bfloat16)
    value = torch.cat([torch.zeros(1, 1, tokens // 2, 2), torch.ones(1, 1, tokens // 2, 2)], dim=2).bfloat16()
    out = mgk.linear_mixture_attention(ones, ones, value, is_causal=True)
    assert float(out[0, 0, -1, 0]) == 0.5


@every_map
def test_padding_changes_nothing(feature_map):
    """P17, P18: neither its content nor its amount, in outputs and gradients."""
    inputs = make_linear(feature_map=feature_map, queries=9, keys=9)
    grad = torch.randn_like(inputs["value"])

    def run(case, grad):
        leaves = {name: case[name].clone().requires_grad_() for name in ("query", "key", "value")}
        out = attend({**case, **leaves})
        gradients = torch.autograd.grad(out, list(leaves.values()), grad)
        return out, [tensor[..., :9, :] for tensor in gradients]

    expected = run(inputs, grad)
    for amount, content in ((1, 0.0), (7, 50.0), (3, math.nan)):
        padded = dict(inputs)
        for name in ("query", "key", "value"):
            shape = list(inputs[name].shape)
            shape[-2] = amount
            padded[name] = torch.cat([inputs[name], inputs[name].new_full(shape, content)], dim=-2)
        mask = torch.arange(9 + amount, device=grad.device).expand(2, -1) < 9
        wide = torch.cat([grad, grad.new_full((*grad.shape[:2], amount, grad.shape[-1]), 3.0)], dim=2)
        out, gradients = run({**padded, "key_mask": mask, "query_mask": mask}, wide)
        assert relative_error(out[:, :, :9], expected[0]) <= 1e-13
        assert (out[:, :, 9:] == 0).all()
        for got, one in zip(gradients, expected[1], strict=True):
            assert relative_error(got, one) <= 1e-13


def test_the_padding_of_a_batch_does_not_count_as_length():
    inputs = make_linear(queries=9, batch=1, normalization="length")
    padded = {**inputs, **{name: torch.cat([inputs[name]] * 2, dim=-2) for name in ("query", "key", "value")}}
    padded["key_mask"] = torch.arange(18, device=inputs["query"].device)[None] < 9
    assert relative_error(attend(padded)[:, :, :9], attend(inputs)) <= 1e-13


@every_backend
@CAUSAL
def test_rows_without_keys_are_zero(backend, is_causal):
    """P17"""
    inputs = make_linear(queries=7, keys=4, is_causal=is_causal)
    inputs["key_mask"] = torch.zeros(2, 4, dtype=torch.bool, device=inputs["query"].device)
    inputs["query"].requires_grad_()
    out = attend(inputs, backend)
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), inputs["query"])[0] == 0).all()
    if is_causal:
        del inputs["key_mask"]
        assert (attend(inputs, backend)[:, :, :3] == 0).all()


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_features_that_vanish(feature_map, dtype):
    """P20: queries and keys far out on the side where features are small give numbers."""
    inputs = make_linear(dtype=dtype, feature_map=feature_map, is_causal=True)
    for name, far in (("query", -300.0), ("key", -300.0), ("key", 300.0), ("query", 300.0)):
        case = {**inputs, name: (inputs[name] + far).requires_grad_()}
        out = attend(case)
        assert out.isfinite().all()
        assert torch.autograd.grad(out.float().square().sum(), case[name])[0].isfinite().all()


def test_later_tokens_change_no_bit_of_earlier_rows():
    """P13"""
    inputs = make_linear(queries=300, dtype=torch.float32, is_causal=True, kind="shifted")
    before = attend(inputs)
    for name in ("key", "value"):
        inputs[name] = inputs[name].clone()
        inputs[name][..., 200:, :] = 7.0
    assert torch.equal(attend(inputs)[:, :, :200], before[:, :, :200])


@every_kind
def test_packed_is_padded(kind):
    """P14"""
    lengths = (5, 0, 13, 1)
    bounds = torch.tensor([0, 5, 5, 18, 19], dtype=torch.int32)
    inputs = make_linear(kind=kind, batch=1, queries=19, is_causal=True, heads=4, kv_heads=2, device="cpu")
    tokens = {name: inputs[name][0].movedim(-2, 0) for name in ("query", "key", "value")}
    others = {name: value for name, value in inputs.items() if name not in tokens}
    packed = mgk.linear_mixture_attention_varlen(**tokens, **others, cu_seqlens_q=bounds)
    start = 0
    for length in lengths:
        own = {name: inputs[name][..., start : start + length, :] for name in tokens}
        expected = attend({**others, **own})[0].transpose(0, 1)
        if length:
            assert relative_error(packed[start : start + length], expected) <= 1e-13
        start += length


def test_favor_is_the_softmax_kernel_on_average():
    """And the same in every process, on every device."""
    dim = 16
    query, key = 0.5 * torch.randn(2, 200, dim, dtype=torch.float64)
    found = feature_maps.favor(dim, num_features=20_000)
    estimate = (found.key(query) * found.key(key)).sum(-1)
    exact = (query * key).sum(-1).div(math.sqrt(dim)).exp()
    assert relative_error(estimate, exact) <= 0.1
    again = feature_maps.favor(dim, num_features=20_000)
    assert torch.equal(found.key(key), again.key(key))
    assert not torch.equal(found.key(key), feature_maps.favor(dim, num_features=20_000, seed=1).key(key))
    # In blocks of D, orthogonal.
    directions = feature_maps._directions(dim, 24, 0)
    gram = torch.nn.functional.normalize(directions[:16], dim=-1)
    assert torch.allclose(gram @ gram.mT, torch.eye(16, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("dim", [192, 256])
def test_favor_of_wide_heads(dim):
    """Features of usual keys neither vanish nor overflow in fp32."""
    inputs = make_linear(queries=32, dim=dim, dtype=torch.float32, feature_map="favor", batch=1)
    exact = {name: t.double() if torch.is_tensor(t) else t for name, t in inputs.items()}
    assert relative_error(attend(inputs), attend(exact, "reference")) <= 1e-4


def in_inference_mode(call, inputs):
    with torch.inference_mode():
        call(inputs)


def with_fake_tensors(call, inputs):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call({name: mode.from_tensor(tensor) for name, tensor in inputs.items()})


def under_meta_as_default(call, inputs):
    with torch.device("meta"):
        feature_maps.favor(inputs["query"].shape[-1])


def under_vmap(call, inputs):
    torch.func.vmap(call)({name: torch.stack([tensor, tensor]) for name, tensor in inputs.items()})


@pytest.mark.parametrize("first", [in_inference_mode, with_fake_tensors, under_meta_as_default, under_vmap])
def test_random_features_are_not_those_of_the_mode_that_needed_them_first(first, device):
    """They are kept for later calls, which may be under no such mode."""
    inputs = make_linear(dim=7, dtype=torch.float64, prior=None, device=device)
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}

    def call(inputs):
        return attend(inputs, feature_map="favor")

    expected = call(inputs)
    feature_maps._directions.cache_clear()
    first(call, inputs)
    out = call(leaves)
    out.sum().backward()
    assert torch.equal(out, expected)


def test_a_function_of_ones_own():
    inputs = make_linear()
    got = attend(inputs, feature_map=lambda x: torch.nn.functional.elu(x) + 1)
    assert relative_error(got, attend(inputs)) <= 1e-12


BAD = [
    ({"feature_map": "softmax"}, ValueError, r"feature_map must be one of 'elu', .*got 'softmax'"),
    ({"feature_map": 3}, TypeError, "feature_map must be a name or a function, got int"),
    ({"feature_map": lambda x: x}, ValueError, "feature_map must give numbers that are not negative, got -"),
    (
        {"feature_map": lambda x: x.sum(-2).abs()},
        ValueError,
        r"feature_map must give \[..., F\] for \[2, 2, 19, 8\], got",
    ),
    ({"feature_map": lambda x: x.abs().float()}, TypeError, "feature_map must keep the dtype, torch.float64, got"),
    ({"normalization": "softmax"}, ValueError, "normalization must be one of 'sum', 'length', got 'softmax'"),
    ({"feature_map": "favor", "normalization": "length"}, ValueError, "feature_map='favor' needs normalization='sum'"),
    ({"backend": "sdpa"}, ValueError, "backend must be one of 'auto', 'reference', 'chunked', 'triton', got 'sdpa'"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    (
        {"query": torch.zeros(2, 2, 19, 7, dtype=torch.float64)},
        ValueError,
        "key must have the head dimension of query, 7",
    ),
    ({"key_mask": torch.zeros(2, 3) > 0}, ValueError, r"key_mask must have shape \[2, 19\], got \[2, 3\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        mgk.linear_mixture_attention(**{**make_linear(device="cpu"), **change})


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(2, 2, 8, 8, dtype=torch.float64), ValueError, r"= \[2, 2, 8, 9\], got \[2, 2, 8, 8\]"),
        (torch.zeros(2, 2, 8, 9), TypeError, "state must be torch.float64, got torch.float32"),
        ([1], TypeError, "state must be a tensor, got list"),
    ],
)
def test_a_bad_state(state, error, message):
    with pytest.raises(error, match=message):
        mgk.linear_mixture_step(**make_linear(device="cpu"), state=state)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
@CAUSAL
def test_empty(shape, is_causal):
    batch, heads, queries, keys = shape
    inputs = make_linear(batch=batch, heads=heads, queries=queries, keys=keys, is_causal=is_causal)
    out = attend(inputs)
    assert out.shape == (batch, heads, queries, 8)
    assert (out == 0).all()


@CAUSAL
def test_compiled_is_eager(is_causal):
    inputs = make_linear(kind="shifted", dtype=torch.float32, is_causal=is_causal)
    compiled = torch.compile(lambda case: attend(case), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(inputs), attend(inputs), atol=1e-6)


def test_autocast():
    inputs = make_linear(dtype=torch.float32, device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(inputs)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, attend({**inputs})) <= 2e-2
