"""`mgk sweep` with several processes, real ones: what it leaves, what stops it, and what cannot."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from sweep_cases import finish, is_alive, printed, results_of, statuses, sweep, wait_for, write_recipe
from training_cases import checkpoints_of, files_of, make_config, make_corpus

from mgk.commands.sweep import cell_process
from mgk.commands.sweep.cell import Cell
from mgk.commands.sweep.cell_process import not_evaluated
from mgk.reproduction.collection import collect
from mgk.training import checkpoint
from mgk.training.loop import CHECKPOINTS, STEP
from mgk.training.tracking import METRICS, read_curves

NAMES = [f"tiny/{row}/seed-{seed}" for row in ("smgk-1", "softmax-2") for seed in (0, 1)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """A sweep that nobody interrupts, with all that it may write."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder)
    options = ("--jobs", "2", "--archive", "all.tar.xz", "--summary", "summary.json", "--results", "results")
    out, _ = finish(folder, cache, recipe, "--seeds", "0-1", *options)
    assert "softmax-2" in out
    assert "smgk-1" in out
    return folder


def curves_of(folder):
    times = {"seconds", "tokens_per_second", "validation_seconds"}
    return [{key: repr(value) for key, value in line.items() if key not in times} for line in read_curves(folder)]


def check_same(folder, undisturbed):
    """Nothing lost, and not one bit of a result, a curve or a last checkpoint different."""
    assert results_of(folder / "runs") == results_of(undisturbed / "runs")
    for name in NAMES:
        one, other = folder / "runs" / name, undisturbed / "runs" / name
        assert curves_of(one / METRICS) == curves_of(other / METRICS)
        last = "step-00000040"
        assert files_of(one / CHECKPOINTS / last) == files_of(other / CHECKPOINTS / last)


def test_what_a_sweep_leaves(undisturbed, cache):
    assert list(results_of(undisturbed / "runs")) == NAMES
    said = statuses(undisturbed)
    assert {each.state for each in said.values()} == {"done"}
    assert all((each.step, each.steps) == (40, 40) for each in said.values())
    assert all(each.save_seconds > 0 and 0 < each.start_seconds < each.seconds for each in said.values())
    # Each had a process and a session of its own.
    assert len({each.process for each in said.values()}) == 4
    for name in NAMES:
        _, row, seed = name.split("/")
        kept = json.loads((undisturbed / "results" / "tiny" / f"{row}-{seed}.json").read_text())
        assert kept == json.loads((undisturbed / "runs" / name / "result.json").read_text())

    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["jobs"] == 2
    assert summary["device"] == kept["device"]
    assert summary["cells_finished"] == 4
    assert summary["seconds_per_cell"] == summary["seconds"] / 4
    # Several at once: the whole takes less than its parts, and each part counts its start.
    parts = summary["cells"]
    assert all(0 < each["start_seconds"] < each["seconds"] < summary["seconds"] for each in parts)
    assert [(each["row"], each["seed"], each["steps"], each["attempts"]) for each in parts] == [
        (row, seed, 40, 1) for seed in (0, 1) for row in ("softmax-2", "smgk-1")
    ]

    # Again: nothing is run.
    times = {path: path.stat().st_mtime_ns for path in (undisturbed / "runs").rglob("*")}
    out, err = finish(undisturbed, cache, undisturbed / "tiny.yaml", "--seeds", "0-1", "--jobs", "2")
    assert "softmax-2" in out
    assert err == ""
    assert {path: path.stat().st_mtime_ns for path in (undisturbed / "runs").rglob("*")} == times


def test_results_count_where_the_runs_are_gone(undisturbed, cache, tmp_path):
    """Checkpoints do not travel. What was made with another configuration is no result of this one."""
    shutil.copytree(undisturbed / "results", tmp_path / "results")
    recipe = write_recipe(tmp_path)
    options = ("--rows", "softmax-2", "--seeds", "0-1", "--jobs", "2", "--results", "results")
    assert "softmax-2" in finish(tmp_path, cache, recipe, *options)[0]
    assert not (tmp_path / "runs").exists()
    finish(tmp_path, cache, recipe, "training.steps=4", *options)
    assert len(results_of(tmp_path / "runs")) == 2


def test_an_archive_is_read_back(undisturbed, tmp_path):
    """To the same files as those of the runs themselves."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    written = collect(undisturbed / "all.tar.xz", packed)
    assert len(written) == 8
    collect(undisturbed / "runs", plain)
    contents = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (packed, plain)
    ]
    assert contents[0] == contents[1]
    # Once more: the same results are no others.
    assert collect(undisturbed / "all.tar.xz", packed) == written


def killed_sweep(folder, undisturbed, cache, kills, seed):
    """Kill the sweep or one of its cells again and again, at moments spread over all of its work."""
    recipe = write_recipe(folder)
    arguments = (recipe, "--seeds", "0-1", "--jobs", "2")
    generator = random.Random(seed)
    # Half of them hit the sweep, and the first one.
    victims = ["sweep", *generator.choices(["sweep", "cell"], k=kills - 2), "cell"] if kills > 2 else ["sweep", "cell"]
    moments = sorted(generator.uniform(0, 4 * 40 * 0.9) for _ in victims)
    done, seen = {"sweep": 0, "cell": 0}, set()
    while moments:
        with sweep(folder, cache, *arguments) as running:
            while moments and running.is_alive():

                def is_time():
                    steps = sum(each.step for each in statuses(folder).values())
                    return steps >= moments[0] or not running.is_alive()

                wait_for(is_time)
                time.sleep(generator.uniform(0, 0.1))
                at_work = [each.process for each in statuses(folder).values() if is_alive(each.process)]
                seen.update(at_work)
                if victims[0] == "sweep":
                    running.kill()
                    running.join()
                elif at_work:
                    os.kill(generator.choice(at_work), signal.SIGKILL)
                else:
                    # Between two cells: a moment later.
                    continue
                moments.pop(0)
                done[victims.pop(0)] += 1
            if running.is_alive():
                running.join(120)
                assert running.exitcode == 0, printed(folder)
        # The next one does not wait: processes of this one may still be saving.
    finish(folder, cache, *arguments)
    assert not any(map(is_alive, seen))
    assert sum(done.values()) == kills
    check_same(folder, undisturbed)
    return done


def test_killed(undisturbed, cache, tmp_path):
    done = killed_sweep(tmp_path, undisturbed, cache, 3, seed=0)
    assert min(done.values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_twenty_times(undisturbed, cache, tmp_path, seed):
    done = killed_sweep(tmp_path, undisturbed, cache, 20, seed=seed)
    assert min(done.values()) >= 5


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.slow)])
def test_a_signal_has_all_cells_save(undisturbed, cache, tmp_path, name, code):
    recipe = write_recipe(tmp_path)
    arguments = (recipe, "--seeds", "0-1", "--jobs", "2", "--archive", "out/part.tar.gz")
    with sweep(tmp_path, cache, *arguments) as running:
        wait_for(lambda: [each for each in statuses(tmp_path).values() if each.step >= 5])
        os.kill(running.pid, getattr(signal, name))
        running.join(60)
        assert running.exitcode == code, printed(tmp_path)
    said = statuses(tmp_path)
    assert not any(is_alive(each.process) for each in said.values())
    assert {each.state for each in said.values()} <= {"stopped", "done"}
    stopped = {folder: each for folder, each in said.items() if each.state == "stopped"}
    assert stopped
    for folder, each in stopped.items():
        # A checkpoint of the very step it stopped at, where it had begun to train.
        found = checkpoint.newest(folder / CHECKPOINTS, STEP, pytest.fail)
        assert (0 if found is None else found.step) >= each.step
    assert (tmp_path / "out" / "part.tar.gz").is_file()
    finish(tmp_path, cache, *arguments)
    check_same(tmp_path, undisturbed)
    assert len(collect(tmp_path / "out" / "part.tar.gz", tmp_path / "results")) == 8


def test_time_is_up(cache, tmp_path):
    """Everybody has saved by then; what is left goes on another time."""
    recipe = write_recipe(tmp_path, training={"steps": 100_000, "checkpoint_every": 100_000})
    started = time.monotonic()
    limit = 12
    arguments = (recipe, "--seeds", "0-1", "--jobs", "2", "--time", limit)
    _, err = finish(tmp_path, cache, *arguments, code=143)
    assert time.monotonic() - started < limit + 2
    assert "time is up: 2 cells save and stop" in err
    assert "4 of 4 cells are not done yet: the same command goes on from the checkpoints below runs/tiny" in err
    said = statuses(tmp_path)
    assert {each.state for each in said.values()} == {"stopped"}
    # The first seed of each row: those that are to follow would wait for it.
    assert sorted(folder.parent.name for folder in said) == ["smgk-1", "softmax-2"]
    assert {folder.name for folder in said} == {"seed-0"}
    for folder, each in said.items():
        (name,) = [each for each in checkpoints_of(folder) if each.startswith("step")]
        assert int(name.removeprefix("step-")) >= max(1, each.step)


def test_one_cell_that_fails_harms_nobody(cache, tmp_path):
    """Neither one that cannot be built nor one whose process dies of itself."""
    rows = ("softmax-2", "mlk-2+learn_variance", "smgk-1")
    recipe = write_recipe(tmp_path, rows=rows, training={"steps": 4})
    entries = [{"recipe": recipe.name}, {"recipe": recipe.name, "rows": ["smgk-1"], "seeds": "0-1"}]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"cells": entries}))
    out, err = finish(tmp_path, cache, "--plan", "plan.yaml", "--jobs", "2", code=1)
    assert "learn_variance must be false with attention='mlk', got true" in err
    assert "mlk-2+learn_variance, seed 0" in out
    assert list(results_of(tmp_path / "runs")) == ["tiny/smgk-1/seed-0", "tiny/smgk-1/seed-1", "tiny/softmax-2/seed-0"]
    (failed,) = [each for each in statuses(tmp_path).values() if each.state == "failed"]
    assert "learn_variance" in failed.error
    log = (tmp_path / "runs" / "tiny" / "mlk-2+learn_variance" / "seed-0" / "log.txt").read_text()
    assert "Traceback" in log


def test_cells_are_analysed(cache, tmp_path):
    """Where `mgk reproduce` expects it. What a cell had before is not made again."""
    recipe = write_recipe(tmp_path, training={"steps": 4})
    arguments = (recipe, "--rows", "smgk-1", "--results", "results", "--archive", "all.tar.gz")
    finish(tmp_path, cache, *arguments)
    place = tmp_path / "runs" / "tiny" / "smgk-1" / "seed-0"
    made = (place / "result.json").stat().st_mtime_ns
    finish(tmp_path, cache, *arguments, "--analyze")
    assert (place / "result.json").stat().st_mtime_ns == made
    written = json.loads((place / "analysis" / "analysis.json").read_text())
    assert (written["recipe"], written["row"], written["seed"]) == ("tiny", "smgk-1", 0)
    assert written["corpus"] == "listops"
    assert written["batch"] == "listops test, first 12 of it"
    name = "analysis/tiny-smgk-1-seed-0"
    assert json.loads((tmp_path / "results" / name / "analysis.json").read_text()) == written
    collect(tmp_path / "all.tar.gz", tmp_path / "packed")
    assert {path.name for path in (tmp_path / "packed" / name).iterdir()} >= {"analysis.json", "keys.png"}


def test_cells_are_evaluated(tmp_path):
    """What is evaluated after its training: a language model on the splits that were named, and no classifier."""
    (tmp_path / "evaluation-test.json").write_text("{}")
    language, classifier = make_config("language"), make_config("classification")
    assert not_evaluated(tmp_path, language, ["valid", "test"]) == ["valid"]
    assert not_evaluated(tmp_path, language, []) == []
    assert not_evaluated(tmp_path, classifier, ["valid"]) == []
    # The work itself, in this process.
    place, corpus = tmp_path / "run", make_corpus("language", tmp_path / "corpus")
    config = make_config("language", training={"steps": 2}, schedule={"warmup": 1}, validation={"every": 2})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cell_process.registry, "open_corpus", lambda *_: corpus)
        patched.setattr("mgk.training.evaluate.open_or_prepare", lambda *_, **__: corpus)
        cell = Cell(config=config, folder=place, command="")
        wanted = {"device": "cpu", "threads": 1, "analyze": False, "results": None, "evaluate": ["test"]}
        assert cell_process.work(cell_process.argument_of(cell, **wanted)) == 0
        written = json.loads((place / "evaluation-test.json").read_text())
        # No more than a window, which is short here.
        assert (written["split"], written["stride"]) == ("test", 16)
        made = (place / "result.json").stat().st_mtime_ns
        assert cell_process.work(cell_process.argument_of(cell, **{**wanted, "evaluate": ["valid", "test"]})) == 0
        assert (place / "result.json").stat().st_mtime_ns == made
        assert (place / "evaluation-valid.json").is_file()
    finish(tmp_path, tmp_path, "demo", "--evaluate", "tset", code=1)


@pytest.mark.slow
def test_the_command_as_it_is_typed(undisturbed, cache, tmp_path):
    """With a server that has imported everything by itself."""
    environment = {**os.environ, "MGK_CACHE": str(cache)}
    command = [sys.executable, "-m", "mgk", "sweep", str(write_recipe(tmp_path)), "--seeds", "0-1", "--jobs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_same(tmp_path, undisturbed)
