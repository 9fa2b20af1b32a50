"""How a converted model leaves the one that it was."""

from __future__ import annotations

from typing import Any

from torch import nn


def advance_start(model: nn.Module) -> None:
    """One step of the start ``"near"``: call it once after each optimiser step, on any model, converted or not."""
    raise NotImplementedError


AdvanceStart: Any = None
"""The same as a callback of Hugging Face's ``Trainer``."""
