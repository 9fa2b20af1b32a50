"""Packed sequences: P14 (packed == padded == one by one), what no other sequence may change, and bad input 15."""

import pytest
import torch
from cases import BACKENDS, KINDS, OUTPUT_CAP, relative_error
from packed_cases import (
    KEY_LENGTHS,
    attend_packed,
    attend_padded,
    boundaries,
    make_packed,
    with_gradients,
)

import mgk

OPTIONS = [
    {},
    {"is_causal": True},
    {"assignment": "hard"},
    {"similarity": "dot", "is_causal": True},
    {"variance": "component"},
    {"variance": 3.0, "prior": None},
    {"prior": "position", "is_causal": True},
    {"masked": True, "is_causal": True},
    {"key_lengths": KEY_LENGTHS},
    {"key_lengths": KEY_LENGTHS, "is_causal": True, "masked": True},
    {"heads": 4, "kv_heads": 2, "components": 3},
]

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_backend
@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_is_padded(backend, kind, options, device):
    """P14: outputs and all gradients."""
    if backend == "sdpa" and options.get("assignment") == "hard":
        pytest.skip("sdpa has no hard assignment")
    dtype = torch.float32 if backend == "sdpa" else torch.float64
    inputs = make_packed(kind=kind, dtype=dtype, device=device, **options)
    grad = torch.randn(len(inputs["query"]), inputs["query"].shape[1], 8, device=device)
    out, gradients = with_gradients(attend_packed, inputs, backend, grad)
    expected, expected_gradients = with_gradients(attend_padded, inputs, "reference", grad)
    cap = OUTPUT_CAP[dtype]
    assert out.shape == grad.shape
    assert relative_error(out, expected) <= cap
    for name, gradient in gradients.items():
        # Where a parameter is irrelevant, its gradient is rounding.
        scale = max(1.0, float(expected_gradients["value"].norm() / expected_gradients[name].norm().clamp(min=1e-30)))
        assert relative_error(gradient, expected_gradients[name]) <= 20 * cap * scale, name


@every_kind
def test_keys_are_bounded_as_queries_unless_said(kind, device):
    inputs = make_packed(kind=kind, device=device)
    expected = attend_packed(inputs, "reference")
    inputs.pop("cu_seqlens_k")
    assert torch.equal(attend_packed(inputs, "reference"), expected)


@every_kind
@pytest.mark.parametrize("poison", [1e3, float("nan")])
def test_a_sequence_does_not_know_the_others(kind, poison, device):
    """P18: not even in its last bit."""
    inputs = make_packed(kind=kind, device=device, dtype=torch.float32)
    out = attend_packed(inputs, "chunked")
    for name in ("query", "key", "value"):
        inputs[name][:45] = poison
    assert torch.equal(attend_packed(inputs, "chunked")[45:], out[45:])


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (3, 0)], ids=str)
def test_hardly_any_tokens(lengths, device):
    """P17"""
    inputs = make_packed(lengths=lengths, device=device)
    out = attend_packed(inputs, "auto")
    assert out.shape == (sum(lengths), 2, 8)
    assert out.isfinite().all()


def test_queries_without_keys_are_zero(device):
    inputs = make_packed(lengths=(4, 3), key_lengths=(0, 5), device=device)
    out = attend_packed(inputs, "chunked")
    assert (out[:4] == 0).all()
    assert (out[4:] != 0).all()


def test_dropout_drops_within_sequences(device):
    inputs = make_packed(lengths=(60, 60), device=device, dropout_p=0.5, dtype=torch.float32)
    torch.manual_seed(1)
    first = attend_packed(inputs, "chunked")
    torch.manual_seed(1)
    assert torch.equal(attend_packed(inputs, "chunked"), first)
    assert not torch.equal(attend_packed(inputs, "chunked"), first)


def test_the_longest_may_be_told(device):
    inputs = make_packed(device=device)
    expected = attend_packed(inputs, "reference")
    assert torch.equal(attend_packed({**inputs, "max_seqlen_q": 40, "max_seqlen_k": 100}, "reference"), expected)


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


BAD = [
    ("cu_seqlens_q", lambda bounds: bounds.long(), TypeError, "must be an int32 tensor, got torch.int64"),
    ("cu_seqlens_k", lambda bounds: bounds.tolist(), TypeError, "must be an int32 tensor, got list"),
    ("cu_seqlens_q", lambda bounds: bounds[None], ValueError, r"must have shape \[S \+ 1\], got \[1, 7\]"),
    ("cu_seqlens_q", lambda bounds: bounds[:0], ValueError, r"must have shape \[S \+ 1\], got \[0\]"),
    ("cu_seqlens_q", lambda bounds: bounds + 1, ValueError, "must begin with 0, got 1"),
    ("cu_seqlens_k", lambda _: ends(0, 9, 5, 45, 78, 79, 96), ValueError, "must never decrease, got"),
    (
        "cu_seqlens_q",
        lambda _: ends(0, 5, 5, 45, 78, 79, 95),
        ValueError,
        "must end with the number of tokens, 96, got 95",
    ),
    ("cu_seqlens_k", lambda _: ends(0, 50, 96), ValueError, "as many sequences as cu_seqlens_q, 6, got 2"),
    ("max_seqlen_q", lambda _: 39, ValueError, "must be at least the longest sequence, 40, got 39"),
    ("max_seqlen_k", lambda _: 0, ValueError, "must be at least the longest sequence, 40, got 0"),
    ("max_seqlen_q", lambda _: 39.5, ValueError, "must be a number of tokens, got 39.5"),
    ("query", lambda query: query[None], ValueError, r"must have shape \[Tq, H, D\], got \[1, 96, 2, 16\]"),
    (
        "key",
        lambda key: key[:, 0, 0],
        ValueError,
        r"must have shape \[Tk, Hkv, M, D\] or \[Tk, Hkv, D\], got \[96, 16\]",
    ),
    ("value", lambda value: value[:, 0], ValueError, r"must have shape \[Tk, Hkv, Dv\], got \[96, 8\]"),
    ("value", lambda _: 3, TypeError, "must be a tensor, got int"),
    ("value", lambda value: value[:95], ValueError, "must have as many positions as key, 96, got 95"),
    (
        "key_mask",
        lambda _: torch.ones(1, 96) > 0,
        ValueError,
        r"must have one entry for each token, \[T\], got \[1, 96\]",
    ),
    ("query_mask", lambda _: torch.ones(95) > 0, ValueError, r"must have shape \[1, 96\], got \[1, 95\]"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD)
def test_bad_input(name, change, error, message):
    """Bad input 15, and what else can be wrong with packed tokens."""
    inputs = make_packed()
    with pytest.raises(error, match=f"{name} .*{message}|{message}"):
        attend_packed({**inputs, name: change(inputs.get(name))}, "auto")


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"):
        attend_packed(make_packed(), "cuda")


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@every_kind
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "masked": True}, {"key_lengths": KEY_LENGTHS}], ids=str)
def test_responsibilities_add_up_over_sequences(backend, kind, options, device):
    """P14 of the E-step: the same as over all pairs of which both tokens lie in one sequence."""
    inputs = make_packed(kind=kind, device=device, **options)
    inputs.pop("value")
    query, key, mask, query_mask = (inputs.pop(name, None) for name in ("query", "key", "key_mask", "query_mask"))
    bounds, key_bounds = inputs.pop("cu_seqlens_q"), inputs.pop("cu_seqlens_k")
    got = mgk.mixture_responsibilities_varlen(
        query, key, cu_seqlens_q=bounds, cu_seqlens_k=key_bounds, key_mask=mask, query_mask=query_mask,
        backend=backend, **inputs,
    )  # fmt: skip
    total = 0.0
    for first, end, first_key, end_key in zip(bounds[:-1], bounds[1:], key_bounds[:-1], key_bounds[1:], strict=True):
        if end > first and end_key > first_key:
            total = total + mgk.mixture_responsibilities(
                query[first:end].movedim(0, -2)[None], key[first_key:end_key].movedim(0, -2)[None],
                key_mask=None if mask is None else mask[None, first_key:end_key],
                query_mask=None if mask is None else query_mask[None, first:end],
                backend="reference", reduction="sum", **inputs,
            )  # fmt: skip
    assert relative_error(got, total / total.sum(dim=1, keepdim=True)) <= 1e-10


@pytest.mark.gpu
def test_boundaries_on_another_device():
    """Bad input 15."""
    inputs = make_packed(device="cuda")
    inputs["cu_seqlens_q"] = inputs["cu_seqlens_q"].cpu()
    with pytest.raises(ValueError, match="cu_seqlens_q must be on the device of the tokens, cuda:0, got cpu"):
        attend_packed(inputs, "auto")


def test_tracing_needs_the_fused_kernels():
    inputs = make_packed(dtype=torch.float32)
    compiled = torch.compile(lambda: attend_packed(inputs, "chunked"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="packed sequences can be traced with backend='triton' only"):
        compiled()
    with pytest.raises(NotImplementedError, match="packed sequences can be traced with backend='triton' only"):
        attend_packed({name: x.to("meta") if torch.is_tensor(x) else x for name, x in inputs.items()}, "auto")


def test_nothing_packed_has_gradients_of_zero():
    """Data-parallel training waits for them even where a rank has no token."""
    tokens = [torch.randn(0, 2, 8, requires_grad=True) for _ in range(3)]
    prior = torch.zeros(2, 1, requires_grad=True)
    bounds = torch.zeros(1, dtype=torch.int32)
    for function in (mgk.mixture_attention_varlen, mgk.linear_mixture_attention_varlen):
        out = function(*tokens, cu_seqlens_q=bounds, log_prior=prior)
        for gradient in torch.autograd.grad(out.sum(), [*tokens, prior]):
            assert (gradient == 0).all()


def test_boundaries_are_what_other_libraries_call_so():
    assert boundaries((2, 0, 3)).tolist() == [0, 2, 2, 5]
    assert mgk.mixture_attention_varlen.__module__ == "mgk.ops.packed"
