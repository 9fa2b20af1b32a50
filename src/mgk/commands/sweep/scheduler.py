"""The scheduler of a sweep with several processes: it starts, watches, stops and retries cells."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mgk.commands.processes.launcher import Child, Launcher
from mgk.commands.sweep import deaths
from mgk.commands.sweep.capacity import Capacity
from mgk.commands.sweep.cell import Cell, finished
from mgk.commands.sweep.cell_process import LOG
from mgk.commands.sweep.progress import Progress
from mgk.training.signals import GracefulStop

OFTEN = 0.1
"""Seconds between two checks of the cells."""
WARM_STEPS = 10
"""Number of updates after which the first cell of a row has filled the compiler's caches for the other seeds."""
UNMEASURED_SAVE = 5.0
"""Assumed duration of a save in seconds, until one has been measured."""
MARGIN = 3.0
"""Seconds for a process to end after it has saved."""


class View(Protocol):
    """A display of the cells."""

    def show(self, cells: Sequence[Progress]) -> None:
        """Show the progress of the cells."""

    def say(self, text: str) -> None:
        """Print a message."""


class Scheduler:
    """Runs cells in processes by priority, until all are done, a signal arrives or the deadline approaches.

    Args:
        cells: cells by descending priority.
        launcher: starts the processes.
        capacity: decides how many cells run at once.
        argument_of: returns the argument for the process of a cell.
        device: device on which the results must have been made.
        view: shows the progress.
        stop: records signals.
        deadline: time of ``clock`` by which everything must have ended.
        afterwards: returns the seconds that must be left before the deadline when the processes have ended.
        is_shared: whether the death of a process can cause others to die, as under NVIDIA's service.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        cells: Sequence[Progress],
        launcher: Launcher,
        capacity: Capacity,
        *,
        argument_of: Callable[[Cell], dict[str, Any]],
        device: str,
        view: View,
        stop: GracefulStop,
        deadline: float | None = None,
        afterwards: Callable[[], float] = lambda: 0.0,
        is_shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cells, self.launcher, self.capacity = cells, launcher, capacity
        self.argument_of, self.device, self.view, self.stop = argument_of, device, view, stop
        self.deadline, self.afterwards, self.is_shared, self.clock = deadline, afterwards, is_shared, clock
        self.is_stopping = False
        self._warm = {each.cell.row for each in cells if each.state == "done"}
        self._died: list[tuple[float, Progress]] = []
        self._killed: set[Child] = set()
        self._begun = clock()

    @property
    def running(self) -> list[Progress]:
        return [each for each in self.cells if each.state == "running"]

    @property
    def is_over(self) -> bool:
        """Whether no cell is running and none may start."""
        return not self.running and (self.is_stopping or not any(each.state == "waiting" for each in self.cells))

    def run(self) -> None:
        """Run until :attr:`is_over`."""
        while True:
            self.tick()
            if self.is_over:
                return
            time.sleep(OFTEN)

    def tick(self) -> None:
        """Check every cell once, and start, stop or retry cells where due."""
        self.launcher.poll()
        for each in self.running:
            each.look(self.clock())
            if each.status is not None:
                self.capacity.note(each.cell, each.status)
                is_past = each.status.state in ("evaluating", "analysing", "done")
                if is_past or each.status.step >= each.status.first_step + WARM_STEPS:
                    self._warm.add(each.cell.row)
        ended = [each for each in self.running if each.child is not None and each.child.code is not None]
        # Collect all deaths before handling any, because their cause depends on which processes died together.
        self._died += [(self.clock(), each) for each in ended if each.child is not None and each.child.code != 0]
        for each in ended:
            self._end(each)
        self._stop_in_time()
        if not self.is_stopping:
            self._start_more()
        self.view.show(self.cells)

    def _start_more(self) -> None:
        now = self.clock()
        for each in self.cells:
            if each.state != "waiting" or each.not_before > now:
                continue
            running = self.running
            if each.cell.row not in self._warm and any(other.cell.row == each.cell.row for other in running):
                continue
            if not self.capacity.has_room(each.cell, [other.cell for other in running]):
                # A smaller cell must not take its place, or it might never start.
                return
            if not self._is_worth_starting():
                if not running:
                    self.is_stopping = True
                return
            each.cell.folder.mkdir(parents=True, exist_ok=True)
            each.begin(self.launcher.start(self.argument_of(each.cell), each.cell.folder / LOG), now)

    def _is_worth_starting(self) -> bool:
        """Whether a cell would start training before it has to save."""
        if self.deadline is None:
            return True
        known = [each.start_seconds for each in self.cells if each.start_seconds is not None]
        needed = 1.5 * statistics.median(known) if known else 0.0
        return self.clock() + needed < self.deadline - self._seconds_to_stop(len(self.running) + 1)

    def _seconds_to_stop(self, count: int) -> float:
        """Seconds that all processes need to save and end, one after the other on a slow disk, plus ``afterwards``."""
        assert self.deadline is not None
        said = [each.status.save_seconds for each in self.cells if each.status is not None]
        save = max((each for each in said if each is not None), default=UNMEASURED_SAVE)
        wanted = MARGIN + save * max(1, count) + self.afterwards()
        # At least half of the time is reserved for work, however slow saving is.
        return min(wanted, 0.5 * (self.deadline - self._begun))

    def _stop_in_time(self) -> None:
        now = self.clock()
        is_due = self.deadline is not None and now >= self.deadline - self._seconds_to_stop(len(self.running))
        if not self.is_stopping and (self.stop.signal is not None or is_due):
            self.is_stopping = True
            running = self.running
            if running:
                why = "time is up" if self.stop.signal is None else f"signal {self.stop.signal}"
                what = "1 cell saves and stops" if len(running) == 1 else f"{len(running)} cells save and stop"
                self.view.say(f"{why}: {what}")
            for each in running:
                assert each.child is not None
                each.child.send(signal.SIGTERM)
        if self.is_stopping and self.deadline is not None and now >= self.deadline - self.afterwards():
            # Processes that have not ended are killed; their last checkpoints remain.
            for each in self.running:
                if each.child is not None and each.child.process is not None and each.child not in self._killed:
                    self._killed.add(each.child)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.child.process, signal.SIGKILL)

    def _end(self, each: Progress) -> None:
        """Handle the end of a cell's process."""
        now = self.clock()
        assert each.child is not None
        assert each.child.code is not None
        code = each.child.code
        each.look(now)
        each.seconds += now - each.begun
        each.child = None
        if code == 0:
            try:
                each.result = finished(each.cell.folder, each.cell.config, self.device)
            except (ValueError, OSError) as error:
                each.why = str(error)
            else:
                each.why = "" if each.result is not None else "its process ended well and left no result"
            each.state = "failed" if each.why else "done"
            self._warm.add(each.cell.row)
            self.view.say(f"{each.name}: {each.why or f'done, {each.metric}'} ({each.seconds:,.0f} s)")
            return
        near = [other for when, other in self._died if other is not each and now - when <= deaths.TOGETHER]
        cause = deaths.cause_of(
            each, code, has_neighbours=self.is_shared and bool(near), is_measured=self.capacity.is_measured,
            is_forked=self.launcher.has_server,
        )  # fmt: skip
        if self.is_stopping and cause != "error":
            each.state = "stopped"
            return
        if cause == "memory":
            self.capacity.lower(len(self.running) - 1)
        elif cause == "fork":
            self.view.say("a forked process cannot use the GPU here: each cell gets an interpreter of its own")
            self.launcher.give_up_server()
        if deaths.may_try_again(each, cause):
            each.state, each.not_before = "waiting", now + each.deaths
            self.view.say(f"{each.name}: {deaths.explain(each, code).splitlines()[0]}; it goes on from its checkpoint")
        else:
            each.state, each.why = "failed", deaths.explain(each, code)
            self.view.say(f"{each.name} failed: {each.why}")
