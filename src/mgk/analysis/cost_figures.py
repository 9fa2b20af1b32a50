"""Drawings of figures 3, 4, 8, 10, 15 and 16 of the paper, which show counted costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk.analysis.canvas import BLUE, COLOURS, INK, MARKERS, ORANGE, canvas, show_grid
from mgk.analysis.cost_ratios import Cost, Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_ratios(ratios: Sequence[Ratio], path: Path) -> None:
    """Draw figures 3 and 10: FLOPs against the length for each width, and parameters against the width.

    Training and inference share a panel, since forward and backward cost three times forward in both models.
    """
    widths, lengths = (sorted({getattr(ratio, name) for ratio in ratios}) for name in ("width", "length"))
    by_size = {(ratio.width, ratio.length): ratio for ratio in ratios}
    first = ratios[0]
    names = f"{first.mixture.attention}-{first.mixture.heads} / {first.baseline.attention}-{first.baseline.heads}"
    with canvas(path, columns=3, size=(4.6, 4.0)) as (figure, (flops, with_output, size)):
        for axes, title, attribute in (
            (flops, "A, B  FLOPs of the layers,\ntraining and inference", "flops"),
            (with_output, "FLOPs with the output over\nthe whole vocabulary", "flops_with_output"),
        ):
            for index, width in enumerate(widths):
                values = [getattr(by_size[width, length], attribute) for length in lengths]
                axes.plot(
                    lengths, values, color=COLOURS[index], marker=MARKERS[index], markersize=4, label=f"D = {width}"
                )
            axes.set_title(title)
            _powers_of_two(axes, lengths, "sequence length N, tokens")
        for index, (label, attribute) in enumerate(
            [("all parameters", "parameters"), ("without embeddings", "other_parameters")]
        ):
            values = [getattr(by_size[width, lengths[0]], attribute) for width in widths]
            size.plot(widths, values, color=COLOURS[index + 1], marker=MARKERS[index], markersize=4, label=label)
        size.set_title("C  Parameters\n")
        _powers_of_two(size, widths, "model width D")
        panels = (flops, with_output, size)
        lowest = min(axes.get_ylim()[0] for axes in panels)
        for axes in panels:
            axes.set_ylim(lowest, 1.01)
            axes.axhline(1, color="#999999", linewidth=1, linestyle=":")
            show_grid(axes)
        flops.set_ylabel(f"{names}")
        # The output layer lifts the lines of this panel, which leaves room for the legend below them.
        with_output.legend(title="model width", loc="lower left", ncols=2, title_fontsize=9)
        size.legend(loc="lower left")
        figure.suptitle(f"Cost of {names}, language model of 16 layers", fontsize=11, x=0.01, ha="left")


def draw_over_heads(
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[int, float]]]]], path: Path, *, title: str
) -> None:
    """Draw figures 4 and 15: a cost against the heads of the baseline, of which the mixtures have half.

    Args:
        panels: for each panel the label of its vertical axis and its lines, as heads and values by name. The first line
            is the baseline.
        path: PNG file to write.
        title: title of the figure.
    """
    columns = len(panels) if len(panels) < 4 else math.ceil(len(panels) / 2)
    with canvas(path, rows=math.ceil(len(panels) / columns), columns=columns, size=(4.8, 3.5)) as (figure, grid):
        for axes, (label, lines) in zip(grid, panels, strict=True):
            heads: list[int] = []
            for index, (name, points) in enumerate(lines.items()):
                heads, values = [head for head, _ in points], [value for _, value in points]
                axes.plot(
                    heads, values, color=COLOURS[index], marker=MARKERS[index], markersize=5, label=name,
                    linestyle="-" if index == 0 else "--",
                )  # fmt: skip
            axes.set_ylim(bottom=0)
            axes.set_xticks(heads)
            axes.set_xlabel("heads of the baseline (mixtures: half)")
            axes.set_ylabel(label)
            axes.legend(loc="upper left")
            show_grid(axes)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")


def draw_variants(
    panels: Sequence[tuple[str, Sequence[tuple[str, float]]]], path: Path, *, title: str, unit: Mapping[str, str]
) -> None:
    """Draw figures 8 and 16: a bar for each way to infer and learn the mixture, below the baseline.

    Args:
        panels: for each panel the label of its axis, and values by name; the first is the baseline.
        path: PNG file to write.
        title: title of the figure.
        unit: format of the values of a panel, by the label of its axis.
    """
    with canvas(path, columns=len(panels), size=(5.4, 3.4)) as (figure, grid):
        for axes, (label, bars) in zip(grid, panels, strict=True):
            names, values = [name for name, _ in bars], [value for _, value in bars]
            colours = [INK, *(BLUE if name.startswith("smgk") else ORANGE for name in names[1:])]
            places = range(len(bars), 0, -1)
            axes.barh(list(places), values, color=colours, height=0.65)
            axes.set_yticks(list(places), names)
            axes.set_xlim(0, 1.22 * max(values))
            axes.set_xlabel(label)
            axes.tick_params(axis="y", length=0)
            for place, value in zip(places, values, strict=True):
                share = "" if place == len(bars) else f"  {100 * value / values[0]:.0f} %"
                axes.annotate(
                    f"{unit[label].format(value)}{share}", xy=(value, place), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=8.5,
                )  # fmt: skip
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")


def over_heads(costs: Sequence[Cost], attribute: str, scale: float, *, factor: int) -> list[tuple[int, float]]:
    """Return the points of a line: the heads of the baseline, ``factor`` times those of the model, and a cost."""
    return [(factor * cost.heads, scale * getattr(cost, attribute)) for cost in costs]


def _powers_of_two(axes: Axes, values: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [_short(value) for value in values])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel(label)


def _short(value: Any) -> str:
    return f"{value // 1024}k" if value >= 1024 else f"{value}"
