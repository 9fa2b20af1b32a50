"""How many cells fit on the device at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mgk.commands.sweep.cell import Cell
from mgk.training.status import Status

SHARE = 0.92
"""Of the memory of a GPU may be given away."""
CONTEXT = 2**30
"""Bytes that a process holds on a GPU beside its tensors: the driver's context, kernels, recorded graphs."""
UNTRIED = 1.5
"""What a cell may yet grow by, until it has validated, with larger batches than it trains with."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Capacity:
    """Whether there is room for one more cell.

    A number of jobs is that number. ``None`` is as many as fit: on a CPU one for each core; on a GPU one, until that
    has shown with its first steps how much memory it takes, and then as many as the memory holds, two cores for each,
    since one thread launches kernels and another makes batches.
    """

    def __init__(self, jobs: int | None, *, is_on_gpu: bool) -> None:
        self.is_measured = jobs is None and is_on_gpu
        """Whether the memory decides."""
        self.limit = jobs or (max(1, cores() // 2) if is_on_gpu else cores())
        """The most at once."""
        self._size = 0
        self._needs: dict[tuple[str, str], float] = {}
        self._validated: set[tuple[str, str]] = set()

    @property
    def threads(self) -> int:
        """What each process may have of the CPU."""
        return max(1, cores() // self.limit)

    def note(self, cell: Cell, status: Status) -> None:
        """Learn what a cell takes."""
        self._size = status.device_memory or self._size
        if status.memory is None or status.step <= status.first_step:
            return
        held = CONTEXT + status.memory
        if status.best is None and cell.row not in self._validated:
            self._needs[cell.row] = max(UNTRIED * held, self._needs.get(cell.row, 0.0))
        else:
            # A seed that has yet to validate says less than one that has.
            before = self._needs[cell.row] if cell.row in self._validated else 0.0
            self._needs[cell.row] = max(held, before)
            self._validated.add(cell.row)

    def lower(self, others: int) -> None:
        """Memory has run out for a cell beside so many others: they are the most from now on."""
        self.limit = max(1, min(self.limit, others))

    def has_room(self, cell: Cell, running: Sequence[Cell]) -> bool:
        """Whether a cell may start beside those that run."""
        if len(running) >= self.limit:
            return False
        if not self.is_measured or not running:
            return True
        # Until one has shown what it takes, all others may take anything.
        return bool(self._needs) and sum(map(self._need, [cell, *running])) <= SHARE * self._size

    def _need(self, cell: Cell) -> float:
        """What a cell takes: what its row took, or the largest of its recipe, or twice the largest there is."""
        if cell.row in self._needs:
            return self._needs[cell.row]
        recipe = [need for (name, _), need in self._needs.items() if name == cell.config.name]
        if recipe:
            return max(recipe)
        return 2 * max(self._needs.values())
