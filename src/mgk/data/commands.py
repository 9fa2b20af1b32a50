"""``mgk data``: list, prepare and inspect corpora."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mgk.data import baselines, registry
from mgk.data.full_table import full_table
from mgk.data.kind import check_options
from mgk.data.store import Corpus, Split

T = TypeVar("T")

app = typer.Typer(help="Corpora: list, prepare, inspect.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option("--to", help="Folder of the prepared corpus; default: $MGK_CACHE/NAME or ~/.cache/mgk/NAME."),
]


@app.command("list")
def list_corpora() -> None:
    """All corpora, what they need, and whether they are prepared."""
    table = full_table("name", "what it is, where its files come from, and its options", "prepared")
    for kind in registry.KINDS.values():
        options = " ".join(f"{name}={value}" for name, value in kind.options.items()) or "no options"
        is_there = (registry.default_folder(kind.name) / "manifest.json").is_file()
        described = f"{kind.title} ({kind.task})\n[dim]{escape(kind.origin)}[/dim]\n{escape(options)}"
        table.add_row(kind.name, described, "yes" if is_there else "")
    Console().print(table)


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="Which corpus: see mgk data list.")],
    options: Annotated[list[str] | None, typer.Argument(help="Options of this corpus as key=value.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Folder of the raw files; default: $MGK_DATA.")] = None,
    folder: Folder = None,
) -> None:
    """Read the raw files, check every record, and write token arrays. Safe to interrupt, and to run twice at once."""
    chosen = dict(map(_parse_option, options or []))
    # Before they become keyword arguments, where source=x would collide with another.
    check_options(name, chosen, registry.find_kind(name).options)
    corpus = registry.prepare(name, source, folder, _progress, **chosen)
    Console().print(_counts(corpus))
    typer.echo(f"{corpus.folder}")


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(help="Which corpus: see mgk data list.")],
    folder: Folder = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the histogram of lengths into this file, too.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="How many samples to show.")] = 3,
    with_baselines: Annotated[
        bool, typer.Option("--baselines", help="What needs no transformer, on the test set.")
    ] = False,
) -> None:
    """Counts, lengths, class balance and a few samples of a prepared corpus."""
    corpus = registry.open_corpus(name, folder)
    lengths = {
        f"{split} {field}": sequences.lengths
        for split, content in corpus.splits.items()
        for field, sequences in content.sequences.items()
        if len(sequences) > 1
    }
    if plot is not None and not lengths:
        raise ValueError(
            f"--plot needs a corpus of several sequences, got {name}, which is one long one in every split"
        )
    console = Console()
    console.print(_counts(corpus))
    for fact, value in corpus.manifest["facts"].items():
        console.print(f"{fact}: {value:,}" if isinstance(value, int) else f"{fact}: {value}")
    for split, content in corpus.splits.items():
        if "labels" in content.numbers:
            console.print(f"{split}: {_balance(content)}")
    for title, values in lengths.items():
        console.print(_histogram(title, values))
    if plot is not None:
        _draw(plot, corpus.name, lengths)
        console.print(f"histogram: {plot}")
    if with_baselines:
        for title, value in baselines.compute(corpus).items():
            console.print(f"{title}: {value:.4f}")
    decode = registry.find_kind(name).decode
    for split, content in list(corpus.splits.items())[:1]:
        for field, sequences in content.sequences.items():
            for index in range(min(samples, len(sequences))):
                text = decode(corpus, field, np.asarray(sequences[index][:400]))
                console.print(f"{split} {field} {index}", style="bold")
                console.print(text[:400], markup=False, highlight=False)


def _progress(steps: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    return track(steps, description, total=total)


def _parse_option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"an option must look like key=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _counts(corpus: Corpus) -> Table:
    table = Table("split", "field", "count", "tokens", "longest", title=corpus.name)
    for split, described in corpus.manifest["splits"].items():
        for field, counts in described.items():
            table.add_row(
                split, field, *(f"{counts[key]:,}" if key in counts else "" for key in ("count", "tokens", "longest"))
            )
    return table


def _balance(split: Split) -> str:
    values, counts = np.unique(split.numbers["labels"], return_counts=True)
    shares = (f"{value}: {count / counts.sum():.1%}" for value, count in zip(values, counts, strict=True))
    return "labels " + ", ".join(shares)


def _histogram(title: str, lengths: NDArray[Any], bars: int = 12) -> Table:
    """Lengths as bars of text."""
    counts, edges = np.histogram(lengths, bins=min(bars, max(int(lengths.max() - lengths.min()), 1)))
    table = Table(
        "tokens", "", "sequences", title=f"{title}: mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}"
    )
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        table.add_row(f"{low:,.0f} - {high:,.0f}", "█" * round(40 * count / counts.max()), f"{count:,}")
    return table


def _draw(path: Path, name: str, lengths: dict[str, NDArray[Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    edges = np.histogram_bin_edges(np.concatenate(list(lengths.values())), bins=60).tolist()
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for title, values in lengths.items():
        # Shares, because the splits have different sizes.
        axes.hist(values, bins=edges, histtype="step", label=title, weights=np.full(len(values), 1 / len(values)))
    axes.set(xlabel="tokens", ylabel="share of sequences", title=name)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
