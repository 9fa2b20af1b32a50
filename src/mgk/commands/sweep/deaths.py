"""What is to be done about a cell whose process did not end well."""

from __future__ import annotations

import re
from typing import Literal

from mgk.commands.sweep.progress import Progress

MOST_DEATHS = 3
"""So many processes may die one after the other without the cell coming further; the next one that does fails it."""
MOST_DEATHS_OF_OTHERS = 10
"""Likewise, of those that others took with them."""
TOGETHER = 60.0
"""Seconds within which deaths belong together."""

_CUDA = re.compile(r"CUDA (driver )?error|cudaError|CUBLAS_STATUS|CUDNN_STATUS|CUDA_ERROR|MPS (client|server)", re.I)
_NO_FORK = re.compile(r"forked subprocess|CUDA.{0,40}initialization error|cuInit", re.I | re.S)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.I)

Cause = Literal["killed", "neighbour", "memory", "fork", "error"]


def cause_of(progress: Progress, code: int, *, has_neighbours: bool, is_measured: bool, is_forked: bool) -> Cause:
    """Why a process ended as it did.

    Args:
        progress: of the cell.
        code: what its process ended with.
        has_neighbours: whether another one died shortly before or with it, where they share a GPU's service.
        is_measured: whether the sweep chose how many run at once.
        is_forked: whether the process comes from a server.
    """
    words = progress.last_words()
    if code < 0 or code >= 128:
        # By a signal: one that cannot be caught, a fault of its own, or one that somebody sent and it obeyed.
        return "killed"
    if is_forked and (progress.status is None or progress.status.step == 0) and _NO_FORK.search(words):
        return "fork"
    if _NO_MEMORY.search(words):
        return "memory" if is_measured else "error"
    if has_neighbours and _CUDA.search(words):
        return "neighbour"
    return "error"


def may_try_again(progress: Progress, cause: Cause) -> bool:
    """Count a death. An error of the cell's own would come again; what was done to it need not, if it comes further."""
    step = progress.newest_step()
    if step > progress.saved_step:
        progress.deaths = progress.deaths_of_others = 0
    progress.saved_step = max(step, progress.saved_step)
    if cause == "error":
        return False
    if cause == "neighbour":
        progress.deaths_of_others += 1
    else:
        progress.deaths += 1
    return progress.deaths <= MOST_DEATHS and progress.deaths_of_others <= MOST_DEATHS_OF_OTHERS


def explain(progress: Progress, code: int) -> str:
    """In words, with the last ones of the process itself."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    words = progress.last_words().strip() or "it said nothing"
    again = f", {progress.attempts} times in all" if progress.attempts > 1 else ""
    return f"its process {how}{again}: {words}"
