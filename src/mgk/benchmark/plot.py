"""The plot of a sweep: time and memory against the length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk.benchmark.yardstick import is_stock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"softmax": "#333333", "smgk": "#0072b2", "mgk": "#d55e00"}
"""Colours by preset, for the colour-blind as well."""
OTHER_COLOUR = "#009e73"
OWN_SOFTMAX_COLOUR = "#999999"
"""Colour of softmax with all heads on our own kernel."""
STYLES = {"eager": ":", "chunked": "--", "sdpa": "-."}
"""Line styles by backend; the fastest has a solid line."""

Points = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The line of one contestant over all lengths."""

    label: str
    preset: str
    backend: str
    colour: str
    style: str
    milliseconds: Points
    """Time of forward and backward by length."""
    megabytes: Points
    """Peak memory of forward and backward by length; empty on a CPU."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Plot the sweep of a result to a file."""
    found = lines(result)
    if not found:
        raise ValueError("a plot needs a result with a sweep, got one without: run mgk bench attention --sweep")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("forward and backward, milliseconds", [line.milliseconds for line in found])]
    if any(line.megabytes for line in found):
        panels.append(("peak memory beside the inputs, MB", [line.megabytes for line in found]))
    row = next(record for record in result["rows"] if record.get("sweep"))
    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(1, len(panels), figsize=(6.0 * len(panels), 4.4), layout="constrained")
        for axes, (title, series) in zip([grid] if len(panels) == 1 else grid, panels, strict=True):
            _draw_panel(axes, title, found, series)
        kind = "causal" if row["causal"] else "full"
        figure.suptitle(
            f"{kind.capitalize()} attention on {result['device']}, {row['dtype']}, batch {row['batch']}, "
            f"head_dim {row['head_dim']}: softmax with {row['baseline_heads']} heads, mixtures with {row['heads']}",
            fontsize=11,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def lines(result: Mapping[str, Any]) -> list[Line]:
    """Return the lines: the fastest stock kernel at each length, our own, and every preset on every backend."""
    baselines = [record for record in result["baselines"] if record.get("sweep")]
    rows = [record for record in result["rows"] if record.get("sweep")]
    if not baselines or not rows:
        return []
    fastest: dict[int, dict[str, Any]] = {}
    for record in baselines:
        if not is_stock(record):
            continue
        best = fastest.get(record["tokens"], record)
        fastest[record["tokens"]] = min(best, record, key=lambda each: each["training_ms"])
    found = [_line(f"softmax, {baselines[0]['heads']} heads, SDPA", "softmax", "SDPA", list(fastest.values()))]
    own_softmax = [record for record in baselines if not is_stock(record)]
    if own_softmax:
        backend, heads = own_softmax[0]["backend"], own_softmax[0]["heads"]
        line = _line(f"softmax, {heads} heads, {backend}", "softmax", backend, own_softmax)
        found.append(replace(line, colour=OWN_SOFTMAX_COLOUR))
    for preset, backend in dict.fromkeys((record["preset"], record["backend"]) for record in rows):
        own = [record for record in rows if (record["preset"], record["backend"]) == (preset, backend)]
        found.append(_line(f"{preset}, {own[0]['heads']} heads, {backend}", preset, backend, own))
    return found


def _line(label: str, preset: str, backend: str, records: list[dict[str, Any]]) -> Line:
    return Line(
        label=label,
        preset=preset,
        backend=backend,
        colour=COLOURS.get(preset, OTHER_COLOUR),
        style=STYLES.get(backend, "-"),
        milliseconds={record["tokens"]: record["training_ms"] for record in records},
        megabytes={record["tokens"]: record["peak_bytes"] / 1e6 for record in records if record["peak_bytes"]},
    )


def _draw_panel(axes: Axes, title: str, found: list[Line], series: list[Points]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({length for points in series for length in points})
    for line, points in zip(found, series, strict=True):
        width = 2.2 if line.style == "-" else 1.4
        axes.plot(
            list(points), list(points.values()), color=line.colour, linestyle=line.style, linewidth=width, marker="o",
            markersize=3.5,
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("tokens")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else f"{length}" for length in lengths])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    _label_lines(axes, found, series, lengths[-1])


def _label_lines(axes: Axes, found: list[Line], series: list[Points], longest: int) -> None:
    """Label each line directly: on the right if it reaches the longest length, otherwise above its end."""
    ends = [(line, max(points), points[max(points)]) for line, points in zip(found, series, strict=True) if points]
    low, high = (math.log(value) for value in axes.get_ylim())
    running = sorted((end for end in ends if end[1] == longest), key=lambda end: end[2])
    places = _spread([math.log(value) for _, _, value in running], 0.065 * (high - low), high)
    for (line, _, _), place in zip(running, places, strict=True):
        axes.annotate(
            line.label, xy=(longest, math.exp(place)), xytext=(8, 0), textcoords="offset points", color=line.colour,
            va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip
    stopped: dict[str, list[tuple[Line, int, float]]] = {}
    for end in ends:
        if end[1] != longest:
            stopped.setdefault(end[0].backend, []).append(end)
    for backend, group in stopped.items():
        # The lines of a backend's presets end close to each other, so they share a label.
        _, length, value = max(group, key=lambda end: end[2])
        names = " and ".join(line.preset for line, _, _ in group)
        axes.annotate(
            f"{names}, {backend}", xy=(length, value), xytext=(-8, 2), textcoords="offset points", ha="right",
            color=group[0][0].colour if len(group) == 1 else "#555555", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )  # fmt: skip
    axes.set_ylim(math.exp(low), math.exp(high))


def _spread(places: list[float], step: float, highest: float) -> list[float]:
    """Move sorted places as little as needed to be ``step`` apart, and none above ``highest``."""
    spread = list(places)
    for _ in range(200):
        for below, above in itertools.pairwise(range(len(spread))):
            missing = step - (spread[above] - spread[below])
            if missing > 1e-9:
                spread[below] -= missing / 2
                spread[above] += missing / 2
        if spread and spread[-1] > highest:
            spread[-1] = highest
    return spread
