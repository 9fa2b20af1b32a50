"""What a sweep took: seconds for each cell, all start-ups counted."""

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
    """The content of ``--summary``.

    ``seconds_per_cell`` is the time of the whole command, from the start of its process, over the cells that it
    finished: what one more cell costs. There is none where a cell was stopped or failed, whose time bought nothing yet.

    Args:
        cells: of the sweep.
        seconds: that the whole command took.
        jobs: cells at once, at most.
        is_automatic: whether ``--jobs auto`` chose them.
        has_service: whether they shared the GPU through NVIDIA's service.
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
    """Write it, whole or not at all."""
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
