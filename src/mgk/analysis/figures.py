"""The figures of the analyses. matplotlib is imported when the first one is drawn.

The colours are those of Okabe and Ito and of cividis, which do not rely on telling red from green.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.analysis import canvas
from mgk.analysis.attention_maps import PooledMaps
from mgk.analysis.canvas import show_grid
from mgk.analysis.curves import LearningCurves
from mgk.analysis.density import QueryDensity
from mgk.analysis.findings import Findings
from mgk.analysis.mixture import LearnedMixture
from mgk.analysis.panels import (
    COLOURS,
    IN_A_ROW,
    LONG_NAME,
    MOST_TICKS,
    bars_by_head,
    colorbar,
    colour_of,
    heads_shown,
    heatmaps,
    hide,
    layer_colour,
    name_heads,
    new_figure,
    new_grid,
    panel_title,
    show_frame,
)
from mgk.analysis.rank import AttentionRank
from mgk.analysis.redundancy import HeadRedundancy
from mgk.analysis.responsibilities import TokenResponsibilities
from mgk.analysis.theorem import Approximation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#777777"
# Figures with many small panels need smaller text.
STYLE: Any = {
    **canvas.STYLE, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8,
}  # fmt: skip
# Weights at or below this, relative to uniform attention, get the darkest colour of an attention map.
DARKEST = 1e-2


def draw_all(findings: Findings, folder: Path) -> list[Path]:
    """Draw all findings into a folder, and return the files in order."""
    return [save(draw, folder / f"{name}.png") for name, draw in drawings(findings).items()]


def drawings(findings: Findings) -> dict[str, Callable[[], Figure]]:
    """Return functions that draw the findings, by file name."""
    found: dict[str, Callable[[], Figure]] = {
        "attention-maps": lambda: draw_maps(findings.maps),
        "rank": lambda: draw_rank(findings.rank),
        "redundancy": lambda: draw_redundancy(findings.redundancy),
        "mixture": lambda: draw_mixture(findings.mixture),
        "keys": lambda: draw_keys(findings.mixture),
        "key-projections": lambda: draw_projections(findings.mixture),
    }
    density, responsibilities, curves = findings.density, findings.responsibilities, findings.curves
    if any(layer.shift is not None for layer in findings.mixture):
        found["shifts"] = lambda: draw_shifts(findings.mixture)
    if density is not None:
        found["density"] = lambda: draw_density(density)
    if responsibilities is not None:
        found["responsibilities"] = lambda: draw_responsibilities(responsibilities)
    if curves is not None:
        found["curves"] = lambda: draw_curves([curves])
    return {**found, "theorem": lambda: draw_theorem(findings.theorem)}


def save(draw: Callable[[], Figure], path: Path) -> Path:
    """Draw one figure and write it to a PNG file."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        canvas.write(draw(), path)
    return path


def draw_maps(layers: Sequence[PooledMaps]) -> Figure:
    """Draw attention matrices, a row for each layer and a column for each head (figures 2, 6 and 9 of the paper)."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogFormatter

    heads = max(len(layer.weights) for layer in layers)
    figure, grid = new_grid(len(layers), heads, 1.9, 2.0, extra=(1.6, 0.9))
    cells = torch.cat([layer.weights.flatten() for layer in layers])
    lowest, largest = max(float(cells.min()), DARKEST), max(float(cells.max()), 2 * DARKEST)
    norm = LogNorm(min(lowest, largest / 2), largest, clip=True)
    image: Any = None
    for row, layer in enumerate(layers):
        for head, weights in enumerate(layer.weights):
            axes = grid[row][head]
            image = axes.imshow(
                weights.clamp(min=DARKEST).numpy(), norm=norm, cmap="cividis", aspect="auto", interpolation="nearest",
                extent=(0, layer.num_keys, layer.num_queries, 0),
            )  # fmt: skip
            show_frame(axes)
            axes.set_title(panel_title(layer.layer, head), fontsize=9)
            if head == 0:
                axes.set_ylabel("query position")
            if row == len(layers) - 1:
                axes.set_xlabel("key position")
        hide(grid[row][len(layer.weights) :])
    bar = colorbar(figure, image, [axes for row in grid for axes in row], "weight, 1 = the same for every key")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    figure.suptitle("Where each head looks")
    return figure


def draw_rank(layers: Sequence[AttentionRank]) -> Figure:
    """Draw singular values and the three ranks of each head (figures 2 and 7 of the paper show the first)."""
    figure = new_figure(11.5, 6.4)
    spectrum, *panels = (figure.add_subplot(2, 2, number) for number in range(1, 5))
    smallest = 1.0
    for number, layer in enumerate(layers):
        colour = layer_colour(number, len(layers))
        for sample, heads in enumerate(layer.matrices):
            for head, matrix in enumerate(heads):
                values = matrix.singular_values.clamp(min=1e-16).numpy()
                label = layer.layer if sample == head == 0 else None
                places = np.arange(1, len(values) + 1)
                spectrum.plot(places, values, color=colour, linewidth=1.0, alpha=0.8, label=label)
                smallest = min(smallest, float(values.min()))
    threshold = layers[0].threshold
    spectrum.axhline(threshold, color=GREY, linestyle="--", linewidth=1)
    spectrum.set_yscale("log")
    spectrum.set_ylim(bottom=min(smallest, threshold) / 3)
    spectrum.set_xlabel("number of the singular value")
    spectrum.set_ylabel("singular value")
    spectrum.set_title(f"Spectra of all heads; dashed: {threshold:g}", loc="left")
    spectrum.legend(ncols=1 + len(layers) // 7)
    titles = (
        f"Rank: singular values above {threshold:g} (the paper's)",
        "Numerical rank: singular values above fp32 rounding",
        "Effective rank: exp of the entropy of the spectrum",
    )
    names = ("rank", "numerical_rank", "effective_rank")
    for axes, title, name in zip(panels, titles, names, strict=True):
        bars_by_head(axes, [(layer.layer, _by_head(layer, name)) for layer in layers])
        axes.set_title(title, loc="left")
        axes.set_ylabel(name.replace("_", " "))
    rows, whole = (_span([n for layer in layers for n in getattr(layer, of)]) for of in ("num_queries", "of_queries"))
    of = f"all {whole} queries" if rows == whole else f"{rows} evenly spaced queries of {whole}"
    samples = len(layers[0].matrices)
    marks = "" if samples == 1 else f", bars: mean of {samples} samples, dots: each"
    figure.suptitle(f"Rank of attention matrices, {of}{marks}")
    return figure


def draw_redundancy(layers: Sequence[HeadRedundancy]) -> Figure:
    """Draw distance and similarity of every pair of heads, a column for each layer."""
    heads = max(len(layer.distance) for layer in layers)
    columns = min(IN_A_ROW, len(layers))
    side = max(2.5, 0.55 * heads + 0.9)
    is_crowded = side * columns > 20
    if is_crowded:
        side = 2.5
    lines = -(-len(layers) // columns)
    figure, grid = new_grid(2 * lines, columns, side, side + 0.4, extra=(1.5, 1.0))
    hide([axes for row in grid for axes in row])
    rows = (("distance", "Distance", "share of attention elsewhere"), ("similarity", "CKA", "linear CKA"))
    for number, layer in enumerate(layers):
        for row, (name, title, _) in enumerate(rows):
            axes, square = grid[2 * (number // columns) + row][number % columns], getattr(layer, name)
            axes.set_visible(True)
            axes.imshow(square.numpy(), vmin=0, vmax=1, cmap="cividis")
            for a in range(0 if is_crowded else len(square)):
                for b in range(len(square)):
                    value = float(square[a, b])
                    axes.text(
                        b, a, f"{value:.2f}", ha="center", va="center", color="black" if value > 0.6 else "white",
                        fontsize=8 if heads <= 8 else 6,
                    )  # fmt: skip
            show_frame(axes)
            ticks = range(len(square))
            axes.set_xticks(ticks, [f"{tick + 1}" for tick in ticks])
            axes.set_yticks(ticks, [f"{tick + 1}" for tick in ticks])
            axes.set_title(f"{title}{chr(10) if len(layer.layer) > LONG_NAME else ', '}{layer.layer}", fontsize=9)
            axes.set_xlabel("head")
            if number % columns == 0:
                axes.set_ylabel("head")
    for line in range(2 * lines):
        colorbar(figure, grid[line][0].images[0], grid[line], rows[line % 2][2])
    figure.suptitle("How alike heads are")
    return figure


def draw_density(layers: Sequence[QueryDensity]) -> Figure:
    """Draw the NLL of the queries of each head under the mixture, each component alone, and one Gaussian."""
    heads = sum(len(layer.mixture) for layer in layers)
    figure = new_figure(min(max(7.0, 0.9 * heads + 2.0), 20.0), 4.2)
    axes = figure.add_subplot()
    components = max(len(layer.components) for layer in layers)
    series = [
        ("mixture", COLOURS[0], [layer.mixture for layer in layers]),
        ("one Gaussian at the mean key", COLOURS[1], [layer.merged for layer in layers]),
    ]
    if components > 1:
        for number in range(components):
            colour = ("#888888", "#bbbbbb")[number % 2]
            series.append((f"component {number + 1} alone", colour, [layer.components[number] for layer in layers]))
    width = 0.8 / len(series)
    for number, (label, colour, read) in enumerate(series):
        values = torch.cat(read).numpy()
        places = np.arange(len(values)) + (number - (len(series) - 1) / 2) * width
        axes.bar(places, values, width, color=colour, label=label)
    name_heads(axes, [(layer.layer, len(layer.mixture)) for layer in layers])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("negative log-likelihood, nats a query")
    axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 1.0))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.25 * (high - low))
    axes.set_title(f"How well the keys explain {layers[0].num_queries:,} queries (lower is better)", loc="left")
    return figure


def draw_mixture(layers: Sequence[LearnedMixture]) -> Figure:
    """Draw priors, variances and the distances between components."""
    heads = sum(len(layer.prior) for layer in layers)
    if heads <= MOST_TICKS // 2:
        figure = new_figure(max(11.0, 1.5 * heads), 3.9)
        priors, variances, distances = (figure.add_subplot(1, 3, number) for number in (1, 2, 3))
    else:
        figure = new_figure(min(0.3 * heads + 4.0, 20.0), 9.0)
        priors, variances, distances = (figure.add_subplot(3, 1, number) for number in (1, 2, 3))
    names = [(layer.layer, len(layer.prior)) for layer in layers]
    components = max(layer.prior.shape[1] for layer in layers)
    width = 0.8 / components
    for axes, name in ((priors, "prior"), (variances, "variance")):
        for number in range(components):
            read = [getattr(layer, name) for layer in layers]
            if any(each is None for each in read):
                continue
            values = torch.cat([each[:, number] for each in read]).numpy()
            places = np.arange(len(values)) + (number - (components - 1) / 2) * width
            axes.bar(places, values, width, color=colour_of(number), label=f"component {number + 1}")
        name_heads(axes, names)
        axes.set_ylabel(name)
    priors.axhline(1 / components, color=GREY, linestyle="--", linewidth=1)
    priors.set_ylim(0, 1)
    priors.set_title("Prior; dashed: uniform", loc="left")
    priors.legend(loc="upper right")
    variances.set_title("Variance", loc="left")
    if any(layer.variance is None for layer in layers):
        variances.text(0.5, 0.5, "linear attention has none", transform=variances.transAxes, ha="center", color=GREY)
    apart = [
        torch.stack([layer.distance[:, r, s] for r in range(components) for s in range(r)], dim=-1).mean(-1)
        for layer in layers
        if components > 1
    ]
    spread = torch.cat([layer.spread for layer in layers]).numpy()
    heads_at = np.arange(len(spread))
    if apart:
        distances.bar(heads_at - 0.2, torch.cat(apart).numpy(), 0.4, color=COLOURS[2], label="between components")
    distances.bar(heads_at + 0.2, spread, 0.4, color="#bbbbbb", label="token from mean token")
    name_heads(distances, names)
    distances.set_ylabel("Euclidean distance of keys")
    distances.set_title("How far keys are apart", loc="left")
    distances.legend(loc="upper left")
    low, high = distances.get_ylim()
    distances.set_ylim(low, 1.25 * high)
    figure.suptitle("What the mixtures have learned")
    return figure


def draw_keys(layers: Sequence[LearnedMixture]) -> Figure:
    """Draw the keys of the first tokens, for each component of each head (figure 14 of the paper)."""
    heads, note = heads_shown([len(layer.prior) for layer in layers], max(layer.keys.shape[1] for layer in layers))
    panels = [
        (panel_title(layer.layer, head, number if len(keys) > 1 else None), each.numpy())
        for layer in layers
        for head, keys in enumerate(layer.keys[:heads])
        for number, each in enumerate(keys)
    ]
    title = f"Keys of the first {layers[0].keys.shape[2]} tokens{note}"
    return heatmaps(panels, title, "coordinate", "token", "key")


def draw_projections(layers: Sequence[LearnedMixture]) -> Figure:
    """Draw the weights of the key projections, inputs by coordinates (figure 13 of the paper)."""
    heads, note = heads_shown(
        [len(layer.prior) for layer in layers], max(layer.projection.shape[1] for layer in layers)
    )
    panels = [
        (panel_title(layer.layer, head, number if len(each) > 1 else None), one.T.numpy())
        for layer in layers
        for head, each in enumerate(layer.projection[:heads])
        for number, one in enumerate(each)
    ]
    return heatmaps(panels, f"Key projections{note}", "coordinate of the key", "input", "weight")


def draw_shifts(layers: Sequence[LearnedMixture]) -> Figure:
    """Draw the shifts that the components add to the key, a panel for each layer."""
    shifts = [(layer.layer, layer.shift) for layer in layers if layer.shift is not None]
    if not shifts:
        raise ValueError("layers must have shifted keys, got projected ones")
    heads, components, _ = shifts[0][1].shape
    columns = min(2 if len(shifts) <= 6 else 4, len(shifts))
    lines = -(-len(shifts) // columns)
    figure, grid = new_grid(
        lines, columns, 5.2 if columns <= 2 else 4.0, 0.22 * heads * components + 0.9, extra=(1.2, 0.6)
    )
    largest = max(float(shift.abs().max()) for _, shift in shifts) or 1.0
    image: Any = None
    for number, (name, shift) in enumerate(shifts):
        axes = grid[number // columns][number % columns]
        image = axes.imshow(
            shift.flatten(0, 1).numpy(), vmin=-largest, vmax=largest, cmap="PuOr", aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        show_frame(axes)
        for head in range(1, heads):
            axes.axhline(head * components - 0.5, color="black", linewidth=0.8)
        rows = [f"head {head + 1}, {r + 1}" for head in range(heads) for r in range(components)]
        axes.set_yticks(range(len(rows)), rows)
        axes.set_title(name)
        if number + columns >= len(shifts):
            axes.set_xlabel("coordinate of the key")
    hide([axes for row in grid for axes in row][len(shifts) :])
    colorbar(figure, image, [axes for row in grid for axes in row], "shift")
    figure.suptitle("Shifts of each head and component")
    return figure


def draw_responsibilities(layers: Sequence[TokenResponsibilities]) -> Figure:
    """Draw the responsibilities of the components along the sequence, by key and by query."""
    heads, note = heads_shown([len(layer.mean) for layer in layers], 2)
    rows = [
        (layer, head, name)
        for layer in layers
        for head in range(min(heads, len(layer.mean)))
        for name in ("keys", "queries")
    ]
    columns = 2
    lines = -(-len(rows) // columns)
    figure = new_figure(12.0, 1.15 * lines + 1.6)
    components = layers[0].mean.shape[1]
    last = None
    for number, (layer, head, name) in enumerate(rows):
        axes = figure.add_subplot(lines, columns, number + 1)
        share = layer.of_keys[head] if name == "keys" else layer.of_queries[head]
        place = layer.keys if name == "keys" else layer.queries
        bins = min(256, len(place))
        binned = F.adaptive_avg_pool1d(share.T, bins).numpy()
        at = F.adaptive_avg_pool1d(place.double()[None], bins)[0].numpy()
        axes.stackplot(at, binned, colors=[colour_of(each) for each in range(components)], linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_xlim(float(at[0]), float(at[-1]) if len(at) > 1 else float(at[0]) + 1)
        axes.set_yticks([0, 0.5, 1])
        axes.set_title(f"{layer.layer}, head {head + 1}: {name}", loc="left", fontsize=9)
        if number >= len(rows) - columns:
            axes.set_xlabel("position")
        if number % columns == 0:
            axes.set_ylabel("share")
        last = axes
    assert last is not None
    handles = last.collections[:components]
    figure.legend(
        handles, [f"component {number + 1}" for number in range(components)], loc="outside lower center",
        ncols=components,
    )  # fmt: skip
    figure.suptitle(f"Which component answers: each key (mean over queries), each query (by what it receives){note}")
    return figure


def draw_curves(runs: Sequence[LearningCurves], *, log_scale: bool = False) -> Figure:
    """Draw a panel for each measured quantity, with a colour for each run (figures 1, 5, 11 and 12 of the paper)."""
    names = list(dict.fromkeys(name for run in runs for name in run.points))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = new_figure(4.0 * columns, 2.9 * lines + 0.5)
    for number, name in enumerate(names):
        axes = figure.add_subplot(lines, columns, number + 1)
        for index, run in enumerate(runs):
            points = run.points.get(name, ())
            if points:
                steps, values = zip(*points, strict=True)
                mark = "o" if len(points) <= 40 else None
                axes.plot(
                    steps, values, color=colour_of(index), linewidth=1.4, marker=mark, markersize=3, label=run.name
                )
        if log_scale:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_title(name, loc="left")
        axes.set_xlabel("step")
        show_grid(axes)
        if number == 0 and len(runs) > 1:
            axes.legend()
    figure.suptitle("Learning curves" if len(runs) > 1 else f"Learning curves of {runs[0].name}")
    return figure


def draw_theorem(found: Approximation) -> Figure:
    """Draw the density with a few of its fits, and the largest error against K."""
    figure = new_figure(11.0, 4.2)
    left, right = (figure.add_subplot(1, 2, number) for number in (1, 2))
    grid = found.grid
    left.fill_between(grid, found.target, color="#dddddd", label="the density")
    shown = [number for number, count in enumerate(found.components) if count in (1, 2, 4)]
    for place, number in enumerate(shown):
        fit = found.free[number].density(found.grid)
        left.plot(grid, fit, color=colour_of(place), linewidth=1.6, label=f"K = {found.components[number]}")
    left.set_xlabel("x")
    left.set_ylabel("density")
    left.set_ylim(bottom=0)
    left.set_title("A skewed density and K Gaussians, fitted by EM", loc="left")
    left.legend()
    for mixtures, colour, marker, label in (
        (found.fixed, COLOURS[1], "s", f"every standard deviation {found.fixed_deviation:g}"),
        (found.free, COLOURS[0], "o", "standard deviations fitted"),
    ):
        right.plot(found.components, found.largest_error(mixtures), color=colour, marker=marker, label=label)
    right.set_yscale("log")
    right.set_xticks(list(found.components))
    right.set_xlabel("number of Gaussians K")
    right.set_ylabel("largest error  max |p(x) - p_K(x)|")
    right.set_title("The error falls with K; a fixed width sets a floor", loc="left")
    show_grid(right)
    right.legend()
    return figure


def _span(numbers: Sequence[int]) -> str:
    """Format a range of numbers, such as ``28`` or ``17 to 28``."""
    low, high = min(numbers), max(numbers)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _by_head(layer: AttentionRank, name: str) -> Tensor:
    """Return one kind of rank of every matrix of a layer, ``[samples, heads]``."""
    return torch.tensor([[getattr(matrix, name) for matrix in heads] for heads in layer.matrices], dtype=torch.float64)
