"""What to keep of an update that had to be skipped: enough to find out why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mgk.data.batches import Batches
from mgk.models.layer import MGKLayer
from mgk.training.distributed import total_norm


def describe(
    model: nn.Module, batches: Batches, number: int, run: Callable[[dict[str, Tensor]], Any]
) -> dict[str, Any]:
    """The samples of micro-batch ``number``, its largest logit, and the gradient of every part of the model.

    The batch is run again without dropout, on the weights of now: that update did not change them, but on a GPU the
    next one has. Nothing is left behind: no gradient, no random numbers drawn.

    Args:
        model: whose gradients are looked at.
        batches: of this rank.
        number: counted over all epochs.
        run: forward and backward of a batch, gives the outputs.
    """
    epoch, place = divmod(number, len(batches))
    model.eval()
    try:
        outputs = run(batches.batch(epoch, place))
        norms = {name: float(total_norm(gradients)) for name, gradients in _gradients(model)}
    finally:
        model.train()
        # In place: a recorded update knows where they are.
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


def _gradients(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Of each layer, and of each module outside of them."""
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, MGKLayer)]
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = next((layer for layer in layers if name.startswith(layer)), None)
            part = layer[:-1] if layer is not None else name.rpartition(".")[0]
            parts.setdefault(part, []).append(parameter.grad)
    yield from parts.items()


def is_leap(loss: Tensor, running: Tensor, ratio: float) -> Tensor:
    """Whether a loss exceeds ``ratio`` times its running mean. Small losses leap without harm: they count as 0.1."""
    return loss > ratio * running.clamp(min=0.1)


def running_mean(loss: Tensor, running: Tensor, skip: Tensor) -> Tensor:
    """The running mean with one more loss, unless that is skipped; it is NaN before the first."""
    mixed = torch.where(running.isnan(), loss, 0.98 * running + 0.02 * loss)
    return torch.where(skip, running, mixed)
