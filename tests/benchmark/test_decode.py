"""A step of generation, and generation end to end: who is right, who gets a number, and what the numbers are."""

import json
import re

import pytest
import torch
from benchmark_cases import Script
from typer.testing import CliRunner

import mgk
from mgk.benchmark import correctness, decode, generation, markdown
from mgk.benchmark.contestants import baselines, mixtures
from mgk.benchmark.correctness import Judge
from mgk.benchmark.generation import Setting, Writer
from mgk.benchmark.plan import make_decode_plan
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Effort
from mgk.cli import app

CPU = torch.device("cpu")
SHAPE = Shape(batch=2, heads=4, tokens=40, head_dim=8)
SETTING = Setting(batch=2, prompt=12, new_tokens=4, layers=1, hidden_size=32, heads=4, head_dim=8, vocab_size=32)
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)
FIELDS = {
    "device", "dtype", "batch", "heads", "baseline_heads", "tokens", "head_dim", "causal", "preset", "backend",
    "baseline", "baseline_ms", "forward_ratio", "training_ratio", "peak_bytes", "cache_bytes", "cache_ratio", "noise",
}  # fmt: skip


def compare_steps(presets=("softmax", "smgk", "mgk"), clock=None):
    contestants = [*baselines(CPU), *mixtures(presets, ("chunked",))]
    return decode.compare(SHAPE, contestants, Judge(torch.float32, CPU), EFFORT, clock=clock)


def test_ratios_of_a_step_and_of_its_cache():
    clock = Script(
        softmax_through_SDPA_flash=6.0, softmax_through_SDPA_math=8.0, softmax=4.0, smgk=3.0, mgk=5.0, copy=2.0
    )
    found = compare_steps(clock=clock)
    rows = {row["preset"]: row for row in found.rows}
    for row in rows.values():
        assert row.keys() >= FIELDS
        assert (row["baseline"], row["baseline_ms"], row["queries"], row["training_ratio"]) == ("flash", 6.0, 1, None)
    assert [rows[name]["forward_ratio"] for name in ("softmax", "smgk", "mgk")] == [1.5, 2.0, 1.2]
    assert [rows[name]["cache_ratio"] for name in ("softmax", "smgk", "mgk")] == [0.5, 0.5, 0.75]
    cache = 2 * 2 * 2 * 40 * 8 * 4
    assert rows["smgk"]["cache_bytes"] == cache
    # A copy reads and writes; a step reads.
    per_ms = 2 * decode.COPIED_BYTES["cpu"] / 2.0
    assert rows["smgk"]["over_reading"] == pytest.approx(3.0 / (cache / per_ms))


def test_the_cache_is_that_of_the_models():
    """All components of a token lie together."""
    inputs = decode.draw_step("mgk", SHAPE, 2, Judge(torch.float32, CPU))
    assert inputs.query.shape == (2, 2, 1, 8)
    assert inputs.key.shape == (2, 2, 2, 40, 8)
    assert inputs.key.stride()[2:] == (8, 16, 1)
    assert not inputs.leaves()


def test_a_wrong_step_gets_no_number(monkeypatch):
    right = mgk.mixture_attention
    monkeypatch.setattr(mgk, "mixture_attention", lambda *args, **options: 1.01 * right(*args, **options))
    found = compare_steps(("smgk",))
    assert not found.rows
    assert [each["preset"] for each in found.failures] == ["smgk"]
    assert "the error of the output must be at most 1e-05" in found.failures[0]["reason"]


def test_tokens_per_second():
    chosen = generation.writers(("smgk", "mgk"), SETTING, CPU)
    assert [writer.name for writer in chosen] == ["softmax-4 through sdpa", "smgk-2 through auto", "mgk-2 through auto"]
    clock = Script(
        **{
            "softmax-4_through_sdpa,_all": 80.0, "softmax-4_through_sdpa,_prompt": 20.0,
            "smgk-2_through_auto,_all": 40.0, "smgk-2_through_auto,_prompt": 10.0,
            "mgk-2_through_auto,_all": 50.0, "mgk-2_through_auto,_prompt": 20.0,
        }
    )  # fmt: skip
    found = generation.compare(chosen, SETTING, device=CPU, effort=EFFORT, clock=clock)
    smgk, mixture = found.rows
    assert smgk.keys() >= FIELDS - {"peak_bytes"}
    assert smgk["tokens_per_second"] == 1e3 * 2 * 4 / 40
    assert (smgk["forward_ratio"], smgk["step_ms"], smgk["step_ratio"]) == (2.0, 10.0, 2.0)
    assert (smgk["cache_ratio"], mixture["cache_ratio"]) == (0.5, 0.75)
    # Keys and values of 16 slots.
    assert smgk["cache_bytes"] == 2 * 2 * 2 * 16 * 8 * 4


def test_a_model_that_writes_something_else_gets_no_number(monkeypatch):
    right = generation.Generation.write

    def wrong(self, count):
        tokens = right(self, count).clone()
        tokens[:, -1] = (tokens[:, -1] + 7) % self.setting.vocab_size
        return tokens

    model = generation.Generation(Writer(attention="smgk", heads=2), SETTING, CPU)
    assert model.regret < 1e-4
    monkeypatch.setattr(generation.Generation, "write", wrong)
    monkeypatch.setattr(generation, "LEAST_AGREEMENT", 1e-3)
    with pytest.raises(RuntimeError, match="softmax must write beside the mixtures, got none that is right"):
        generation.compare(
            [Writer(attention="softmax", heads=4, backend="sdpa", is_baseline=True)], SETTING, device=CPU, effort=EFFORT
        )  # fmt: skip


def test_on_a_gpu_softmax_has_our_kernel_too():
    names = [writer.name for writer in generation.writers(("smgk",), SETTING, torch.device("cuda"))]
    assert names == ["softmax-4 through sdpa", "softmax-4 through triton", "smgk-2 through auto"]
    plan = make_decode_plan(torch.device("cuda"))
    assert plan.backends == ["triton"]
    assert str(plan.shapes[0]) == "batch 8, 16 heads, 32,768 tokens, head_dim 128, full"
    assert plan.writing.prompt + plan.writing.new_tokens == 8192


def test_decode_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})
    arguments = ["bench", "decode", "--quick", "--preset", "smgk", "--shape", "1,4,64,8", "--output", "decode-cpu.json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"^ *smgk +auto +2 +[\d.]+ +[\d.]+x +[\d.]+x +[\d.,]+ +0 MB +0\.50x *$", done.output, re.MULTILINE)
    assert re.search(r"^ *smgk-2 +auto +[\d,]+ +[\d.]+x +[\d.]+x +[\d.]+ +[\d.]+x", done.output, re.MULTILINE)
    found = json.loads((tmp_path / "decode-cpu.json").read_text())
    assert (found["benchmark"], len(found["rows"]), found["failures"]) == ("decode", 3, [])
    text = markdown.tables(found)
    assert "**Batch 1, 4 heads, 64 tokens in the cache, head_dim 8**" in text
    assert "| smgk-2 | auto |" in text
