"""The style of our figures: colours for the colour-blind, few lines, and identical files for identical numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, BLUE, ORANGE, GREEN, PINK, YELLOW = "#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"
SKY = "#56b4e9"
COLOURS = (INK, BLUE, ORANGE, GREEN, PINK, YELLOW)
"""Colours of Okabe and Ito, with dark grey for black. The first one is for the baseline."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""A marker for each colour, so that colour is not needed to tell lines apart."""

STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 9, "savefig.dpi": 150,
}  # fmt: skip
"""Style of every figure; figures of curves and costs also have their titles on the left."""


@contextmanager
def canvas(
    path: Path, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.0, 3.8)
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Context with a figure and its panels, row by row, which is written to ``path`` at the end.

    Args:
        path: PNG file to write.
        rows: number of rows of panels.
        columns: number of columns of panels.
        size: width and height of a panel in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "axes.titlelocation": "left"}):
        # pyplot is not used, because it would choose a window system for the whole process and keep the figure.
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.1, h_pad=0.08)
        yield figure, list(grid.flat)
        write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Write a PNG without the version of matplotlib, so that identical numbers give identical files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def show_grid(axes: Axes) -> None:
    """Draw faint horizontal lines for reading values."""
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.8)


def hide(axes: Axes) -> None:
    """Hide an empty panel."""
    axes.set_axis_off()
