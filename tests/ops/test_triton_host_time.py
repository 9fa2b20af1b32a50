"""The benchmark of the host's time leaves out what it says it leaves out. No kernel runs here."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import mgk
from mgk.benchmark.timing import Effort, HostClock
from mgk.ops.triton import launch, replay, tuning
from mgk.ops.triton.kernels import forward

ROOT = Path(__file__).parents[2]


@pytest.fixture
def host_time(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("host_time")


@pytest.fixture
def asked(monkeypatch):
    """How often Triton was asked to start a kernel, and how often a compiled one was started directly."""
    if not isinstance(forward.attention_forward, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    counts = Counter()

    class Compiled:
        function = packed_metadata = None

        def run(self, *_):
            counts["direct"] += 1

    def compile_and_start(*_):
        counts["Triton"] += 1
        return Compiled()

    monkeypatch.setattr(launch, "_compile_and_start", compile_and_start)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(replay, "_recordings", {})
    for module in (launch, replay):
        monkeypatch.setattr(module, "current_stream", lambda: (0, 0))
    monkeypatch.setattr(replay, "is_possible", lambda device: True)
    monkeypatch.setattr(tuning, "_architecture", lambda index: "sm90")
    monkeypatch.setattr(tuning, "multiprocessors", lambda index: 132)
    monkeypatch.setattr("mgk.ops.triton.unsupported", lambda problem: None)
    monkeypatch.setattr("mgk.ops.dispatch._HAS_TRITON", True)
    monkeypatch.setattr("mgk.ops.dispatch.fused", mgk.ops.triton, raising=False)
    monkeypatch.setitem(mgk.ops.dispatch._BACKENDS, "triton", mgk.ops.triton)
    return counts


@pytest.mark.parametrize(("work", "kernels"), [("training", 9), ("inference", 3), ("step", 2)])
def test_every_way_starts_its_kernels_its_own_way(work, kernels, host_time, asked, monkeypatch):
    case = host_time.Case(work, "smgk", 128)
    ways = (host_time.EAGER, host_time.NO_REPLAY, host_time.NO_LAUNCH)
    thought, passes = [], mgk.ops.triton.operator.forward_pass
    monkeypatch.setattr("mgk.ops.triton.operator.forward_pass", lambda *call: (thought.append(1), passes(*call))[1])
    found = {one.name: one for one in host_time.candidates(host_time.call_of(case, torch.device("cpu")), ways)}
    expected = {  # started by Triton, started directly, calls that are thought through
        host_time.EAGER: (0, kernels, 0),
        host_time.NO_REPLAY: (0, kernels, 0 if work == "step" else 1),
        host_time.NO_LAUNCH: (kernels, 0, 0 if work == "step" else 1),
    }
    for way in ways:
        asked.clear(), thought.clear()
        with found[way].context():
            found[way].call()
        assert (asked["Triton"], asked["direct"], len(thought)) == expected[way], way


def test_a_case_is_measured_in_every_way(host_time, asked):
    ways = (host_time.EAGER, host_time.NO_REPLAY, host_time.NO_LAUNCH)
    effort = Effort(rounds=2, seconds=0.01, fewest=1)
    case = host_time.Case("inference", "mgk", 64)
    row = host_time.measure(case, ways, torch.device("cpu"), HostClock(), effort)
    assert (row["work"], row["preset"], row["tokens"]) == case
    assert list(row["us"]) == list(ways)
    assert all(time > 0 for time in row["us"].values())
    assert set(host_time.gains(row)) == {"replay", "launch"}


def test_a_defence_that_brings_little_is_named(host_time):
    times = dict(zip(host_time.WAYS, (100.0, 150.0, 153.0, 90.0, 50.0), strict=True))
    row = {**host_time.Case("training", "smgk", 128)._asdict(), "us": times}
    assert host_time.gains(row) == pytest.approx({"replay": 0.5, "launch": 0.02, "CUDA graph": 1.0})
    printed = host_time.table([row, {**row, "us": {**times, "without replay": 151.0}}], host_time.WAYS)
    assert "replay: at most +51.0%, stays" in printed
    assert "launch: at most +2.0%, brings less than 5%" in printed


def test_the_page_has_the_committed_host_times(host_time, tmp_path, monkeypatch):
    run = ROOT / "results" / "bench" / "host-h200.json"
    text = host_time.PAGE.read_text()
    table = host_time.page_table(json.loads(run.read_text()))
    assert table in text, "run python benchmarks/host_time.py --write results/bench/host-h200.json"
    page = tmp_path / "kernels.md"
    page.write_text(text.replace(table, "| old |"))
    monkeypatch.setattr(host_time.write_page, "__defaults__", (page,))
    monkeypatch.setattr("sys.argv", ["host_time.py", "--write", str(run)])
    host_time.main()
    assert page.read_text() == text


def test_the_page_says_what_the_host_times_say(host_time):
    """All three stay; a step is not replayed; compiled alone, every call takes longer."""
    rows = json.loads((ROOT / "results" / "bench" / "host-h200.json").read_text())["rows"]
    for row in rows:
        found = host_time.gains(row)
        assert found.keys() == {"launch", "CUDA graph"} | ({"replay"} if row["work"] != "step" else set())
        assert min(found.values()) > host_time.WORTH
        assert row["us"][host_time.COMPILED] > row["us"][host_time.EAGER]


def test_every_work_has_a_case(host_time):
    found = list(host_time.cases(host_time.PRESETS, (128, 256)))
    assert Counter(case.work for case in found) == {"training": 4, "inference": 4, "step": 2}
