"""Where a run is, and what the device says of each update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.training.loss_scale import LossScale


@dataclass
class State:
    """Where a run is, besides weights, optimiser and random numbers."""

    step: int = 0
    """Updates done."""
    validated: int = 0
    """The last step that was validated."""
    best: float | None = None
    """The best validation, as a score: higher is better."""
    best_step: int = 0
    tokens: int = 0
    """Read by all ranks, padding not counted."""
    seconds: float = 0.0
    """Spent on updates, by all processes that have worked on this run."""
    skipped: int = 0
    """Updates skipped."""
    skipped_in_a_row: int = 0
    running_loss: float | None = None
    """The mean that a leap of the loss is measured against."""
    loss_scale: float = LossScale.FIRST
    since_overflow: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Since the last line of the log."""


class Report(NamedTuple):
    """What the device says about an update."""

    step: int
    values: Tensor
    """Loss, norm of the gradient, whether it was skipped, tokens, ranks that were told to stop: ``[5]`` on the host."""
    ready: torch.cuda.Event | None
    """When the values are there."""
