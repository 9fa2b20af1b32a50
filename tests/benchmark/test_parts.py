"""A result of several calls: joined, or gone on with where an earlier call stopped."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mgk.benchmark import attention, correctness, markdown, parts, plan
from mgk.benchmark.contestants import baselines, mixtures
from mgk.benchmark.correctness import Judge
from mgk.benchmark.shape import Shape
from mgk.benchmark.sweep import lengths, sweep
from mgk.benchmark.timing import Effort
from mgk.cli import app

CONFIG = {"dtype": "bfloat16", "quick": False, "backends": ["triton", "flex"]}
SIZES = {"head_dim": 64, "causal": True, "dtype": "bfloat16"}


def run(*arguments):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.output


def result(*sizes, written="2026-11-18T20:56:04+00:00", config=(), **other):
    """Of an H200, from (batch, tokens, whether it belongs to a sweep)."""
    baselines, rows = [], []
    for batch, tokens, is_swept in sizes:
        facts = {
            **SIZES,
            "batch": batch,
            "tokens": tokens,
            "preset": "softmax",
            **({"sweep": True} if is_swept else {}),
        }
        baselines.append({**facts, "kernel": "cudnn", "heads": 8})
        rows.append({**facts, "preset": "smgk", "backend": "triton", "heads": 4, "baseline_heads": 8})
    return {
        "benchmark": "attention", "device": "NVIDIA H200", "architecture": "sm90", "written": written,
        "versions": {"torch": "2.11", "triton": "3.6"}, "config": {**CONFIG, **dict(config)}, "baselines": baselines,
        "rows": rows, "skipped": [], "failures": [], **other,
    }  # fmt: skip


EARLIER = "2026-11-18T07:31:04+00:00"


def test_a_joined_result_says_what_each_call_has_measured():
    old = result((4, 16384, False), (1, 512, True), (1, 1024, True), written=EARLIER, config={"backends": ["triton"]})
    del old["architecture"]
    new = result((32, 4096, False)), result((4, 16384, False), written="2026-11-18T21:04:18+00:00")
    found = parts.join([*new, parts.only_lengths(old)])
    assert [row["tokens"] for row in found["rows"]] == [4096, 16384, 512, 1024]
    assert [(part["written"][11:16], part["shapes"], part["lengths"]) for part in found["parts"]] == [
        ("20:56", ["32,8,4096,64,causal"], []),
        ("21:04", ["4,8,16384,64,causal"], []),
        ("07:31", [], ["1,8,512,64,causal", "1,8,1024,64,causal"]),
    ]
    assert [part["config"]["backends"] for part in found["parts"]] == [["triton", "flex"]] * 2 + [["triton"]]
    # At the top stands what the first says of itself.
    assert (found["written"], found["architecture"]) == (new[0]["written"], "sm90")
    # Joined once more, with what it still lacks.
    again = parts.join([found, result((8, 4096, False), written="2026-11-19T00:00:00+00:00")])
    assert [len(part["shapes"] + part["lengths"]) for part in again["parts"]] == [1, 1, 2, 1]
    sweep_alone = parts.only_lengths(found)
    assert (len(sweep_alone["rows"]), len(sweep_alone["parts"]), sweep_alone["written"]) == (2, 1, EARLIER)


def test_shapes_are_written_as_the_option_has_them():
    for text in ("32,8,4096,64", "4,16,16384,64,causal"):
        assert Shape.parse(text).option == text
    for record in (*result((32, 4096, False))["baselines"], *result((32, 4096, False))["rows"]):
        assert Shape.of(record) == Shape(batch=32, heads=8, tokens=4096, head_dim=64, is_causal=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"versions": {"torch": "2.11", "triton": "3.9"}}, "versions of results that are joined must be the same"),
        (
            {"device": "NVIDIA B200"},
            "device of results that are joined must be the same, got NVIDIA H200 and NVIDIA B200",
        ),
        (
            {"config": {"dtype": "float16"}},
            "dtype of results that are joined must be the same, got bfloat16 and float16",
        ),
        ({"config": {"quick": True}}, "quick of results that are joined must be the same"),
    ],
)
def test_results_that_are_not_alike_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        parts.join([result((32, 4096, False)), result((4, 16384, False), **other)])


def test_a_shape_belongs_to_one_call():
    with pytest.raises(ValueError, match="shapes must be measured in one of the results each, got 4,8,16384,64,causal"):
        parts.join([result((32, 4096, False), (4, 16384, False)), result((4, 16384, False))])
    # A length of a sweep is no shape of the tables.
    assert len(parts.join([result((1, 4096, False)), result((1, 4096, True))])["rows"]) == 2


def test_a_sweep_is_taken_of_a_result_with_one():
    with pytest.raises(ValueError, match="a result with a sweep is expected, got that of 2026-11-18T20:56:04"):
        parts.only_lengths(result((1, 4096, False)))


def test_merge_from_the_command_line(tmp_path):
    files = [tmp_path / f"{number}.json" for number in range(3)]
    made = result((32, 4096, False)), result((4, 16384, False)), result((4, 4096, False), (1, 512, True))
    for file, each in zip(files, made, strict=True):
        file.write_text(json.dumps(each))
    out = tmp_path / "all.json"
    assert run("merge", *files[:2], "--sweep", files[2], "--output", out).strip() == str(out)
    assert json.loads(out.read_text()) == parts.join([*made[:2], parts.only_lengths(made[2])])
    files[0].write_text(json.dumps({**made[0], "benchmark": "decode"}))
    with pytest.raises(ValueError, match="must be the JSON of mgk bench attention, got mgk bench decode"):
        run("merge", *files, "--output", out)


def test_the_page_says_which_call_was_which():
    first, second = result((32, 4096, False)), result((4, 16384, False), written="2026-11-18T21:04:18+00:00")
    earlier = result((1, 512, True), written=EARLIER, config={"backends": ["triton"]})
    assert markdown._calls(parts.join([first, second, earlier])) == (
        "The shapes were measured in 2 calls, begun 2026-11-18 20:56 UTC and 2026-11-18 21:04 UTC; the sweep over "
        "lengths is of an earlier run, begun 2026-11-18 07:31 UTC, through triton, without softmax through our "
        "own kernel."
    )
    went_on = parts.join([first, result((4, 16384, False), (1, 512, True), written="2026-11-18T21:04:18+00:00")])
    expected = "Measured in 2 calls, begun 2026-11-18 20:56 UTC and 2026-11-18 21:04 UTC."
    assert markdown._calls(went_on) == expected


@pytest.fixture
def _small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})
    shortest = Shape(batch=1, heads=2, tokens=16, head_dim=8, is_causal=True)
    monkeypatch.setattr(plan, "CPU_QUICK_LENGTHS", lengths(shortest, 64))


def measured_shapes(monkeypatch, stop_at=None):
    """Which shapes are measured from now on; the clock of the lease runs out at one of them."""
    compare, seen = attention.compare, []

    def watched(shape, *args, **options):
        if shape.tokens == stop_at:
            raise KeyboardInterrupt
        seen.append(shape.tokens)
        return compare(shape, *args, **options)

    monkeypatch.setattr(attention, "compare", watched)
    monkeypatch.setattr("mgk.benchmark.sweep.compare", watched)
    return seen


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("stop_at", "before", "after"), [(20, [24], [20, 16, 32, 64]), (32, [24, 20, 16], [32, 64])])
def test_a_run_goes_on_where_it_was_cut(stop_at, before, after, monkeypatch):
    arguments = (
        "attention", "--quick", "--preset", "smgk", "--backend", "chunked", "--shape", "1,2,24,8",
        "--shape", "1,2,20,8", "--sweep", "--output", "a.json", "--resume",
    )  # fmt: skip
    with monkeypatch.context() as context:
        # Nothing is there yet: the same command begins.
        seen = measured_shapes(context, stop_at)
        CliRunner().invoke(app, ["bench", *arguments])
        assert seen == before
    written = json.loads(Path("a.json").read_text())["written"]
    with monkeypatch.context() as context:
        seen = measured_shapes(context)
        run(*arguments, "--plot", "a.png")
        assert seen == after
    found = json.loads(Path("a.json").read_text())
    assert [row["tokens"] for row in found["rows"] if row["preset"] == "smgk"] == [24, 20, 16, 32, 64]
    spelled = [part["shapes"] + part["lengths"] for part in found["parts"]]
    assert [len(each) for each in spelled] == [len(before), len(after)]
    assert found["written"] == written
    assert Path("a.png").exists()
    # There is nothing left: what is there stays as it is.
    text = Path("a.json").read_text()
    with monkeypatch.context() as context:
        assert not measured_shapes(context)
        run(*arguments)
    assert Path("a.json").read_text() == text
    with pytest.raises(ValueError, match=r"--resume must go on with .* with other presets: use another --output"):
        run(*arguments, "--preset", "mgk")
    with pytest.raises(ValueError, match="dtype of results that are joined must be the same, got float32 and bfloat16"):
        run(*arguments, "--dtype", "bfloat16")


@pytest.mark.usefixtures("_small")
def test_who_was_too_slow_before_is_not_tried_again():
    shapes = plan.CPU_QUICK_LENGTHS
    contestants = [*baselines(torch.device("cpu")), *mixtures(("smgk",), ("chunked",))]
    judge, effort = Judge(torch.float32, torch.device("cpu")), Effort(rounds=1, seconds=0.1, fewest=1)
    first, *_ = sweep(shapes, contestants, judge, effort)
    for row in first.rows:
        row["training_ms"] = 1e6
    later = list(sweep(shapes, contestants, judge, effort, known={shapes[0]: first}))
    assert [each.baselines[0]["tokens"] for each in later] == [32, 64]
    assert not any(each.rows for each in later)
