"""Linear attention in the benchmark: who is right, the ratios, and where softmax is overtaken."""

import json
import re

import pytest
import torch
from benchmark_cases import Script
from typer.testing import CliRunner

import mgk
from mgk.benchmark import correctness, markdown
from mgk.benchmark.contestants import baselines, linears
from mgk.benchmark.correctness import Judge
from mgk.benchmark.linear import compare, crossovers
from mgk.benchmark.plan import make_linear_plan
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Effort
from mgk.cli import app

CPU = torch.device("cpu")
SHAPE = Shape(batch=1, heads=4, tokens=40, head_dim=8, is_causal=True)
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)


@pytest.fixture(autouse=True)
def _small_gradients(monkeypatch):
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})


def run(presets=("mlk", "smlk"), clock=None):
    contestants = [*linears(presets, "chunked"), *baselines(CPU)]
    return compare(SHAPE, contestants, Judge(torch.float32, CPU), EFFORT, clock=clock)


def test_ratios_to_linear_and_to_softmax():
    clock = Script(
        **{
            "linear_through_chunked,_forward": 6.0, "linear_through_chunked,_training": 18.0,
            "mlk_through_chunked,_forward": 4.0, "mlk_through_chunked,_training": 12.0,
            "smlk_through_chunked,_forward": 3.0, "smlk_through_chunked,_training": 9.0,
            "softmax_through_SDPA_flash,_forward": 12.0, "softmax_through_SDPA_flash,_training": 24.0,
            "softmax_through_SDPA_math,_forward": 20.0, "softmax_through_SDPA_math,_training": 22.0,
        }
    )  # fmt: skip
    found = run(clock=clock)
    assert not found.failures
    rows = {row["preset"]: row for row in found.rows}
    assert (rows["mlk"]["forward_ratio"], rows["mlk"]["training_ratio"]) == (1.5, 1.5)
    assert (rows["smlk"]["forward_ratio"], rows["smlk"]["forward_over_softmax"]) == (2.0, 4.0)
    assert rows["mlk"]["training_over_softmax"] == pytest.approx(22 / 12)
    assert (rows["mlk"]["heads"], rows["mlk"]["baseline_heads"], rows["mlk"]["baseline"]) == (2, 4, "linear")
    plain = next(record for record in found.baselines if record["preset"] == "linear")
    assert (plain["heads"], plain["forward_over_softmax"]) == (4, 2.0)


def test_a_wrong_mixture_gets_no_number(monkeypatch):
    right = mgk.linear_mixture_attention

    def wrong(*args, shift=None, **options):
        out = right(*args, shift=shift, **options)
        return out if shift is None else 1.01 * out

    monkeypatch.setattr(mgk, "linear_mixture_attention", wrong)
    found = run()
    assert [each["preset"] for each in found.failures] == ["smlk"]
    assert [row["preset"] for row in found.rows] == ["mlk"]


def test_where_softmax_is_overtaken():
    def record(tokens, forward, training):
        return {
            "preset": "mlk", "causal": True, "tokens": tokens, "forward_over_softmax": forward,
            "training_over_softmax": training,
        }  # fmt: skip

    found = crossovers([record(128, 1.2, 0.5), record(256, 0.9, 0.7), record(512, 1.1, 0.9), record(1024, 2.0, 1.0)])
    assert [each["tokens"] for each in found] == [512, None]


def test_what_is_measured_on_a_gpu():
    plan = make_linear_plan(torch.device("cuda"))
    assert (plan.presets, plan.backends) == (["mlk", "smlk"], ["triton"])
    assert {(shape.tokens, shape.head_dim, shape.is_causal) for shape in plan.shapes} == {
        *((tokens, dim, causal) for tokens in (4096, 65536) for dim in (32, 64) for causal in (False, True)),
        (16384, 64, True),
    }
    with pytest.raises(ValueError, match="--preset must be one of linear, mlk, smlk, got 'mgk'"):
        make_linear_plan(CPU, presets=["mgk"])


def test_linear_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "linear", "--quick", "--shape", "1,4,48,8", "--output", "linear-cpu.json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"^ *smlk +chunked +2 +[\d.]+ +[\d.]+x +[\d.]+ +[\d.]+x", done.output, re.MULTILINE)
    assert "faster than softmax" in done.output
    found = json.loads((tmp_path / "linear-cpu.json").read_text())
    assert len(found["crossovers"]) == 12
    text = markdown.tables(found)
    assert "**Full, batch 1, 4 heads, 48 tokens, head_dim 8**" in text
    assert "- smlk, causal, training: faster than softmax" in text
