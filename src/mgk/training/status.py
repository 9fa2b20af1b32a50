"""The status of a run for other processes: a small JSON file in its folder, written atomically."""

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
"""Seconds between two writes, which is often enough to watch and costs next to nothing."""

State = Literal["starting", "training", "evaluating", "analysing", "done", "stopped", "failed"]


@dataclass(kw_only=True)
class Status:
    """The status that a run reports."""

    process: int
    """Id of the process."""
    state: State = "starting"
    first_step: int = 0
    """Step at which this process began."""
    step: int = 0
    """Number of updates done."""
    steps: int = 0
    """Number of updates in total."""
    loss: float | None = None
    best: float | None = None
    """Best validation score so far; higher is better."""
    says: str = ""
    """Line of text that the display shows."""
    seconds: float = 0.0
    """Seconds since this process began."""
    start_seconds: float | None = None
    """Seconds until its first update was done."""
    save_seconds: float | None = None
    """Longest time in seconds that writing a checkpoint took."""
    device: str = ""
    """Name of the device."""
    memory: int | None = None
    """Peak GPU memory of the process in bytes, without the driver's own share."""
    device_memory: int | None = None
    """Total memory of the GPU in bytes."""
    error: str = ""
    """Reason of a failure."""


class StatusFile:
    """The file of a :class:`Status`. Errors of writing it, such as a full disk, never stop the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATUS
        self.status = Status(process=os.getpid())
        self.begun = time.monotonic()
        self._written = -math.inf
        self.write()

    def write(self, *, at_least: float = 0.0) -> None:
        """Write the status, unless the last write was less than ``at_least`` seconds ago."""
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
        """Enter a new state, and write it at once."""
        self.status.state, self.status.error = state, error
        self.write()


def read_status(folder: Path) -> Status | None:
    """Read the last status of the run in a folder; ``None`` if there is none that can be read."""
    try:
        return Status(**json.loads((folder / STATUS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class StatusDisplay(Display):
    """A display that also keeps a status file up to date."""

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
        # JSON cannot represent NaN.
        status.loss = loss if loss is not None and math.isfinite(loss) else None
        status.step, status.best, status.says = done, best, says
        is_first = status.start_seconds is None and done > status.first_step
        if is_first:
            status.start_seconds = time.monotonic() - self.file.begun
        # The first update is written at once, because another process may be waiting for it.
        self.file.write(at_least=0.0 if is_first else EVERY)

    def saved(self, seconds: float) -> None:
        self.file.status.save_seconds = max(seconds, self.file.status.save_seconds or 0.0)
