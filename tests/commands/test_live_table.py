"""What people see of a sweep: a table that moves in a terminal, lines elsewhere."""

import io
import json
import time

import pytest
from rich.console import Console
from sweep_cases import write_recipe
from training_cases import make_config, make_trainer, take_steps

from mgk.commands.processes.launcher import Child
from mgk.commands.sweep.cell import cells_of
from mgk.commands.sweep.live_table import LiveTable, line_of, table_of
from mgk.commands.sweep.progress import Progress
from mgk.training.loop import Trainer
from mgk.training.run import finish
from mgk.training.status import STATUS, Status, StatusDisplay, StatusFile, read_status


@pytest.fixture
def cells(tmp_path):
    """One of each kind."""
    recipe = write_recipe(tmp_path)
    found = [Progress(cell=cell) for cell in cells_of(str(recipe), None, range(3), [], tmp_path / "runs")]
    found[0].state, found[0].result = "done", {"metrics": {"test": {"accuracy": 0.371}}}
    found[1].state = "running"
    found[1].status = Status(
        process=1, state="training", first_step=100, step=301, steps=1301, loss=1.25, best=0.36, seconds=25.0,
        start_seconds=5.0,
    )  # fmt: skip
    found[2].state, found[2].why = "failed", "no"
    found[3].state = "running"
    return found


def shown(table):
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()


def test_one_table_of_all_cells(cells):
    text = shown(table_of(cells, 100))
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "seed" in line]
    assert lines == [
        ["tiny softmax-2, seed 0", "done", "", "", "37.10 %", ""],
        ["tiny smgk-1, seed 0", "training", "301 of 1,301", "1.2500", "36.00 %", "0:01:40"],
        ["tiny softmax-2, seed 1", "failed", "", "", "", ""],
        ["tiny smgk-1, seed 1", "running", "", "", "", ""],
        ["tiny softmax-2, seed 2", "waiting", "", "", "", ""],
        ["tiny smgk-1, seed 2", "waiting", "", "", "", ""],
    ]
    assert "2 running, 1 failed, 1 done, 2 waiting" in text
    # In a small window those that are at work, or went wrong.
    text = shown(table_of(cells, 3))
    assert all(f"{name} " in text for name in ("smgk-1, seed 0", "softmax-2, seed 1", "smgk-1, seed 1"))
    assert "softmax-2, seed 2" not in text


def test_lines_where_there_is_no_terminal(cells):
    console = Console(file=io.StringIO(), width=160)
    with LiveTable(console, every=0.0) as table:
        table.show(cells)
        table.say("[red]not markup[/red]")
    assert console.file.getvalue().splitlines() == [
        "tiny smgk-1, seed 0: training, step 301 of 1,301, loss 1.2500, best 36.00 %, 0:01:40 left",
        "tiny smgk-1, seed 1: starting",
        "[red]not markup[/red]",
    ]
    # Every now and then, and not at once: whoever starts says so in other words.
    console = Console(file=io.StringIO(), width=160)
    with LiveTable(console, every=30.0) as table:
        table.show(cells)
    assert console.file.getvalue() == ""


def test_a_table_in_a_terminal(cells):
    console = Console(file=io.StringIO(), width=160, force_terminal=True, height=40)
    with LiveTable(console) as table:
        table.show(cells)
        table.say("above it")
    text = console.file.getvalue()
    assert "301 of 1,301" in text
    assert "above it" in text
    # It is gone when the sweep is.
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_closed_pipe_costs_lines_only(cells):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    with LiveTable(Console(file=Closed(), width=160), every=0.0) as table:
        table.show(cells)
        table.say("nobody reads this")


def test_a_loss_is_no_percentage(cells):
    config = cells[1].cell.config
    object.__setattr__(config.validation, "metric", "loss")
    cells[1].status.best = -2.5
    assert "best 2.5000" in line_of(cells[1])


# The status file of a run


def test_a_run_says_where_it_is(corpus, tmp_path):
    file = StatusFile(tmp_path)
    assert read_status(tmp_path).state == "starting"
    config = make_config(training={"steps": 12, "checkpoint_every": 4, "log_every": 2}, validation={"every": 6})
    trainer = make_trainer(config, tmp_path, corpus, Trainer, display=StatusDisplay(file, console=quiet()))
    assert read_status(tmp_path).state == "training"
    take_steps(trainer, 1)
    said = read_status(tmp_path)
    # The first update is said at once.
    assert (said.step, said.steps, said.first_step) == (1, 12, 0)
    assert said.start_seconds > 0
    assert said.best is None
    take_steps(trainer, 12)
    finish(trainer)
    file.enter("done")
    said = read_status(tmp_path)
    assert (said.state, said.step) == ("done", 12)
    assert said.best == trainer.state.best
    assert said.loss == pytest.approx(trainer.log.loss)
    assert "validation accuracy" in said.says
    assert 0 < said.save_seconds < said.seconds

    # Another process goes on, and says where it began.
    again = StatusFile(tmp_path / "other")
    assert again.status.first_step == 0
    make_trainer(config, tmp_path, corpus, Trainer, display=StatusDisplay(again, console=quiet()))
    assert (again.status.first_step, again.status.step) == (12, 12)


def quiet():
    return Console(file=io.StringIO())


def test_it_is_written_seldom(tmp_path, monkeypatch):
    """A thousand updates are one or two writings, and each costs microseconds."""
    file = StatusFile(tmp_path)
    display = StatusDisplay(file, console=quiet())
    row = display.add("tiny", 2000)
    written = []
    monkeypatch.setattr("mgk.training.status.json.dumps", lambda content: written.append(content) or "{}")
    started = time.perf_counter()
    for step in range(1, 1001):
        display.update(row, step, 2000, "", loss=float("nan"), best=None)
    seconds = time.perf_counter() - started
    assert 1 <= len(written) <= 2 + seconds / 0.5
    assert written[0]["loss"] is None


def test_a_disk_that_is_full_costs_the_status_only(tmp_path):
    file = StatusFile(tmp_path / "nowhere")
    file.enter("done")
    assert read_status(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"process": 1, "unknown": 2}', "null"])
def test_what_is_no_status(tmp_path, content):
    (tmp_path / STATUS).write_text(content)
    assert read_status(tmp_path) is None


def test_only_its_own_process_is_believed(cells, tmp_path):
    each = cells[3]
    each.cell.folder.mkdir(parents=True)
    each.child = Child(0)
    each.child.process = 77
    for process, expected in ((76, None), (77, 5)):
        (each.cell.folder / STATUS).write_text(json.dumps({"process": process, "step": 5}))
        each.look(0.0)
        assert (None if each.status is None else each.status.step) == expected
