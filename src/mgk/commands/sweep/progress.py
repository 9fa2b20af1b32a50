"""A cell on its way through a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mgk.commands.processes.launcher import Child
from mgk.commands.sweep.cell import Cell
from mgk.commands.sweep.cell_process import LOG
from mgk.commands.training import show_metric
from mgk.training import checkpoint
from mgk.training.loop import CHECKPOINTS, STEP
from mgk.training.status import Status, read_status

State = Literal["waiting", "running", "done", "stopped", "failed"]

LAST_LINES = 12
"""Of a log are shown where a process died without a word."""


@dataclass(eq=False, kw_only=True)
class Progress:
    """How far a cell is, and what happened to it."""

    cell: Cell
    state: State = "waiting"
    result: dict[str, Any] | None = None
    why: str = ""
    """Why it failed."""
    child: Child | None = None
    """The process at work on it."""
    status: Status | None = None
    """What that said last."""
    attempts: int = 0
    """Processes that have worked on it in this sweep."""
    seconds: float = 0.0
    """Spent on it by those, start-ups counted."""
    begun: float = 0.0
    start_seconds: float | None = None
    """From the start of its last process until that had trained."""
    not_before: float = 0.0
    """When it may be tried again."""
    deaths: int = 0
    """Processes that died one after the other without the cell coming further."""
    deaths_of_others: int = 0
    """Likewise, of those which another process took with it."""
    saved_step: int = 0
    """Of the newest checkpoint, when it died last."""
    log_size: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        return f"{self.cell.config.name} {self.cell.title}"

    def look(self, now: float) -> None:
        """Read what the process says."""
        found = read_status(self.cell.folder)
        # Not what one before it has said.
        if found is not None and self.child is not None and found.process == self.child.process:
            self.status = found
            if self.start_seconds is None and found.start_seconds is not None:
                self.start_seconds = now - self.begun

    def newest_step(self) -> int:
        """The step that the cell would go on from."""
        found = checkpoint.candidates(self.cell.folder / CHECKPOINTS, STEP)
        return checkpoint.step_of(found[0]) if found else 0

    def begin(self, child: Child, now: float) -> None:
        """A process has been started."""
        log = self.cell.folder / LOG
        self.log_size = log.stat().st_size if log.is_file() else 0
        self.child, self.status, self.state, self.begun = child, None, "running", now
        self.start_seconds = None
        self.attempts += 1

    def last_words(self) -> str:
        """What the process said of its failure, or the end of its log."""
        if self.status is not None and self.status.state == "failed":
            return self.status.error
        return "\n".join(self.log().splitlines()[-LAST_LINES:])

    def log(self) -> str:
        """All that the process has printed."""
        try:
            with (self.cell.folder / LOG).open("rb") as file:
                file.seek(self.log_size)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    @property
    def seconds_left(self) -> float | None:
        """Until its last update, at the speed of its process so far."""
        status = self.status
        if self.state != "running" or status is None or status.start_seconds is None:
            return None
        pace = (status.seconds - status.start_seconds) / max(1, status.step - status.first_step - 1)
        return pace * (status.steps - status.step)

    @property
    def metric(self) -> str:
        """The best validation so far, or the test once it is done, for people."""
        name = self.cell.config.validation.metric
        if self.result is not None:
            return show_metric(name, self.result["metrics"]["test"][name])
        best = None if self.status is None else self.status.best
        return "" if best is None else show_metric(name, -best if name == "loss" else best)
