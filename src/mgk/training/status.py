"""Where a run is, for another process: one small JSON file in the folder of the run, always whole."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import TaskID

from mgk.training.tracking import Display

STATUS = "status.json"
EVERY = 0.5
"""Seconds between two writings: often enough to look at, seldom enough to cost nothing."""

State = Literal["starting", "training", "evaluating", "analysing", "done", "stopped", "failed"]


@dataclass(kw_only=True)
class Status:
    """What a run says about itself."""

    process: int
    """Which one says it."""
    state: State = "starting"
    first_step: int = 0
    """Where this process began."""
    step: int = 0
    """Updates done."""
    steps: int = 0
    """Updates in all."""
    loss: float | None = None
    best: float | None = None
    """The best validation so far, as a score: higher is better."""
    says: str = ""
    """The line that people see."""
    seconds: float = 0.0
    """Since this process began."""
    start_seconds: float | None = None
    """How much of that went by until its first update was done."""
    save_seconds: float | None = None
    """The longest time that a checkpoint took to write."""
    device: str = ""
    """In words."""
    memory: int | None = None
    """Bytes of the GPU that the process has held at most, the driver's own share not counted."""
    device_memory: int | None = None
    """Bytes that the GPU has."""
    error: str = ""
    """Why it failed."""


class StatusFile:
    """Keeps a :class:`Status` in a folder up to date. A disk that takes no more costs the status, never the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATUS
        self.status = Status(process=os.getpid())
        self.begun = time.monotonic()
        self._written = -math.inf
        self.write()

    def write(self, *, at_least: float = 0.0) -> None:
        """Write it, unless the last time was less than so many seconds ago."""
        now = time.monotonic()
        if now - self._written < at_least:
            return
        self._written = now
        self.status.seconds = now - self.begun
        if torch.cuda.is_initialized():
            self.status.memory = torch.cuda.max_memory_reserved()
            if self.status.device_memory is None:
                self.status.device_memory = torch.cuda.mem_get_info()[1]
        temporary = self.path.with_name(f".{self.path.name}")
        try:
            temporary.write_text(json.dumps(dataclasses.asdict(self.status)), encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            return

    def enter(self, state: State, error: str = "") -> None:
        """Say that something new has begun, or ended."""
        self.status.state, self.status.error = state, error
        self.write()


def read_status(folder: Path) -> Status | None:
    """What the run in a folder said last; ``None`` where it has said nothing that can be read."""
    try:
        return Status(**json.loads((folder / STATUS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class StatusDisplay(Display):
    """A display that keeps a status file as well."""

    def __init__(self, file: StatusFile, *, console: Console | None = None) -> None:
        super().__init__(console=console)
        self.file = file

    def add(self, name: str, total: int, done: int = 0) -> TaskID:
        status = self.file.status
        status.first_step = status.step = done
        status.steps = total
        self.file.enter("training")
        return super().add(name, total, done)

    def update(
        self,
        row: TaskID,
        done: int,
        total: int,
        says: str,
        *,
        always: bool = False,
        loss: float | None = None,
        best: float | None = None,
    ) -> None:
        super().update(row, done, total, says, always=always, loss=loss, best=best)
        status = self.file.status
        # JSON has no word for NaN.
        status.loss = loss if loss is not None and math.isfinite(loss) else None
        status.step, status.best, status.says = done, best, says
        is_first = status.start_seconds is None and done > status.first_step
        if is_first:
            status.start_seconds = time.monotonic() - self.file.begun
        # Somebody may be waiting for the first one.
        self.file.write(at_least=0.0 if is_first else EVERY)

    def saved(self, seconds: float) -> None:
        self.file.status.save_seconds = max(seconds, self.file.status.save_seconds or 0.0)
