"""The loss scale of fp16, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """A factor on the loss that keeps small gradients above the smallest number of fp16.

    It is halved when a gradient has overflowed, and doubled after a long time without an overflow. Unlike
    ``torch.amp.GradScaler`` it leaves the decision to skip an update to the caller, who may have other reasons to skip.
    """

    FIRST, GROWS_AFTER = 2.0**16, 2000

    def __init__(self, device: torch.device, *, value: float = FIRST, since_overflow: float = 0.0) -> None:
        self.value = torch.full((), value, device=device)
        self.since_overflow = torch.full((), since_overflow, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Update the scale. ``overflowed`` is a boolean scalar tensor, which is not read on the host."""
        since = torch.where(overflowed, 0.0, self.since_overflow + 1.0)
        grows = since >= self.GROWS_AFTER
        self.value = self.value * torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.since_overflow = torch.where(grows, 0.0, since)
