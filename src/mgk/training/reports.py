"""The values that updates report, on their way from the device to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Report(NamedTuple):
    """The values of an update."""

    step: int
    values: Tensor
    """Loss, gradient norm, whether it was skipped, tokens, number of ranks told to stop: ``[5]`` on the host."""
    ready: torch.cuda.Event | None
    """Event after which the values are valid; ``None`` on a CPU."""


class Reports:
    """The reports of all updates, in order. On a GPU each is read when the next update has been queued.

    Args:
        read: called with each report, whose values are valid by then.
    """

    def __init__(self, read: Callable[[Report], None]) -> None:
        self._read = read
        self._waiting: deque[Report] = deque()

    def add(self, step: int, values: Tensor) -> None:
        """Start copying the values of an update to the host, and read those of the previous one."""
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self._waiting.append(Report(step, host, ready))
            # The previous update has finished or will soon, and meanwhile the GPU has work.
            while len(self._waiting) > 1:
                self._hand_over(self._waiting.popleft())
        else:
            self._hand_over(Report(step, values, None))

    def settle(self) -> None:
        """Wait for every update that was queued, and read its report."""
        while self._waiting:
            self._hand_over(self._waiting.popleft())

    def _hand_over(self, report: Report) -> None:
        if report.ready is not None:
            report.ready.synchronize()
        self._read(report)
