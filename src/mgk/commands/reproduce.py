"""``mgk reproduce``: build the tables and figures of the paper from ``results/``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mgk.reproduction.page import Grid, Page
    from mgk.reproduction.results import Results

STYLES = {"holds": "green", "does not hold": "red", "complete": "green", "in part": "yellow"}


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Pages to write: T1 ... T10, F1 ... F16, the name of another page, or all."
        ),
    ],
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    folder: Annotated[Path, typer.Option("--to", help="Folder for the pages.")] = Path("docs/results"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds that each row should have.")] = 5,
    collect: Annotated[
        Path | None,
        typer.Option(
            help="Folder of runs, or archive of a sweep, whose finished runs are first copied into the results."
        ),
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(help="README to update if all pages are built; default: README.md two folders above them."),
    ] = None,
) -> None:
    """Build the tables and figures of the paper from our results, next to the paper's numbers, with verdicts.

    If results are missing, lists the commands that produce them and ends with status 1.
    """
    from mgk.reproduction import collection, pages
    from mgk.reproduction.readme import fill, results_text
    from mgk.reproduction.results import read_results

    wanted = pages.parse_names(names)
    console = Console()
    if collect is not None:
        count = len(collection.collect(collect, results))
        console.print(f"{count} files brought from {collect}", highlight=False)
    if not results.is_dir():
        console.print(f"{results} is no folder, so there are no results yet", style="yellow", highlight=False)
    found = read_results(results)
    built = []
    for name in wanted:
        page = pages.build(name, found, folder, seeds)
        pages.write(page, folder)
        built.append(page)
        if len(wanted) <= len(names):
            _show(page, console)
    is_all = set(wanted) == set(pages.names())
    if is_all:
        pages.write_index(built, found, folder)
        fill(folder.parent.parent / "README.md" if readme is None else readme, results_text(built, found))
    if len(wanted) > len(names):
        _overview(built, console)
    _show_missing(built, found, console)
    typer.echo(f"{folder / (pages.INDEX if is_all else f'{wanted[-1]}.md')}")
    if not all(page.is_complete for page in built):
        raise typer.Exit(1)


def _show(page: Page, console: Console) -> None:
    from mgk.reproduction.page import by_sentence, summary, title, verdict_grid

    console.print(title(page), style="bold", highlight=False, markup=False)
    for grid in page.grids:
        console.print(_table(grid))
    for (sentence, where), verdicts in by_sentence(page.verdicts).items():
        console.print(_table(verdict_grid(verdicts), f"{sentence} ({where}): {summary(verdicts)}"))
    for what, holds, why in page.statements:
        outcome = "holds" if holds else "does not hold"
        console.print(f"[{STYLES[outcome]}]{outcome}[/]: {what} ({why})", highlight=False)
    for picture in page.pictures:
        console.print(f"{picture}", highlight=False, markup=False)


def _overview(built: Sequence[Page], console: Console) -> None:
    table = Table("page", "what", "state", "claims")
    for page in built:
        style = STYLES.get(page.state, "")
        table.add_row(page.name, page.title, f"[{style}]{page.state}[/]" if style else page.state, page.tally)
    console.print(table)


def _table(grid: Grid, title: str = "") -> Table:
    table = Table(*grid.header, title=title or grid.title or None, title_justify="left")
    for line in grid.lines:
        table.add_row(*line, style=STYLES.get(line[-1]))
    return table


def _show_missing(built: Sequence[Page], results: Results, console: Console) -> None:
    from mgk.reproduction.missing import find_missing
    from mgk.reproduction.pages import ALL

    needs = list(dict.fromkeys(need for page in built for need in page.needs))
    missing = find_missing(results, needs, built[0].name if len(built) == 1 else ALL)
    if not missing:
        return
    incomplete = [page.name for page in built if not page.is_complete]
    console.print(f"missing, for {', '.join(incomplete)}:", style="bold", highlight=False)
    for each in missing:
        console.print(f"  {each.what}", highlight=False, markup=False, soft_wrap=True)
    console.print("commands that make it:", style="bold")
    # Commands are not wrapped, so that they can be copied.
    for command in dict.fromkeys(command for each in missing for command in each.commands):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
