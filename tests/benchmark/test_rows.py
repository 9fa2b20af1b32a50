"""Rows of a recipe in turns: the updates of the loop itself, right first, group by group."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from training_cases import KINDS, make_config, make_corpus
from typer.testing import CliRunner

import mgk
from mgk.benchmark import markdown, result, row_step, rows
from mgk.benchmark.correctness import WrongResultError
from mgk.benchmark.random_text import random_text
from mgk.benchmark.row_step import RowStep, check_gradient
from mgk.benchmark.timing import Effort
from mgk.cli import app
from mgk.recipes import load
from mgk.training.distributed import build_fabric

CPU = torch.device("cpu")
EFFORT = Effort(rounds=2, seconds=1.0, fewest=1)
TINY = [
    "model.num_hidden_layers=1", "model.hidden_size=16", "model.head_dim=8", "model.intermediate_size=16",
    "data.longest=8", "training.batch_size=2",
]  # fmt: skip
ROWS = ("softmax-2+qk_norm", "smgk-1", "mgk-1")


class Clock:
    """Makes the update, and says what it was told of the row."""

    def __init__(self, default=1.0, **times):
        self.default, self.times = default, times

    def host(self, candidate):
        return None

    def sample(self, candidate, host_ms):
        candidate.call()
        return self.times.get(candidate.name, self.default)


@pytest.fixture(scope="module")
def fabric():
    return build_fabric(device="cpu")


def tiny(*names):
    recipe = load("enwik8")
    # By its short name: what is tiny about it is not what a row is called for.
    return [dataclasses.replace(recipe.config(name, TINY), row=name) for name in names]


def test_rows_take_turns_and_are_compared_with_the_first(fabric):
    runs = tiny(*ROWS)
    clock = Clock(**{"softmax-2+qk_norm": 8.0, "smgk-1": 4.0, "mgk-1": 16.0})
    found = rows.compare(runs, random_text(runs[0]), fabric=fabric, effort=EFFORT, clock=clock)
    assert (found.failures, found.skipped, found.left) == ([], [], [])
    assert [record["row"] for record in (*found.baselines, *found.rows)] == list(ROWS)
    assert [record["training_ratio"] for record in (*found.baselines, *found.rows)] == [1.0, 2.0, 0.5]
    assert found.rows[0]["tokens_per_second"] == 2 * 8 / 4e-3
    # One layer in bf16: two heads with a key and a value, one head with the same, one head with two keys.
    assert [each["cache_bytes"] for each in (*found.baselines, *found.rows)] == [2 * 2 * 8 * 2, 2 * 8 * 2, 3 * 8 * 2]
    for record in (*found.baselines, *found.rows):
        assert record["samples"] == EFFORT.rounds
        assert record["error"]["gradient"] < 1e-3
        assert record["error"]["loss"] < 1e-4
        assert not record["is_recorded"]
        assert not record["is_compiled"]


def test_an_update_is_that_of_the_loop(fabric, tmp_path):
    """With its schedule, its clipping and its data: the weights after some are those of the run itself."""
    run = tiny("smgk-1")[0]
    corpus = random_text(run)
    (tmp_path / "timed").mkdir()
    step = RowStep(run, corpus, fabric, tmp_path / "timed")
    step.warm_up(0.0)
    step.train()
    updates = step.trainer.state.step
    assert step.tokens_per_update == 2 * 8
    step.close()
    (tmp_path / "run").mkdir()
    other = RowStep(run, corpus, fabric, tmp_path / "run")
    for _ in range(updates):
        other.train()
    other.close()
    assert updates == 6
    for (name, timed), (_, trained) in zip(
        step.trainer.model.named_parameters(), other.trainer.model.named_parameters(), strict=True
    ):
        assert torch.equal(timed, trained), name
    assert not any((tmp_path / "timed").rglob("step-*"))


@pytest.mark.parametrize("task", KINDS)
def test_every_task_is_checked(task, tmp_path):
    """Of the tokens that it reads, without dropout, though these runs have some."""
    config = make_config(task)
    assert check_gradient(config, make_corpus(task, tmp_path / "corpus"), CPU) < 1e-3


def test_half_precision_is_judged_by_what_it_costs_anyway(monkeypatch):
    """Where materialised attention has a larger error than is usual, ours may have a quarter more, and no more."""
    run = load("enwik8").config("mgk-2", [*TINY, "training.precision=bf16"])
    corpus = random_text(run)
    error = check_gradient(run, corpus, CPU)
    assert 1e-3 < error < 0.1
    monkeypatch.setitem(row_step.GRADIENT_CAP, torch.bfloat16, error / 2)
    assert check_gradient(run, corpus, CPU) == error
    monkeypatch.setattr(row_step, "OVER_EAGER", 0.1)
    with pytest.raises(WrongResultError, match="the error of the gradient must be at most"):
        check_gradient(run, corpus, CPU)


def test_updates_of_many_shapes(fabric, tmp_path):
    """Sentences: how many tokens an update has is counted."""
    config = make_config("translation")
    corpus = make_corpus("translation", tmp_path / "corpus")
    found = rows.compare([config], corpus, fabric=fabric, effort=EFFORT, clock=Clock(10.0))
    assert 1 < found.baselines[0]["tokens"] <= 2 * 64
    assert found.baselines[0]["tokens_per_second"] == pytest.approx(100 * found.baselines[0]["tokens"])


def test_a_row_that_is_wrong_gets_no_number(fabric, monkeypatch):
    right = mgk.ops.dispatch.attend

    def wrong(problem, backend):
        out = right(problem, backend)
        return out if problem.shift is None or backend == "reference" else 1.5 * out

    monkeypatch.setattr("mgk.nn.attention.attend", wrong)
    runs = tiny(*ROWS)
    found = rows.compare(runs, random_text(runs[0]), fabric=fabric, effort=EFFORT, clock=Clock())
    assert [each["row"] for each in found.failures] == ["smgk-1"]
    assert "error of the gradient must be at most 0.001, got" in found.failures[0]["reason"]
    assert [each["row"] for each in found.rows] == ["mgk-1"]


def test_an_update_with_another_loss_gets_no_number(fabric, monkeypatch):
    """As a compiler that goes wrong would have."""
    right = RowStep._loss
    monkeypatch.setattr(RowStep, "_loss", lambda self, *args: (1.2 if self.row == ROWS[0] else 1) * right(self, *args))
    runs = tiny(*ROWS[:2])
    found = rows.compare(runs, random_text(runs[0]), fabric=fabric, effort=EFFORT, clock=Clock())
    assert "the error of the loss must be at most 0.01, got 0.1" in found.failures[0]["reason"]
    # Without the first there is nothing to compare with.
    assert [(each["row"], each["training_ratio"]) for each in found.rows] == [("smgk-1", None)]


def test_updates_that_are_all_skipped_get_no_number(fabric, monkeypatch):
    monkeypatch.setattr("mgk.training.skipped.is_leap", lambda loss, *_: torch.tensor(True))
    runs = tiny(*ROWS[:1])
    found = rows.compare(runs, random_text(runs[0]), fabric=fabric, effort=EFFORT, clock=Clock())
    assert [each["reason"] for each in found.failures] == [
        "updates must have a finite loss, got too many that had none"
    ]
    assert (found.baselines, found.rows) == ([], [])


def test_what_time_does_not_reach_is_left(fabric):
    runs = tiny(*ROWS)
    found = rows.compare(
        runs, random_text(runs[0]), fabric=fabric, effort=EFFORT, seconds=1e-6, clock=Clock()
    )  # fmt: skip
    assert [each["row"] for each in found.rows] == ["smgk-1"]
    assert [run.row for run in found.left] == ["mgk-1"]


def test_tokens_that_are_drawn():
    run = tiny("smgk-1")[0]
    corpus = random_text(run, vocabulary=1000)
    tokens = corpus.splits["train"].sequences["text"].tokens
    assert tokens.min() >= 0
    assert tokens.max() < 1000
    counts = np.bincount(random_text(load("enwik8").config(), 1000).splits["train"].sequences["text"].tokens)
    # Half of the words that occur are among the first few: those of 1/r.
    assert counts[:32].sum() / counts.sum() == pytest.approx(np.log(33) / np.log(1000), abs=0.01)
    assert corpus.manifest["facts"]["vocabulary"] == 1000
    with pytest.raises(ValueError, match="for a language model only, got translation: give --data"):
        random_text(load("multi30k").config())


def test_a_gpu_that_others_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**30)
    with pytest.raises(ValueError, match=r"must have the GPU to itself, got one where others use 3\.2 GB"):
        rows.check_alone(torch.device("cuda"))
    rows.check_alone(CPU)


def bench(*arguments, status=0):
    done = CliRunner().invoke(app, ["bench", "rows", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


def test_rows_from_the_command_line(tmp_path):
    """A call with one row more goes on: the first row is timed again, for the ratio of the new one."""
    path = tmp_path / "rows-enwik8-cpu.json"
    options = ["enwik8", *TINY, "--quick", "--rounds", 1, "--device", "cpu", "--output", path]
    bench(*options, "--rows", " ".join(ROWS[:2]))
    said = bench(*options, "--rows", " ".join(ROWS), "--resume")
    found = result.read(path)
    names = [f"{row}+" for row in ROWS]
    assert [len(group["rows"]) for group in found["groups"]] == [2, 2]
    assert [record["group"] for record in found["baselines"]] == [0, 1]
    assert [record["row"].startswith(name) for record, name in zip(found["rows"], names[1:], strict=True)] == [True] * 2
    assert said.count("1.00x") == 1
    text = markdown.tables(found)
    assert text.count("| smgk-1+") == text.count("| mgk-1+") == text.count("| softmax-2+") == 1
    # Nothing is left to do.
    assert json.loads(path.read_text()) == found
    bench(*options, "--rows", " ".join(ROWS), "--resume")
    assert json.loads(path.read_text()) == found
    with pytest.raises(ValueError, match=r"--resume must go on with a result of the same config, got .* use another"):
        bench("enwik8", *TINY, "optimizer.lr=1", "--quick", "--device", "cpu", "--output", path, "--resume")


def test_a_recipe_of_converted_models_is_refused():
    with pytest.raises(ValueError, match="must have a recipe that trains from the beginning, got smollm2"):
        bench("smollm2")


@pytest.mark.gpu
def test_rows_on_a_gpu_are_compiled_recorded_and_counted():
    recipe = load("enwik8")
    runs = [
        recipe.config(row, ["data.longest=256", "training.batch_size=16"]) for row in ("softmax-8+qk_norm", "smgk-4")
    ]
    found = rows.compare(
        runs, random_text(runs[0]), fabric=build_fabric(device="cuda"), effort=Effort(rounds=3, seconds=1, fewest=3)
    )  # fmt: skip
    assert not found.failures
    for record in (*found.baselines, *found.rows):
        assert record["is_compiled"]
        assert record["is_recorded"]
        assert record["peak_bytes"] > 16 * record["parameters"]
