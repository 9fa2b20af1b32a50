"""`mgk demo`, as a user runs it: a short one here, the whole one where there is time."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from rich.console import Console

from mgk.analysis import attention_maps
from mgk.data import baselines, listops
from mgk.demo import ROWS, make_report, train_side_by_side
from mgk.training.tracking import METRICS, read_curves

SHORT = [
    "training.steps=30", "schedule.warmup=5", "validation.every=15", "training.log_every=10",
    "training.checkpoint_every=20", "data.options.train=2000", "data.options.valid=100", "data.options.test=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def demo(cache, monkeypatch, run_command):
    """The command: what it printed."""
    monkeypatch.setenv("MGK_CACHE", str(cache))
    return functools.partial(run_command, "demo")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A short demo that nobody disturbed: its folder, and the report that it made."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_CACHE", str(cache))
        trained, corpus = train_side_by_side(ROWS, SHORT, folder, Console(quiet=True))
    return folder, trained, corpus


def result_of(folder, row, seed=0):
    return json.loads((folder / row / f"seed-{seed}" / "result.json").read_text())


def without_times(result):
    return {key: value for key, value in result.items() if key not in ("seconds", "written")}


def weights_of(folder, row):
    return (folder / row / "seed-0" / "checkpoints" / "step-00000030" / "model.safetensors").read_bytes()


def embedded(page):
    """What the page's script draws."""
    return json.loads(re.search(r"<script[^>]*>(\{.*?\})</script>", page, re.DOTALL)[1])


def test_a_short_demo(demo, finished, tmp_path):
    printed = demo("--to", tmp_path, *SHORT)
    assert printed.out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    table = printed.out
    for row in ROWS:
        found = result_of(tmp_path, row)
        assert found["steps"] == 30
        assert without_times(found) == without_times(result_of(finished[0], row))
        line = next(line for line in table.splitlines() if f" {row} " in line)
        assert f"{found['metrics']['test']['accuracy']:.1%}" in line
        assert f"{found['parameters']:,}" in line
    for name, value in found["baselines"].items():
        line = next(line for line in table.splitlines() if name.removesuffix(", accuracy") in line)
        assert f"{value:.1%}" in line
    page = (tmp_path / "report.html").read_text()
    assert [run["name"] for run in embedded(page)["runs"]] == list(ROWS)
    assert f"mgk demo {' '.join(SHORT)}" in page

    # Again: both are finished, nothing is trained, and the page is the same but for the times.
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/*/*")}
    assert kept
    printed = demo("--to", tmp_path, *SHORT)
    assert printed.err.count("going on from step-00000030") == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoints/*/*")} == kept
    for row in ROWS:
        assert without_times(result_of(tmp_path, row)) == without_times(result_of(finished[0], row))
    assert embedded((tmp_path / "report.html").read_text()) == embedded(page)


def test_what_is_learned_does_not_depend_on_the_company(demo, finished, tmp_path):
    """Side by side or alone, a model learns the same."""
    demo("--to", tmp_path, "--rows", "smgk-4", *SHORT)
    assert weights_of(tmp_path, "smgk-4") == weights_of(finished[0], "smgk-4")
    assert without_times(result_of(tmp_path, "smgk-4")) == without_times(result_of(finished[0], "smgk-4"))
    assert f"mgk demo --rows smgk-4 {SHORT[0]}" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "softmax-8").exists()


# A whole process that gets a real SIGINT when the second model has made an update, the first one one more.
INTERRUPTED = """
import os, signal, sys
from mgk.training import loop

update = loop.Trainer._update

def update_and_interrupt(trainer, batches):
    update(trainer, batches)
    if trainer.config.row == "softmax-8" and trainer.state.step == 13:
        os.kill(os.getpid(), signal.SIGINT)

loop.Trainer._update = update_and_interrupt
from mgk.cli import main
sys.argv = ["mgk", "demo", *sys.argv[1:]]
main()
"""


def test_an_interrupted_demo_goes_on(demo, finished, cache, tmp_path):
    arguments = ["--to", str(tmp_path), *SHORT]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "MGK_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stderr.splitlines()[-1] == "stopped and saved: the same command goes on from here"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.html").exists()
    saved = {row: [path.name for path in (tmp_path / row / "seed-0" / "checkpoints").iterdir()] for row in ROWS}
    # Neither went on after the signal.
    assert saved == {"softmax-8": ["step-00000013"], "smgk-4": ["step-00000012"]}
    printed = demo(*arguments)
    assert "going on from step-00000013" in printed.err
    assert "going on from step-00000012" in printed.err
    for row in ROWS:
        assert weights_of(tmp_path, row) == weights_of(finished[0], row)
        assert without_times(result_of(tmp_path, row)) == without_times(result_of(finished[0], row))


def test_the_report(finished):
    folder, trained, corpus = finished
    report = make_report(trained, corpus, "mgk demo")
    assert [run.name for run in report.runs] == list(ROWS)
    expected = baselines.compute(corpus)
    assert report.baselines == {
        "majority class": expected["majority class, accuracy"],
        "root operator": expected["root operator, accuracy"],
    }
    assert report.metric == "validation accuracy"
    assert any("100 test lists: differences below 10.0% are noise" in note for note in report.notes)
    for run, heads in zip(report.runs, (8, 4), strict=True):
        trainer, found = trained[run.name]
        lines = read_curves(folder / run.name / "seed-0" / METRICS)
        assert run.curves.keys() == {"training loss", "validation accuracy"}
        assert [step for step, _ in run.curves["training loss"]] == [10, 20, 30]
        assert run.curves["validation accuracy"] == [
            (line["step"], line["accuracy"]) for line in lines if line["kind"] == "valid"
        ]
        assert [step for step, _ in run.curves["validation accuracy"]] == [15, 30]
        assert max(value for _, value in run.curves["validation accuracy"]) == found["metrics"]["valid"]["accuracy"]

        columns = run.columns
        assert columns["test accuracy"] == f"{found['metrics']['test']['accuracy']:.1%}"
        assert columns["parameters"] == f"{sum(p.numel() for p in trainer.model.parameters()):,}"
        # Keys and values of 2 layers, 8 wide heads, 2 bytes each.
        assert columns["key and value bytes a token"] == f"{2 * 2 * heads * 8 * 2}"
        assert columns["ms a step"] == f"{1000 * found['seconds'] / 30:.1f}"
        assert run.configuration["model.attention"] == run.name.partition("-")[0]
        assert run.configuration["training.steps"] == 30
        assert run.configuration["data.options.train"] == 2000

        assert len(run.maps) == 3
        for maps in run.maps:
            assert len(maps.tokens) >= 16
            assert set(maps.tokens) <= set(listops.TOKENS)
            assert maps.weights.shape == (2, heads, len(maps.tokens), len(maps.tokens))
            assert maps.weights.sum(-1).sub(1).abs().max() < 1e-5
            tokens = torch.tensor([[listops.TOKENS.index(word) + 1 for word in maps.tokens]])
            expected_maps = attention_maps(trainer.model, input_ids=tokens)
            np.testing.assert_allclose(maps.weights, torch.stack([layer[0] for layer in expected_maps]), atol=1e-6)
    # The same lists for both, and not the same maps.
    first, second = (run.maps for run in report.runs)
    assert [maps.tokens for maps in first] == [maps.tokens for maps in second]
    assert (first[0].weights.mean(1) - second[0].weights.mean(1)).abs().max() > 1e-3
    flops = [float(run.columns["MFLOPs a list"]) for run in report.runs]
    assert flops[1] < flops[0]


def test_lists_that_are_too_short_to_look_at(demo, tmp_path):
    """No maps, and still a page."""
    demo("--to", tmp_path, "training.steps=2", "schedule.warmup=0", *SHORT[5:], "data.options.maximum=10")
    assert all(run["maps"] == [] for run in embedded((tmp_path / "report.html").read_text())["runs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", ""], "--rows must name at least one model, got none"),
        (["--rows", "softmax-8 smkg-4"], "(did you mean 'smgk'?)"),
        (["training.step=3"], "training.step is not a key (did you mean 'steps'?)"),
    ],
)
def test_what_is_refused(demo, tmp_path, arguments, message):
    printed = demo("--to", tmp_path, *arguments, code=1)
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_demo(tmp_path):
    """What `make demo` runs: within five minutes on two cores both models are far beyond what needs no model."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mgk", "demo", "--to", str(tmp_path / "demo")], capture_output=True, text=True,
        check=False, env={**os.environ, "MGK_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "report.html").is_file()
    for row in ROWS:
        found = result_of(tmp_path / "demo", row)
        assert found["metrics"]["test"]["count"] == 4000
        for name in ("majority class, accuracy", "root operator, accuracy"):
            assert found["metrics"]["test"]["accuracy"] > found["baselines"][name] + 0.15, (row, name)
    assert seconds < 300
