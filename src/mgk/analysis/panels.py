"""Building blocks of figures with many heads: grids of panels, bars by head, names, colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mgk.analysis.canvas import BLUE, GREEN, INK, ORANGE, PINK, SKY, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

# The colour of the baseline comes last, because no component, layer or run is a baseline here.
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, INK)
# Most heads side by side in a row of panels.
IN_A_ROW = 8
# Most panels in a figure; with more, only the first heads of each layer are shown.
MOST_PANELS = 48
# Most characters in the name of a layer that does not get a line of its own.
LONG_NAME = 10
# Most heads on an axis that are numbered.
MOST_TICKS = 24


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_grid(
    rows: int, columns: int, width: float, height: float, extra: tuple[float, float]
) -> tuple[Figure, list[list[Axes]]]:
    figure = new_figure(columns * width + extra[0], rows * height + extra[1])
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def heads_shown(heads: Sequence[int], panels: int) -> tuple[int, str]:
    """Return how many heads per layer fit, with ``panels`` panels each, and a note if that is not all."""
    most = max(1, MOST_PANELS // (panels * len(heads)))
    return most, "" if most >= max(heads) else f" (heads 1 to {most} of {max(heads)} in each layer)"


def heatmaps(panels: Sequence[tuple[str, Any]], title: str, across: str, down: str, label: str) -> Figure:
    """Draw matrices with one symmetric scale, so that zero has the middle colour."""
    columns = min(IN_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = new_grid(lines, columns, 1.65, 2.6, extra=(1.5, 0.9))
    largest = max(float(np.abs(matrix).max()) for _, matrix in panels) or 1.0
    image: Any = None
    for number, (name, matrix) in enumerate(panels):
        axes = grid[number // columns][number % columns]
        image = axes.imshow(
            matrix, vmin=-largest, vmax=largest, cmap="PuOr", aspect="auto", interpolation="nearest"
        )  # fmt: skip
        show_frame(axes)
        axes.set_title(name, fontsize=8)
        if number % columns == 0:
            axes.set_ylabel(down)
        if number + columns >= len(panels):
            axes.set_xlabel(across)
    hide([axes for row in grid for axes in row][len(panels) :])
    colorbar(figure, image, [axes for row in grid for axes in row], label)
    figure.suptitle(title)
    return figure


def bars_by_head(axes: Axes, layers: Sequence[tuple[str, Tensor]]) -> None:
    """Draw a bar for the mean of each head and a dot for each sample, from ``[samples, heads]`` of each layer."""
    place = 0
    for number, (_, values) in enumerate(layers):
        places = np.arange(place, place + values.shape[1])
        axes.bar(places, values.mean(0).numpy(), 0.7, color=layer_colour(number, len(layers)))
        if len(values) > 1:
            for row in values.numpy():
                axes.plot(places, row, ".", color="black", markersize=3)
        place += values.shape[1]
    name_heads(axes, [(name, values.shape[1]) for name, values in layers])


def name_heads(axes: Axes, layers: Sequence[tuple[str, int]]) -> None:
    """Label the heads, with the layers below them, or only the layers if there are many heads."""
    labels, middles, place = [], [], 0
    total = sum(count for _, count in layers)
    for name, count in layers:
        middle = (count - 1) // 2
        labels += [f"{head + 1}" + (f"\n{name}" if head == middle else "") for head in range(count)]
        middles.append(place + (count - 1) / 2)
        place += count
        if place < total:
            axes.axvline(place - 0.5, color="#cccccc", linewidth=0.8)
    if total <= MOST_TICKS:
        axes.set_xticks(range(total), labels)
        axes.set_xlabel("head")
    else:
        axes.set_xticks(middles, [_short(name) for name, _ in layers])
        axes.set_xlabel("layer, its heads side by side")
        if len(layers) > 12 and any(len(name) > LONG_NAME for name, _ in layers):
            axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlim(-0.6, total - 0.4)


def panel_title(layer: str, head: int, component: int | None = None) -> str:
    """Return the title of a panel, in two lines if one would be too long."""
    if component is not None:
        return f"{layer}\nhead {head + 1}, component {component + 1}"
    return f"{layer}{chr(10) if len(layer) > LONG_NAME else ', '}head {head + 1}"


def _short(layer: str) -> str:
    """Return a short name of a layer."""
    short = layer.replace("encoder layer", "enc").replace("decoder layer", "dec").replace(", cross", "\ncross")
    return short.removeprefix("layer ")


def colorbar(figure: Figure, image: Any, many: Sequence[Axes], label: str) -> Colorbar:
    """Add a colour bar whose width does not depend on the height of the figure, and which is a few panels long."""
    rows = len({place.rowspan.start for axes in many if (place := axes.get_subplotspec()) is not None})
    shrink = min(0.9, 2.4 / rows)
    bar = figure.colorbar(image, ax=list(many), pad=0.02, shrink=shrink, aspect=15 * rows * shrink)
    bar.set_label(label)
    return bar


def show_frame(axes: Axes) -> None:
    """Show all four sides of the frame, as images have."""
    for side in axes.spines.values():
        side.set_visible(True)


def hide(many: Sequence[Axes]) -> None:
    for axes in many:
        axes.set_visible(False)


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def layer_colour(number: int, total: int) -> Any:
    """Return the colour of a layer: distinct colours for a few layers, from dark to light for many."""
    if total <= len(COLOURS):
        return colour_of(number)
    import matplotlib

    return matplotlib.colormaps["cividis"](number / (total - 1))
