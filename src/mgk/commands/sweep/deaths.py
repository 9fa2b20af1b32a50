"""The decision whether to retry a cell whose process has failed."""

from __future__ import annotations

import re
from typing import Literal

from mgk.commands.sweep.progress import Progress

MOST_DEATHS = 3
"""Most deaths in a row without progress of the cell; the next one fails it."""
MOST_DEATHS_OF_OTHERS = 10
"""The same for deaths that another process has caused."""
TOGETHER = 60.0
"""Seconds within which deaths are assumed to have the same cause."""

_CUDA = re.compile(r"CUDA (driver )?error|cudaError|CUBLAS_STATUS|CUDNN_STATUS|CUDA_ERROR|MPS (client|server)", re.I)
_NO_FORK = re.compile(r"forked subprocess|CUDA.{0,40}initialization error|cuInit", re.I | re.S)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.I)

Cause = Literal["killed", "neighbour", "memory", "fork", "error"]


def cause_of(progress: Progress, code: int, *, has_neighbours: bool, is_measured: bool, is_forked: bool) -> Cause:
    """Return the cause of a process's death.

    Args:
        progress: progress of the cell.
        code: exit code of its process.
        has_neighbours: whether another process that shares the GPU's service died shortly before or with it.
        is_measured: whether the sweep chose the number of processes by memory.
        is_forked: whether the process was forked from a server.
    """
    words = progress.last_words()
    if code < 0 or code >= 128:
        # A signal: one that cannot be caught, a fault of the process, or one that somebody sent.
        return "killed"
    if is_forked and (progress.status is None or progress.status.step == 0) and _NO_FORK.search(words):
        return "fork"
    if _NO_MEMORY.search(words):
        return "memory" if is_measured else "error"
    if has_neighbours and _CUDA.search(words):
        return "neighbour"
    return "error"


def may_try_again(progress: Progress, cause: Cause) -> bool:
    """Count a death, and return whether to retry. An error of the cell itself would recur; other causes may not."""
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
    """Describe the end of the process in words, with the last lines that it printed."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    words = progress.last_words().strip() or "it said nothing"
    again = f", {progress.attempts} times in all" if progress.attempts > 1 else ""
    return f"its process {how}{again}: {words}"
