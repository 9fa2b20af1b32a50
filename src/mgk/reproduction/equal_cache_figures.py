"""Bits of rows against the bytes of their cache, and against the time of their training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgk.analysis.canvas import COLOURS, MARKERS, canvas, show_grid
from mgk.reproduction.equal_time import Curve
from mgk.reproduction.statistics import mean, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPREAD = 0.7
"""Rows of equal cache stand beside each other, over so much of the distance between two caches."""


def draw_over_cache(rows: Mapping[str, tuple[int, Sequence[float]]], path: Path, *, title: str) -> int:
    """Mean and standard error over seeds; how many rows are drawn.

    Args:
        rows: bytes of cache a token, and the bits of each seed; rows without any keep their colour.
        path: the PNG; not written where there is nothing.
        title: of the figure.
    """
    there = {row: found for row, found in rows.items() if found[1]}
    if not there:
        return 0
    sizes = sorted({size for size, _ in rows.values()})
    by_size = {size: [row for row, (own, _) in rows.items() if own == size] for size in sizes}
    with canvas(path, size=(9.0, 4.2)) as (figure, (axes,)):
        for number, (row, (size, values)) in enumerate(rows.items()):
            if not values:
                continue
            group = by_size[size]
            place = sizes.index(size) + SPREAD * (group.index(row) - (len(group) - 1) / 2) / max(1, len(group) - 1)
            colour, marker, fill = _style(number)
            axes.errorbar(
                place, mean(values), yerr=standard_error(values) or 0.0, color=colour, marker=marker,
                markerfacecolor=fill, markersize=7, capsize=3, linestyle="none", label=row,
            )  # fmt: skip
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        axes.set_xlabel("bytes of cache a token, bf16")
        axes.set_ylabel("test bits per byte")
        _finish(axes)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return len(there)


def draw_over_time(rows: Mapping[str, Mapping[int, Curve]], path: Path, *, title: str) -> int:
    """Means over seeds at the validations that all seeds of a row have; how many rows are drawn.

    Args:
        rows: the curve of each seed; rows without any keep their colour.
        path: the PNG; not written where there is nothing.
        title: of the figure.
    """
    if not any(rows.values()):
        return 0
    with canvas(path, size=(9.0, 4.2)) as (figure, (axes,)):
        for number, (row, seeds) in enumerate(rows.items()):
            if not seeds:
                continue
            common = sorted(set.intersection(*({seconds for seconds, _ in curve} for curve in seeds.values())))
            means = [mean([dict(curve)[seconds] for curve in seeds.values()]) for seconds in common]
            colour, marker, fill = _style(number)
            axes.plot(
                common, means, color=colour, marker=marker, markerfacecolor=fill, markersize=5, linewidth=1.4, label=row
            )  # fmt: skip
        axes.set_xlabel("seconds of training, alone on the device")
        axes.set_ylabel("validation bits per byte")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.2f}")
        axes.yaxis.set_minor_formatter("{x:.2f}")
        _finish(axes)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return sum(bool(seeds) for seeds in rows.values())


def _style(number: int) -> tuple[str, str, str]:
    """Colour, marker and filling: those of the second half dozen are hollow."""
    colour = COLOURS[number % len(COLOURS)]
    return colour, MARKERS[number % len(MARKERS)], colour if number < len(COLOURS) else "white"


def _finish(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    show_grid(axes)
