"""The tiles for CPUs: many small ones give what one large one gives, and a call leaves nothing behind."""

import json
import threading
from pathlib import Path

import pytest
import torch

import mgk
from mgk.ops import cpu
from mgk.ops.cpu import grid
from mgk.ops.cpu.memory import LARGEST_KEPT, workspace
from mgk.ops.dispatch import choose_backend
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import make_problem

BENCHMARK = Path(__file__).parents[2] / "results" / "bench" / "layer-cpu.json"

KINDS = {
    "one key": {"components": 1},
    "two projected": {"components": 2},
    "three projected, dot": {"components": 3, "similarity": "dot"},
    "two shifted": {"components": 2, "shifted": True},
    "four shifted": {"components": 4, "shifted": True},
    "two far shifts": {"components": 2, "shifted": True, "spread": 8.0},
}


def make(kind, dtype=torch.float32, batch=3, heads=4, kv_heads=2, queries=21, keys=29, dim=5, value_dim=3):
    """Keyword arguments of the attention. Far shifts are too wide for some rows and not for others."""
    options = KINDS[kind]
    components, spread = options["components"], options.get("spread", 1.0)
    shape = (batch, kv_heads, keys, dim) if options.get("shifted") else (batch, kv_heads, components, keys, dim)
    inputs = {
        "query": torch.randn(batch, heads, queries, dim, dtype=dtype),
        "key": torch.randn(shape, dtype=dtype),
        "value": torch.randn(batch, kv_heads, keys, value_dim, dtype=dtype),
    }
    if options.get("shifted"):
        inputs["shift"] = spread * torch.randn(kv_heads, components, dim, dtype=dtype)
    if components > 1:
        inputs["log_prior"] = torch.randn(kv_heads, components, dtype=dtype)
    return inputs, {"similarity": options.get("similarity", "gaussian")}


def results(inputs, grad, **options):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    out = mgk.mixture_attention(**leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(got, expected):
    for name, tensor in expected.items():
        # Where one component wins everywhere the gradient of the priors is 0 but for rounding.
        assert (got[name] - tensor).norm() <= 1e-10 * tensor.norm() + 1e-12, name


@pytest.fixture
def small_tiles(monkeypatch):
    """So small that every loop runs several times, with a rest at its end."""
    monkeypatch.setattr(grid, "TILE_PAIRS", 200)
    monkeypatch.setattr(grid, "TILE_ROWS", 8)
    monkeypatch.setattr(grid, "TILE_KEYS", 12)
    monkeypatch.setattr(grid, "BLOCK_NUMBERS", 500)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_agree_with_the_reference(kind, is_causal, masked):
    inputs, options = make(kind, torch.float64)
    grad = torch.randn(3, 4, 21, 3, dtype=torch.float64)
    options["is_causal"] = is_causal
    if masked:
        options["key_mask"] = torch.rand(3, 29) > 0.4
        options["key_mask"][1] = False
        options["query_mask"] = torch.rand(3, 21) > 0.2
    got = results(inputs, grad, backend="cpu", **options)
    expected = results(inputs, grad, backend="reference", **options)
    check(got, expected)


@pytest.mark.usefixtures("small_tiles")
def test_queries_before_the_first_key_see_nothing():
    inputs, _ = make("two shifted", torch.float64, queries=29, keys=13)
    grad = torch.randn(3, 4, 29, 3, dtype=torch.float64)
    got = results(inputs, grad, backend="cpu", is_causal=True)
    expected = results(inputs, grad, backend="reference", is_causal=True)
    assert (got["out"][:, :, :16] == 0).all()
    assert (got["query"][:, :, :16] == 0).all()
    check(got, expected)


def test_rows_that_are_too_wide_do_not_disturb_the_others():
    inputs, _ = make("two far shifts", torch.float64)
    wide = cpu._wide_rows(problem_of(**inputs))
    assert wide.any()
    assert not wide.all()


def problem_of(query, key, value, dropout_p=0.0, **options):
    mixture = {name: options.pop(name) for name in Mixture._fields if name in options}
    return make_problem(query, key, value, Mixture(**mixture), Visibility(**options), dropout_p)


def test_calls_share_memory_but_not_numbers():
    """The workspace of one call is that of the next, also between the forward and the backward pass of one."""
    inputs, _ = make("two shifted", batch=2)
    others, _ = make("two projected", batch=2)
    grad = torch.randn(2, 4, 21, 3)
    alone = results(inputs, grad, backend="cpu")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    out = mgk.mixture_attention(**leaves, backend="cpu")
    results(others, grad, backend="cpu")
    for _ in range(2):
        gradients = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            assert torch.equal(gradient, alone[name]), name
    assert torch.equal(out, alone["out"])


def test_threads_do_not_meet_in_the_workspace():
    inputs, _ = make("two shifted", queries=70, keys=70)
    expected = mgk.mixture_attention(**inputs, backend="cpu")
    wrong = []

    def call():
        for _ in range(20):
            if not torch.equal(mgk.mixture_attention(**inputs, backend="cpu"), expected):
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_long_sequences_give_their_memory_back(monkeypatch):
    monkeypatch.setattr("mgk.ops.cpu.memory.LARGEST_KEPT", 1000)
    inputs, _ = make("two shifted")
    results(inputs, torch.randn(3, 4, 21, 3), backend="cpu")
    assert max(map(len, workspace._arrays.values())) <= 1000 < LARGEST_KEPT


def test_gradients_lie_in_memory_as_the_projections_want_them():
    query, key, value = (torch.randn(2, 9, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out = mgk.mixture_attention(query, key, value, backend="cpu")
    assert out.transpose(1, 2).is_contiguous()
    for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
        assert gradient.transpose(1, 2).is_contiguous()


UNSUPPORTED = {
    "assignment='hard' with several components": {"assignment": "hard"},
    "a variance that is a tensor": {"variance": torch.tensor([1.0, 2.0])},
    "an attn_mask that depends on the query": {"attn_mask": torch.ones(21, 29, dtype=torch.bool)},
    "a log_prior of each position": {"log_prior": torch.zeros(2, 2, 29)},
    "dropout_p > 0": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_it_cannot_do_it_refuses(reason):
    inputs, _ = make("two projected")
    options = {**inputs, **UNSUPPORTED[reason]}
    with pytest.raises(ValueError, match="backend='cpu' cannot do ") as error:
        mgk.mixture_attention(**options, backend="cpu")
    assert reason in str(error.value)
    mgk.mixture_attention(**options)


def test_auto_takes_what_the_benchmark_found_fastest():
    """``make bench``, written with ``--write``: no other backend beats the choice of `auto` by a tenth."""
    rows = json.loads(BENCHMARK.read_text(encoding="utf-8"))["rows"]
    assert {(row["batch"], row["tokens"]) for row in rows} >= {(64, 32), (64, 64), (32, 256), (8, 1024), (2, 4096)}
    chosen = choose_backend(problem_of(*(torch.randn(1, 4, 32, 32) for _ in range(3))), "auto")
    assert chosen == "cpu"
    for row in rows:
        if row["backend"] != chosen:
            continue
        rivals = [
            other["training_ms"]
            for other in rows
            if other["backend"] not in ("auto", "stock", chosen)
            and all(other[key] == row[key] for key in ("preset", "heads", "batch", "tokens", "is_causal"))
        ]
        assert row["training_ms"] <= 1.1 * min(rivals), row
