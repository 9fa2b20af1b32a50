"""The summary of a sweep: seconds per cell, start-ups included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgk.commands.sweep.progress import Progress
from mgk.training import result

FORMAT = 1


def summarize(
    cells: Sequence[Progress], *, seconds: float, jobs: int, is_automatic: bool, has_service: bool
) -> dict[str, Any]:
    """Return the content of ``--summary``.

    ``seconds_per_cell`` is the time of the whole command, from the start of its process, divided by the number of cells
    that it finished. It is left out if a cell was stopped or failed, because the time of that cell would count without
    a result.

    Args:
        cells: cells of the sweep.
        seconds: time of the whole command.
        jobs: most cells at once.
        is_automatic: whether ``--jobs auto`` chose ``jobs``.
        has_service: whether the cells shared the GPU through NVIDIA's service.
    """
    worked = [each for each in cells if each.attempts]
    made = [each for each in worked if each.state == "done"]
    devices = sorted({each.status.device for each in worked if each.status is not None and each.status.device})
    return {
        "format": FORMAT,
        "device": devices[0] if len(devices) == 1 else devices,
        "versions": result.versions(),
        "jobs": jobs,
        "jobs_automatic": is_automatic,
        "multi_process_service": has_service,
        "seconds": seconds,
        "cells_finished": len(made),
        "seconds_per_cell": seconds / len(made) if made and len(made) == len(worked) else None,
        "cells": [_describe(each) for each in worked],
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write the summary atomically."""
    result.write(path, content)


def _describe(each: Progress) -> dict[str, Any]:
    config, status = each.cell.config, each.status
    return {
        "recipe": config.name,
        "row": config.row,
        "seed": config.seed,
        "state": each.state,
        "seconds": each.seconds,
        "start_seconds": each.start_seconds,
        "first_step": None if status is None else status.first_step,
        "steps": None if status is None else status.step,
        "attempts": each.attempts,
        "memory": None if status is None else status.memory,
    }
