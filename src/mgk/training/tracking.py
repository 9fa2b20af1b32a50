"""Tracking of a run: a line of JSON per measurement, TensorBoard, and a progress display."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

METRICS = "metrics.jsonl"

Report = Callable[[str], None]


class Curves:
    """Writer of measurements to ``metrics.jsonl`` and TensorBoard. Errors such as a full disk never stop the run.

    Args:
        folder: folder of the run.
        step: step from which the run resumes. Later lines, from a process that died before its next checkpoint, are
            dropped, since they will be written again.
        validated: step of the last validation, for the same reason.
        report: called once with a message if something cannot be written.
        tensorboard: whether to write for TensorBoard as well.
    """

    def __init__(self, folder: Path, step: int, validated: int, report: Report, *, tensorboard: bool = True) -> None:
        self.path = folder / METRICS
        self._report = report
        self._failed = False
        self._board: Any = None
        self._guard(self._drop_after, step, validated)
        if tensorboard:
            self._guard(self._open_board, folder, step)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Write one measurement."""
        self._guard(self._write, step, kind, values)

    def close(self) -> None:
        if self._board is not None:
            self._guard(self._board.close)

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            # JSON cannot represent NaN.
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def _open_board(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _drop_after(self, step: int, validated: int) -> None:
        if self.path.exists():
            lines = read_curves(self.path)
            kept = [line for line in lines if line["step"] <= (validated if line["kind"] == "valid" else step)]
            temporary = self.path.with_suffix(".writing")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            temporary.replace(self.path)

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if not self._failed:
                self._report(f"the curves cannot be written, the run goes on without: {error}")
            self._failed = True


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Read the measurements of a run in order, without a line that a dying process cut short."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


class Display:
    """A progress bar in a terminal, plain lines elsewhere, and nothing if ``quiet``.

    Several runs may share a display, with a row for each. Errors of the output, such as a full disk, a closed pipe or a
    vanished terminal, lose lines but never stop the run.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None, every: float = 30.0) -> None:
        self.console = console or Console(stderr=True)
        self.console.file = cast(IO[str], CarelessFile(self.console.file))
        self.quiet = quiet
        self.every = every
        self._is_live = self.console.is_terminal and not quiet
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[says]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=self.console, disable=not self._is_live,
        )  # fmt: skip
        self._last: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._begun: dict[int, tuple[float, int]] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def add(self, name: str, total: int, done: int = 0) -> TaskID:
        """Add a row and return its id."""
        row = self._bars.add_task(name, total=total, completed=done, says="")
        self._names[row] = name
        self._begun[row] = time.monotonic(), done
        return row

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
        """Update a row. Without a terminal this prints a line every ``every`` seconds, and whenever ``always`` is set.

        ``says`` already shows ``loss`` and ``best``, the best validation score. They are passed as numbers for displays
        that store them, such as :class:`mgk.training.status.StatusDisplay`.
        """
        self._bars.update(row, completed=done, says=says)
        now = time.monotonic()
        if not self._is_live and not self.quiet and (always or now - self._last.get(row, 0.0) >= self.every):
            self._last[row] = now
            begun, first = self._begun[row]
            left = datetime.timedelta(seconds=round((now - begun) / max(done - first, 1) * (total - done)))
            parts = (f"{self._names[row]}: step {done:,} of {total:,}", says, f"{left} left")
            self.say(", ".join(part for part in parts if part))

    def saved(self, seconds: float) -> None:
        """Note how long writing a checkpoint took, for displays that must stop a run in time."""

    def say(self, text: str) -> None:
        """Print a message."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class CarelessFile:
    """A file for display whose errors are ignored, because rich would end the program at a closed pipe."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
