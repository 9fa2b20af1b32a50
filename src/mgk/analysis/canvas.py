"""How our figures look: colours that the colour-blind tell apart, few lines, the same file for the same numbers."""

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
"""Okabe and Ito's, dark grey in place of black: the first one is for the baseline."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""One for each colour, for those who see none."""

STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 9, "savefig.dpi": 150,
}  # fmt: skip
"""Of every picture; canvases of curves and costs have their titles on the left as well."""


@contextmanager
def canvas(
    path: Path, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.0, 3.8)
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its panels, row by row; written to ``path`` at the end.

    Args:
        path: the PNG.
        rows: of panels.
        columns: of panels.
        size: of one panel in inches, width and height.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "axes.titlelocation": "left"}):
        # Without pyplot, which would choose a window for the whole process and keep the figure.
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.1, h_pad=0.08)
        yield figure, list(grid.flat)
        write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Write a PNG. Without the version of matplotlib in it, the same numbers are the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def show_grid(axes: Axes) -> None:
    """Faint horizontal lines, to read values by."""
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.8)


def hide(axes: Axes) -> None:
    """A panel that nothing is in."""
    axes.set_axis_off()
