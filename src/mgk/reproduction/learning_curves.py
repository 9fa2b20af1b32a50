"""Figures with learning curves of several rows, as mean and standard error over seeds."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk.analysis.canvas import COLOURS, MARKERS, canvas, hide, show_grid
from mgk.reproduction.statistics import mean, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED = 10
"""Number of measurements over which training losses are averaged."""

Lines = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The content of a panel."""

    title: str
    label: str
    """Label of the vertical axis."""
    kind: str
    """``train`` or ``valid``."""
    key: str
    """Key of the measurement."""
    scale: float = 1.0
    is_exponential: bool = False
    """Whether to show the exponential, which is the perplexity of a loss."""
    log: bool = False
    """Whether both axes are logarithmic."""
    zoom: bool = False
    """Whether to show only the second half of training."""


def points(runs: Mapping[int, Lines], panel: Panel) -> tuple[list[int], list[float], list[float]]:
    """Return steps, means and standard errors over seeds (0 for a single seed), at the steps that every seed has."""
    by_seed = []
    for lines in runs.values():
        own = {
            line["step"]: line[panel.key]
            for line in lines
            if line["kind"] == panel.kind and math.isfinite(line.get(panel.key, math.nan)) and line["step"] > 0
        }
        by_seed.append(_smooth(own) if panel.kind == "train" else own)
    steps = sorted(set.intersection(*(set(own) for own in by_seed))) if by_seed else []
    means, errors = [], []
    for step in steps:
        values = [_transform(own[step], panel) for own in by_seed]
        means.append(mean(values))
        errors.append(standard_error(values) or 0.0)
    return steps, means, errors


def draw(
    panels: Sequence[tuple[Panel, Mapping[str, Mapping[int, Lines]]]], path: Path, *, title: str, columns: int
) -> int:
    """Draw the panels, and return the number of curves.

    Args:
        panels: panels with their runs by row and seed. The first row is the baseline; rows without runs keep their
            colour.
        path: PNG file to write, unless there is no curve.
        title: title of the figure.
        columns: number of panels side by side.
    """
    found = [(panel, {row: points(runs, panel) for row, runs in rows.items()}) for panel, rows in panels]
    count = sum(bool(steps) for _, rows in found for steps, _, _ in rows.values())
    if not count:
        return 0
    with canvas(path, rows=len(panels) // columns, columns=columns, size=(4.6, 3.4)) as (figure, grid):
        for axes, (panel, rows) in zip(grid, found, strict=True):
            if any(steps for steps, _, _ in rows.values()):
                _draw_panel(axes, panel, rows)
            else:
                hide(axes)
                axes.set_title(f"{panel.title}: no runs yet")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return count


def _draw_panel(axes: Axes, panel: Panel, rows: Mapping[str, tuple[list[int], list[float], list[float]]]) -> None:
    last = max(steps[-1] for steps, _, _ in rows.values() if steps)
    for index, (row, (steps, means, errors)) in enumerate(rows.items()):
        if not steps:
            continue
        if panel.zoom:
            # A run that ended in the first half has no points left.
            first = bisect.bisect_left(steps, last / 2)
            steps, means, errors = steps[first:], means[first:], errors[first:]
        axes.plot(
            steps, means, color=COLOURS[index], linewidth=1.6, label=row, marker=MARKERS[index], markersize=4,
            markevery=(0.04 * index, 0.2),
        )  # fmt: skip
        lower = [centre - error for centre, error in zip(means, errors, strict=True)]
        upper = [centre + error for centre, error in zip(means, errors, strict=True)]
        axes.fill_between(steps, lower, upper, color=COLOURS[index], alpha=0.2, linewidth=0)
    if panel.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_ticks(axes)
    else:
        axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
        axes.locator_params(axis="x", nbins=5)
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.label)
    axes.legend(loc="best")
    show_grid(axes)


def _plain_ticks(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers, also between powers of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: thousands(value))


def thousands(value: float) -> str:
    """``2k`` for 2,000."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _transform(value: float, panel: Panel) -> float:
    return panel.scale * (math.exp(min(value, 50.0)) if panel.is_exponential else value)


def _smooth(values: Mapping[int, float]) -> dict[int, float]:
    steps = sorted(values)
    return {
        step: mean([values[each] for each in steps[max(0, place - SMOOTHED + 1) : place + 1]])
        for place, step in enumerate(steps)
    }
