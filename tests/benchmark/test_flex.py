"""Mixtures in FlexAttention: the formula of each `score_mod`, and a row for what can only go forward."""

import pytest
import torch
from rich.console import Console

from mgk.benchmark import correctness, flex, markdown, oracle, table
from mgk.benchmark.attention import compare
from mgk.benchmark.contestants import baselines, mixtures, own_softmax
from mgk.benchmark.correctness import Judge
from mgk.benchmark.inputs import draw
from mgk.benchmark.plan import make_plan
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Effort

CPU = torch.device("cpu")
SHAPE = Shape(batch=1, heads=4, tokens=40, head_dim=16, is_causal=True)
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)
BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def _not_compiled(monkeypatch):
    """FlexAttention as it is: to compile it for a CPU takes a minute."""
    monkeypatch.setattr(flex, "_compiled", lambda function, kind: function)
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})


def inputs_of(preset, is_causal, dtype=torch.float64, needs_gradients=True, device=CPU, tokens=37):
    torch.manual_seed(0)
    return draw(
        preset, batch=2, heads=3, tokens=tokens, head_dim=16, is_causal=is_causal, dtype=dtype, device=device,
        needs_gradients=needs_gradients,
    )  # fmt: skip


def every_pair(inputs):
    """What FlexAttention is asked for, for all pairs at once, in fp64 and with gradients: on a CPU it has none."""
    inputs = inputs.in_float64()
    operands = flex.prepare(inputs.query, inputs.key, inputs.value, inputs.shift, inputs.log_prior)
    score = inputs.query @ operands.key.mT / inputs.query.shape[-1] ** 0.5
    batch, head, row, place = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    score = flex.score_mod_of(operands)(score, batch, head, row, place)
    if inputs.is_causal:
        score = score.masked_fill(~flex.block_mask_of(inputs).mask_mod(batch, head, row, place), -torch.inf)
    return score.softmax(-1) @ operands.value, inputs


@BOTH_MASKS
@pytest.mark.parametrize("preset", flex.PRESETS)
def test_every_score_mod_is_the_formula_with_its_gradients(preset, is_causal):
    out, inputs = every_pair(inputs_of(preset, is_causal))
    exact = inputs.in_float64()
    expected = oracle.attention(exact)
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(expected)
    got = torch.autograd.grad(out, list(inputs.leaves().values()), grad)
    wanted = torch.autograd.grad(expected, list(exact.leaves().values()), grad)
    assert {"gaussian": 3, "smgk": 5, "mgk": 4}[preset] == len(wanted)
    for mine, its in zip(got, wanted, strict=True):
        assert torch.allclose(mine, its, atol=1e-10)


@pytest.mark.usefixtures("_not_compiled")
@BOTH_MASKS
@pytest.mark.parametrize("preset", flex.PRESETS)
def test_flex_attention_computes_it(preset, is_causal):
    inputs = inputs_of(preset, is_causal, torch.float32)
    with torch.no_grad():
        out = flex.attention(inputs)
    assert torch.allclose(out, oracle.attention(inputs).float(), atol=2e-6)


@pytest.mark.slow
@BOTH_MASKS
@pytest.mark.parametrize("preset", flex.PRESETS)
def test_flex_attention_computes_it_compiled(preset, is_causal):
    inputs = inputs_of(preset, is_causal, torch.float32, tokens=64)
    with torch.no_grad():
        out = flex.attention(inputs)
    assert torch.allclose(out, oracle.attention(inputs).float(), atol=2e-6)


@pytest.mark.gpu
@BOTH_MASKS
@pytest.mark.parametrize("preset", flex.PRESETS)
def test_on_a_gpu_it_has_gradients(preset, is_causal):
    judge = Judge(torch.bfloat16, torch.device("cuda"))
    contestant = mixtures([preset], ["flex"])[0]
    shape = Shape(batch=2, heads=6, tokens=256, head_dim=64, is_causal=is_causal)
    torch.manual_seed(0)
    inputs = draw(
        preset, batch=2, heads=3, tokens=256, head_dim=64, is_causal=is_causal, dtype=judge.dtype, device=judge.device
    )
    assert judge.check(contestant, inputs, shape).keys() == {"output", *inputs.leaves()}


def run():
    contestants = [*baselines(CPU), own_softmax(CPU), *mixtures(("softmax", "gaussian", "smgk"), ("chunked", "flex"))]
    return compare(SHAPE, contestants, Judge(torch.float32, CPU), EFFORT)


@pytest.mark.usefixtures("_not_compiled")
def test_what_cannot_be_trained_has_a_time_forward_and_a_reason():
    found = run()
    assert not found.failures
    assert not found.skipped
    rows = {(row["preset"], row["backend"]): row for row in found.rows}
    # It is written for mixtures; softmax is what it has of its own.
    assert [preset for preset, backend in rows if backend == "flex"] == ["gaussian", "smgk"]
    row = rows["smgk", "flex"]
    assert row["forward_ms"] > 0
    assert row["forward_ratio_of_all"] > 0
    assert {row[name] for name in ("training_ms", "training_ratio", "training_ratio_of_all", "peak_bytes")} == {None}
    assert "FlexAttention does not support backward on CPU" in row["no_training"]
    assert row["error"].keys() == {"output"}
    assert rows["smgk", "chunked"]["training_ratio_of_all"] > 0
    console = Console(width=200, record=True)
    console.print(table.attention_table(found))
    line = next(line for line in console.export_text().splitlines() if line.split()[:2] == ["smgk", "flex"])
    assert line.split()[-1] == "none"
    assert any(
        "no training: smgk through flex: it stopped with NotImplementedError" in each for each in table.notes(found)
    )
    result = {
        "benchmark": "attention", "device": "CPU", "written": "2026-11-18", "versions": {"torch": "2", "triton": "3"},
        "baselines": found.baselines, "rows": found.rows, "skipped": [], "failures": [],
    }  # fmt: skip
    text = markdown.tables(result)
    assert "| smgk | flex | 2 |" in text
    assert "- No training of smgk through flex: it stopped with NotImplementedError: FlexAttention does not" in text
    assert markdown.NO_FLEX not in text
    assert markdown.NO_FLEX in markdown.tables({**result, "rows": [rows["smgk", "chunked"]]})


@pytest.mark.usefixtures("_not_compiled")
def test_one_that_is_wrong_gets_no_number(monkeypatch):
    right = flex.prepare

    def wrong(*args):
        operands = right(*args)
        return operands._replace(columns=tuple(1.1 * column for column in operands.columns))

    monkeypatch.setattr(flex, "prepare", wrong)
    found = run()
    assert [(each["preset"], each["backend"]) for each in found.failures] == [("gaussian", "flex"), ("smgk", "flex")]
    assert all("error of the output must be at most 1e-05" in each["reason"] for each in found.failures)
    assert not any(row["backend"] == "flex" for row in found.rows)


@pytest.mark.usefixtures("_not_compiled")
def test_one_that_stops_is_left_out_and_the_others_go_on(monkeypatch):
    def stops(*args):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(flex, "attend", stops)
    found = run()
    assert not found.failures
    assert [each["reason"] for each in found.skipped] == ["it stopped with RuntimeError: no kernel for this"] * 2
    assert [row["preset"] for row in found.rows] == ["softmax", "gaussian", "smgk"]


def test_each_kind_of_call_has_code_of_its_own(monkeypatch):
    """One version each to look through, however many shapes there are."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    flex._compiled.cache_clear()
    one, other = (flex._compiled(flex.prepare, (tokens,)) for tokens in (64, 128))
    assert one is flex._compiled(flex.prepare, (64,))
    assert one.__code__ is not other.__code__
    assert one.__code__ == other.__code__ == flex.prepare.__code__
    flex._compiled.cache_clear()


def test_where_it_takes_part():
    """On a GPU unless told otherwise; never in a sweep, where every length would be compiled."""
    assert "flex" in make_plan(torch.device("cuda")).backends
    assert "flex" not in make_plan(torch.device("cuda")).swept_backends
    assert "flex" not in make_plan(CPU).backends
    assert make_plan(CPU, backends=["flex"]).backends == ["flex"]
