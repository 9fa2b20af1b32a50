"""To which kernel `auto` gives plain softmax: decided by a table, without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from mgk.benchmark.softmax_choice import LEAST_GAIN
from mgk.ops import dispatch, reference, sdpa, softmax_kernel
from mgk.ops.dispatch import choose_backend
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.softmax_kernel import Faster
from mgk.ops.validation import make_problem

ROOT = Path(__file__).parents[2]
ARCHITECTURE = softmax_kernel.architecture
TABLE = (
    Faster("sm90", torch.bfloat16, 32, False, False, False, tokens=128, queries=1024),
    Faster("sm90", torch.bfloat16, 64, True, False, True, tokens=256, queries=1024),
    Faster("sm90", torch.bfloat16, 32, False, True, True, tokens=128, queries=1024),
)


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """As on an H200 for which something was measured."""
    monkeypatch.setattr(softmax_kernel, "_table", TABLE)
    monkeypatch.setattr(softmax_kernel, "architecture", lambda index: "sm90")
    monkeypatch.setattr(
        dispatch, "is_half_on_gpu", lambda problem: problem.query.dtype in (torch.float16, torch.bfloat16)
    )


def backend(
    batch=2, heads=4, tokens=128, head_dim=32, *, kv_heads=None, keys=None, value_dim=None, dtype=torch.bfloat16,
    requires_grad=False, similarity="dot", variance=None, dropout_p=0.0, **visibility,
):  # fmt: skip
    keys, kv_heads = keys or tokens, kv_heads or heads
    query = torch.zeros(batch, heads, tokens, head_dim, dtype=dtype, requires_grad=requires_grad)
    key = torch.zeros(batch, kv_heads, keys, head_dim, dtype=dtype)
    value = torch.zeros(batch, kv_heads, keys, value_dim or head_dim, dtype=dtype)
    mixture = Mixture(variance=variance, similarity=similarity)
    problem = make_problem(query, key, value, mixture, Visibility(**visibility), dropout_p)
    return choose_backend(problem, "auto")


def test_what_was_measured_to_be_faster_is_ours():
    assert backend() == "triton"
    assert backend(tokens=4096, batch=1, heads=1) == "triton"
    assert backend(tokens=256, head_dim=64, is_causal=True, requires_grad=True) == "triton"


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 127, "batch": 16}, {"batch": 1}, {"head_dim": 64}, {"head_dim": 33}, {"is_causal": True},
        {"requires_grad": True}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"dropout_p": 0.1},
        {"kv_heads": 2}, {"keys": 256}, {"value_dim": 64}, {"variance": torch.ones(1)},
        {"key_mask": torch.ones(2, 128, dtype=torch.bool)}, {"query_mask": torch.ones(2, 128, dtype=torch.bool)},
        {"attn_mask": torch.ones(128, 128, dtype=torch.bool)},
        {"attn_mask": torch.ones(128, 128, dtype=torch.bool), "key_mask": torch.ones(2, 128, dtype=torch.bool)},
        {"tokens": 255, "head_dim": 64, "is_causal": True, "requires_grad": True},
        {"tokens": 256, "head_dim": 64, "is_causal": True},
    ],
    ids=lambda other: "-".join(other),
)  # fmt: skip
def test_everything_else_keeps_the_stock_kernels(other):
    # Here, on a CPU, dropout would have them materialise its pairs.
    assert backend(**other) == ("chunked" if "dropout_p" in other else "sdpa")


def test_a_mask_of_keys_is_another_case():
    """Queries are masked with it where a sequence attends to itself, which costs nothing."""
    mask = torch.ones(2, 128, dtype=torch.bool)
    assert backend(requires_grad=True, key_mask=mask) == "triton"
    assert backend(requires_grad=True, key_mask=mask, query_mask=mask) == "triton"
    for other in ({}, {"is_causal": True, "requires_grad": True}, {"head_dim": 64, "requires_grad": True}):
        assert backend(key_mask=mask, **other) == "sdpa"
    with softmax_kernel.ignored():
        assert backend(requires_grad=True, key_mask=mask) == "sdpa"


def test_auto_takes_what_the_committed_run_found_faster(monkeypatch):
    """At every shape and in both directions, and what docs/benchmarks.md says of it in words."""
    run = json.loads((ROOT / "results" / "bench" / "attention-h200.json").read_text())
    monkeypatch.setattr(softmax_kernel, "_table", softmax_kernel.read())
    monkeypatch.setattr(softmax_kernel, "architecture", lambda index: run["architecture"])
    chosen = {}
    for own in run["baselines"]:
        if "kernel" in own or own.get("sweep"):
            continue
        size = {name: own[name] for name in ("batch", "heads", "tokens", "head_dim", "causal", "dtype")}
        stock = [each for each in run["baselines"] if "kernel" in each and size.items() <= each.items()]
        for direction in ("forward", "training"):
            best = min(each[f"{direction}_ms"] for each in stock)
            is_ours = auto_at(size, needs_gradient=direction == "training") == "triton"
            assert is_ours == (best >= LEAST_GAIN * own[f"{direction}_ms"]), (size, direction)
            chosen[own["tokens"], own["head_dim"], direction] = is_ours
            assert auto_at({**size, "tokens": own["tokens"] - 128}, needs_gradient=direction == "training") == "sdpa"
    assert len(chosen) == 8
    assert {key for key, is_ours in chosen.items() if not is_ours} == {
        key for key in chosen if key[1:] in {(64, "training"), (128, "training")}
    }


def auto_at(size, *, needs_gradient):
    """The backend of `auto` at a size of the JSON; one number stands for all of a tensor."""
    zero = torch.zeros((), dtype=getattr(torch, size["dtype"]))
    shape = size["batch"], size["heads"], size["tokens"], size["head_dim"]
    query, key, value = (zero.expand(shape).requires_grad_(needs_gradient) for _ in range(3))
    visibility = Visibility(is_causal=size["causal"])
    return choose_backend(make_problem(query, key, value, Mixture(similarity="dot"), visibility), "auto")


def test_a_gradient_that_nobody_takes_is_none():
    with torch.no_grad():
        assert backend(requires_grad=True) == "triton"


def test_other_gpus_keep_the_stock_kernels(monkeypatch):
    monkeypatch.setattr(softmax_kernel, "architecture", lambda index: "sm80")
    assert backend() == "sdpa"
    # Mixtures are ours everywhere.
    assert backend(similarity="gaussian") == "triton"


def test_on_a_cpu_nobody_asks_for_a_gpu(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(softmax_kernel, "_table", TABLE)
    assert backend() == "sdpa"


def test_a_measurement_of_stock_kernels_gets_them():
    with softmax_kernel.ignored():
        assert backend() == "sdpa"
    assert backend() == "triton"


def test_the_choice_is_compiled_without_a_break(monkeypatch):
    def is_ours(query):
        problem = make_problem(query, query, query, Mixture(similarity="dot"), Visibility())
        return query + int(softmax_kernel.is_faster(problem))

    # As dispatch does where there is a GPU.
    torch.compiler.assume_constant_result(ARCHITECTURE)
    compiled = torch.compile(is_ours, backend="eager", fullgraph=True, dynamic=True)
    ARCHITECTURE.cache_clear()
    monkeypatch.setattr(softmax_kernel, "architecture", ARCHITECTURE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for tokens, expected in ((512, 1), (640, 1), (64, 0), (512, 1)):
        assert compiled(torch.zeros(2, 4, tokens, 32, dtype=torch.bfloat16)).unique().tolist() == [expected]
    ARCHITECTURE.cache_clear()


def test_the_table_is_read_from_its_file(tmp_path):
    entry = {
        "architecture": "sm90", "dtype": "bfloat16", "head_dim": 32, "causal": False, "direction": "forward",
        "tokens": 128, "queries": 1024, "gain": 1.4,
    }  # fmt: skip
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"faster": [entry, {**entry, "direction": "training", "causal": True}]}))
    assert softmax_kernel.read(file) == (TABLE[0], TABLE[0]._replace(is_causal=True, needs_gradient=True))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_stock_kernels_get_a_mask_and_no_more_columns(kv_heads, monkeypatch):
    """A row of keys that are all masked must not be NaN there; it is zeroed afterwards."""
    query, key, value = (torch.randn(3, heads, 16, 32) for heads in (4, kv_heads, kv_heads))
    valid = torch.arange(16) < torch.tensor([[16], [5], [0]])
    stock, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*tensors, attn_mask=None, **options):
        seen.append((*(each.shape[-1] for each in tensors), attn_mask))
        return stock(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    problem = make_problem(query, key, value, Mixture(similarity="dot"), Visibility(key_mask=valid))
    out = sdpa.attention(problem)
    ((*widths, mask),) = seen
    assert widths == [32, 32, 32]
    assert mask.shape == (3, 1, 1, 16)
    assert mask[:, 0, 0].sum(-1).tolist() == [16, 5, 16]
    torch.testing.assert_close(out, reference.attention(problem))
    assert out[2].eq(0).all()
