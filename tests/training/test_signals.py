"""Signals, real ones, to a real process: it stops, has saved, and goes on as if nothing had been."""

import os
import signal
import threading
import time

import pytest
from training_cases import (
    ECHO,
    Lines,
    checkpoints_of,
    exit_code,
    files_of,
    hear,
    make_values,
    process,
    run_in_process,
    train,
    updates_of,
)

from mgk.training import RunConfig, build_fabric, checkpoint, fit, from_mapping, result, run, signals
from mgk.training.loop import CHECKPOINTS, STEP, Trainer
from mgk.training.signals import STOPPING, GracefulStop

VALUES = make_values(training={"steps": 16, "checkpoint_every": 10}, validation={"every": 10, "batch_size": 8})

# The step that a signal in each phase stops at.
PHASES = {"start": 0, "step": 6, "valid": 10, "save": 10, "test": 16}
SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}
QUICK = {("SIGTERM", "step"), ("SIGINT", "valid"), ("SIGUSR1", "save"), ("SIGTERM", "start"), ("SIGINT", "test")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_in_process(folder, corpus.folder, VALUES) == 0
    return folder


def check_end(folder, corpus, undisturbed):
    """The same command goes on to the same end."""
    assert run_in_process(folder, corpus.folder, VALUES) == 0
    assert updates_of(folder) == updates_of(undisturbed)
    name = "step-00000016"
    assert files_of(folder / CHECKPOINTS / name) == files_of(undisturbed / CHECKPOINTS / name)
    one, other = (result.read(each / "result.json") for each in (folder, undisturbed))
    assert all(one[key] == other[key] for key in one if key not in ("seconds", "written"))


def everything(quick):
    """All of them, the slow ones marked."""
    return [
        pytest.param(name, phase, marks=() if (name, phase) in quick else pytest.mark.slow)
        for name in SIGNALS
        for phase in PHASES
    ]


@pytest.mark.parametrize(("name", "phase"), everything(QUICK))
def test_one_signal(undisturbed, corpus, tmp_path, name, phase):
    with process(train, tmp_path, corpus.folder, VALUES, phase) as (child, pipe):
        assert hear(pipe) == "here"
        os.kill(child.pid, getattr(signal, name))
        assert hear(pipe) == "signalled"
        pipe.send("go on")
        assert exit_code(child) == SIGNALS[name]
    # One checkpoint of that step, beside the periodic ones before it.
    found = checkpoint.newest(tmp_path / CHECKPOINTS, STEP, pytest.fail)
    assert found.step == PHASES[phase]
    steps = [each for each in checkpoints_of(tmp_path) if not each.startswith("best")]
    assert steps == (["step-00000010", "step-00000016"] if phase == "test" else [f"step-{PHASES[phase]:08d}"])
    assert not (tmp_path / "result.json").exists()
    check_end(tmp_path, corpus, undisturbed)


@pytest.mark.parametrize(("name", "phase"), everything({("SIGTERM", "save"), ("SIGINT", "step"), ("SIGUSR1", "valid")}))
def test_a_second_signal_ends_it_at_once(undisturbed, corpus, tmp_path, name, phase):
    """Wherever it is: nothing that can be seen is half."""
    with process(train, tmp_path, corpus.folder, VALUES, phase) as (child, pipe):
        assert hear(pipe) == "here"
        os.kill(child.pid, signal.SIGTERM)
        assert hear(pipe) == "signalled"
        time.sleep(ECHO + 0.05)
        os.kill(child.pid, getattr(signal, name))
        # Nobody lets it go on.
        assert exit_code(child, 10) == SIGNALS[name]
    found = checkpoint.newest(tmp_path / CHECKPOINTS, STEP, pytest.fail)
    assert (0 if found is None else found.step) in (0, 16)
    if phase == "save":
        assert [each for each in checkpoints_of(tmp_path) if each.startswith(checkpoint.WRITING)]
    check_end(tmp_path, corpus, undisturbed)
    assert not [each for each in checkpoints_of(tmp_path) if each.startswith(".")]


def test_an_echo_is_no_second_signal(corpus, tmp_path):
    """``timeout`` and batch systems send one to a process, and one to its group."""
    with process(train, tmp_path, corpus.folder, VALUES, "step") as (child, pipe):
        assert hear(pipe) == "here"
        for _ in range(3):
            os.kill(child.pid, signal.SIGTERM)
        assert hear(pipe) == "signalled"
        pipe.send("go on")
        assert exit_code(child) == 143
    assert checkpoint.newest(tmp_path / CHECKPOINTS, STEP, pytest.fail).step == 6


def test_in_this_process(corpus, tmp_path):
    """As a library: SystemExit with the code, the handlers as before, the lock free."""

    def interrupt(trainer):
        if trainer.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    class Kind(Trainer):
        def _update(self, batches):
            super()._update(batches)
            interrupt(self)

    before = [signal.getsignal(number) for number in STOPPING]
    lines = Lines()
    config = from_mapping(RunConfig, VALUES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Trainer", Kind)
        with pytest.raises(SystemExit) as caught:
            fit(config, tmp_path, corpus, build_fabric(device="cpu"), display=lines.display)
    assert caught.value.code == 143
    assert lines.said[-1] == "stopped at step 3 and saved: the same command goes on from here"
    assert checkpoints_of(tmp_path) == ["step-00000003"]
    assert [signal.getsignal(number) for number in STOPPING] == before
    assert fit(config, tmp_path, corpus, build_fabric(device="cpu"))["steps"] == 16


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with GracefulStop() as stop:
        assert stop.signal is None
        assert [signal.getsignal(number) for number in STOPPING] == [stop._receive] * 3
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal == signal.SIGUSR1
        assert stop.exit_code == 138
        with pytest.MonkeyPatch.context() as patch:
            codes = []
            patch.setattr(os, "_exit", codes.append)
            os.kill(os.getpid(), signal.SIGTERM)
            assert codes == []
            assert stop.exit_code == 138
            patch.setattr(signals, "ECHO", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert codes == [143]
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_other_threads_leave_signals_alone():
    before = [signal.getsignal(number) for number in STOPPING]
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append((stop.signal, [signal.getsignal(number) for number in STOPPING]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
