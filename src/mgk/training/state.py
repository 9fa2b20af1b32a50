"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgk.training.loss_scale import LossScale


@dataclass
class State:
    """The progress of a run: its state besides weights, optimiser and random generators."""

    step: int = 0
    """Number of updates done."""
    validated: int = 0
    """Step of the last validation."""
    best: float | None = None
    """Best validation score; higher is better."""
    best_step: int = 0
    tokens: int = 0
    """Number of tokens that all ranks have read, without padding."""
    seconds: float = 0.0
    """Seconds spent on updates, summed over restarts."""
    skipped: int = 0
    """Number of skipped updates."""
    skipped_in_a_row: int = 0
    running_loss: float | None = None
    """Running mean of the loss, against which leaps are measured."""
    loss_scale: float = LossScale.FIRST
    since_overflow: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Losses since the last line of the log."""
