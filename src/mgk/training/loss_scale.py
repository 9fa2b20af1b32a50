"""The loss scale of fp16, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """A factor on the loss that keeps small gradients above fp16's smallest number.

    Halved where a gradient has overflowed, doubled after a long time without. Unlike ``torch.amp.GradScaler`` it leaves
    the decision to skip an update to the caller, who has other reasons to skip as well.
    """

    FIRST, GROWS_AFTER = 2.0**16, 2000

    def __init__(self, device: torch.device, *, value: float = FIRST, since_overflow: float = 0.0) -> None:
        self.value = torch.full((), value, device=device)
        self.since_overflow = torch.full((), since_overflow, device=device)

    def update(self, overflowed: Tensor) -> None:
        """``overflowed`` is a boolean scalar, and is not read on the host."""
        since = torch.where(overflowed, 0.0, self.since_overflow + 1.0)
        grows = since >= self.GROWS_AFTER
        self.value = self.value * torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.since_overflow = torch.where(grows, 0.0, since)
