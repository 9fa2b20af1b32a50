"""Skipped updates: which ones are, and a description that is detailed enough to find the reason."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgk.data.batches import Batches
from mgk.models.layer import MGKLayer
from mgk.training.distributed import total_norm

SKIPPED = "skipped.jsonl"


def describe(
    model: nn.Module, batches: Batches, number: int, run: Callable[[dict[str, Tensor]], Any]
) -> dict[str, Any]:
    """Return the samples of micro-batch ``number``, its largest logit, and the gradient norms of the model's parts.

    The batch is run again without dropout on the current weights. The skipped update did not change them, but on a GPU
    the next one has. Gradients and random states are restored afterwards.

    Args:
        model: model whose gradients are described.
        batches: batches of this rank.
        number: number of the micro-batch, counted over all epochs.
        run: runs forward and backward of a batch, and returns the outputs.
    """
    epoch, place = divmod(number, len(batches))
    model.eval()
    try:
        outputs = run(batches.batch(epoch, place))
        norms = {name: float(total_norm(gradients)) for name, gradients in _gradients(model)}
    finally:
        model.train()
        # Zeroed in place, because a captured graph holds the addresses of the gradients.
        model.zero_grad(set_to_none=False)
    logits = getattr(outputs, "logits", None)
    return {
        "epoch": epoch,
        "batch": place,
        "samples": batches.rows(epoch, place).tolist(),
        "loss_now": float(outputs.loss.detach()),
        "largest_logit": None if logits is None else float(logits.detach().abs().max()),
        "gradient_norms": norms,
    }


def log(folder: Path, rank: int, step: int, loss: float, norm: float, batches: list[dict[str, Any]]) -> Path:
    """Append a skipped update to the file of this rank, unless the disk refuses it, and return the path of the file."""
    path = folder / (SKIPPED if rank == 0 else f"rank{rank}-{SKIPPED}")
    line = {"step": step, "rank": rank, "loss": loss, "gradient_norm": norm, "batches": batches}
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path


def _gradients(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the gradients of each layer and of each module outside the layers."""
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, MGKLayer)]
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = next((layer for layer in layers if name.startswith(layer)), None)
            part = layer[:-1] if layer is not None else name.rpartition(".")[0]
            parts.setdefault(part, []).append(parameter.grad)
    yield from parts.items()


def is_leap(loss: Tensor, running: Tensor, ratio: float) -> Tensor:
    """Whether a loss exceeds ``ratio`` times its running mean, which counts as at least 0.1."""
    return loss > ratio * running.clamp(min=0.1)


def running_mean(loss: Tensor, running: Tensor, skip: Tensor) -> Tensor:
    """Update the running mean with a loss, unless that is skipped. The mean is NaN before the first loss."""
    mixed = torch.where(running.isnan(), loss, 0.98 * running + 0.02 * loss)
    return torch.where(skip, running, mixed)
