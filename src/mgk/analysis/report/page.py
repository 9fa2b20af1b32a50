"""The content of the page, and how it is written.

``page.html`` is the frame and ``page.css`` the style. ``dom.js``, ``charts.js``, ``explorer.js`` and ``start.js``, in
this order, draw the embedded data.
"""

from __future__ import annotations

import base64
import hashlib
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

# Number of colours in page.css; row 7 has the first colour again, with a dashed line.
NUM_COLOURS = 6
# Shown in a table for a value that a run does not have.
ABSENT = "\N{EN DASH}"
SCRIPTS = ("dom.js", "charts.js", "explorer.js", "start.js")


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """The attention weights of one sequence."""

    tokens: Sequence[str]
    """The N tokens as text."""
    weights: ArrayLike
    """``[layers, heads, N, N]``, queries before keys. Each weight takes 4/3 bytes of the page."""
    shares: ArrayLike | None = None
    """``[layers, heads, M, N, N]``: the share of each component in a weight; ``None`` if there is one component. Each
    share but those of the last component takes 4/3 bytes of the page."""
    title: str = ""
    """Description of the sequence, and of what is left out of it."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The content of the page about one run."""

    name: str
    """Name of the run, unique on the page."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Cells of the run in the summary table, for a report without ``results``."""
    row: str = ""
    """Name of the row, whose runs differ only in their seed and share a colour and a legend; empty for ``name``."""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Points (step, value) by name; curves with the same name share a chart. Points that are not finite are left out,
    and their number is shown below the chart."""
    maps: Sequence[AttentionMaps] = ()
    """Attention maps of each example. The explorer selects them by number, so every run must have the same examples."""
    shares_are: str = "responsibility"
    """Name of the shares in its maps."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """All settings, which are compared below the charts."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other facts on which its numbers may depend, such as versions and the checksum of the data."""
    command: str = ""
    """Command that repeats this run."""

    @property
    def row_name(self) -> str:
        return self.row or self.name


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One line of a table."""

    name: str
    cells: Sequence[str]
    is_reference: bool = False
    """Whether it is a reference, such as a baseline without a model."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose lines are rows of the comparison."""

    columns: Sequence[str]
    """Headings, except that of the names."""
    rows: Sequence[TableRow]
    notes: Sequence[str] = ()
    """Sentences below the table."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the page."""

    title: str
    """The heading."""
    runs: Sequence[RunReport]
    """The runs, at least one."""
    subtitle: str = ""
    """A sentence under the heading."""
    results: Table | None = None
    """The first table; ``None`` builds it from the ``columns`` of the runs."""
    costs: Table | None = None
    """Table of the models' costs."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Baselines without a model, such as the share of the largest class, each drawn as a dashed line."""
    metric: str | None = None
    """Curve to which the baselines belong; ``None`` for every curve with "accuracy" in its name."""
    missing: Sequence[str] = ()
    """Sentences about what the explorer cannot show, with reasons."""
    notes: Sequence[str] = ()
    """Sentences that a reader needs to judge the numbers."""
    command: str = ""
    """Command that writes this page again."""


def write_report(path: str | Path, report: Report) -> Path:
    """Write the page, and create its folder. The same report gives the same bytes.

    Args:
        path: path of the HTML file.
        report: content of the page.
    """
    _check(report)
    charts = _charts(report)
    rows = _rows(report.runs)
    summary = _table("results", _columns_of_runs(report.runs) if report.results is None else report.results, rows)
    sections = [
        ("Results", summary),
        ("Curves", _chart_frames(report, charts)),
        ("Attention", _explorer(report)),
        ("Costs", "" if report.costs is None else _table("costs", report.costs, rows)),
        ("Configuration", _configuration(report.runs, rows)),
        ("Reproduce", _reproduce(report, rows)),
        ("Notes", _list(report.notes)),
    ]
    shown = [(title, content) for title, content in sections if content]
    style, script = _resource("page.css"), "".join(map(_resource, SCRIPTS))
    page = Template(_resource("page.html")).substitute(
        title=escape(report.title),
        subtitle=f'<p class="subtitle">{escape(report.subtitle)}</p>' if report.subtitle else "",
        # Whatever the data contains, the browser runs only this script and applies only this style.
        script_hash=_hash(script),
        style_hash=_hash(style),
        style=style,
        navigation="\n".join(f'<a href="#{title.lower()}">{title}</a>' for title, _ in shown),
        sections="\n".join(_section(title, content) for title, content in shown),
        data=_embed(_data(report, charts, rows)),
        script=script,
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
    for table in (report.results, report.costs):
        for row in () if table is None else table.rows:
            if table is not None and len(row.cells) != len(table.columns):
                raise ValueError(f"row {row.name!r} must have {len(table.columns)} cells, got {len(row.cells)}")


def _union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all keys in the order in which they first appear."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _rows(runs: Sequence[RunReport]) -> dict[str, int]:
    """Return the number of each row, which decides its colour."""
    return {name: number for number, name in enumerate(dict.fromkeys(run.row_name for run in runs))}


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode("ascii")


def _section(title: str, content: str) -> str:
    name = title.lower()
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{content}\n</section>'


def _list(sentences: Sequence[str]) -> str:
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>\n{items}\n</ul>" if items else ""


def _swatch(number: int) -> str:
    return f'<span class="swatch run-{number % NUM_COLOURS}{" dashed" if number >= NUM_COLOURS else ""}"></span>'


def _columns_of_runs(runs: Sequence[RunReport]) -> Table:
    columns = _union(run.columns for run in runs)
    lines = [TableRow(name=run.name, cells=[run.columns.get(key, ABSENT) for key in columns]) for run in runs]
    return Table(columns=columns, rows=lines)


def _table(name: str, table: Table, rows: Mapping[str, int]) -> str:
    lines = [
        _line(
            (_swatch(rows[row.name]) if row.name in rows else "") + escape(row.name),
            row.cells,
            mark="reference" if row.is_reference else "",
        )
        for row in table.rows
    ]
    notes = "".join(f'\n<p class="small">{escape(note)}</p>' for note in table.notes)
    return _box(name, ["", *map(escape, table.columns)], lines) + notes if table.columns else ""


def _box(name: str, heads: Sequence[str], lines: Sequence[str]) -> str:
    """Return a table in a box that scrolls if the table is wider than the page."""
    head = "".join(f'<th scope="col">{content}</th>' if content else "<td></td>" for content in heads)
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {name}">\n<table class="{name}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _line(head: str, cells: Sequence[str], *, mark: str = "") -> str:
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    marked = f' class="{mark}"' if mark else ""
    return f'<tr{marked}><th scope="row">{head}</th>{data}</tr>'


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """All curves with one name."""

    name: str
    points: Sequence[NDArray[np.float64]]
    """Points ``[n, 2]`` of each run, finite and sorted by step; n may be 0."""
    left_out: Sequence[int]
    """Number of points of each run that were not finite."""
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
    """Return an empty figure for each chart, which the script fills."""
    frames = []
    for number, chart in enumerate(charts):
        counts = zip(report.runs, chart.left_out, strict=True)
        missing = "; ".join(f"{run.name}: {count}" for run, count in counts if count)
        note = f'\n<p class="small">Not finite, so not drawn: {escape(missing)}.</p>' if missing else ""
        name = escape(chart.name)
        if any(map(len, chart.points)):
            plot = f'<svg role="img" tabindex="0" aria-label="{name} over steps: arrow keys read the values"></svg>'
            frames.append(
                f'<figure class="chart" data-chart="{number}">\n<figcaption>{name}</figcaption>\n'
                f'<div class="plot">{plot}</div>\n<ul class="legend"></ul>{note}\n</figure>\n'
            )
        elif note:
            frames.append(f"<figure>\n<figcaption>{name}</figcaption>{note}\n</figure>\n")
    return f'<div class="charts">\n{"".join(frames)}</div>' if frames else ""


def _explorer(report: Report) -> str:
    explorer = _resource("explorer.html") if any(run.maps for run in report.runs) else ""
    missing = _list(report.missing)
    return explorer + (f'<div class="missing">\n{missing}\n</div>' if missing else "")


def _configuration(runs: Sequence[RunReport], rows: Mapping[str, int]) -> str:
    """Return the settings: the differing ones are visible, the rest can be unfolded."""
    keys = _union(run.configuration for run in runs)
    if not keys:
        return ""
    settings = {key: [_value(run.configuration.get(key, ABSENT)) for run in runs] for key in keys}
    different = [key for key, cells in settings.items() if len(set(cells)) > 1]
    heads = ["setting", *(_swatch(rows[run.row_name]) + escape(run.name) for run in runs)]
    parts = []
    if different:
        parts.append(_box("differences", heads, [_line(escape(key), settings[key]) for key in different]))
    elif len(runs) > 1:
        parts.append('<p class="small">All runs have the same settings.</p>')
    lines = [_line(escape(key), cells, mark="differs" * (key in different)) for key, cells in settings.items()]
    whole = _box("configuration", heads, lines)
    parts.append(f"<details>\n<summary>All {len(keys)} settings</summary>\n{whole}\n</details>")
    return "\n".join(parts)


def _value(value: Any) -> str:
    """Format a value as YAML, as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reproduce(report: Report, rows: Mapping[str, int]) -> str:
    parts = []
    for run in report.runs:
        if not run.command and not run.facts:
            continue
        title = f"<h3>{_swatch(rows[run.row_name])}{escape(run.name)}</h3>"
        facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>\n" for key, value in run.facts.items())
        shown = f"<details>\n<summary>Versions and data</summary>\n<dl>\n{facts}</dl>\n</details>" if facts else ""
        parts.append(f'<div class="run">\n{title}\n{_command(run.command, run.name)}\n{shown}\n</div>')
    if report.command:
        title = "<h3>This page</h3>\n" if parts else ""
        parts.append(f'<div class="run">\n{title}{_command(report.command, "this page")}\n</div>')
    return "\n".join(parts)


def _command(command: str, of: str) -> str:
    if not command:
        return ""
    label = escape(f"Copy the command of {of}")
    return (
        f'<div class="command"><pre tabindex="0"><code>{escape(command)}</code></pre>'
        f'<button type="button" class="copy" aria-label="{label}">copy</button></div>'
    )


def _data(report: Report, charts: Sequence[_Chart], rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the data for the script."""
    return {
        "rows": list(rows),
        "runs": [
            {
                "name": run.name,
                "row": rows[run.row_name],
                "sharesAre": run.shares_are,
                "maps": [_encode_maps(run.name, maps) for maps in run.maps],
            }
            for run in report.runs
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
    """Round to seven digits, which is more than a screen shows."""
    return float(f"{number:.7g}")


def _encode_maps(run: str, maps: AttentionMaps) -> dict[str, Any]:
    """Encode weights as bytes ``round(255 sqrt(weight / m))``, with the row maximum m in fp32, and shares as bytes.

    The square root gives small weights, of which there are most, more resolution; an error is below 0.4 % of m. Shares
    of all components but the last are ``round(255 share)``. The error of a share is below 0.002, and that of the last
    component below M - 1 times that.
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
    encoded = {
        "title": maps.title,
        "tokens": list(maps.tokens),
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "components": 1,
        "levels": _base64(np.rint(255 * np.sqrt(ratio)).astype(np.uint8)),
        "largest": _base64(largest.astype("<f4")),
    }
    if maps.shares is None:
        return encoded
    shares = np.asarray(maps.shares, dtype=np.float32)
    expected = weights.shape[:2]
    if shares.ndim != 5 or shares.shape[2] < 1 or (*shares.shape[:2], *shares.shape[3:]) != weights.shape:
        raise ValueError(
            f"shares of {run!r} must have shape [{expected[0]}, {expected[1]}, components, {length}, {length}], "
            f"got {list(shares.shape)}"
        )
    if not (np.abs(shares.sum(axis=2) - 1) < 1e-3).all() or (shares < 0).any():
        raise ValueError(f"shares of {run!r} must not be negative and sum to 1 over the components, got others")
    return {
        **encoded,
        "components": shares.shape[2],
        "shares": _base64(np.rint(255 * shares[:, :, :-1]).clip(0, 255).astype(np.uint8)),
    }


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _embed(data: dict[str, Any]) -> str:
    """Encode data as JSON that cannot end the script element that contains it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
