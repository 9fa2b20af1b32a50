"""Contexts for the evaluation of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context without dropout and gradients, after which every module returns to its former mode."""
    # The mode is restored for each module, so that parts that the caller has set to evaluation stay so.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # inference_mode is not used, because FSDP keeps the tensors that it gathers, and training could not use them.
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextmanager
def inference(model: nn.Module, device: torch.device, precision: torch.dtype | None) -> Iterator[None]:
    """:func:`evaluation_mode` with autocast to ``precision``, unless that is ``None``."""
    with evaluation_mode(model), torch.autocast(device.type, dtype=precision, enabled=precision is not None):
        yield
