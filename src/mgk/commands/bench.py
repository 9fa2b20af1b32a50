"""``mgk bench``: measure speed and memory of attention, and of a model end to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mgk.commands.bench_results import plot, write_choice, write_merged, write_table

if TYPE_CHECKING:
    import torch

    from mgk.benchmark.attention import Comparison
    from mgk.benchmark.timing import Report
    from mgk.training.tracking import Display

app = typer.Typer(
    help="Measure speed and memory next to stock softmax attention in the same run.", no_args_is_help=True
)

RESULTS, SCRATCH = Path("results/bench"), Path("runs/bench")

Presets = Annotated[list[str] | None, typer.Option("--preset", help="Attention preset; repeat the option for several.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Measure a few small cases, as a trial; the JSON goes to runs/bench.")
]
Output = Annotated[Path | None, typer.Option(help="JSON file to write; default: results/bench/NAME-DEVICE.json.")]


@app.command()
def attention(
    presets: Presets = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="B,H,N,D or B,H,N,D,causal; repeat for several. Presets get half of the H heads."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, float16, bfloat16, or auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="Backend of the presets: triton, sdpa, chunked, eager (the paper's way), flex, reference or auto.",
        ),
    ] = None,
    quick: Quick = False,
    sweep: Annotated[
        bool | None, typer.Option("--sweep/--no-sweep", help="Also measure a range of lengths; off with --quick.")
    ] = None,
    output: Output = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Complete the result at --output: measure only what it lacks."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of time and memory against the length.")] = None,
    device: Device = "auto",
) -> None:
    """Measure attention, forward and backward: presets with half the heads against softmax on every kernel.

    Every contestant is first compared with fp64. A wrong one gets no number, and the command ends with status 1.
    """
    from mgk.benchmark import parts, result, table
    from mgk.benchmark.attention import compare
    from mgk.benchmark.contestants import baselines, mixtures, own_softmax
    from mgk.benchmark.correctness import Judge
    from mgk.benchmark.plan import make_plan
    from mgk.benchmark.plot import draw
    from mgk.benchmark.sweep import sweep as compare_lengths
    from mgk.training.result import write

    where = _find_device(device)
    plan = make_plan(
        where, presets=presets, backends=backends, shapes=shapes, dtype=dtype, quick=quick, sweep=sweep
    )  # fmt: skip
    if plot is not None and not plan.lengths:
        raise ValueError("--plot needs a sweep to draw, got --no-sweep, or --quick without --sweep")
    path = _default_output("attention", where, quick) if output is None else output
    judge = Judge(plan.dtype, where)
    found = result.begin("attention", where, {**plan.facts(), "quick": quick})
    earlier = parts.earlier_part(path, found) if resume else None
    known, known_lengths = ({} if earlier is None else parts.measured(earlier, sweep=each) for each in (False, True))
    console, heard = _console(), set[str]()

    def keep(comparison: Comparison) -> None:
        """Write the result after every shape, so that measurements survive a crash."""
        result.add(found, comparison)
        write(path, joined())

    def joined() -> dict[str, Any]:
        return found if earlier is None else parts.join([earlier, found])

    contestants = [*baselines(where), own_softmax(where), *mixtures(plan.presets, plan.backends)]
    for shape in parts.missing(plan.shapes, known):
        with _display() as display:
            comparison = compare(shape, contestants, judge, plan.effort, report=_follow(display, str(shape)))
        keep(comparison)
        console.print(table.attention_table(comparison))
        _say_notes(console, comparison, heard)
    if parts.missing(plan.lengths, known_lengths):
        swept = mixtures(plan.swept_presets, plan.swept_backends)
        contestants = [*baselines(where), own_softmax(where), *swept]
        comparisons = []
        with _display() as display:
            for comparison in compare_lengths(
                plan.lengths, contestants, judge, plan.effort, report=lambda shape: _follow(display, str(shape)),
                known=known_lengths,
            ):  # fmt: skip
                comparisons.append(comparison)
                keep(comparison)
        console.print(table.sweep_table(joined()["rows"]))
        for comparison in comparisons:
            _say_notes(console, comparison, heard)
    if plot is not None:
        draw(joined(), plot)
        typer.echo(f"{plot}")
    _end(joined(), path)


@app.command()
def retrieval(
    presets: Presets = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Document pairs in a batch; default: 32 on a GPU, fewer on a CPU.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Bytes in a document; default: 4096 on a GPU, fewer on a CPU.")
    ] = None,
    quick: Quick = False,
    output: Output = None,
    device: Device = "auto",
) -> None:
    """Measure a training step of the Long Range Arena Retrieval model: 4 heads of a preset against 8 of softmax."""
    from mgk.benchmark import result, table
    from mgk.benchmark import retrieval as measurement
    from mgk.benchmark.plan import check_presets, usual_effort
    from mgk.training.result import write

    where = _find_device(device)
    chosen = presets or list(measurement.PRESETS)
    check_presets(chosen, linear=True)
    if pairs is None:
        pairs = 32 if where.type == "cuda" else 2
    if tokens is None:
        tokens = 4096 if where.type == "cuda" else 64 if quick else 256
    effort = usual_effort(where, quick)
    path = _default_output("retrieval", where, quick) if output is None else output
    found = result.begin("retrieval", where, {"presets": chosen, "quick": quick, "rounds": effort.rounds})
    with _display() as display:
        comparison = measurement.compare(
            measurement.matchers(chosen, where), pairs=pairs, tokens=tokens, device=where, effort=effort,
            report=_follow(display, "Retrieval"),
        )  # fmt: skip
    result.add(found, comparison)
    write(path, found)
    console = _console()
    console.print(table.retrieval_table(comparison))
    _say_notes(console, comparison, set())
    _end(found, path)


@app.command()
def decode(
    presets: Presets = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="B,H,N,D with N cached tokens; repeat for several. Presets get half of the H heads."
        ),
    ] = None,
    writes: Annotated[
        bool, typer.Option("--generation/--no-generation", help="Also measure whole models end to end.")
    ] = True,
    quick: Quick = False,
    output: Output = None,
    device: Device = "auto",
) -> None:
    """Measure generation: one step of attention to a long cache, and tokens per second of a whole decoder."""
    from mgk.benchmark import decode as measurement
    from mgk.benchmark import generation, result, table
    from mgk.benchmark.contestants import baselines, mixtures, own_softmax
    from mgk.benchmark.correctness import Judge
    from mgk.benchmark.plan import make_decode_plan
    from mgk.training.result import write

    where = _find_device(device)
    plan = make_decode_plan(where, presets=presets, shapes=shapes, quick=quick)
    path = _default_output("decode", where, quick) if output is None else output
    judge = Judge(plan.dtype, where)
    found = result.begin("decode", where, {**plan.facts(), "quick": quick})
    console, heard = _console(), set[str]()
    contestants = [*baselines(where), own_softmax(where), *mixtures(plan.presets, plan.backends)]
    for shape in plan.shapes:
        with _display() as display:
            comparison = measurement.compare(
                shape,
                contestants,
                judge,
                plan.effort,
                report=_follow(display, f"a step, {shape.tokens:,} in the cache"),
            )
        result.add(found, comparison)
        write(path, found)
        console.print(table.decode_table(comparison))
        _say_notes(console, comparison, heard)
    if writes:
        with _display() as display:
            comparison = generation.compare(
                generation.writers(plan.writing_presets, plan.writing, where), plan.writing, device=where,
                effort=plan.writing_effort, report=_follow(display, "generation"),
            )  # fmt: skip
        result.add(found, comparison)
        write(path, found)
        console.print(table.generation_table(comparison))
        _say_notes(console, comparison, heard)
    _end(found, path)


@app.command()
def linear(
    presets: Presets = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="B,H,N,D or B,H,N,D,causal; repeat for several. Presets get half of the H heads."),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep/--no-sweep", help="Also find the length from which linear attention is faster than softmax."
        ),
    ] = True,
    quick: Quick = False,
    output: Output = None,
    device: Device = "auto",
) -> None:
    """Measure linear attention: mlk and smlk with half the heads against linear and softmax attention."""
    from mgk.benchmark import linear as measurement
    from mgk.benchmark import result, table
    from mgk.benchmark.cells import show_crossover
    from mgk.benchmark.contestants import baselines, linears, own_softmax
    from mgk.benchmark.correctness import Judge
    from mgk.benchmark.plan import make_linear_plan
    from mgk.training.result import write

    where = _find_device(device)
    plan = make_linear_plan(where, presets=presets, shapes=shapes, quick=quick)
    path = _default_output("linear", where, quick) if output is None else output
    judge = Judge(plan.dtype, where)
    found = result.begin("linear", where, {**plan.facts(), "quick": quick})
    console, heard = _console(), set[str]()
    # Only stock kernels that can be the fastest: the others would take most of the time.
    contestants = [
        *linears(plan.presets, plan.backends[0]), *baselines(where, ("cudnn", "flash")), own_softmax(where)
    ]  # fmt: skip
    for shape in plan.shapes:
        with _display() as display:
            comparison = measurement.compare(
                shape, contestants, judge, plan.effort, report=_follow(display, str(shape))
            )  # fmt: skip
        result.add(found, comparison)
        write(path, found)
        console.print(table.linear_table(comparison))
        _say_notes(console, comparison, heard)
    if sweep:
        swept = []
        with _display() as display:
            for shape in plan.lengths:
                comparison = measurement.compare(
                    shape, contestants, judge, plan.effort, report=_follow(display, str(shape))
                )  # fmt: skip
                for record in (*comparison.baselines, *comparison.rows):
                    record["sweep"] = True
                    swept.append(record)
                result.add(found, comparison)
                write(path, found)
        found["crossovers"] = measurement.crossovers(swept)
        write(path, found)
        for record in found["crossovers"]:
            console.print(show_crossover(record), highlight=False)
    _end(found, path)


@app.command()
def packed(
    presets: Presets = None,
    reviews: Annotated[
        int | None, typer.Option(min=1, help="Reviews in a batch; default: 32 on a GPU, fewer on a CPU.")
    ] = None,
    source: Annotated[Path | None, typer.Option("--data", help="Folder of the raw files; default: $MGK_DATA.")] = None,
    quick: Quick = False,
    output: Output = None,
    device: Device = "auto",
) -> None:
    """Measure a training step on IMDb reviews at their real lengths: packed, next to padded to 4,096 bytes."""
    from mgk import recipes
    from mgk.benchmark import packed as measurement
    from mgk.benchmark import result, table
    from mgk.benchmark.plan import check_presets, usual_effort
    from mgk.training.corpora import open_or_prepare
    from mgk.training.result import write

    where = _find_device(device)
    chosen = presets or ["smgk"]
    check_presets(chosen)
    count = reviews or (32 if where.type == "cuda" else 2)
    effort = usual_effort(where, quick)
    path = _default_output("packed", where, quick) if output is None else output
    with _display() as display:
        data = recipes.load(measurement.RECIPE).config("softmax-8").data
        corpus = open_or_prepare(data, source=source)
        config = {"presets": chosen, "quick": quick, "rounds": effort.rounds, "corpus": corpus.fingerprint}
        found = result.begin("packed", where, config)
        comparison = measurement.compare(
            measurement.readers(chosen, where), corpus, count=count, device=where, effort=effort,
            report=_follow(display, "IMDb"),
        )  # fmt: skip
    result.add(found, comparison)
    write(path, found)
    console = _console()
    console.print(table.packed_table(comparison))
    _say_notes(console, comparison, set())
    _end(found, path)


@app.command()
def rows(
    recipe: Annotated[str, typer.Argument(help="A recipe (mgk recipes), or a path to a YAML file of your own.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the recipe as key=value. With changes the JSON goes to runs/bench."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option("--rows", help="Rows, separated by spaces; the first is the baseline. Default: all rows."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the raw files. Without it, enwik8 is replaced by random bytes."),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=2, help="Use random tokens from a vocabulary of this size, for any language model."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of turns of each row.")] = None,
    seconds: Annotated[
        float | None, typer.Option("--time", min=1, help="Time limit in seconds; --resume continues.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the result at --output with the rows that it lacks.")
    ] = False,
    quick: Quick = False,
    output: Output = None,
    device: Device = "auto",
) -> None:
    """Measure training of every row of a recipe: tokens per second and memory, rows in turns.

    Each row first has its gradient compared with materialised attention in fp32, and its first loss with the
    uncompiled model. A wrong row gets no number, and the command ends with status 1.
    """
    import dataclasses
    import time

    import mgk.recipes
    from mgk.benchmark import result, table
    from mgk.benchmark import rows as measurement
    from mgk.benchmark.plan import usual_effort
    from mgk.benchmark.random_text import BYTES, random_text
    from mgk.training.corpora import open_or_prepare
    from mgk.training.distributed import build_fabric
    from mgk.training.result import write

    begun, where = time.monotonic(), _find_device(device)
    chosen = mgk.recipes.load(recipe)
    if chosen.values.get("task") == "uptraining":
        raise ValueError(f"mgk bench rows must have a recipe that trains from the beginning, got {recipe}")
    wanted = list(chosen.rows) if names is None else names.split()
    runs = list({run.row: run for run in (chosen.config(row, changes or []) for row in wanted)}.values())
    measurement.check_alone(where)
    data = runs[0].data
    is_drawn = source is None and (vocabulary is not None or data.corpus == "enwik8")
    corpus = random_text(runs[0], vocabulary or BYTES) if is_drawn else open_or_prepare(data, source=source)
    effort = usual_effort(where, quick)
    effort = dataclasses.replace(effort, rounds=rounds or min(effort.rounds, 12))
    settings = {
        "recipe": chosen.name, "changes": changes or [], "corpus": "drawn" if is_drawn else corpus.fingerprint,
        "vocabulary": vocabulary, "quick": quick, "compared_with": runs[0].row,
    }  # fmt: skip
    kind = f"rows-{chosen.name.replace('/', '-')}"
    path = _default_output(kind, where, quick or bool(changes)) if output is None else output
    earlier = measurement.read_earlier(path, result.begin("rows", where, settings)) if resume else None
    known = measurement.measured(earlier)
    left = [run for run in runs[1:] if run.row not in known]
    fabric = build_fabric(device=where.type)
    fabric.launch()
    console, heard = _console(), set[str]()
    while earlier is None or left:
        remaining = None if seconds is None else seconds - (time.monotonic() - begun)
        if remaining is not None and remaining <= 0:
            break
        with _display() as display:
            group = measurement.compare(
                [runs[0], *left], corpus, fabric=fabric, effort=effort, seconds=remaining,
                report=_follow(display, chosen.name),
            )  # fmt: skip
        left = group.left
        earlier = measurement.join(earlier, result.begin("rows", where, settings), group)
        write(path, earlier)
        console.print(table.rows_table(group, chosen.name))
        _say_notes(console, group, heard)
    if left:
        typer.echo(f"{len(left)} rows are left, {', '.join(run.row for run in left)}: run the same with --resume")
    assert earlier is not None
    _end(earlier, path)


def _find_device(name: str) -> torch.device:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be one of auto, cpu, cuda, got {name!r}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("--device must be one that is there, got cuda, and torch sees no GPU")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _default_output(kind: str, device: torch.device, quick: bool) -> Path:
    """Path of the JSON file, which for a quick run is not among the real results."""
    from mgk.benchmark.result import short_name

    return (SCRATCH if quick else RESULTS) / f"{kind}-{short_name(device)}.json"


def _console() -> Console:
    """Console that is wide enough for the tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _display() -> Display:
    from mgk.training.tracking import Display

    return Display(console=Console(stderr=True), every=5.0)


def _follow(display: Display, name: str) -> Report:
    """Return a callback that shows the progress of a measurement in a row of the display."""
    row: Any = None

    def report(done: int, total: int, text: str) -> None:
        nonlocal row
        if row is None:
            row = display.add(name, total)
        display.update(row, done, total, text)

    return report


def _say_notes(console: Console, found: Comparison, heard: set[str]) -> None:
    """Print the wrong contestants and the ones that were left out, each reason once."""
    from mgk.benchmark.table import notes, wrongs

    for style, lines in (("red", wrongs(found)), ("dim", notes(found))):
        for line in lines:
            if line not in heard:
                console.print(line, style=style, markup=False, highlight=False)
                heard.add(line)


def _end(found: dict[str, Any], path: Path) -> None:
    typer.echo(f"{path}")
    if found["failures"]:
        typer.secho(f"error: {len(found['failures'])} results are wrong and have no numbers", fg="red", err=True)
        raise typer.Exit(1)


# Last, so that help lists the measurements first.
app.command()(plot)
app.command("merge")(write_merged)
app.command("table")(write_table)
app.command("choose")(write_choice)
