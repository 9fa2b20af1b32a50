"""Figures of survival curves, with a panel for each number of heads and a colour for each kind of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgk.analysis.canvas import BLUE, COLOURS, GREEN, INK, MARKERS, ORANGE, PINK, canvas, hide, show_grid
from mgk.reproduction.learning_curves import thousands
from mgk.reproduction.survival import Run, kaplan_meier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {
    "softmax": (INK, "o"), "linear": (INK, "o"), "smgk": (BLUE, "s"), "smlk": (BLUE, "s"), "mgk": (ORANGE, "^"),
    "mlk": (ORANGE, "^"), "gaussian": (GREEN, "D"), "softmax+qk_norm": (PINK, "v"),
}  # fmt: skip
"""Kinds of attention in the panels by heads; other kinds share a panel."""
COLUMNS = 3


def split_row(row: str) -> tuple[str, int]:
    """Split a row into its kind of attention and its heads: ``softmax-8+qk_norm`` is ``softmax+qk_norm`` with 8."""
    base, plus, changes = row.partition("+")
    kind, _, heads = base.rpartition("-")
    return f"{kind}{plus}{changes}", int(heads)


def draw(rows: Mapping[str, Sequence[Run]], path: Path, *, title: str) -> int:
    """Draw the curves, and return their number.

    Args:
        rows: runs of each row.
        path: PNG file to write, unless there are no runs.
        title: title of the figure.
    """
    panels = _panels([row for row, runs in rows.items() if runs])
    if not panels:
        return 0
    last = max(time for runs in rows.values() for time, _ in runs)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    with canvas(path, rows=lines, columns=columns, size=(3.9, 3.4)) as (figure, grid):
        for place, axes in enumerate(grid):
            if place >= len(panels):
                hide(axes)
                continue
            name, styles = panels[place]
            for row, (colour, marker) in styles.items():
                _draw_row(axes, rows[row], row, colour, marker)
            axes.set_title(name)
            axes.set_xlim(0, 1.02 * last)
            axes.set_ylim(-0.04, 1.04)
            axes.locator_params(axis="x", nbins=5)
            axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
            axes.set_xlabel("step")
            if place % columns == 0:
                axes.set_ylabel("share of runs still there")
            # The legend is below the panel, because curves that begin in a corner and end at any height leave no free
            # place inside.
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.0)
            show_grid(axes)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return sum(len(styles) for _, styles in panels)


def _panels(rows: Sequence[str]) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Return the title of each panel, and its rows with their colours and markers."""
    by_heads: dict[int, dict[str, tuple[str, str]]] = {}
    others: list[str] = []
    for row in rows:
        kind, heads = split_row(row)
        if kind in KINDS:
            by_heads.setdefault(heads, {})[row] = KINDS[kind]
        else:
            others.append(row)
    found = [
        (f"{heads} head{'s' if heads > 1 else ''}", dict(sorted(own.items(), key=lambda each: _place(each[0]))))
        for heads, own in sorted(by_heads.items())
    ]
    for start in range(0, len(others), len(COLOURS)):
        chosen = others[start : start + len(COLOURS)]
        found.append(("other rows", dict(zip(chosen, zip(COLOURS, MARKERS, strict=True), strict=False))))
    return found


def _place(row: str) -> int:
    return list(KINDS).index(split_row(row)[0])


def _draw_row(axes: Axes, runs: Sequence[Run], row: str, colour: str, marker: str) -> None:
    points = kaplan_meier(runs)
    end = max(time for time, _ in runs)
    steps = [0.0, *(point.time for point in points), end]
    shares = [1.0, *(point.survival for point in points)]
    axes.plot(steps, [*shares, shares[-1]], drawstyle="steps-post", color=colour, linewidth=1.6, alpha=0.9)
    axes.plot(steps[1:-1], shares[1:], color=colour, linestyle="none", marker=marker, markersize=4)
    # Runs that were observed to their end without the event.
    stayed = sorted({time for time, left in runs if not left})
    heights = [min((point.survival for point in points if point.time <= time), default=1.0) for time in stayed]
    axes.plot(stayed, heights, color=colour, linestyle="none", marker="+", markersize=9, markeredgewidth=1.6)
    left = sum(happened for _, happened in runs)
    axes.plot([], [], color=colour, linewidth=1.6, marker=marker, markersize=4, label=f"{row} ({left} of {len(runs)})")
