"""A comparison of runs as one HTML file: table, curves, attention maps. It loads nothing, so it can be mailed.

``report.html`` is the frame, ``report.css`` the look, ``report.js`` draws the data that is embedded here.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# As many as report.css has; run 7 gets the first one again, with a dashed line.
NUM_COLOURS = 6
# In a table, what a run does not have.
ABSENT = "\N{EN DASH}"


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """The attention weights of one sequence."""

    tokens: Sequence[str]
    """N tokens, as they are to be shown."""
    weights: ArrayLike
    """``[layers, heads, N, N]``, queries before keys. The page grows by 4/3 bytes for each weight."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the page shows of one run."""

    name: str
    """Unique on the page."""
    columns: Mapping[str, str]
    """Its row of the summary table."""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Points (step, value) by name; curves of one name share a chart. Points that are not finite are left out, and
    their number is written under the chart."""
    maps: Sequence[AttentionMaps] = ()
    """One for each example. The explorer shows them by number: give every run the same examples."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """All settings, compared below the charts."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything on the page."""

    title: str
    """The heading."""
    runs: Sequence[RunReport]
    """At least one."""
    subtitle: str = ""
    """A sentence under the heading."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """What needs no model, such as the share of the largest class: a dashed line each."""
    metric: str | None = None
    """The curve that the baselines belong to; ``None``: every curve with "accuracy" in its name."""
    notes: Sequence[str] = ()
    """What a reader must know to judge the numbers."""
    command: str = ""
    """What writes this page again."""


def write_report(path: str | Path, report: Report) -> Path:
    """Write the page, folders included. The same report gives the same bytes.

    Args:
        path: of the HTML file.
        report: what to show.
    """
    _check(report)
    charts = _charts(report)
    page = Template(_resource("report.html")).substitute(
        title=escape(report.title),
        header=_header(report),
        style=_resource("report.css"),
        summary=_summary(report.runs),
        curves=_section("Curves", _chart_frames(report, charts)),
        maps=_section("Attention", _resource("report_maps.html") if any(run.maps for run in report.runs) else ""),
        configuration=_section("Configuration", _configuration(report.runs)),
        footer=_footer(report),
        data=_embed(_data(report, charts)),
        script=_resource("report.js"),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def _check(report: Report) -> None:
    if len(report.runs) == 0:
        raise ValueError("runs must hold at least one run, got none")
    names = [run.name for run in report.runs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names of runs must differ, got {name!r} {names.count(name)} times")
    curves = _union(run.curves for run in report.runs)
    if report.metric is not None and report.metric not in curves:
        raise ValueError(f"metric must be one of the curves {', '.join(curves) or '(none)'}, got {report.metric!r}")
    for name, value in report.baselines.items():
        if not math.isfinite(value):
            raise ValueError(f"baseline {name!r} must be finite, got {value}")


def _union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, in the order in which they first appear."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _resource(name: str) -> str:
    return (resources.files("mgk.analysis") / name).read_text(encoding="utf-8")


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def _header(report: Report) -> str:
    subtitle = f'\n<p class="subtitle">{escape(report.subtitle)}</p>' if report.subtitle else ""
    return f"<header>\n<h1>{escape(report.title)}</h1>{subtitle}\n</header>"


def _swatch(number: int) -> str:
    return f'<span class="swatch run-{number % NUM_COLOURS}{" dashed" if number >= NUM_COLOURS else ""}"></span>'


def _summary(runs: Sequence[RunReport]) -> str:
    columns = _union(run.columns for run in runs)
    rows = [
        _row(_swatch(number) + escape(run.name), [str(run.columns.get(column, ABSENT)) for column in columns])
        for number, run in enumerate(runs)
    ]
    return f"<section>\n{_table('summary', ['run', *map(escape, columns)], rows)}\n</section>"


def _table(name: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """In a box of its own, which scrolls where the table is wider than the page."""
    head = "".join(f'<th scope="col">{content}</th>' for content in heads)
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">\n<table class="{name}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _row(head: str, cells: Sequence[str], *, is_marked: bool = False) -> str:
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    mark = ' class="differs"' if is_marked else ""
    return f'<tr{mark}><th scope="row">{head}</th>{data}</tr>'


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """All curves of one name."""

    name: str
    points: Sequence[NDArray[np.float64]]
    """``[n, 2]`` of each run, finite and sorted by step; n may be 0."""
    left_out: Sequence[int]
    """How many points of each run were not finite."""
    has_baselines: bool


def _charts(report: Report) -> list[_Chart]:
    charts = []
    for name in _union(run.curves for run in report.runs):
        points, left_out = [], []
        for run in report.runs:
            given = np.asarray(list(run.curves.get(name, ())), dtype=np.float64)
            if given.size and (given.ndim != 2 or given.shape[1] != 2):
                raise ValueError(f"curve {name!r} must hold pairs (step, value), got shape {list(given.shape)}")
            given = given.reshape(-1, 2)
            kept = given[np.isfinite(given).all(axis=1)]
            points.append(kept[kept[:, 0].argsort(kind="stable")])
            left_out.append(len(given) - len(kept))
        is_metric = "accuracy" in name.lower() if report.metric is None else name == report.metric
        charts.append(_Chart(name=name, points=points, left_out=left_out, has_baselines=is_metric))
    return charts


def _chart_frames(report: Report, charts: Sequence[_Chart]) -> str:
    """A figure for each chart; the script fills it."""
    frames = []
    for number, chart in enumerate(charts):
        counts = zip(report.runs, chart.left_out, strict=True)
        missing = "; ".join(f"{run.name}: {count}" for run, count in counts if count)
        note = f'\n<p class="small">Not finite, so not drawn: {escape(missing)}.</p>' if missing else ""
        name = escape(chart.name)
        if any(map(len, chart.points)):
            plot = f'<svg role="img" tabindex="0" aria-label="{name} over steps"></svg>'
            frames.append(
                f'<figure class="chart" data-chart="{number}">\n<figcaption>{name}</figcaption>\n'
                f'<div class="plot">{plot}</div>\n<ul class="legend"></ul>{note}\n</figure>\n'
            )
        elif note:
            frames.append(f"<figure>\n<figcaption>{name}</figcaption>{note}\n</figure>\n")
    return f'<div class="charts">\n{"".join(frames)}</div>' if frames else ""


def _configuration(runs: Sequence[RunReport]) -> str:
    keys = _union(run.configuration for run in runs)
    if not keys:
        return ""
    rows = []
    for key in keys:
        cells = [str(run.configuration.get(key, ABSENT)) for run in runs]
        rows.append(_row(escape(key), cells, is_marked=len(set(cells)) > 1))
    heads = ["setting", *(_swatch(number) + escape(run.name) for number, run in enumerate(runs))]
    title = "All settings; those that differ are marked"
    return f"<details>\n<summary>{title}</summary>\n{_table('configuration', heads, rows)}\n</details>"


def _footer(report: Report) -> str:
    notes = "\n".join(f"<li>{escape(note)}</li>" for note in report.notes)
    command = f'<div class="scroll"><pre><code>{escape(report.command)}</code></pre></div>' if report.command else ""
    return _section("Notes", f"<ul>\n{notes}\n</ul>" if notes else "") + _section("Reproduce", command)


def _data(report: Report, charts: Sequence[_Chart]) -> dict[str, Any]:
    """What the script draws."""
    return {
        "runs": [
            {"name": run.name, "maps": [_encode_maps(run.name, maps) for maps in run.maps]} for run in report.runs
        ],
        "charts": [
            {
                "name": chart.name,
                "hasBaselines": chart.has_baselines,
                "points": [[[_short(number) for number in point] for point in points] for points in chart.points],
            }
            for chart in charts
        ],
        "baselines": [{"name": name, "value": float(value)} for name, value in report.baselines.items()],
    }


def _short(number: float) -> float:
    """Seven digits, which is more than a screen shows."""
    return float(f"{number:.7g}")


def _encode_maps(run: str, maps: AttentionMaps) -> dict[str, Any]:
    """Weights as bytes ``round(255 sqrt(weight / m))``, m the largest of the row, which is kept in fp32.

    The root spends the bytes on small weights, of which there are most; an error is below 0.4 % of m.
    """
    weights, length = np.asarray(maps.weights, dtype=np.float32), len(maps.tokens)
    if weights.ndim != 4 or weights.size == 0 or weights.shape[2:] != (length, length):
        raise ValueError(
            f"weights of {run!r} must have shape [layers, heads, {length}, {length}] for {length} tokens, "
            f"got {list(weights.shape)}"
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError(f"weights of {run!r} must be finite and not negative, got {weights.min()} to {weights.max()}")
    largest = weights.max(axis=-1)
    ratio = weights / np.where(largest > 0, largest, 1.0)[..., None]
    levels = np.rint(255 * np.sqrt(ratio)).astype(np.uint8)
    return {
        "tokens": list(maps.tokens),
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "levels": base64.b64encode(levels.tobytes()).decode("ascii"),
        "largest": base64.b64encode(largest.astype("<f4").tobytes()).decode("ascii"),
    }


def _embed(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
