"""A sweep that runs every row of a recipe with every seed, one after the other in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import mgk.recipes
from mgk.commands.sweep.cell import cells_of, finished, kept
from mgk.commands.training import run, show_metric, write_copy
from mgk.data.full_table import full_table
from mgk.training.folder import make_folder


@dataclass
class Sweep:
    """The results of the cells of a sweep."""

    recipe: str
    metric: str
    """The metric in the table, which is that of the validation."""
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Results by row, one for each finished seed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason why a cell has no result, by cell."""


def run_sweep(
    name: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    changes: Sequence[str] = (),
    folder: Path,
    source: Path | None = None,
    device: str = "auto",
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Sweep:
    """Run the cells that have no result yet, one after the other. If a cell fails, note it and continue.

    Args:
        name: name of the recipe.
        rows: rows to run; ``None`` is all.
        seeds: seeds of each row.
        changes: values of the recipe to override, as ``key=value``.
        folder: folder for the runs, each in ``RECIPE/ROW/seed-N``.
        source: folder of the raw files.
        device: ``cpu``, ``cuda`` or ``auto``.
        results: folder for a copy of every result; a cell with a result there counts as done.
        say: called with a message before each cell.
    """
    make_folder("--results", results)
    cells = cells_of(name, rows, seeds, changes, folder)
    sweep = Sweep(cells[0].config.name, cells[0].config.validation.metric)
    for number, cell in enumerate(cells, start=1):
        title, config, place = cell.title, cell.config, cell.folder
        try:
            found = finished(place, config, device)
            if found is not None and results is not None:
                write_copy(results, found)
            elif results is not None:
                found = kept(results, config, device)
            say(f"[{number}/{len(cells)}] {title}: {'done before' if found else place}")
            if found is None:
                found = run(
                    config, place, source=source, resume="auto", device=device, results=results, command=cell.command
                )
            sweep.results.setdefault(config.row, []).append(found)
        except (ValueError, OSError, RuntimeError) as error:
            sweep.failed[title] = str(error)
            say(f"[{number}/{len(cells)}] {title} failed: {error}")
    return sweep


def table_of(sweep: Sweep) -> Table:
    """Return a table with the mean and standard error over the seeds of each row, next to the paper's number."""
    metric = sweep.metric
    table = full_table(
        "row", f"test {metric}", "standard error", "seeds", "the paper", "parameters", title=sweep.recipe
    )
    for row, found in sweep.results.items():
        values = [each["metrics"]["test"][metric] for each in found]
        mean, error = mean_and_error(values)
        published = mgk.recipes.published(sweep.recipe, row)
        table.add_row(
            row, show_metric(metric, mean), "" if error is None else show_metric(metric, error), str(len(values)),
            ", ".join(f"{name} {value:g}" for name, value in published.items()), f"{found[0]['parameters']:,}",
        )  # fmt: skip
    for why in dict.fromkeys(sweep.failed.values()):
        titles = [title for title, other in sweep.failed.items() if other == why]
        # What one cell lacks, a file of data for example, all of them often lack.
        more = f" and {len(titles) - 1:,} more" if len(titles) > 1 else ""
        table.add_row(f"{titles[0]}{more}", f"[red]{escape(why[:60])}[/red]", "", "0", "", "")
    return table


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, which is ``None`` for fewer than two values."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
