"""What counts as the result of a cell: that of its folder, or one that lies in the folder of results."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from mgk.commands.sweep import run_sweep
from mgk.commands.sweep.at_once import run_cells
from mgk.commands.sweep.cell import cells_of, kept
from mgk.reproduction.collection import write_result
from mgk.training.agreement import record_of
from mgk.training.status import StatusFile

CHANGES = ["training.steps=30", "schedule.warmup=3"]


def cell_of(folder, recipe="demo", changes=(), row="softmax-8"):
    (cell,) = cells_of(recipe, [row], [0], list(changes), folder)
    return cell


def content_of(cell, **facts):
    config = cell.config
    return {
        "format": 2, "recipe": config.name, "row": config.row, "seed": config.seed, "precision": "float32",
        "device": "CPU", "metrics": {"test": {"accuracy": 0.5}}, "parameters": 1, "packed": False,
        **record_of(config), **facts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "changes", "precision", "folder"),
    [
        ("demo", [], "float32", "demo"),
        ("demo", CHANGES, "float32", "other/demo"),
        ("lra/listops", ["training.precision=fp16"], "float16", "lra/listops-fp16"),
    ],
)
def test_a_result_is_found_wherever_it_is_filed(tmp_path, recipe, changes, precision, folder):
    """A run with changes is filed under the recipe that it agrees with, or under none."""
    cell = cell_of(tmp_path, recipe, changes)
    content = content_of(cell, precision=precision)
    path = write_result(tmp_path / "results", content)
    assert path == tmp_path / "results" / folder / "softmax-8-seed-0.json"
    found = kept(tmp_path / "results", cell.config, "cpu")
    assert found == json.loads(path.read_text())


def test_the_result_of_another_run_is_none_of_the_cell(tmp_path):
    """Not one with other changes, and not one of a recipe that only happens to have the same values."""
    write_result(tmp_path, content_of(cell_of(tmp_path, "demo", CHANGES)))
    assert kept(tmp_path, cell_of(tmp_path, "demo").config, "cpu") is None
    assert kept(tmp_path, cell_of(tmp_path, "demo", ["training.steps=300"]).config, "cpu") is None
    changed = cell_of(tmp_path, "lra/listops", ["training.precision=fp16"])
    write_result(tmp_path, content_of(cell_of(tmp_path, "lra/listops-fp16"), precision="float16"))
    assert kept(tmp_path, changed.config, "cpu") is None


def test_cells_in_turn_are_not_run_again_where_the_runs_are_gone(tmp_path, monkeypatch):
    """As those of several at once are not."""
    monkeypatch.setattr("mgk.commands.sweep.in_turn.run", lambda *_, **__: pytest.fail("it must not be run again"))
    written = write_result(tmp_path / "results", content_of(cell_of(tmp_path, "demo", CHANGES)))
    before, said = written.read_bytes(), []
    sweep = run_sweep(
        "demo", rows=["softmax-8"], changes=CHANGES, folder=tmp_path / "runs", device="cpu",
        results=tmp_path / "results", say=said.append,
    )  # fmt: skip
    assert said == ["[1/1] softmax-8, seed 0: done before"]
    assert len(sweep.results["softmax-8"]) == 1
    assert written.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"archive": "file/all.tar.xz"}, "the folder of --archive"),
        ({"summary": "file/summary.json"}, "the folder of --summary"),
        ({"results": "file"}, "--results"),
    ],
)
def test_what_is_written_at_the_end_is_checked_at_the_start(tmp_path, options, what):
    """Before the time of a machine that goes back afterwards is spent."""
    (tmp_path / "file").write_text("")
    paths = {name: tmp_path / path for name, path in options.items()}
    with pytest.raises(ValueError, match=f"{what} must be a folder that can be written to, got .*file: File exists"):
        run_cells([], None, jobs=1, **paths)
    if "results" in paths:
        with pytest.raises(ValueError, match="--results must be a folder that can be written to"):
            run_sweep("demo", folder=tmp_path / "runs", **paths)


def test_an_archive_that_cannot_be_extended_is_an_error_at_the_start(tmp_path):
    (tmp_path / "all.tar.xz").write_bytes(b"half of one")
    with pytest.raises(ValueError, match=r"all\.tar\.xz must be an archive of mgk sweep --archive, got "):
        run_cells([], None, jobs=1, archive=tmp_path / "all.tar.xz")


def test_the_command_of_the_docs_takes_the_runs_that_are_not_done(tmp_path):
    """Also one that was killed while it trained, with everything that is in its folder."""
    page = Path(__file__).parents[2] / "docs" / "training.md"
    (command,) = re.findall(r"^grep -rL .*$", page.read_text(), re.MULTILINE)
    for seed, state in enumerate(("done", "stopped", "training")):
        folder = tmp_path / "runs" / "demo" / "softmax-8" / f"seed-{seed}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "weights").write_text("")
        StatusFile(folder).enter(state)
    (tmp_path / "out").mkdir()
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    with tarfile.open(tmp_path / "out" / "unfinished.tar.gz") as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    assert sorted(names) == [
        f"runs/demo/softmax-8/seed-{seed}/{name}" for seed in (1, 2) for name in ("checkpoints/weights", "status.json")
    ]
