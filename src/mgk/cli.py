"""The command ``mgk``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import mgk

try:
    import typer
except ImportError as error:  # pragma: no cover
    raise SystemExit("the command mgk needs typer and transformers: pip install 'mgk[models]'") from error

from mgk.commands.analyze import analyze
from mgk.commands.bench import app as bench_app
from mgk.commands.conversion import register as register_conversion
from mgk.commands.published import import_published
from mgk.commands.report import report
from mgk.commands.reproduce import reproduce
from mgk.commands.training import register as register_training
from mgk.data.commands import app as data_app
from mgk.demo import demo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

app = typer.Typer(
    help="Attention with a mixture of Gaussian keys.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.command()(demo)
app.command()(analyze)
app.command()(report)
app.command()(reproduce)
app.command("import")(import_published)
register_training(app)
register_conversion(app)


def main() -> None:
    """Run the command. An error of the user prints one line and no traceback, unless ``MGK_TRACEBACK`` is set."""
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("MGK_TRACEBACK"):
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(1) from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mgk"):
            raise
        typer.secho(f"error: this command needs {error.name}: pip install 'mgk[train]'", fg="red", err=True)
        raise SystemExit(1) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mgk {mgk.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or owner/name on the Hub.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue, or to translate; - reads standard input.")] = "-",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate at most.")] = 100,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="0 always takes the most likely token; 1 samples from the model's distribution."),
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample among the most likely tokens with this total probability.")
    ] = 1.0,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams; above 1 is beam search.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: the dtype of the saved weights.")
    ] = "auto",
    cache: Annotated[bool, typer.Option(help="Cache the keys and values of earlier tokens.")] = True,
) -> None:
    """Generate text with a language model, or translate, and print it token by token.

    The tokenizer is read from the folder of the model.
    If the source has its own vocabulary, its tokenizer is read from the subfolder `source_tokenizer`.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, TextStreamer, set_seed
    from transformers.utils import logging

    import mgk.models

    logging.disable_progress_bar()

    if not Path(model).is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", model) is None:
        raise ValueError(f"model must be a folder, or owner/name on the hub, got {model!r}, where no folder is")
    if Path(model).is_dir():
        _check_model(Path(model))
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, mgk.models.MGKConfig):
        raise ValueError(f"{model} must be a model of mgk, got model_type {config.model_type!r}")
    if temperature == 0 and (top_k > 0 or top_p < 1):
        raise ValueError("--top-k and --top-p need a --temperature above 0, got 0")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device must be one that is there, got {device}, and torch sees no GPU")
    writer = _load_writer(model, config, dtype).to(device).eval()
    if Path(model).is_dir():
        _check_has_tokenizer(Path(model))
    tokenizer = reader = AutoTokenizer.from_pretrained(model)
    mgk.models.check_tokenizer(config, tokenizer)
    if config.is_encoder_decoder and config.source_vocab_size is not None:
        reader = AutoTokenizer.from_pretrained(model, subfolder="source_tokenizer")
        mgk.models.check_tokenizer(config, reader, is_source=True)
    if seed is not None:
        set_seed(seed)

    text = sys.stdin.read() if prompt == "-" else prompt
    inputs = reader(text, return_tensors="pt", return_token_type_ids=False).to(device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt must hold at least one token, got none")
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "num_beams": beams, "use_cache": cache}
    if temperature > 0:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    else:
        settings |= {"do_sample": False}
    if tokenizer.pad_token_id is None and config.pad_token_id is None:
        settings["pad_token_id"] = config.eos_token_id if isinstance(config.eos_token_id, int) else 0

    if beams > 1:
        # The best beam is known only at the end, so nothing can be streamed.
        tokens = writer.generate(**inputs, **settings)[0]
        typer.echo(tokenizer.decode(tokens, skip_special_tokens=True))
    else:
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        writer.generate(**inputs, **settings, streamer=streamer)


def _check_model(folder: Path) -> None:
    """Check that a folder holds a model. Where it is the folder of a run, the error names that of its best model."""
    if not (folder / "config.json").is_file():
        models = sorted(folder.glob("checkpoints/best-*"))
        hint = f": the best model of this run is {models[-1]}" if models else ""
        raise ValueError(f"{folder} must be the folder of a saved model, got one without config.json{hint}")


def _check_has_tokenizer(folder: Path) -> None:
    """Check that a folder holds a tokenizer, because the error of transformers does not say that there is none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"{folder} must hold the tokenizer of its model, got none: runs on bytes and on WikiText's words save none"
        )


def _load_writer(model: str, config: mgk.models.MGKConfig, dtype: str) -> PreTrainedModel:
    """Load the model that a saved folder names, if its class can generate."""
    import mgk.models

    classes = (mgk.models.MGKForCausalLM, mgk.models.MGKForSeq2SeqLM)
    for kind in classes:
        if kind.__name__ in (config.architectures or ()):
            return kind.from_pretrained(model, dtype=dtype)
    names = " or ".join(kind.__name__ for kind in classes)
    raise ValueError(f"{model} must hold a {names}, got {', '.join(config.architectures or ['none'])}")
