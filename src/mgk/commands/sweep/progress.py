"""The progress of a cell through a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mgk.commands.processes.launcher import Child
from mgk.commands.sweep.cell import Cell
from mgk.commands.sweep.cell_process import LOG
from mgk.commands.training import show_metric
from mgk.training import checkpoint
from mgk.training.run_checkpoints import CHECKPOINTS, STEP
from mgk.training.status import Status, read_status

State = Literal["waiting", "running", "done", "stopped", "failed"]

LAST_LINES = 12
"""Number of lines of the log to show if a process died without a message."""


@dataclass(eq=False, kw_only=True)
class Progress:
    """The state of a cell and its history in this sweep."""

    cell: Cell
    state: State = "waiting"
    result: dict[str, Any] | None = None
    why: str = ""
    """Reason of its failure."""
    child: Child | None = None
    """Process that runs it now."""
    status: Status | None = None
    """Last status that the process has reported."""
    attempts: int = 0
    """Number of processes started for it in this sweep."""
    seconds: float = 0.0
    """Time that these processes took, start-up included."""
    begun: float = 0.0
    start_seconds: float | None = None
    """Seconds from the start of its last process to the first update."""
    not_before: float = 0.0
    """Time before which it must not be retried."""
    deaths: int = 0
    """Number of deaths in a row without progress."""
    deaths_of_others: int = 0
    """Number of deaths in a row without progress that another process has caused."""
    saved_step: int = 0
    """Step of the newest checkpoint at the last death."""
    log_size: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        return f"{self.cell.config.name} {self.cell.title}"

    def look(self, now: float) -> None:
        """Read the status that the process reports."""
        found = read_status(self.cell.folder)
        # Ignore the status of an earlier process.
        if found is not None and self.child is not None and found.process == self.child.process:
            self.status = found
            if self.start_seconds is None and found.start_seconds is not None:
                self.start_seconds = now - self.begun

    def newest_step(self) -> int:
        """Step from which the cell would resume."""
        found = checkpoint.candidates(self.cell.folder / CHECKPOINTS, STEP)
        return checkpoint.step_of(found[0]) if found else 0

    def begin(self, child: Child, now: float) -> None:
        """Record that a process has been started."""
        log = self.cell.folder / LOG
        self.log_size = log.stat().st_size if log.is_file() else 0
        self.child, self.status, self.state, self.begun = child, None, "running", now
        self.start_seconds = None
        self.attempts += 1

    def last_words(self) -> str:
        """The error that the process has reported, or the end of its log."""
        if self.status is not None and self.status.state == "failed":
            return self.status.error
        return "\n".join(self.log().splitlines()[-LAST_LINES:])

    def log(self) -> str:
        """The whole log of the process."""
        try:
            with (self.cell.folder / LOG).open("rb") as file:
                file.seek(self.log_size)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last update, at the speed of its process so far."""
        status = self.status
        if self.state != "running" or status is None or status.start_seconds is None:
            return None
        pace = (status.seconds - status.start_seconds) / max(1, status.step - status.first_step - 1)
        return pace * (status.steps - status.step)

    @property
    def metric(self) -> str:
        """The best validation metric so far, or the test metric of a finished cell, formatted."""
        name = self.cell.config.validation.metric
        if self.result is not None:
            return show_metric(name, self.result["metrics"]["test"][name])
        best = None if self.status is None else self.status.best
        return "" if best is None else show_metric(name, -best if name == "loss" else best)
