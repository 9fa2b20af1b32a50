"""``mgk import``: convert a checkpoint of the paper's authors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_published(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .pt or .model file saved by transformer-mgk, or its state as safetensors.")
    ],
    folder: Annotated[Path, typer.Option("--to", help="Folder to write the model to, new or empty.")],
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of heads; required unless the checkpoint has shifted keys.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Padded length (default: the table of positions), or the window of a language model (default: 256).",
        ),
    ] = None,
    cutoffs: Annotated[
        str | None,
        typer.Option(help="Cutoffs of the adaptive softmax; default: 20000,40000,200000 as for WikiText-103."),
    ] = None,
) -> None:
    """Convert a checkpoint of the paper's authors to a model folder. No code in their file is run."""
    from transformers.utils import logging

    from mgk.data.store import checksum
    from mgk.models import card, import_checkpoint

    logging.disable_progress_bar()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--to must be a new or empty folder, got {folder}, which is not")
    ends = None
    if cutoffs is not None:
        parts = cutoffs.split(",")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"--cutoffs must look like 20000,40000,200000, got {cutoffs!r}")
        ends = [int(part) for part in parts]
    model = import_checkpoint(checkpoint, num_attention_heads=heads, length=length, adaptive_cutoffs=ends)
    model.save_pretrained(folder)
    origin = (
        f"Imported with `mgk import` from `{checkpoint.name}`, SHA-256 `{checksum(checkpoint)}`, a checkpoint of the "
        "code of the paper's authors, minhtannguyen/transformer-mgk."
    )
    sections = [("Origin", origin), ("Licence", card.licence())]
    card.write(card.build(model, card.metadata(model), sections), folder)
    typer.echo(f"{type(model).__name__}, {model.config.attention}, {model.num_parameters():,} parameters: {folder}")
