"""Which cell is started when, and what becomes of those that die: with processes and a clock that are made up."""

import dataclasses
import itertools
import json
import signal

import pytest
from sweep_cases import write_recipe

from mgk.commands.processes.launcher import Child
from mgk.commands.sweep import capacity as capacities
from mgk.commands.sweep.at_once import Outcome
from mgk.commands.sweep.capacity import Capacity
from mgk.commands.sweep.cell import cells_of
from mgk.commands.sweep.cell_process import LOG
from mgk.commands.sweep.deaths import MOST_DEATHS, MOST_DEATHS_OF_OTHERS
from mgk.commands.sweep.progress import Progress
from mgk.commands.sweep.scheduler import WARM_STEPS, Scheduler
from mgk.training.agreement import record_of
from mgk.training.loop import CHECKPOINTS
from mgk.training.signals import GracefulStop
from mgk.training.status import STATUS, Status

GIB = 2**30


class Processes:
    """Stands for a launcher: says what was started, and has ended what the test ends."""

    def __init__(self):
        self.has_server = False
        self.started, self.signals = [], []
        self._numbers = itertools.count(10**9)

    def start(self, argument, log):
        child = Child(len(self.started))
        child.process = next(self._numbers)
        child.send = lambda number: self.signals.append((argument, number))
        self.started.append(argument)
        return child

    def poll(self):
        pass

    def give_up_server(self):
        self.has_server = False


class Case:
    """A sweep of rows with three seeds, and a clock that the test moves."""

    def __init__(self, folder, *, rows=("softmax-2", "smgk-1"), seeds=3, jobs=2, is_on_gpu=False, **options):
        recipe = write_recipe(folder)
        cells = cells_of(str(recipe), rows, range(seeds), [], folder / "runs")
        self.cells = [Progress(cell=cell) for cell in cells]
        self.processes, self.now, self.said = Processes(), 0.0, []
        self.capacity = Capacity(jobs, is_on_gpu=is_on_gpu)
        self.stop = GracefulStop()
        self.scheduler = Scheduler(
            self.cells, self.processes, self.capacity, argument_of=lambda cell: cell.title, device="cpu", view=self,
            stop=self.stop, clock=lambda: self.now, **options,
        )  # fmt: skip

    def show(self, cells):
        pass

    def say(self, text):
        self.said.append(text)

    def tick(self, seconds=1.0):
        self.now += seconds
        self.scheduler.tick()
        return self.processes.started

    def settle(self):
        """Time for what has died to be seen, and to be started again."""
        self.tick(10)
        return self.tick(20)

    def cell(self, title):
        return next(each for each in self.cells if each.cell.title == title)

    def report(self, title, **values):
        """The process of a cell says something."""
        each = self.cell(title)
        said = Status(process=each.child.process, state="training", steps=40, **values)
        (each.cell.folder / STATUS).write_text(json.dumps(dataclasses.asdict(said)))

    def end(self, title, code, *, says="", error=""):
        """It ends; well, if it is 0."""
        each = self.cell(title)
        if code == 0:
            content = {
                "recipe": "tiny", "row": each.cell.config.row, "seed": each.cell.config.seed, "device": "CPU",
                "precision": "float32", **record_of(each.cell.config),
                "metrics": {"test": {"accuracy": 0.5}}, "parameters": 1,
            }  # fmt: skip
            (each.cell.folder / "result.json").write_text(json.dumps(content))
        if says:
            with (each.cell.folder / LOG).open("a") as file:
                file.write(says)
        if error:
            said = Status(process=each.child.process, state="failed", error=error)
            (each.cell.folder / STATUS).write_text(json.dumps(dataclasses.asdict(said)))
        each.child.code = code


@pytest.fixture
def case(tmp_path):
    return lambda **options: Case(tmp_path, **options)


def titles(row, *seeds):
    return [f"{row}, seed {seed}" for seed in seeds]


def test_the_first_of_a_row_goes_before_its_other_seeds(case):
    sweep = case(jobs=4)
    first = ["softmax-2, seed 0", "smgk-1, seed 0"]
    assert sweep.tick() == first
    assert sweep.tick() == first
    sweep.report("smgk-1, seed 0", step=WARM_STEPS - 1)
    assert sweep.tick() == first
    sweep.report("smgk-1, seed 0", step=WARM_STEPS)
    assert sweep.tick()[2:] == titles("smgk-1", 1, 2)
    # Its end does, too, even a bad one: the next seed is then the first.
    sweep.end("softmax-2, seed 0", 1, error="ValueError: no")
    assert sweep.tick()[4:] == titles("softmax-2", 1)
    assert sweep.tick()[4:] == titles("softmax-2", 1)


def test_steps_from_before_warm_nothing(case):
    sweep = case(jobs=2)
    sweep.tick()
    sweep.report("softmax-2, seed 0", step=25, first_step=20)
    sweep.end("smgk-1, seed 0", 1, error="ValueError: no")
    assert sweep.tick()[2:] == ["smgk-1, seed 1"]


def test_the_most_wanted_first(case):
    sweep = case(rows=("softmax-2",), jobs=1)
    order = titles("softmax-2", 0, 1, 2)
    for number, title in enumerate(order, start=1):
        assert sweep.tick() == order[:number]
        assert not sweep.scheduler.is_over
        sweep.end(title, 0)
    sweep.tick()
    assert sweep.scheduler.is_over
    assert Outcome(cells=sweep.cells).exit_code == 0
    (found,) = Outcome(cells=sweep.cells).sweeps
    assert [each["seed"] for each in found.results["softmax-2"]] == [0, 1, 2]


def test_what_was_killed_goes_on_before_the_others(case):
    sweep = case(rows=("softmax-2",), jobs=1)
    sweep.tick()
    sweep.end("softmax-2, seed 0", -9)
    assert sweep.tick() == ["softmax-2, seed 0", "softmax-2, seed 1"]
    sweep.end("softmax-2, seed 1", 0)
    # Not at once: what killed it may still be there.
    assert sweep.tick()[2:] == ["softmax-2, seed 0"]


def test_deaths_without_coming_further_are_counted(case):
    sweep = case(rows=("softmax-2",), seeds=1, jobs=1)
    each = sweep.cells[0]
    for step in (4, 8):
        for _ in range(MOST_DEATHS):
            sweep.settle()
            sweep.end("softmax-2, seed 0", -9)
        # It has come further: the last of these deaths is the first since then.
        (each.cell.folder / CHECKPOINTS / f"step-{step:08d}").mkdir(parents=True)
    for _ in range(MOST_DEATHS):
        sweep.settle()
        assert each.state == "running"
        sweep.end("softmax-2, seed 0", -11, says="\n".join(f"line {n}" for n in range(40)))
    sweep.tick(10)
    assert each.state == "failed"
    assert "was ended by signal 11, 9 times in all" in each.why
    assert each.why.endswith("line 38\nline 39")
    assert "line 20\n" not in each.why
    assert Outcome(cells=sweep.cells).exit_code == 1


def test_an_error_is_not_tried_again(case):
    sweep = case(seeds=1)
    sweep.tick()
    sweep.end("softmax-2, seed 0", 1, says="Traceback ...", error="ValueError: learn_variance must be false")
    sweep.end("smgk-1, seed 0", 0)
    sweep.tick()
    assert sweep.scheduler.is_over
    assert [each.state for each in sweep.cells] == ["failed", "done"]
    assert sweep.cells[0].why == "its process ended with 1: ValueError: learn_variance must be false"
    (found,) = Outcome(cells=sweep.cells).sweeps
    assert list(found.failed) == ["softmax-2, seed 0"]


CUDA_ERROR = "AcceleratorError: CUDA error: an illegal memory access was encountered"


def test_neighbours_of_an_abrupt_death_are_started_again(case):
    """Under NVIDIA's service one process that dies takes the others with it."""
    sweep = case(jobs=3, rows=("softmax-2", "smgk-1", "mgk-1"), seeds=1, is_shared=True)
    names = ["softmax-2, seed 0", "smgk-1, seed 0", "mgk-1, seed 0"]
    for _ in range(MOST_DEATHS):
        assert sorted(sweep.settle()[-3:]) == sorted(names)
        sweep.end("softmax-2, seed 0", 1, error=CUDA_ERROR)
        sweep.end("smgk-1, seed 0", -9)
        sweep.end("mgk-1, seed 0", 1, error=CUDA_ERROR)
    sweep.settle()
    # Of the one that died of itself it is the last time; the others had no part in it.
    assert [each.deaths for each in sweep.cells] == [0, MOST_DEATHS, 0]
    sweep.end("smgk-1, seed 0", -9)
    sweep.end("mgk-1, seed 0", 1, error=CUDA_ERROR)
    sweep.settle()
    assert [each.state for each in sweep.cells] == ["running", "failed", "running"]
    # Alone, it is an error of its own.
    sweep.end("mgk-1, seed 0", 1, error=CUDA_ERROR)
    sweep.tick(1000)
    assert sweep.cells[2].state == "failed"


def test_neighbours_are_not_started_again_for_ever(case):
    sweep = case(seeds=1, is_shared=True)
    for _ in range(MOST_DEATHS_OF_OTHERS + 1):
        sweep.settle()
        assert {each.state for each in sweep.cells} == {"running"}
        for each in sweep.cells:
            sweep.end(each.cell.title, 1, error=CUDA_ERROR)
    sweep.tick(10)
    assert {each.state for each in sweep.cells} == {"failed"}


def test_without_the_service_neighbours_have_errors_of_their_own(case):
    sweep = case(seeds=1)
    sweep.tick()
    sweep.end("softmax-2, seed 0", -9)
    sweep.end("smgk-1, seed 0", 1, error=CUDA_ERROR)
    sweep.tick()
    assert [each.state for each in sweep.cells] == ["waiting", "failed"]


def test_a_fork_that_cannot_use_the_gpu(case):
    sweep = case(seeds=1, jobs=1, rows=("softmax-2",))
    sweep.processes.has_server = True
    sweep.tick()
    sweep.end("softmax-2, seed 0", 1, error="RuntimeError: Cannot re-initialize CUDA in forked subprocess.")
    sweep.tick(5)
    assert not sweep.processes.has_server
    assert sweep.tick(5) == ["softmax-2, seed 0"] * 2


def test_a_signal_stops_all(case):
    sweep = case()
    sweep.tick()
    sweep.stop.signal = signal.SIGINT
    sweep.tick()
    assert sweep.processes.signals == [(title, signal.SIGTERM) for title in ("softmax-2, seed 0", "smgk-1, seed 0")]
    sweep.end("softmax-2, seed 0", 143)
    sweep.tick()
    assert not sweep.scheduler.is_over
    # One that was about to end, ends.
    sweep.end("smgk-1, seed 0", 0)
    sweep.tick()
    assert sweep.scheduler.is_over
    assert len(sweep.processes.started) == 2
    assert [each.state for each in sweep.cells] == ["stopped", "done", "waiting", "waiting", "waiting", "waiting"]
    assert Outcome(cells=sweep.cells, signal=signal.SIGINT).exit_code == 130


def test_signals_are_sent_once(case):
    sweep = case()
    sweep.tick()
    sweep.stop.signal = signal.SIGTERM
    for _ in range(5):
        sweep.tick()
    assert len(sweep.processes.signals) == 2


def test_time_for_all_to_save(case):
    """Two saves of ten seconds each, three more to end, and five for what comes then."""
    sweep = case(deadline=500.0, afterwards=lambda: 5.0)
    sweep.tick()
    for title in ("softmax-2, seed 0", "smgk-1, seed 0"):
        sweep.report(title, step=5, save_seconds=10.0, start_seconds=1.0)
    sweep.tick(470)
    assert sweep.processes.signals == []
    sweep.tick(1.1)
    assert len(sweep.processes.signals) == 2
    sweep.end("softmax-2, seed 0", 143)
    sweep.end("smgk-1, seed 0", 143)
    sweep.tick()
    assert sweep.scheduler.is_over
    assert Outcome(cells=sweep.cells).exit_code == 143


def test_who_does_not_stop_in_time_is_killed(case, monkeypatch):
    killed = []
    monkeypatch.setattr("os.killpg", lambda *arguments: killed.append(arguments))
    sweep = case(deadline=500.0, afterwards=lambda: 5.0, jobs=1)
    sweep.tick()
    number = sweep.cells[0].child.process
    sweep.tick(490)
    assert len(sweep.processes.signals) == 1
    assert killed == []
    sweep.tick(5)
    sweep.tick(0.1)
    assert killed == [(number, signal.SIGKILL)]
    sweep.end("softmax-2, seed 0", -9)
    sweep.tick()
    assert sweep.scheduler.is_over
    assert sweep.cells[0].state == "stopped"


def test_nothing_is_started_that_would_not_get_to_train(case):
    """A start took forty seconds."""
    sweep = case(deadline=200.0, jobs=1, rows=("softmax-2",))
    sweep.tick()
    sweep.report("softmax-2, seed 0", step=5, save_seconds=1.0, start_seconds=38.0)
    sweep.tick(40)
    sweep.end("softmax-2, seed 0", 0)
    # At second 130 sixty would be left, and ten to stop.
    assert sweep.tick(80)[1:] == ["softmax-2, seed 1"]
    sweep.end("softmax-2, seed 1", 0)
    assert sweep.tick(20)[2:] == []
    assert sweep.scheduler.is_over
    assert Outcome(cells=sweep.cells).exit_code == 143


# How many at once


def test_a_number_of_jobs_is_that_number(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(capacities, "cores", lambda: 16)
    assert Capacity(6, is_on_gpu=True).limit == 6
    assert Capacity(6, is_on_gpu=True).threads == 2
    assert Capacity(None, is_on_gpu=False).limit == 16
    assert Capacity(None, is_on_gpu=False).threads == 1
    assert Capacity(None, is_on_gpu=True).limit == 8
    assert Capacity(32, is_on_gpu=False).threads == 1


@pytest.mark.parametrize(
    ("given", "threads"), [("1", 1), ("2", 2), ("64", 8), ("3,2", 3), ("", 8), ("0", 8), ("many", 8)]
)
def test_the_user_may_ask_for_fewer_threads(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(capacities, "cores", lambda: 16)
    assert Capacity(2, is_on_gpu=False).threads == threads


def test_as_many_as_fit(case, monkeypatch):
    """The first one shows what it takes: with the driver's share and what it may yet grow by, 36 of 140 GiB."""
    monkeypatch.setattr(capacities, "cores", lambda: 64)
    sweep = case(jobs=None, is_on_gpu=True, rows=("softmax-2", "smgk-1", "mgk-1"), seeds=3)
    assert sweep.tick() == ["softmax-2, seed 0"]
    assert sweep.tick() == ["softmax-2, seed 0"]
    gpu = {"device_memory": 140 * GIB, "memory": 23 * GIB}
    sweep.report("softmax-2, seed 0", step=20, **gpu)
    assert sweep.tick() == ["softmax-2, seed 0", "smgk-1, seed 0", "mgk-1, seed 0"]
    # Once they have validated there is nothing left to grow: 24 of each, so that five fit.
    for row in ("softmax-2", "smgk-1", "mgk-1"):
        sweep.report(f"{row}, seed 0", step=20, best=0.5, **gpu)
    assert sweep.tick()[3:] == ["softmax-2, seed 1", "smgk-1, seed 1"]


def test_a_row_needs_what_its_hungriest_seed_took(case, monkeypatch):
    """Here one that has validated, though another one, which has not, says later that it holds less."""
    monkeypatch.setattr(capacities, "cores", lambda: 64)
    sweep = case(jobs=None, is_on_gpu=True, rows=("softmax-2",), seeds=3)
    sweep.tick()
    sweep.report("softmax-2, seed 0", step=20, device_memory=140 * GIB, memory=9 * GIB)
    assert len(sweep.tick()) == 3
    sweep.report("softmax-2, seed 0", step=30, device_memory=140 * GIB, memory=59 * GIB, best=0.5)
    sweep.report("softmax-2, seed 1", step=20, device_memory=140 * GIB, memory=9 * GIB)
    sweep.tick()
    sweep.end("softmax-2, seed 2", -9)
    # Two of sixty are all that fit.
    assert len(sweep.settle()) == 3
    sweep.end("softmax-2, seed 0", 0)
    assert sweep.settle()[3:] == ["softmax-2, seed 2"]


def test_memory_that_runs_out(case, monkeypatch):
    monkeypatch.setattr(capacities, "cores", lambda: 64)
    sweep = case(jobs=None, is_on_gpu=True, rows=("softmax-2",), seeds=3)
    sweep.tick()
    sweep.report("softmax-2, seed 0", step=20, device_memory=140 * GIB, memory=GIB)
    assert len(sweep.tick()) == 3
    sweep.end("softmax-2, seed 1", 1, error="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    sweep.tick(10)
    assert sweep.capacity.limit == 2
    assert sweep.cell("softmax-2, seed 1").state == "waiting"
    sweep.end("softmax-2, seed 0", 0)
    assert sweep.tick(10)[3:] == ["softmax-2, seed 1"]
