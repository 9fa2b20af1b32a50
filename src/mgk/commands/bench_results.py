"""``mgk bench plot | merge | table | choose``: what is made of the JSON of a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PAGE = Path("docs/benchmarks.md")


def plot(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file of mgk bench attention.")],
    to: Annotated[Path | None, typer.Option("--to", help="Image file to write; default: beside the JSON file.")] = None,
) -> None:
    """Plot time and memory against the length, from the JSON of mgk bench attention."""
    from mgk.benchmark import result
    from mgk.benchmark.plot import draw

    picture = file.with_suffix(".png") if to is None else to
    draw(result.read(file), picture)
    typer.echo(f"{picture}")


def write_merged(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON files of mgk bench attention.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another such file, of which only the sweep over lengths is used."),
    ] = None,
) -> None:
    """Join results of mgk bench attention that were measured in several calls.

    They must come from the same device, dtype and versions, and no two may contain the same shape.
    The joined file records when each call began, how it was configured and what it measured.
    """
    from mgk.benchmark import parts
    from mgk.training.result import write

    found = [parts.read_attention(file) for file in files]
    if sweep is not None:
        found.append(parts.only_lengths(parts.read_attention(sweep)))
    write(output, parts.join(found))
    typer.echo(f"{output}")


def write_table(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file of a benchmark.")],
    page: Annotated[Path, typer.Option(help="Page with a section for this file.")] = PAGE,
) -> None:
    """Write the tables and the headline of a result into the docs, between the comments that name its file."""
    from mgk.benchmark import result
    from mgk.benchmark.markdown import headline, tables
    from mgk.benchmark.page import rewrite

    found = result.read(file)
    rewrite(page, file, tables(found), headline(found) if found["benchmark"] == "attention" else None)
    typer.echo(f"{page}")


def write_choice(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file of mgk bench attention on a GPU.")],
    padded: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of benchmarks/padded_softmax.py on that GPU.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Table to write; default: the one that the library reads.")
    ] = None,
) -> None:
    """Write the table of cases in which `auto` runs plain softmax on our own kernel, because it was measured faster."""
    from mgk.benchmark import result
    from mgk.benchmark.softmax_choice import choose
    from mgk.ops import softmax_kernel
    from mgk.training.result import read_object, write

    path = softmax_kernel.PATH if to is None else to
    found = choose(result.read(file), file.name, None if padded is None else read_object(padded))
    write(path, found)
    if not found["faster"]:
        typer.echo("nothing to choose: plain softmax keeps the stock kernels everywhere")
    typer.echo(f"{path}")
