"""The number of cells that fit on the device at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mgk.commands.sweep.cell import Cell
from mgk.training.status import Status

SHARE = 0.92
"""Share of a GPU's memory that the cells may use."""
CONTEXT = 2**30
"""Bytes that a process uses on a GPU besides its tensors: the driver's context, kernels, captured graphs."""
UNTRIED = 1.5
"""Factor by which the memory of a cell may still grow until its first validation, which has larger batches."""


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Capacity:
    """Decides whether there is room for one more cell.

    ``jobs`` fixes the number of cells; ``None`` is as many as fit. On a CPU that is one per core. On a GPU it is one
    until the first steps of that cell have shown how much memory it needs, and then as many as fit the memory, with two
    cores for each: one thread launches kernels and another makes batches.
    """

    def __init__(self, jobs: int | None, *, is_on_gpu: bool) -> None:
        self.is_measured = jobs is None and is_on_gpu
        """Whether the memory of the GPU limits the number."""
        self.limit = jobs or (max(1, cores() // 2) if is_on_gpu else cores())
        """Most cells at once."""
        self._size = 0
        self._needs: dict[tuple[str, str], float] = {}
        self._validated: set[tuple[str, str]] = set()

    @property
    def threads(self) -> int:
        """Number of CPU threads for each process: its part of the cores, or fewer if the user has set a limit."""
        # With as many threads as cores, a process spends most of its time waiting when it is not alone on the machine.
        most = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        part = max(1, cores() // self.limit)
        return min(part, int(most)) if most.isdigit() and int(most) > 0 else part

    def note(self, cell: Cell, status: Status) -> None:
        """Record the memory that a cell uses."""
        self._size = status.device_memory or self._size
        if status.memory is None or status.step <= status.first_step:
            return
        held = CONTEXT + status.memory
        if status.best is None and cell.row not in self._validated:
            self._needs[cell.row] = max(UNTRIED * held, self._needs.get(cell.row, 0.0))
        else:
            # A measurement after validation replaces those from seeds that have not validated yet.
            before = self._needs[cell.row] if cell.row in self._validated else 0.0
            self._needs[cell.row] = max(held, before)
            self._validated.add(cell.row)

    def lower(self, others: int) -> None:
        """Lower the limit to ``others``, after a cell ran out of memory beside so many."""
        self.limit = max(1, min(self.limit, others))

    def has_room(self, cell: Cell, running: Sequence[Cell]) -> bool:
        """Whether a cell may start beside the running ones."""
        if len(running) >= self.limit:
            return False
        if not self.is_measured or not running:
            return True
        # Nothing is known about memory until one cell has been measured.
        return bool(self._needs) and sum(map(self._need, [cell, *running])) <= SHARE * self._size

    def _need(self, cell: Cell) -> float:
        """Estimate the memory of a cell: that of its row, else the largest of its recipe, else twice the largest."""
        if cell.row in self._needs:
            return self._needs[cell.row]
        recipe = [need for (name, _), need in self._needs.items() if name == cell.config.name]
        if recipe:
            return max(recipe)
        return 2 * max(self._needs.values())
