"""The tiles for CPUs: many small ones give what one large one gives, and a call leaves nothing behind."""

import json
import threading
from pathlib import Path

import pytest
import torch

import mgk
from mgk.ops import cpu
from mgk.ops.cpu import grid
from mgk.ops.cpu.kept_weights import MOST_KEYS as MOST_KEPT
from mgk.ops.cpu.memory import LARGEST_KEPT, workspace
from mgk.ops.cpu.whole_rows import MOST_KEYS
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
    problem = problem_of(**inputs)
    wide = cpu._wide_rows(problem, cpu._origin(problem))
    assert wide.any()
    assert not wide.all()


@pytest.mark.parametrize("first_is_wide", [False, True])
@pytest.mark.parametrize("distance", [3.0, 300.0], ids=["near zero", "far from zero"])
def test_rows_that_are_too_wide_are_beside_others_wherever_the_data_lies(distance, first_is_wide):
    """Ratios that are judged from one point and measured from another overflow, or are cut off where they count."""
    sign = torch.tensor([-1.0, 1.0])
    query, key = 0.3 * torch.randn(2, 1, 2, 12, 2)
    query[:, :, 0 if first_is_wide else 5] += 40.0 * sign
    key[:, :, 3] += 1.4 * sign
    inputs = {
        # The origin lies on the line between the two shifts, which is where a query tells them apart.
        "query": query + distance * sign,
        "key": key + distance * sign,
        "value": torch.randn(1, 2, 12, 3),
        "shift": torch.stack([12.0 * sign, -12.0 * sign]).expand(2, 2, 2).clone(),
    }
    grad = torch.randn(1, 2, 12, 3)
    got = results(inputs, grad, backend="cpu")
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    for name, tensor in results(exact, grad.double(), backend="reference").items():
        # Logits of this size cost fp32 some digits in every backend; a ratio that is cut off costs them all.
        assert (got[name] - tensor).norm() <= 1e-2 * tensor.norm(), name


def problem_of(query, key, value, dropout_p=0.0, **options):
    mixture = {name: options.pop(name) for name in Mixture._fields if name in options}
    return make_problem(query, key, value, Mixture(**mixture), Visibility(**options), dropout_p)


@pytest.mark.parametrize("kind", ["one key", "two shifted"])
def test_calls_share_memory_but_not_numbers(kind):
    """The workspace of one call is that of the next, also between the forward and the backward pass of one."""
    inputs, _ = make(kind, batch=2)
    others, _ = make("two projected", batch=2)
    grad = torch.randn(2, 4, 21, 3)
    alone = results(inputs, grad, backend="cpu")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    out = mgk.mixture_attention(**leaves, backend="cpu")
    results(others, grad, backend="cpu")
    results(make("one key", batch=2)[0], grad, backend="cpu")
    for _ in range(2):
        gradients = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            assert torch.equal(gradient, alone[name]), name
    assert torch.equal(out, alone["out"])


@pytest.mark.parametrize("kind", ["one key", "two projected", "two shifted"])
@pytest.mark.parametrize("keys", [29, MOST_KEPT + 1])
def test_a_call_in_inference_mode_does_not_spoil_the_workspace(kind, keys, monkeypatch):
    """Evaluation first and training afterwards: arrays made in inference mode could not be written to outside of it."""
    inputs, _ = make(kind, keys=keys, value_dim=5)
    grad = torch.randn(3, 4, 21, 5)
    expected = results(inputs, grad, backend="cpu")
    monkeypatch.setattr(workspace, "_arrays", {})
    monkeypatch.setattr(workspace, "_sizes", {})
    monkeypatch.setattr(workspace, "_views", {})
    with torch.inference_mode():
        own = {name: tensor.clone() for name, tensor in inputs.items()}
        assert mgk.mixture_attention(**own, backend="cpu").isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(mgk.mixture_attention(**inputs, backend="cpu"), expected["out"])
    for name, tensor in results(inputs, grad, backend="cpu").items():
        assert torch.equal(tensor, expected[name]), name


def test_the_caller_may_reuse_a_mask_before_the_backward_pass(monkeypatch):
    monkeypatch.setattr(grid, "BLOCK_NUMBERS", 500)
    monkeypatch.setattr(grid, "TILE_PAIRS", 200)
    inputs, _ = make("two projected", torch.float64)
    mask = torch.rand(3, 29) > 0.4
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    out = mgk.mixture_attention(**inputs, key_mask=mask, backend="cpu")
    expected = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    mask.fill_(True)
    for gradient, own in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert torch.equal(gradient, own)


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


@pytest.fixture
def ways(monkeypatch):
    """The names of the passes that calls have taken."""
    taken = []

    def record(name):
        function = getattr(cpu, name)

        def recorded(*arguments):
            taken.append(name)
            return function(*arguments)

        monkeypatch.setattr(cpu, name, recorded)

    for name in (
        "Forward", "stock_forward", "forward_pass", "backward_with_weights", "backward_of_rows", "backward_pass"
    ):  # fmt: skip
        record(name)
    return taken


KEPT, STOCK, TILES = "Forward", "stock_forward", "forward_pass"
KEPT_BACK, ROWS_BACK, TILES_BACK = "backward_with_weights", "backward_of_rows", "backward_pass"

# Queries, keys, width of the values, causal, and the ways forward and backward. The head dimension is 5.
WAYS = {
    "one query and one key": (1, 1, 5, False, {KEPT, KEPT_BACK}),
    "very short": (21, 29, 5, False, {KEPT, KEPT_BACK}),
    "most keys that are kept": (9, MOST_KEPT, 5, False, {KEPT, KEPT_BACK}),
    "short": (9, MOST_KEPT + 1, 5, False, {STOCK, ROWS_BACK}),
    "most keys of a whole row": (9, MOST_KEYS, 5, False, {STOCK, ROWS_BACK}),
    "one key more": (9, MOST_KEYS + 1, 5, False, {STOCK, TILES_BACK}),
    "very short, values of another width": (21, 29, 3, False, {KEPT, KEPT_BACK}),
    "values of another width": (21, MOST_KEPT + 1, 3, False, {TILES, TILES_BACK}),
    "very short, causal": (29, 29, 5, True, {KEPT, KEPT_BACK}),
    "short, causal": (MOST_KEPT + 1, MOST_KEPT + 1, 5, True, {STOCK, ROWS_BACK}),
    "long, causal": (MOST_KEYS + 1, MOST_KEYS + 1, 5, True, {STOCK, TILES_BACK}),
    "very short, causal from a cache": (21, 29, 5, True, {KEPT, KEPT_BACK}),
    "causal from a cache": (21, MOST_KEPT + 1, 5, True, {TILES, TILES_BACK}),
    "causal before the first key": (29, 21, 5, True, {TILES, TILES_BACK}),
}


@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["around zero", "far from zero"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("case", WAYS)
def test_one_key_takes_the_shortest_way_and_agrees_with_the_reference(case, similarity, masked, offset, ways):
    queries, keys, width, is_causal, expected_ways = WAYS[case]
    inputs, _ = make("one key", torch.float64, queries=queries, keys=keys, value_dim=width)
    if similarity == "gaussian":
        inputs["query"], inputs["key"] = inputs["query"] + offset, inputs["key"] + offset
    # A constant channel, from which the values are moved away.
    inputs["value"][..., 0] = offset
    options = {"similarity": similarity, "is_causal": is_causal}
    if masked:
        options["key_mask"] = torch.rand(3, keys) > 0.4
        options["key_mask"][1] = False
        options["query_mask"] = torch.rand(3, queries) > 0.2
    grad = torch.randn(3, 4, queries, width, dtype=torch.float64)
    got = results(inputs, grad, backend="cpu", **options)
    assert set(ways) == expected_ways
    expected = results(inputs, grad, backend="reference", **options)
    for name, tensor in expected.items():
        assert (got[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-11, name


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("length", "way"), [(32, KEPT), (64, KEPT), (100, STOCK), (MOST_KEYS + 44, STOCK)])
def test_one_key_keeps_the_digits_of_fp32(length, way, is_causal, ways):
    inputs, _ = make("one key", queries=length, keys=length, dim=32, value_dim=32)
    inputs = {name: tensor + 10.0 for name, tensor in inputs.items()}
    grad = torch.randn(3, 4, length, 32)
    got = results(inputs, grad, backend="cpu", is_causal=is_causal)
    assert ways[0] == way
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    expected = results(exact, grad.double(), backend="reference", is_causal=is_causal)
    for name, tensor in expected.items():
        assert (got[name] - tensor).norm() <= (1e-6 if name == "out" else 1e-4) * tensor.norm(), name


def test_without_gradients_nothing_is_kept_and_the_stock_kernel_is_taken(ways):
    inputs, _ = make("one key", value_dim=5)
    out = mgk.mixture_attention(**inputs, backend="cpu")
    assert ways == [STOCK]
    torch.testing.assert_close(out, results(inputs, torch.ones(3, 4, 21, 5), backend="cpu")["out"])


@pytest.mark.parametrize("constant", ["a value", "zero", "a channel"])
def test_constant_values_of_very_short_rows_come_back_exact(constant, ways):
    inputs, _ = make("one key", value_dim=5)
    if constant == "a channel":
        inputs["value"][1, 0, :, 2] = 1000.0
    else:
        inputs["value"] = torch.full_like(inputs["value"], 0.0 if constant == "zero" else 0.1)
    got = results(inputs, torch.randn(3, 4, 21, 5), backend="cpu")["out"]
    assert ways[0] == KEPT
    if constant == "a channel":
        assert (got[1, :2, :, 2] == 1000.0).all()
    else:
        assert (got == inputs["value"][0, 0, 0, 0]).all()


def test_the_stock_kernel_is_given_no_gaps_in_a_head(ways):
    """It reads wrong numbers where the last axis has a stride."""
    query, key, value = (torch.randn(2, 3, 8, 11, dtype=torch.float64).mT for _ in range(3))
    got = mgk.mixture_attention(query, key, value, backend="cpu")
    assert ways == [STOCK]
    torch.testing.assert_close(got, mgk.mixture_attention(query, key, value, backend="reference"))


def test_data_around_zero_is_not_moved_and_two_equal_values_are_not_a_constant():
    query, key, value = (torch.randn(2, 4, 9, 8) for _ in range(3))
    value[:, :, 1], value[:, :, -1] = value[:, :, 0], -value[:, :, 0]
    problem = problem_of(query, key, value)
    assert cpu._origin(problem) is None
    assert cpu._common_value(problem) == (None, None)
    assert cpu._origin(problem_of(query + 30.0, key + 30.0, value)) is not None
    constant = problem_of(query, key, torch.ones_like(value))
    assert torch.equal(cpu._common_value(constant)[1], torch.ones(2, 4, 1, 8))


@pytest.mark.parametrize("kind", ["one key", "two shifted"])
def test_queries_before_the_first_key_are_zero_beside_constant_values(kind):
    inputs, _ = make(kind, queries=7, keys=4)
    inputs["value"] = torch.full_like(inputs["value"], 3.0)
    out = mgk.mixture_attention(**inputs, is_causal=True, backend="cpu")
    assert (out[:, :, :3] == 0).all()
    assert (out[:, :, 3:] == 3).all()


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


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_is_refused(components, power):
    """With a constant gradient of the output as well, which is no reason to be differentiable."""
    query, value = torch.randn(2, 2, 9, 8, requires_grad=True), torch.randn(2, 2, 9, 8)
    key = torch.randn(2, 2, components, 9, 8)
    out = mgk.mixture_attention(query, key, value, backend="cpu")
    (gradient,) = torch.autograd.grad(out.pow(power).sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        gradient.sum().backward()
