"""Curves and lines: a sink that fails costs what would have gone there, and nothing else."""

import io
import json
import re
import sys
import threading
import time

import pytest
from rich.console import Console
from training_cases import Lines, contents, different, make_config, make_trainer, take_steps

from mgk.training import Display, build_fabric, fit
from mgk.training.loop import CHECKPOINTS
from mgk.training.tracking import METRICS, Curves, read_curves


def make_curves(folder, said, step=0, validated=0, **options):
    return Curves(folder, step, validated, said.append, **options)


def test_a_run_writes_its_curves(corpus, tmp_path):
    config = make_config(training={"steps": 12, "log_every": 5}, validation={"every": 6})
    take_steps(make_trainer(config, tmp_path, corpus), 12)
    lines = read_curves(tmp_path / METRICS)
    assert [(line["step"], line["kind"]) for line in lines] == [
        (5, "train"),
        (6, "valid"),
        (10, "train"),
        (12, "valid"),
    ]
    assert lines[0].keys() == {"step", "kind", "loss", "lr", "tokens_per_second", "tokens", "seconds"}
    assert lines[1].keys() == {"step", "kind", "accuracy", "loss", "count", "validation_seconds"}
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_can_read_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    curves = make_curves(tmp_path, said)
    for step in (1, 2, 3):
        curves.write(step, "train", {"loss": step / 2})
    curves.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert said == []


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = []
    curves = make_curves(tmp_path, said)
    curves.write(1, "train", {"loss": 0.5})
    curves.close()
    assert said == []
    assert len(read_curves(tmp_path / METRICS)) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    """Those of training and of validation by themselves: a checkpoint may lie before the validation of its step."""
    curves = make_curves(tmp_path, [])
    for step in range(1, 8):
        curves.write(step, "train", {"loss": float(step)})
        if step % 2 == 0:
            curves.write(step, "valid", {"loss": float(step)})
    curves.close()
    make_curves(tmp_path, [], step=4, validated=2).close()
    found = [(line["step"], line["kind"]) for line in read_curves(tmp_path / METRICS)]
    assert found == [(1, "train"), (2, "train"), (2, "valid"), (3, "train"), (4, "train")]


def test_lines_are_neither_doubled_nor_lost(corpus, tmp_path):
    """Stopped three times, at different distances from the last checkpoint."""
    changes = {"training": {"steps": 40, "log_every": 3, "checkpoint_every": 8}, "validation": {"every": 4}}
    take_steps(make_trainer(make_config(**changes), tmp_path / "whole", corpus), 40)
    for step in (15, 16, 39, 40):
        take_steps(make_trainer(make_config(**changes), tmp_path / "parts", corpus), step)
    keys = ("step", "kind", "loss", "lr", "tokens", "accuracy")
    whole, parts = (
        [[line.get(key) for key in keys] for line in read_curves(tmp_path / name / METRICS)]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert len(parts) == 13 + 10


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "kin', '{"step": 3, "kind": "train", "loss": 1.0', "\x00\x00", "[1, 2]", "{}", "x"]
)
def test_a_torn_line_is_left_out(tmp_path, torn):
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "kind": "train"}\n' + torn)
    assert [line["step"] for line in read_curves(path)] == [1, 2]
    said = []
    curves = make_curves(tmp_path, said, step=2, tensorboard=False)
    curves.write(3, "train", {"loss": 0.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert said == []


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / METRICS).write_bytes(b'{"step": 1, "kind": "train"}\n\xff\xfe\n')
    assert len(read_curves(tmp_path / METRICS)) == 1
    assert read_curves(tmp_path / "none") == []


def compare_with_undisturbed(corpus, folder, break_it):
    """A run whose sink fails says so once, and is otherwise the run whose sink works."""
    config = make_config(training={"steps": 12, "log_every": 2, "checkpoint_every": 6}, validation={"every": 4})
    good = make_trainer(config, folder / "good", corpus)
    take_steps(good, 12)
    expected = contents(good)
    bad, lines = folder / "bad", Lines()
    bad.mkdir()
    before = break_it(bad)
    trainer = make_trainer(config, bad, corpus, display=lines.display)
    if before is not None:
        before(trainer)
    take_steps(trainer, 12)
    assert trainer.records == good.records
    assert different(contents(trainer), expected) == []
    assert sorted(path.name for path in (bad / CHECKPOINTS).iterdir())[-1] == "step-00000012"
    assert len([line for line in lines.said if "the curves cannot be written, the run goes on without" in line]) == 1


def test_a_sink_that_is_no_file(corpus, tmp_path):
    compare_with_undisturbed(corpus, tmp_path, lambda folder: (folder / METRICS).mkdir())


def test_a_full_sink(corpus, tmp_path):
    def fill(trainer):
        (trainer.folder / METRICS).symlink_to("/dev/full")

    compare_with_undisturbed(corpus, tmp_path, lambda folder: fill)


def test_a_sink_that_is_not_writable(corpus, tmp_path):
    def deny(trainer):
        def fail(*args):
            raise PermissionError(13, "Permission denied")

        trainer.log._curves._write = fail

    compare_with_undisturbed(corpus, tmp_path, lambda folder: deny)


def test_no_place_for_tensorboard(corpus, tmp_path):
    def occupy(folder):
        (folder / "tensorboard").write_text("")

    compare_with_undisturbed(corpus, tmp_path, occupy)


def test_tensorboard_that_fails_later(corpus, tmp_path, monkeypatch):
    """Its own thread meets the full disk, and the next one to write hears of it."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def fill(trainer):
        writer = trainer.log._curves._board.file_writer.event_writer._async_writer

        def fail(data):
            raise OSError(28, "No space left on device")

        writer._writer.write = fail
        trainer.log._curves._board.add_scalar("x", 1.0, 0)
        until = time.monotonic() + 20
        while writer._worker.exception is None and time.monotonic() < until:
            time.sleep(0.01)

    compare_with_undisturbed(corpus, tmp_path, lambda folder: fill)
    assert len(read_curves(tmp_path / "bad" / METRICS)) == len(read_curves(tmp_path / "good" / METRICS))


class Gone(io.StringIO):
    """A file on a full disk, or a pipe whose other end is closed."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
def test_a_log_that_cannot_be_written_stops_nothing(corpus, tmp_path, error, is_terminal):
    """mgk train ... 2> a file on a full disk, or | head."""
    display = Display(console=Console(file=Gone(error), force_terminal=is_terminal), every=0.0)
    config = make_config(training={"steps": 6, "log_every": 1})
    assert fit(config, tmp_path, corpus, build_fabric(device="cpu"), display=display)["steps"] == 6
    assert len(read_curves(tmp_path / METRICS)) == 7


def test_lines_for_people(corpus, tmp_path):
    text = io.StringIO()
    display = Display(console=Console(file=text, width=200), every=0.0)
    fit(
        make_config(training={"steps": 4, "log_every": 2}),
        tmp_path,
        corpus,
        build_fabric(device="cpu"),
        display=display,
    )
    lines = text.getvalue().splitlines()
    assert lines[0] == f"no checkpoint in {tmp_path / CHECKPOINTS}: starting at step 0"
    # A sign of life after the first step; the speed from the first line of the log on.
    assert lines[1].startswith("tiny: step 1 of 4, loss 2.")
    assert lines[2].startswith("tiny: step 2 of 4, loss 2.")
    assert re.search(r" tokens/s, \d:\d\d:\d\d left$", lines[2])
    assert any("loss" in line and "valid batch 1 of 2" in line for line in lines), "validation shows how far it is, too"
    assert lines[-1].startswith("tiny: step 4 of 4, loss ")
    assert "test batch 2 of 2" in "".join(lines)
    # A process that only tests a finished run has seen no loss.
    (tmp_path / "result.json").unlink()
    text.truncate(0)
    config = make_config(training={"steps": 4, "log_every": 2})
    fit(config, tmp_path, corpus, build_fabric(device="cpu"), display=display)
    assert "tiny: step 4 of 4, test batch 1 of 2, " in text.getvalue()
    assert "nan" not in text.getvalue()
    assert "tiny: step 4 of 4, 0:00:00 left" in text.getvalue().splitlines()


def test_quiet_is_quiet():
    text = io.StringIO()
    display = Display(quiet=True, console=Console(file=text))
    with display:
        row = display.add("run", 3)
        display.update(row, 1, 3, "x", always=True)
        display.say("hello")
    assert text.getvalue() == ""


def test_a_bar_in_a_terminal():
    text = io.StringIO()
    display = Display(console=Console(file=text, force_terminal=True, width=120))
    with display:
        row = display.add("run", 3)
        display.update(row, 2, 3, "loss 1.5")
        display.say("a [line] in between")
    assert "a [line] in between" in text.getvalue()
    assert "2/3" in text.getvalue()
    assert "loss 1.5" in text.getvalue()
