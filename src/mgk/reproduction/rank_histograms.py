"""Histograms of the ranks of attention matrices, with a panel for each layer and row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgk.analysis.canvas import COLOURS, canvas, hide
from mgk.reproduction.statistics import mean

BINS = 24


def edges(low: float, high: float) -> list[float]:
    """Return the edges of at most :data:`BINS` bins, each around one or more whole numbers."""
    width = math.ceil((high - low + 1) / BINS)
    count = math.ceil((high - low + 1) / width)
    return [low - 0.5 + width * place for place in range(count + 1)]


def draw(ranks: Mapping[int, Mapping[str, Sequence[float]]], path: Path, *, title: str) -> int:
    """Draw histograms, layers from top to bottom and rows of the table from left to right, and return their number.

    Args:
        ranks: ranks by layer and row of the table.
        path: PNG file to write, unless there are no ranks.
        title: title of the figure.
    """
    every = [rank for rows in ranks.values() for own in rows.values() for rank in own]
    if not every:
        return 0
    names = list(next(iter(ranks.values())))
    bins = edges(min(every), max(every))
    tallest = 0.0
    with canvas(path, rows=len(ranks), columns=len(names), size=(3.9, 2.6)) as (figure, grid):
        for place, (layer, name) in enumerate((layer, name) for layer in ranks for name in names):
            axes, own = grid[place], ranks[layer][name]
            if not own:
                hide(axes)
                axes.set_title(f"{name}, layer {layer}: no analysis yet")
                continue
            colour = COLOURS[names.index(name)]
            shares, _, _ = axes.hist(own, bins=bins, color=colour, weights=[1 / len(own)] * len(own))
            tallest = max(tallest, float(max(shares)))
            axes.axvline(mean(own), color="#000000", linewidth=1.2, linestyle="--")
            axes.set_xlim(bins[0], bins[-1])
            axes.locator_params(axis="x", integer=True, nbins=7)
            axes.set_title(f"{name}, layer {layer}: mean {mean(own):.0f}, n = {len(own)}")
            axes.set_xlabel("rank (singular values above 1e-6)")
            if name == names[0]:
                axes.set_ylabel("share of matrices")
        for axes in grid:
            axes.set_ylim(0, 1.08 * tallest)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return len(every)
