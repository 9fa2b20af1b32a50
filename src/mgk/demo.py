"""``mgk demo``: train two models on short ListOps side by side, and write a report about them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from mgk.analysis import Report
    from mgk.analysis.report.examples import Example
    from mgk.data import Corpus
    from mgk.training import Trainer

RECIPE = "demo"
ROWS = ("softmax-8", "smgk-4")
REPORT = "report.html"
# Length of the longest list in the recipe.
LONGEST = 64


def demo(
    folder: Annotated[Path, typer.Option("--to", help="Folder for the runs and the report.")] = Path("runs/demo"),
    rows: Annotated[str, typer.Option(help="Rows to train, separated by spaces (see mgk recipes demo).")] = " ".join(
        ROWS
    ),
    changes: Annotated[
        list[str] | None, typer.Argument(help="Values to override, as key=value, such as seed=1.")
    ] = None,
) -> None:
    """Train softmax with 8 heads and smgk with 4 side by side on this CPU, and write an HTML report."""
    console = Console(stderr=True)
    trained, corpus = train_side_by_side(rows.split(), changes or [], folder, console)
    chosen = [] if rows.split() == list(ROWS) else ["--rows", rows]
    report = make_report(trained, corpus, shlex.join(["mgk", "demo", *chosen, *(changes or [])]))
    path = _write(report, folder / REPORT)
    Console().print(_table(report))
    typer.echo(f"report: {path}")


def train_side_by_side(
    rows: Sequence[str], changes: Sequence[str], folder: Path, console: Console
) -> tuple[dict[str, tuple[Trainer, dict[str, Any]]], Corpus]:
    """Train the models by one update of each in turn, so that both have the same machine.

    Like every training it can be interrupted, and resumes when it is called again.

    Returns:
        Trainer and result of each row, and the corpus.
    """
    import torch

    import mgk.recipes
    from mgk.commands.training import bar
    from mgk.training import Display, Trainer, build_fabric, open_or_prepare
    from mgk.training.errors import Interrupted
    from mgk.training.lock import RunLock
    from mgk.training.run import finish, write_config
    from mgk.training.signals import GracefulStop

    if not rows:
        raise ValueError("--rows must name at least one model, got none")
    recipe = mgk.recipes.load(RECIPE)
    configs = {row: recipe.config(row, changes) for row in rows}
    corpus = open_or_prepare(next(iter(configs.values())).data, progress=bar(console))
    # Batches this small do not gain from a second thread, and the user may need the rest of the machine.
    torch.set_num_threads(1)
    display = Display(console=console)
    trainers: dict[str, Trainer] = {}
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(GracefulStop())
        stack.enter_context(display)
        for row, config in configs.items():
            place = folder / config.row / f"seed-{config.seed}"
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(place))
            fabric = build_fabric(device="cpu")
            trainers[row] = Trainer(config, place, corpus, fabric, display=display, stop=stop)
            write_config(place, config)
        walks = [trainer.steps() for trainer in trainers.values()]
        try:
            # zip would stop at the shortest: a resumed model that is further along must not end the others.
            while walks:
                walks = [walk for walk in walks if next(walk, None) is not None]
            return {row: (trainer, finish(trainer)) for row, trainer in trainers.items()}, corpus
        except Interrupted:
            # Once training is over, the models hold their best weights for the test and have been saved.
            for trainer in trainers.values() if walks else ():
                trainer.save(must=True)
            display.say("stopped and saved: the same command goes on from here")
            raise SystemExit(stop.exit_code) from None


def make_report(trained: dict[str, tuple[Trainer, dict[str, Any]]], corpus: Corpus, command: str) -> Report:
    """Build the report: costs, learning curves and attention maps of the models."""
    from mgk.analysis import Report, RunReport, cost
    from mgk.analysis.report.examples import look
    from mgk.analysis.report.settings import flatten
    from mgk.training.tracking import METRICS, read_curves

    examples = _examples(corpus)
    runs = []
    for row, (trainer, found) in trained.items():
        model = trainer.model.eval()
        batch = trainer.batches.batch(0, 0)
        samples = len(batch["labels"])
        curves: dict[str, list[tuple[float, float]]] = {}
        for line in read_curves(trainer.folder / METRICS):
            name, key = {"train": ("training loss", "loss"), "valid": ("validation accuracy", "accuracy")}[line["kind"]]
            if line[key] is not None:
                curves.setdefault(name, []).append((line["step"], line[key]))
        maps = [look(model, example) for example in examples]
        columns = {
            "test accuracy": f"{found['metrics']['test']['accuracy']:.1%}",
            "parameters": f"{cost.parameters(model):,}",
            "MFLOPs a list": f"{cost.forward_flops(model, **batch) / samples / 1e6:.2f}",
            "key and value bytes a token": f"{cost.cache_bytes_per_token(model.config):,}",
            "ms a step": f"{1000 * found['seconds'] / found['steps']:.1f}",
        }
        runs.append(
            RunReport(name=row, columns=columns, curves=curves, maps=maps, configuration=flatten(found["config"]))
        )
    _, any_result = next(iter(trained.values()))
    baselines = {name.removesuffix(", accuracy"): value for name, value in any_result["baselines"].items()}
    count = int(any_result["metrics"]["test"]["count"])
    error = (0.25 / count) ** 0.5
    return Report(
        title="Half the heads",
        subtitle="Softmax attention and a mixture of shifted Gaussian keys learn short ListOps, side by side",
        runs=runs,
        baselines=baselines,
        metric="validation accuracy",
        notes=[
            f"One seed, {count:,} test lists: differences below {2 * error:.1%} are noise.",
            "FLOPs count every product of a forward pass once, as the algebra needs it; bytes are those of bf16.",
            "ms a step: one update on this CPU with stock kernels, both models in turn. With lists this short it is "
            "small operations that take the time, not attention.",
        ],
        command=command,
    )


def _examples(corpus: Corpus, count: int = 3) -> list[Example]:
    """Return the first few test lists that are long enough to be interesting."""
    from mgk.analysis.report.examples import SHORTEST, find_examples

    found = find_examples(corpus, count=count, longest=LONGEST)
    return [example for example in found if len(example.ids) >= SHORTEST]


def _write(report: Report, path: Path) -> Path:
    from mgk.analysis import write_report

    return write_report(path, report)


def _table(report: Report) -> Table:
    table = Table("", *report.runs[0].columns)
    for run in report.runs:
        table.add_row(run.name, *run.columns.values())
    for name, value in report.baselines.items():
        table.add_row(f"[dim]{name}[/dim]", f"[dim]{value:.1%}[/dim]")
    return table
