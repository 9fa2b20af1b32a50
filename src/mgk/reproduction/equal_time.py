"""Loss of a row after a given time of training, alone on the device: its steps times the seconds of a step.

Runs of a sweep share the GPU, so their own clocks say nothing; the seconds of an update come from ``mgk bench rows``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mgk.reproduction import throughput
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results

Curve = list[tuple[float, float]]
"""Seconds and bits, in order."""


def curves(timed: str, home: str, row: str, results: Results) -> dict[int, Curve]:
    """The validation loss of each seed in bits, against the seconds of training; empty where the row is not timed.

    Args:
        timed: the recipe whose rows took turns.
        home: the recipe that the runs belong to.
        row: of both.
        results: what we have.
    """
    seconds = throughput.seconds_per_update(timed, row, results)
    if seconds is None:
        return {}
    found = {}
    for seed, lines in results.curves(home, row).items():
        if seed not in results.trained(home, row):
            continue
        points = _points(lines)
        if points:
            found[seed] = [(step * seconds, bits) for step, bits in points]
    return found


def duration(timed: str, row: str, results: Results) -> float | None:
    """Return the seconds that all updates of the recipe take, alone on the device."""
    seconds = throughput.seconds_per_update(timed, row, results)
    return None if seconds is None else seconds * int(bundled(timed).values["training"]["steps"])


def at_time(curve: Curve, seconds: float) -> float | None:
    """Interpolate the bits after the given seconds; ``None`` before the first validation.

    Between two validations they lie on the line through them. A run that is over learns no more.
    """
    if not curve or seconds < curve[0][0]:
        return None
    for (start, before), (end, after) in itertools.pairwise(curve):
        if seconds <= end:
            share = (seconds - start) / (end - start)
            return (1 - share) * before + share * after
    return curve[-1][1]


def _points(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    by_step = {
        int(line["step"]): float(line["loss"]) / math.log(2)
        for line in lines
        if line["kind"] == "valid" and line["step"] > 0 and math.isfinite(line.get("loss", math.nan))
    }
    return sorted(by_step.items())
