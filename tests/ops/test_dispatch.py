"""What the dispatcher hands to a backend: the numerics policy, the same for padded, packed and linear calls."""

import pytest
import torch
from cases import relative_error
from packed_cases import KEY_LENGTHS, LENGTHS, attend_packed, attend_padded, make_packed

import mgk
from mgk.ops import dispatch, reference
from mgk.ops.boundaries import count_visible, nth_valid
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import make_problem


class TakesAtOnce:
    """Stands for the fused kernels: takes packed sequences at once, keeps what it was given, and is exact in fp64."""

    def __init__(self):
        self.given = []

    def unsupported(self, problem):
        return None

    def is_step(self, problem):
        return False

    def attention(self, problem):
        self.given.append(problem)
        return reference.attention(problem)

    def packed_attention(self, problem):
        self.given.append(problem)
        return torch.cat([reference.attention(own) for own in dispatch.sequences_of(problem)], dim=2)

    def packed_responsibility_sums(self, problem):
        self.given.append(problem)
        return sum(reference.responsibility_sums(own) for own in dispatch.sequences_of(problem))


@pytest.fixture
def backend(monkeypatch):
    stand_in = TakesAtOnce()
    monkeypatch.setattr(dispatch, "_HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "fused", stand_in, raising=False)
    monkeypatch.setitem(dispatch._BACKENDS, "triton", stand_in)
    return stand_in


def far_inputs(**options):
    """Every sequence far from zero, each elsewhere, with values around a constant of its own."""
    options = {"lengths": (6, 40, 1, 17), "prior": None, "dtype": torch.float32, **options}
    inputs = make_packed(**options)
    for name, bounds in (("query", "cu_seqlens_q"), ("key", "cu_seqlens_k"), ("value", "cu_seqlens_k")):
        lengths = inputs[bounds].diff()
        offset = torch.tensor([64.0, -64.0, 128.0, -32.0]).repeat_interleave(lengths)
        scale = 0.01 if name == "value" else 1.0
        inputs[name] = scale * inputs[name] + offset.reshape(-1, *[1] * (inputs[name].ndim - 1))
    if "key_mask" in inputs:
        # The sequence of one token has one.
        inputs["key_mask"][46] = inputs["query_mask"][46] = True
    return inputs


def attend_alone(inputs):
    """Each sequence in a call of its own."""
    inputs = dict(inputs)
    bounds, key_bounds = inputs.pop("cu_seqlens_q").tolist(), inputs.pop("cu_seqlens_k").tolist()
    for s in range(len(bounds) - 1):
        own, own_keys = slice(bounds[s], bounds[s + 1]), slice(key_bounds[s], key_bounds[s + 1])
        parts = {"query": own, "query_mask": own, "key": own_keys, "value": own_keys, "key_mask": own_keys}
        sequence = {name: inputs[name][part] for name, part in parts.items() if name in inputs}
        for name in ("query", "key", "value"):
            sequence[name] = sequence[name].movedim(0, -2)
        sequence = {name: each[None] for name, each in sequence.items()}
        mgk.mixture_attention(**{**inputs, **sequence}, backend="triton")


SETTINGS = [{}, {"is_causal": True}, {"key_lengths": (9, 31, 2, 1), "is_causal": True}, {"masked": True}]


@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_packed_keys_and_values_move_like_padded_ones(backend, similarity, settings):
    """A sequence is handed over as if it were alone: bit for bit, and near zero."""
    inputs = far_inputs(similarity=similarity, **settings)
    attend_packed(inputs, "triton")
    (packed,) = backend.given
    together = list(dispatch.sequences_of(packed))
    backend.given.clear()
    attend_alone(inputs)
    assert len(backend.given) == len(together) == 4
    for own, alone in zip(together, backend.given, strict=True):
        # Alone, a backend measures distances from the origin itself.
        query, key = alone.centred()
        assert torch.equal(own.query, query)
        assert torch.equal(own.key, key)
        if own.value.shape[2] > 1 and (own.key_mask is None or own.key_mask.sum() > 1):
            assert torch.equal(own.value, alone.value)
        valid = slice(None) if own.key_mask is None else own.key_mask[0]
        assert own.key[:, :, :, valid].abs().max() < 10
        assert own.value.shape[2] == 1 or own.value[:, :, valid].abs().max() < 1


@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_was_moved_comes_back(backend, similarity, settings):
    """The output is that of values where they were; a query that sees one key alone has its value, bit for bit."""
    inputs = far_inputs(similarity=similarity, **settings)
    out = attend_packed(inputs, "triton")
    exact = {name: each.double() if torch.is_floating_point(each) else each
             for name, each in inputs.items() if isinstance(each, torch.Tensor)}  # fmt: skip
    expected = attend_padded({**inputs, **exact}, "reference")
    # Half a unit in the last place of the constants, and little else.
    assert relative_error(out, expected) <= 2e-7
    mask = inputs.get("key_mask")
    seen = count_visible(
        inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], len(out), mask, bool(settings.get("is_causal"))
    )
    first = nth_valid(1, inputs["cu_seqlens_k"], len(inputs["value"]), mask)
    sequence = torch.arange(4).repeat_interleave(inputs["cu_seqlens_q"].diff())
    alone = seen == 1
    if "query_mask" in inputs:
        alone &= inputs["query_mask"]
    assert alone.any()
    assert torch.equal(out[alone], inputs["value"][first[sequence[alone]]].expand_as(out[alone]))


def test_half_precision_is_not_moved(backend):
    inputs = far_inputs(dtype=torch.bfloat16, similarity="dot")
    inputs = {name: each.bfloat16() if name in ("query", "key", "value") else each for name, each in inputs.items()}
    attend_packed(inputs, "triton")
    (given,) = backend.given
    assert torch.equal(given.key[0].movedim(-2, 0), inputs["key"])
    assert torch.equal(given.value[0].movedim(-2, 0), inputs["value"])


def test_packed_responsibilities_have_an_origin_for_each_sequence(backend):
    inputs = far_inputs(is_causal=True)
    del inputs["value"]
    sums = mgk.mixture_responsibilities_varlen(**inputs, reduction="sum", backend="triton")
    (given,) = backend.given
    assert given.key.abs().max() < 10
    inputs |= {name: inputs[name].double() for name in ("query", "key")}
    expected = mgk.mixture_responsibilities_varlen(**inputs, reduction="sum", backend="reference")
    assert relative_error(sums, expected) <= 1e-5


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
def test_linear_attention_moves_values(backend, is_causal, feature_map):
    """Nearly constant values cost neither output nor gradients their digits; a row without features stays 0."""
    query, key = torch.randn(2, 2, 300, 16), torch.randn(2, 2, 2, 300, 16)
    value = 1000 + 0.05 * torch.randn(2, 2, 300, 8)
    query[0, 0, 7] = -1.0
    grad = torch.randn(2, 2, 300, 8)

    def run(dtype):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (query, key, value)]
        out = mgk.linear_mixture_attention(*leaves, feature_map=feature_map, is_causal=is_causal, backend=backend)
        out.backward(grad.to(dtype))
        return out.detach(), [each.grad for each in leaves]

    (out, gradients), (expected, expected_gradients) = run(torch.float32), run(torch.float64)
    assert relative_error(out, expected) <= 2e-7
    # Before values were moved, that of the query had an error of 0.05 here.
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, wanted) <= 5e-5
    if feature_map == "relu":
        assert (out[0, 0, 7] == 0).all()
    if is_causal and feature_map == "elu":
        assert torch.equal(out[:, :, 0], value[:, :, 0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_counts_within_sequences(masked, is_causal):
    inputs = make_packed(key_lengths=KEY_LENGTHS, masked=masked)
    bounds, key_bounds = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
    mask = inputs.get("key_mask")
    valid = torch.ones(key_bounds[-1], dtype=torch.bool) if mask is None else mask
    seen = count_visible(inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], bounds[-1], mask, is_causal).tolist()
    for s in range(len(LENGTHS)):
        for i in range(bounds[s], bounds[s + 1]):
            last = key_bounds[s + 1] - (bounds[s + 1] - 1 - i if is_causal else 0)
            assert seen[i] == int(valid[key_bounds[s] : max(last, key_bounds[s])].sum())
        own = [j for j in range(key_bounds[s], key_bounds[s + 1]) if valid[j]]
        for number in (1, 2):
            found = nth_valid(number, inputs["cu_seqlens_k"], key_bounds[-1], mask)[s]
            assert not own or found == own[min(number, len(own)) - 1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_of_packed_sequences(is_causal):
    """Causality is that of each sequence, also where queries and keys differ in number."""
    inputs = make_packed(key_lengths=KEY_LENGTHS, masked=True, is_causal=is_causal)
    query, key, value = (inputs[name].movedim(0, -2)[None] for name in ("query", "key", "value"))
    visibility = Visibility(
        is_causal, inputs["key_mask"][None], inputs["query_mask"][None], None, inputs["cu_seqlens_q"],
        inputs["cu_seqlens_k"],
    )  # fmt: skip
    problem = make_problem(query, key, value, Mixture(log_prior=inputs["log_prior"]), visibility)
    out = dispatch.weights(problem) @ value.repeat_interleave(2, dim=1)
    assert relative_error(out[0].transpose(0, 1), attend_packed(inputs, "reference")) < 1e-12


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
def test_a_prior_of_zero_hides_the_only_key_of_a_sequence(backend):
    inputs = make_packed(prior="position")
    token = sum(LENGTHS[:4])
    inputs["log_prior"][:, :, token] = -torch.inf
    out = attend_packed(inputs, backend)
    assert (out[token] == 0).all()
    assert out.isfinite().all()


def test_boundaries_must_be_given():
    inputs = make_packed()
    inputs["cu_seqlens_q"] = None
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor, got NoneType"):
        attend_packed(inputs, "auto")


@pytest.mark.parametrize("name", ["reference", "chunked", "cpu", "sdpa"])
def test_tensors_of_a_call_are_where_its_inputs_are(name):
    """And not on the default device, which is another one while a program moves to a GPU."""
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    shift, log_prior = torch.randn(2, 2, 8), torch.randn(2, 2)
    options = {"shift": shift, "log_prior": log_prior, "is_causal": True, "backend": name}
    expected = mgk.mixture_attention(query, key, value, **options)
    with torch.device("meta"):
        assert torch.equal(mgk.mixture_attention(query, key, value, **options), expected)
