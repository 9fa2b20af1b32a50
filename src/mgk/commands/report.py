"""``mgk report``: compare runs on one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

OUTPUT = Path("report.html")
# Size in bytes above which a page is unpleasant to mail or to open on a phone.
LARGE = 8e6


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or result files copied from them.")
    ],
    output: Annotated[Path, typer.Option("--to", help="HTML file to write.")] = OUTPUT,
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the title of the recipe.")] = None,
    examples: Annotated[
        int, typer.Option(min=0, help="Number of sequences in the attention explorer; 0 leaves it out.")
    ] = 2,
    tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of each such sequence; the page grows with their square.")
    ] = 64,
    source: Annotated[Path | None, typer.Option("--data", help="Folder of the raw files; default: $MGK_DATA.")] = None,
) -> None:
    """Compare runs on one self-contained HTML page.

    Shows results, learning curves, an attention explorer, costs and the commands to repeat the runs.
    Runs that differ only in their seed share a row.
    A run without a checkpoint is shown without the explorer.
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
