"""Learning curves, from the lines that a run writes while it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgk.training.tracking import METRICS, read_curves

KINDS = {"train": "training", "valid": "validation"}

# What is measured but is no learning curve.
NOT_LEARNED = ("step", "kind", "count", "seconds", "tokens", "tokens_per_second", "gpu_gib")


@dataclass(frozen=True, kw_only=True)
class LearningCurves:
    """What one run measured over its steps."""

    name: str
    """Of the run: its folder, or its file."""
    points: Mapping[str, Sequence[tuple[int, float]]]
    """``(step, value)`` in order, by names such as ``training loss`` and ``validation accuracy``."""
    left_out: int
    """How many values were not finite."""


def learning_curves(path: str | Path, *, name: str | None = None) -> LearningCurves:
    """Read the curves of a run.

    Args:
        path: the folder of a run, or a file of JSON lines such as those in ``results/curves``.
        name: for people; ``None``: that of the folder or file.
    """
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} must be the folder of a run or a file of its measurements, got no {file.name} there")
    lines = read_curves(file)
    points: dict[str, list[tuple[int, float]]] = {}
    left_out = 0
    for line in lines:
        for key, value in line.items():
            if key in NOT_LEARNED:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                left_out += 1
                continue
            points.setdefault(f"{KINDS.get(line['kind'], line['kind'])} {key}", []).append((line["step"], float(value)))
    if not points:
        found = len(file.read_bytes().splitlines())
        raise ValueError(
            f"{file} must hold a measurement as JSON on each line, got {found} lines and none of that kind"
        )
    for curve in points.values():
        curve.sort(key=lambda point: point[0])
    if name is None:
        name = path.name if path.is_dir() else path.stem
    return LearningCurves(name=name, points=points, left_out=left_out)
