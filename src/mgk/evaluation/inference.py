"""The state in which a model is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards every module is in the mode it was in."""
    # Each module's own mode: a part that the caller froze must not wake up.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: FSDP keeps the tensors it gathers, and the next training step would find them unusable.
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextmanager
def inference(model: nn.Module, device: torch.device, precision: torch.dtype | None) -> Iterator[None]:
    """:func:`evaluation_mode`, with autocast to ``precision`` unless it is ``None``."""
    with evaluation_mode(model), torch.autocast(device.type, dtype=precision, enabled=precision is not None):
        yield
