"""The step at which each run left the plateau, against the size of the initial shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgk.analysis.canvas import COLOURS, MARKERS, canvas, show_grid
from mgk.reproduction.survival import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOT, ONE, SINGLE = "dot product", "one Gaussian", "one shift"
PLACES = (DOT, ONE, "0", "0.1", "0.25", "0.3", "0 and 0.5", "1", "2", SINGLE)
"""From left to right: no shifts, two shifts by their size, and one of 1 for all keys."""

Series = Mapping[str, Sequence[tuple[str, Sequence[Run]]]]
"""By name: runs at a place of the axis."""


def draw(panels: Sequence[tuple[str, Series]], path: Path) -> int:
    """Draw those panels that have runs; how many rows of runs there are.

    Args:
        panels: a title and its series.
        path: the PNG; not written where there are no runs.
    """
    shown = [(title, series) for title, series in panels if _count(series)]
    if not shown:
        return 0
    with canvas(path, columns=len(shown), size=(6.2, 4.8)) as (figure, grid):
        for axes, (title, series) in zip(grid, shown, strict=True):
            _draw_panel(axes, title, series)
        title = "Steps until a run leaves the plateau, by the shifts it starts with"
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return sum(_count(series) for _, series in shown)


def _count(series: Series) -> int:
    return sum(bool(runs) for own in series.values() for _, runs in own)


def _draw_panel(axes: Axes, title: str, series: Series) -> None:
    there = {place for own in series.values() for place, runs in own if runs}
    places = [place for place in PLACES if place in there]
    drawn = {name: own for name, own in series.items() if any(runs for _, runs in own)}
    for number, (name, own) in enumerate(drawn.items()):
        # Beside each other, so that none hides another.
        offset = 0.7 * ((number + 0.5) / len(drawn) - 0.5)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        for place, runs in own:
            where = [places.index(place) + offset for _ in runs]
            left = [(x, step) for x, (step, has_left) in zip(where, runs, strict=True) if has_left]
            stayed = [(x, step) for x, (step, has_left) in zip(where, runs, strict=True) if not has_left]
            if left:
                axes.plot(*zip(*left, strict=True), color=colour, marker=marker, markersize=4.5, linestyle="none")
            if stayed:
                axes.plot(
                    *zip(*stayed, strict=True), color=colour, marker="+", markersize=9, markeredgewidth=1.6,
                    linestyle="none",
                )  # fmt: skip
        axes.plot([], [], color=colour, marker=marker, markersize=4.5, linestyle="none", label=name)
    axes.set_xticks(range(len(places)), [place.replace(" ", "\n") for place in places], fontsize=9)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, 1.06 * max(step for own in drawn.values() for _, runs in own for step, _ in runs))
    axes.set_title(title)
    axes.set_xlabel("standard deviation of the initial shifts")
    axes.set_ylabel("step (+: still there)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, columnspacing=1.0)
    show_grid(axes)
