"""``mgk report``: runs side by side on one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

OUTPUT = Path("report.html")
# Of a page that is still pleasant to mail and to open on a phone.
LARGE = 8e6


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or results that were copied out of them.")
    ],
    output: Annotated[Path, typer.Option("--to", help="The HTML file.")] = OUTPUT,
    title: Annotated[str | None, typer.Option(help="Heading of the page; default: the recipe's.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Sequences to explore; 0: no attention explorer.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each, at most; the page grows by their square.")] = 64,
    source: Annotated[Path | None, typer.Option("--data", help="Folder of the raw files; default: $MGK_DATA.")] = None,
) -> None:
    """Compare runs on one self-contained page: results, curves, an attention explorer, costs, how to make them again.

    Runs that differ in their seed alone make one row. A run without a checkpoint is shown without the explorer.
    """
    from mgk.analysis import write_report
    from mgk.analysis.report.comparison import compare_runs
    from mgk.commands.training import bar

    words = ["mgk", "report", *map(str, runs)]
    for name, value, default in (
        ("--to", output, OUTPUT), ("--title", title, None), ("--examples", examples, 2), ("--tokens", tokens, 64),
        ("--data", source, None),
    ):  # fmt: skip
        if value != default:
            words += [name, str(value)]
    console = Console(stderr=True)
    content = compare_runs(
        runs, title=title, examples=examples, tokens=tokens, source=source, command=shlex.join(words),
        progress=bar(console),
    )  # fmt: skip
    for sentence in content.missing:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    path = write_report(output, content)
    size = path.stat().st_size
    if size > LARGE:
        console.print(
            f"{size / 1e6:.1f} MB: fewer --examples or --tokens make it smaller", markup=False, highlight=False
        )
    typer.echo(f"{path}")
