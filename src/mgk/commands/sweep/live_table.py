"""The live display of a sweep: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mgk.commands.sweep.progress import Progress
from mgk.training.tracking import CarelessFile

STYLES = {"running": "bold", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
# States by descending interest, for a window that cannot show all cells.
ORDER = ("running", "failed", "stopped", "done", "waiting")
BESIDE = 8
"""Lines of the window that are not for cells."""


class LiveTable:
    """Context that shows the progress of cells.

    Args:
        console: console to print to; it shows a table if it is a terminal.
        every: seconds between two lines about a cell if it is not.
    """

    def __init__(self, console: Console | None = None, *, every: float = 30.0) -> None:
        self.console = console or Console(stderr=True)
        self.console.file = cast(IO[str], CarelessFile(self.console.file))
        self.every = every
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._last: dict[Progress, float] = {}
        self._drawn = -math.inf

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, cells: Sequence[Progress]) -> None:
        """Show the progress of the cells, if an update is due."""
        now = time.monotonic()
        if self.console.is_terminal:
            if now - self._drawn >= 0.5:
                self._drawn = now
                self._live.update(table_of(cells, max(3, self.console.height - BESIDE)), refresh=True)
            return
        for each in cells:
            if each.state == "running" and now - self._last.setdefault(each, now) >= self.every:
                self._last[each] = now
                self.say(line_of(each))

    def say(self, text: str) -> None:
        """Print a message above the table."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def table_of(cells: Sequence[Progress], lines: int) -> Table:
    """Return a table of at most ``lines`` cells, the most interesting first, with the count of each state below."""
    counts = {state: sum(each.state == state for each in cells) for state in ORDER}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table("cell", "state", "step", "loss", "metric", "left", caption=said, caption_justify="left")
    chosen = sorted(cells, key=lambda each: ORDER.index(each.state))[:lines]
    for each in (each for each in cells if each in chosen):
        state = each.status.state if each.state == "running" and each.status is not None else each.state
        table.add_row(
            escape(each.name), state, *_numbers(each), each.metric, _time(each.seconds_left), style=STYLES[each.state]
        )
    return table


def line_of(each: Progress) -> str:
    """Return the row of one cell as a line of text."""
    step, loss = _numbers(each)
    state = "starting" if each.status is None else each.status.state
    parts = [
        f"{each.name}: {state}", f"step {step}" if step else "", f"loss {loss}" if loss else "",
        f"best {each.metric}" if each.metric else "",
        f"{_time(each.seconds_left)} left" if each.seconds_left is not None else "",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _numbers(each: Progress) -> tuple[str, str]:
    status = each.status
    if status is None or not status.steps:
        return "", ""
    return f"{status.step:,} of {status.steps:,}", "" if status.loss is None else f"{status.loss:.4f}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))
