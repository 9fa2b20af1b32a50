"""Training throughput of rows as measured by ``mgk bench rows``, for tables and for comparisons at equal time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mgk.benchmark.cells import show_ratio
from mgk.reproduction.missing import Missing
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results

HEADER = ("training tokens/s, alone", "times the first row")
"""Of the columns of a table; the first row is that of the measurement."""


def has_speed(recipe: str, results: Results) -> bool:
    """Return whether any row of a recipe has been timed."""
    return any(name == recipe for name, _ in results.speeds)


def cells(recipe: str, row: str, results: Results) -> tuple[str, str]:
    """Return the cells of a row under :data:`HEADER`."""
    found = results.speeds.get((recipe, row))
    if found is None:
        return "", ""
    return f"{found['tokens_per_second']:,.0f}", show_ratio(found["training_ratio"])


def seconds_per_update(recipe: str, row: str, results: Results) -> float | None:
    """What an update takes, alone on the device: of rows from several groups by their ratio to the first row, since a
    clock may drift between groups. All rows of a language model have the same tokens in an update."""
    found = results.speeds.get((recipe, row))
    if found is None or found["training_ratio"] is None:
        return None
    first = results.speeds[recipe, found["baseline"]]
    return float(first["training_ms"]) / 1e3 / float(found["training_ratio"])


def note(recipe: str, results: Results) -> tuple[str, ...]:
    """Describe where the times come from."""
    devices = dict.fromkeys(
        f"{found['device']}, {found['dtype']}" for (name, _), found in results.speeds.items() if name == recipe
    )
    return tuple(
        f"Training tokens/s are those of the training loop with the recipe's configuration. Each row has the device "
        f"({device}) to itself, and rows take turns (`mgk bench rows {recipe}`). The first row is that of the "
        "measurement."
        for device in devices
    )


def find_untimed(recipe: str, rows: Sequence[str], results: Results) -> list[Missing]:
    """Find the rows of a table without a time, and the command that measures them."""
    absent = [row for row in rows if (recipe, row) not in results.speeds]
    if not absent:
        return []
    usual = list(bundled(recipe).rows)
    listed = "" if set(rows) <= set(usual) else f" --rows {shlex.quote(' '.join(dict.fromkeys([*usual, *rows])))}"
    resume = " --resume" if has_speed(recipe, results) else ""
    return [
        Missing(
            what=f"{recipe}: training tokens per second of {', '.join(absent)}",
            commands=(f"mgk bench rows {recipe}{listed}{resume}",),
        )
    ]
