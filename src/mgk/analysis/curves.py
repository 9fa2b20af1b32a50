"""Learning curves, read from the measurements that a run writes during training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk.training.tracking import METRICS

KINDS = {"train": "training", "valid": "validation"}

# Measurements that are not learning curves.
NOT_LEARNED = ("step", "kind", "count", "seconds", "tokens", "tokens_per_second", "gpu_gib", "validation_seconds")


@dataclass(frozen=True, kw_only=True)
class LearningCurves:
    """The measurements of one run over its steps."""

    name: str
    """Name of the run: that of its folder or file."""
    points: Mapping[str, Sequence[tuple[int, float]]]
    """Points ``(step, value)`` in order, by names such as ``training loss`` and ``validation accuracy``."""
    left_out: int
    """Number of values that were not finite."""


def learning_curves(path: str | Path, *, name: str | None = None) -> LearningCurves:
    """Read the curves of a run.

    Args:
        path: folder of a run, or a file of JSON lines such as those in ``results/curves``.
        name: name to show; ``None`` is that of the folder or file.
    """
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} must be the folder of a run or a file of its measurements, got no {file.name} there")
    points: dict[str, list[tuple[int, float]]] = {}
    left_out = 0
    lines = read_measurements(file)
    for line in lines:
        for key, value in line.items():
            if key in NOT_LEARNED:
                continue
            if not math.isfinite(value):
                left_out += 1
                continue
            points.setdefault(f"{KINDS.get(line['kind'], line['kind'])} {key}", []).append((line["step"], value))
    if not points:
        raise ValueError(
            f"{file} must hold a measurement as JSON on each line, got {len(lines)} and none that is finite"
        )
    for curve in points.values():
        curve.sort(key=lambda point: point[0])
    if name is None:
        name = path.name if path.is_dir() else path.stem
    return LearningCurves(name=name, points=points, left_out=left_out)


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """Read the measurements of a run in order: ``step``, ``kind``, and numbers, which are NaN if not finite.

    The last line may be cut short by a process that died. Any other damaged line is an error, because an unnoticed gap
    in a curve is worse than no curve.
    """
    lines: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        line = _parse(text)
        if line is not None:
            lines.append(line)
        elif text.strip() and number < len(texts):
            raise ValueError(
                f"{path} must have a measurement as JSON in every line, got {text[:60]!r} in line {number}"
            )
    return lines


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not isinstance(line.get("kind"), str):
        return None
    values = {key: value for key, value in line.items() if key not in ("step", "kind")}
    if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
        return None
    # A measurement that is not finite is written as null.
    return {**line, **{key: math.nan if value is None else float(value) for key, value in values.items()}}
