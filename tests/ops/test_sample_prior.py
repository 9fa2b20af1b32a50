"""A prior of each sample and key position, ``log_prior [B, Hkv, M, Nk]``: a bias of each key."""

import math

import oracle
import pytest
import torch
from cases import BACKENDS, DEVICE, KINDS, attend, make_inputs, padding, relative_error, with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

import mgk

SETTINGS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, more keys": {"is_causal": True, "queries": 7, "keys": 12},
    "padding": {"masked": True},
    "causal and padding": {"is_causal": True, "masked": True},
    "pairs": {"pairs": True},
    "grouped": {"heads": 4, "kv_heads": 2},
    "multi-query": {"heads": 4, "kv_heads": 1, "is_causal": True},
    "one component": {"components": 1},
    "three components": {"components": 3},
    "one key": {"keys": 1},
    "unequal variances": {"variance": "component"},
    "dot": {"similarity": "dot"},
    "dot of one key": {"similarity": "dot", "components": 1},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(kind, masked=False, pairs=False, **settings):
    torch.manual_seed(0)
    inputs = make_inputs(**{"kind": kind, "prior": "sample", "batch": 3, "queries": 11, "device": DEVICE, **settings})
    batch, _, queries, _ = inputs["query"].shape
    keys = inputs["key"].shape[-2]
    if masked:
        inputs["key_mask"] = padding(batch, keys, DEVICE)
    if pairs:
        inputs["attn_mask"] = torch.rand(batch, 1, queries, keys, device=DEVICE) > 0.3
        inputs["attn_mask"][:, :, 2] = False
    return inputs


def grad_of(inputs):
    return torch.randn(*inputs["query"].shape[:3], inputs["value"].shape[-1], dtype=torch.float64, device=DEVICE)


def of_sample(inputs, number):
    """One sample alone, with its prior in the form that has no axis of samples."""
    batched = ("query", "key", "value", "key_mask", "query_mask", "attn_mask")
    own = {name: value[number : number + 1] if name in batched else value for name, value in inputs.items()}
    return {**own, "log_prior": inputs["log_prior"][number]}


@every_kind
@every_backend
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_output_and_gradients(kind, backend, setting):
    inputs = make(kind, **SETTINGS[setting])
    grad = grad_of(inputs)
    out, got = with_gradients(inputs, grad, backend)
    expected_out, expected = with_gradients(inputs, grad, function=oracle.attention)
    assert relative_error(out, expected_out) < 1e-12
    for name, gradient in got.items():
        assert gradient.shape == inputs[name].shape
        scale = expected["value"].square().mean().sqrt()  # One key alone has gradients of zero.
        assert (gradient - expected[name]).abs().max() < 1e-10 * max(scale, expected[name].abs().max()), name


@every_kind
@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision(kind, backend, dtype):
    inputs = make(kind, dtype=dtype, is_causal=True, dim=16, queries=33)
    grad = grad_of(inputs).to(dtype)
    out, got = with_gradients(inputs, grad, backend)
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    expected_out, expected = with_gradients(exact, grad.double(), function=oracle.attention)
    assert got["log_prior"].dtype == torch.float32
    assert relative_error(out, expected_out) < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    cap = 1e-4 if dtype == torch.float32 else 2e-2
    assert relative_error(got["log_prior"], expected["log_prior"]) < cap


@every_kind
@every_backend
def test_one_prior_for_all_samples_is_the_form_without_them(kind, backend):
    """The output is the same; the gradients of the samples add up to the gradient of the prior that they share."""
    inputs = make(kind, is_causal=True, prior="position")
    grad = grad_of(inputs)
    out, shared = with_gradients(inputs, grad, backend)
    copies = inputs["log_prior"].expand(3, *inputs["log_prior"].shape)
    own_out, own = with_gradients({**inputs, "log_prior": copies}, grad, backend)
    torch.testing.assert_close(own_out, out)
    torch.testing.assert_close(own["log_prior"].sum(0), shared["log_prior"])
    assert relative_error(own["log_prior"][0], own["log_prior"][1]) > 0.1


@every_kind
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_hard_assignment_ignores_it(kind, backend):
    inputs = make(kind, assignment="hard")
    grad = grad_of(inputs)
    out, got = with_gradients(inputs, grad, backend)
    torch.testing.assert_close(out, attend({**inputs, "log_prior": None}, backend))
    assert torch.equal(got["log_prior"], torch.zeros_like(inputs["log_prior"]))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_bias_takes_the_distance_back(backend, dtype):
    """With ``|k_j|^2 / (2 variance)`` as the log prior of each key the distance is the dot product."""
    inputs = make("projected", components=1, prior=None, dtype=dtype, scale=3.0, is_causal=True)
    bias = inputs["key"].square().sum(-1) / (2 * inputs["key"].shape[-1] ** 0.5)
    out = attend({**inputs, "log_prior": bias}, backend)
    expected = attend({**inputs, "similarity": "dot"}, "reference")
    assert relative_error(out, expected) < (1e-12 if dtype == torch.float64 else 1e-5)


@every_kind
@every_backend
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_without_a_prior_are_not_seen(kind, backend, is_causal):
    """-inf in every component hides a key from its sample alone; a sample of which all are hidden is 0."""
    inputs = make(kind, is_causal=is_causal)
    hidden = torch.zeros(3, 11, dtype=torch.bool, device=DEVICE)
    hidden[0, 4:7] = True
    hidden[0, 0] = True
    hidden[2] = True
    prior = inputs["log_prior"].masked_fill(hidden[:, None, None], -math.inf)
    grad = grad_of(inputs)
    out, got = with_gradients({**inputs, "log_prior": prior}, grad, backend)
    # Where no key is seen the oracle takes a softmax of nothing; a mask of keys says the same.
    masked = {**inputs, "key_mask": ~hidden}
    expected_out, expected = with_gradients(masked, grad, function=oracle.attention)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-10)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)
    assert torch.equal(got["log_prior"][2], torch.zeros_like(got["log_prior"][2]))


@every_kind
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("setting", ["causal and padding", "grouped", "unequal variances"])
def test_statistics(kind, backend, setting):
    inputs = make(kind, **SETTINGS[setting])
    density = mgk.mixture_log_density(**without_value(inputs), normalized=True, backend=backend)
    sums = mgk.mixture_responsibilities(**without_value(inputs), reduction="sum", backend=backend)
    weights = mgk.mixture_weights(**without_value(inputs))
    alone = [without_value(of_sample(inputs, number)) for number in range(3)]
    torch.testing.assert_close(density, torch.cat([mgk.mixture_log_density(**own, normalized=True) for own in alone]))
    torch.testing.assert_close(sums, sum(mgk.mixture_responsibilities(**own, reduction="sum") for own in alone))
    torch.testing.assert_close(weights, oracle.weights(inputs))


def without_value(inputs):
    return {name: value for name, value in inputs.items() if name != "value"}


@every_kind
def test_second_derivatives(kind):
    inputs = make(kind, batch=2, heads=1, queries=3, dim=2, is_causal=True)
    tensors = tuple(inputs[name].requires_grad_() for name in ("query", "key", "value", "log_prior"))

    def run(query, key, value, log_prior):
        return attend({**inputs, "query": query, "key": key, "value": value, "log_prior": log_prior}, "reference")

    assert torch.autograd.gradgradcheck(run, tensors)
    (first,) = torch.autograd.grad(attend(inputs, "chunked").square().sum(), inputs["log_prior"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        first.square().sum().backward()


@every_kind
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_func(kind, backend):
    """Mapped over a stack of batches; and the gradient of each."""
    inputs = make(kind, is_causal=True)
    stack = torch.stack([inputs["log_prior"], inputs["log_prior"].flip(-1)])

    def run(log_prior):
        return attend({**inputs, "log_prior": log_prior}, backend)

    torch.testing.assert_close(torch.func.vmap(run)(stack), torch.stack([run(each) for each in stack]))
    got = torch.func.grad(lambda prior: run(prior).square().sum())(stack[0])
    prior = stack[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(prior).square().sum(), prior)
    torch.testing.assert_close(got, expected)


@every_backend
def test_traced(backend):
    inputs = make("shifted", is_causal=True, dtype=torch.float32)
    expected = attend(inputs, backend)
    compiled = torch.compile(lambda inputs: attend(inputs, backend), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), expected, rtol=1e-4, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        fake["log_prior"].requires_grad_()
        out = attend(fake, backend)
        out.sum().backward()
    assert out.shape == expected.shape
    assert fake["log_prior"].grad.shape == inputs["log_prior"].shape


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attention(backend, shifted, is_causal):
    inputs = make("shifted" if shifted else "projected")
    shift, prior = inputs.get("shift"), inputs["log_prior"]
    tensors = [inputs[name] for name in ("query", "key", "value")]
    out = mgk.linear_mixture_attention(*tensors, shift=shift, log_prior=prior, is_causal=is_causal, backend=backend)
    alone = [
        mgk.linear_mixture_attention(
            *(tensor[n : n + 1] for tensor in tensors), shift=shift, log_prior=prior[n], is_causal=is_causal
        )
        for n in range(3)
    ]
    torch.testing.assert_close(out, torch.cat(alone))


def test_packed_sequences_have_a_form_of_their_own():
    """``[Hkv, M, Tk]`` has an entry for each key of each sequence already."""
    tokens = [torch.randn(6, 2, 8) for _ in range(3)]
    boundaries = torch.tensor([0, 2, 6], dtype=torch.int32)
    said = r"log_prior of packed sequences must have shape \[M\], \[Hkv, M\] or \[Hkv, M, Tk\], got \[1, 2, 1, 6\]"
    prior = torch.zeros(1, 2, 1, 6)
    with pytest.raises(ValueError, match=said):
        mgk.mixture_attention_varlen(*tokens, cu_seqlens_q=boundaries, log_prior=prior)
    with pytest.raises(ValueError, match=said):
        mgk.linear_mixture_attention_varlen(*tokens, cu_seqlens_q=boundaries, log_prior=prior)
    with pytest.raises(ValueError, match=said):
        mgk.mixture_responsibilities_varlen(*tokens[:2], cu_seqlens_q=boundaries, log_prior=prior)
