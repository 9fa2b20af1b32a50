"""``mgk train``, ``mgk recipes``, ``mgk evaluate`` and ``mgk sweep``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mgk.data.full_table import full_table
from mgk.data.kind import Progress, no_progress
from mgk.training.folder import make_folder

if TYPE_CHECKING:
    from mgk.training.configuration import RunConfig

RECIPE = typer.Argument(help="Name of a recipe (see mgk recipes), or path of your own YAML file.")
CHANGES = typer.Argument(help="Values to override, as key=value: seed=3 optimizer.lr=2e-4 model.dropout=0.2")
SOURCE = typer.Option("--data", help="Folder of the raw files; default: $MGK_DATA.")
DEVICE = typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")
RUNS = Path("runs")

Changes = Annotated[list[str] | None, CHANGES]
Source = Annotated[Path | None, SOURCE]
Device = Annotated[str, DEVICE]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for command in (train, recipes, evaluate, sweep):
        app.command()(command)


def recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to print in full.")] = None,
) -> None:
    """List the recipes of the library, with their rows and the sources of their values."""
    import yaml

    import mgk.recipes

    console = Console()
    if name is None:
        table = full_table("recipe", "what it is", "rows")
        for each in mgk.recipes.names():
            recipe = mgk.recipes.load(each)
            table.add_row(each, recipe.title, " ".join(recipe.rows))
        console.print(table)
        return
    recipe = mgk.recipes.load(name)
    console.print(f"{recipe.name}: {recipe.title}", style="bold", highlight=False, markup=False)
    for sentence in recipe.source:
        console.print(f"  {sentence}", highlight=False, markup=False)
    console.print(f"rows: {' '.join(recipe.rows)}", highlight=False)
    console.print(yaml.safe_dump(recipe.values, sort_keys=False), markup=False)


def train(
    recipe: Annotated[str, RECIPE],
    changes: Changes = None,
    attention: Annotated[str | None, typer.Option(help="Attention preset: softmax, gaussian, mgk, smgk, ...")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads; the width of a head is kept.")] = None,
    row: Annotated[str | None, typer.Option(help="Row of the recipe, such as smgk-4 or softmax-8+qk_norm.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--to", help="Folder for the run; default: runs/RECIPE/ROW/seed-N.")
    ] = None,
    source: Source = None,
    resume: Annotated[
        str, typer.Option(help="Checkpoint to resume from: auto (the newest), never, or its step.")
    ] = "auto",
    device: Device = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Number of processes on each node, with one device each.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    strategy: Annotated[str, typer.Option(help="ddp, fsdp2, or auto: ddp if there are several devices.")] = "auto",
    results: Annotated[
        Path | None, typer.Option(help="Folder for a second copy of the result, written as RECIPE/ROW-seed-N.json.")
    ] = None,
) -> None:
    """Train a model by a recipe, test the best checkpoint and write the result. Repeat the command to resume."""
    import mgk.recipes
    from mgk.recipes.row import parse_row

    chosen = mgk.recipes.load(recipe)
    model: list[str] = []
    if attention is not None:
        model.append(f"model.attention={attention}")
    if heads is not None:
        model.append(f"model.num_attention_heads={heads}")
    if row is not None:
        parse_row(row)
        if model:
            raise ValueError("--row must stand alone, got --attention or --heads as well")
    config = chosen.config(row, [*model, *(changes or [])])
    named = {"--attention": attention, "--heads": heads, "--row": row}
    options = [part for name, value in named.items() if value is not None for part in (name, str(value))]
    make_folder("--results", results)
    place = default_run(config) if folder is None else folder
    run(
        config, place, source=source, resume=parse_resume(resume), device=device, devices=devices, nodes=nodes,
        strategy=strategy, results=results, command=train_command(recipe, [*(changes or []), *options]),
    )  # fmt: skip


def train_command(recipe: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a run, without the folders of this machine."""
    return shlex.join(["mgk", "train", recipe, *arguments])


def run(
    config: RunConfig,
    folder: Path,
    *,
    source: Path | None,
    resume: Any,
    device: str,
    devices: int = 1,
    nodes: int = 1,
    strategy: str = "auto",
    results: Path | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Launch, prepare the data, train and print the result. ``command`` is recorded in the card of the model."""
    from mgk.training.corpora import open_or_prepare
    from mgk.training.distributed import build_fabric, on_first_rank
    from mgk.training.run import fit
    from mgk.training.tracking import Display

    fabric = build_fabric(device=device, devices=devices, nodes=nodes, strategy=strategy)  # type: ignore[arg-type]
    fabric.launch()
    console = Console(stderr=True)
    # One rank prepares the data, and the others then open it.
    on_first_rank(fabric, lambda: open_or_prepare(config.data, source=source, progress=bar(console)))
    corpus = open_or_prepare(config.data, source=source)
    found = fit(config, folder, corpus, fabric, resume=resume, display=Display(console=console), command=command)
    if fabric.is_global_zero:
        if results is not None:
            write_copy(results, found)
        Console().print(_table(found))
        typer.echo(f"{folder}")
    return found


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    split: Annotated[str, typer.Option(help="Split of the corpus to evaluate on.")] = "test",
    stride: Annotated[
        int, typer.Option(min=1, help="Language models: tokens by which the sliding window moves; the paper uses 1.")
    ] = 1,
    sliding: Annotated[bool, typer.Option(help="Language models: also evaluate with a sliding window.")] = True,
    beams: Annotated[int, typer.Option(min=1, help="Translation: number of beams.")] = 5,
    length_penalty: Annotated[
        float, typer.Option(help="Translation: exponent of the length; above 1 prefers longer sentences (WMT'14: 0.6).")
    ] = 1.0,
    source: Source = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: the precision of the recipe.")] = "auto",
) -> None:
    """Test the best model of a run with the paper's protocol, next to simple baselines."""
    from mgk.training.evaluate import evaluate_run

    console = Console(stderr=True)
    found = evaluate_run(
        folder, split, stride=stride if sliding else None, beams=beams, length_penalty=length_penalty, source=source,
        device=device, precision=precision, progress=bar(console),
    )  # fmt: skip
    table = full_table("metric", "value", title=f"{found['recipe']} {found['row']}, {split}")
    for name, value in found["metrics"].items():
        table.add_row(name, show_metric(name, value))
    for name, value in found["baselines"].items():
        table.add_row(f"[dim]{name}[/dim]", f"[dim]{show_metric(name, value)}[/dim]")
    Console().print(table)


def sweep(
    recipe: Annotated[str | None, RECIPE] = None,
    changes: Changes = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows to run, separated by spaces; default: all rows of the recipe.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, as 0-4 or 0,3,7; default: 0.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="YAML file that lists the runs by priority, instead of a recipe.")
    ] = None,
    jobs: Annotated[
        str, typer.Option(help="Number of runs at once, each in its own process; auto: as many as fit on the device.")
    ] = "1",
    folder: Annotated[Path, typer.Option("--to", help="Folder for the runs.")] = RUNS,
    source: Source = None,
    device: Device = "auto",
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for a second copy of every result; a run whose result is there is not run again."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--time", min=1, help="Time limit in seconds, within which every run saves and stops."),
    ] = None,
    analyze: Annotated[bool, typer.Option("--analyze", help="Analyse each run when it has finished.")] = False,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="Splits on which to evaluate each finished language model and translator, separated by spaces: test, "
            "or 'valid test'. Windows slide by the step that the pages of results show."
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            help="Tar file for results, curves and analyses of finished runs, without checkpoints, to be read by mgk "
            "reproduce --collect. An archive of this name is extended."
        ),
    ] = None,
    summary: Annotated[Path | None, typer.Option(help="JSON file for the seconds that each run took.")] = None,
) -> None:
    """Run every row of a recipe with every seed. Repeat the command to skip finished runs and resume the rest."""
    if (recipe is None) == (plan is None) or (plan is not None and (rows is not None or seeds is not None)):
        got = "neither" if recipe is None and plan is None else "both"
        raise ValueError(f"a sweep must have a recipe, with rows and seeds, or a --plan, which has its own, got {got}")
    chosen, numbers = None if rows is None else rows.split(), parse_seeds("0" if seeds is None else seeds)
    count = parse_jobs(jobs)
    splits = [] if evaluate is None else evaluate.split()
    if unknown := [split for split in splits if split not in ("train", "valid", "test")]:
        raise ValueError(f"--evaluate must name splits, train, valid or test, got {unknown[0]!r}")
    if count == 1 and not (plan or seconds or analyze or splits or archive or summary):
        from mgk.commands.sweep import run_sweep, table_of

        assert recipe is not None
        found = run_sweep(
            recipe, rows=chosen, seeds=numbers, changes=changes or [], folder=folder, source=source, device=device,
            results=results, say=typer.echo,
        )  # fmt: skip
        Console().print(table_of(found))
        raise typer.Exit(1 if found.failed else 0)

    import torch

    from mgk.commands.processes.launcher import Launcher

    module = "mgk.commands.sweep.cell_process"
    compilers = max(2, (os.cpu_count() or 1) // (count or 4))
    # Otherwise every cell would start as many compiler threads as there are cores.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(compilers))}
    # On a GPU models may be compiled, and importing the compiler takes a while.
    compiler = ["torch._dynamo"] if device != "cpu" and torch.cuda.is_available() else []
    # The launcher starts first, so that the fork server imports its modules while this process imports its own.
    with Launcher(f"{module}:work", [module, *compiler], environment=environment) as launcher:
        from mgk.commands.sweep.at_once import run_cells
        from mgk.commands.sweep.cell import cells_of
        from mgk.commands.sweep.in_turn import table_of
        from mgk.commands.sweep.plan import plan_cells

        if plan is not None:
            cells = plan_cells(plan, folder)
        else:
            assert recipe is not None
            cells = cells_of(recipe, chosen, numbers, changes or [], folder)
        outcome = run_cells(
            cells, launcher, jobs=count, source=source, device=device, results=results, seconds=seconds,
            archive=archive, analyze=analyze, evaluate=splits, summary=summary, progress=bar(Console(stderr=True)),
        )  # fmt: skip
    for each in outcome.sweeps:
        Console().print(table_of(each))
    raise typer.Exit(outcome.exit_code)


def default_run(config: RunConfig, runs: Path = RUNS) -> Path:
    """Default folder of a run."""
    return runs / config.name / config.row / f"seed-{config.seed}"


def write_copy(results: Path, found: dict[str, Any]) -> None:
    """Copy a result to the folder of results, under the recipe that it agrees with."""
    from mgk.reproduction.collection import write_result

    write_result(results, found)


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0-4`` or ``0,3,7``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, separator, last = part.partition("-")
        if not first.isdecimal() or (separator and not last.isdecimal()):
            raise ValueError(f"--seeds must look like 0-4 or 0,3,7, got {text!r}")
        seeds += range(int(first), int(last if separator else first) + 1)
    if not seeds:
        raise ValueError(f"--seeds must hold at least one seed, got {text!r}")
    return seeds


def parse_jobs(text: str) -> int | None:
    """Parse a number of jobs; ``auto`` is ``None``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--jobs must be a number of at least 1, or auto, got {text!r}")
    return int(text)


def bar(console: Console) -> Progress:
    """Return a progress bar, which is disabled if the output is not a terminal."""
    if not console.is_terminal:
        return no_progress
    return lambda steps, description, total=None: track(steps, description, total=total, console=console)


def parse_resume(text: str) -> Any:
    """Parse ``auto``, ``never`` or a step."""
    if text in ("auto", "never"):
        return text
    if not text.isdigit():
        raise ValueError(f"--resume must be auto, never or a step, got {text!r}")
    return int(text)


def show_metric(name: str, value: Any) -> str:
    """Format a metric. Accuracies are in percent, as in the paper."""
    if not isinstance(value, float):
        return f"{value}"
    if name == "count":
        return f"{value:,.0f}"
    return f"{100 * value:.2f} %" if name.endswith("accuracy") and value <= 1 else f"{value:.4f}"


def _table(found: dict[str, Any]) -> Table:
    """Return a table of a result next to the paper's numbers and simple baselines."""
    import mgk.recipes

    table = full_table("", "value", title=f"{found['recipe']} {found['row']}, seed {found['seed']}")
    for split, metrics in found["metrics"].items():
        for name, value in metrics.items():
            table.add_row(f"{split} {name}", show_metric(name, value))
    for name, value in mgk.recipes.published(found["recipe"], found["row"]).items():
        # The paper's accuracies are already in percent.
        unit = " %" if name.endswith("accuracy") else ""
        table.add_row(f"[dim]the paper: {name}[/dim]", f"[dim]{value:.2f}{unit}[/dim]")
    for name, value in found["baselines"].items():
        table.add_row(f"[dim]{name}[/dim]", f"[dim]{show_metric(name, value)}[/dim]")
    table.add_row("parameters", f"{found['parameters']:,}")
    table.add_row("best step", f"{found['best_step']:,} of {found['steps']:,}")
    table.add_row("seconds of training", f"{found['seconds']:,.0f}")
    return table
