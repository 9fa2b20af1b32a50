"""Formatting of results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mgk.benchmark import cells
from mgk.benchmark.attention import Comparison
from mgk.benchmark.yardstick import Record, show_way

HOST_BOUND = "* the host takes longer to queue the call than the device takes to do it; the time is the host's"


def attention_table(found: Comparison) -> Table:
    """Table for one shape: softmax, presets, and wrong contestants without numbers."""
    some = found.baselines[0]
    title = f"{cells.show_shape(some)}, {some['dtype']}, {some['device']}"
    return _table(title, cells.ATTENTION, cells.attention_cells(found.baselines, found.rows), found.failures)


def retrieval_table(found: Comparison) -> Table:
    """Table for models end to end."""
    some = [*found.baselines, *found.rows, *found.failures][0]
    title = f"Retrieval, {some['pairs']} pairs of {some['tokens']:,} bytes, {some['device']}"
    return _table(title, cells.RETRIEVAL, cells.retrieval_cells(found.baselines, found.rows), found.failures)


def linear_table(found: Comparison) -> Table:
    """Table for linear attention at one shape."""
    some = found.baselines[0]
    title = f"{cells.show_shape(some)}, {some['dtype']}, {some['device']}"
    return _table(title, cells.LINEAR, cells.linear_cells([*found.baselines, *found.rows]), found.failures)


def decode_table(found: Comparison) -> Table:
    """Table for a step of generation."""
    some = found.baselines[0]
    title = f"{cells.show_context(some)}, {some['dtype']}, {some['device']}"
    return _table(title, cells.DECODE, cells.decode_cells([*found.baselines, *found.rows]), found.failures)


def generation_table(found: Comparison) -> Table:
    """Table for greedy generation end to end."""
    some = found.baselines[0]
    title = f"{cells.show_writing(some)}, {some['dtype']}, {some['device']}"
    return _table(title, cells.GENERATION, cells.generation_cells([*found.baselines, *found.rows]), found.failures)


def packed_table(found: Comparison) -> Table:
    """Table for a step on reviews."""
    some = [*found.baselines, *found.rows, *found.failures][0]
    title = f"IMDb, {some['batch']} reviews of {some['tokens']:,} bytes together, {some['device']}"
    return _table(title, cells.PACKED, cells.packed_cells([*found.baselines, *found.rows]), found.failures)


def rows_table(found: Comparison, recipe: str) -> Table:
    """Rows of a recipe that took turns."""
    some = [*found.baselines, *found.rows, *found.failures][0]
    title = f"{recipe}, updates as the recipe trains, {some.get('dtype', '')}, {some.get('device', '')}".rstrip(", ")
    return _table(title, cells.ROWS, cells.row_cells([*found.baselines, *found.rows]), found.failures)


def sweep_table(rows: Sequence[Record]) -> Table:
    """Table for the rows of a sweep, with their lengths."""
    rows = [record for record in rows if record.get("sweep")]
    lines = [
        [*cell, f"{record['tokens']:,}"] for record, cell in zip(rows, cells.attention_cells([], rows), strict=True)
    ]
    return _table("against the length", (*cells.ATTENTION, "tokens"), lines, ())


def notes(found: Comparison) -> list[str]:
    """Return a line for every reason why a contestant was left out, and one that explains the stars."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in found.skipped:
        reasons.setdefault((show_way(record), record["reason"]), []).append(
            str(record["row" if "row" in record else "preset"])
        )
    lines = [f"left out: {way} for {', '.join(presets)}: {why}" for (way, why), presets in reasons.items()]
    lines += [f"no training: {cells.show_no_training(record)}" for record in found.rows if record.get("no_training")]
    measured = [
        (record, direction)
        for record in (*found.baselines, *found.rows)
        for direction in ("forward", "training")
        if record.get(f"{direction}_ms") is not None and f"{direction}_host_ms" in record
    ]
    if any("*" in cells.show_time(record, direction) for record, direction in measured):
        lines.append(HOST_BOUND)
    return lines


def wrongs(found: Comparison) -> list[str]:
    """Return a line for every wrong result."""
    names = [record.get("row", f"{record['preset']} through {show_way(record)}") for record in found.failures]
    return [f"wrong: {name}: {record['reason']}" for name, record in zip(names, found.failures, strict=True)]


def _table(title: str, headers: Iterable[str], lines: Iterable[list[str]], failures: Iterable[Record]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers:
        is_name = header in ("preset", "model", "through", "reviews", "row")
        table.add_column(header, justify="left" if is_name else "right", no_wrap=is_name)
    for line in lines:
        table.add_row(*map(escape, line), style="dim" if line[1].startswith("SDPA") else None)
    for record in failures:
        name = [record["row"]] if "row" in record else [record["preset"], show_way(record), str(record["heads"])]
        table.add_row(*name, "wrong", style="red")
    return table
