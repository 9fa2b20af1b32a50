"""Graceful stopping at a signal: finish the step, save, and exit with the usual code."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
"""Signals that stop a run. SLURM can be told to send SIGUSR1 before the time is up."""

ECHO = 1.0


class GracefulStop:
    """Context in which the first signal is recorded in :attr:`signal`, and a second one ends the process at once.

    A second signal within :data:`ECHO` seconds counts as the first: ``timeout``, launchers and batch systems send one
    to a process and one to its group. Nothing is interrupted: a loop checks :attr:`signal` when it suits, and exits
    with :attr:`exit_code`.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, as shells count: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signal is not None
        return 128 + self.signal

    def __enter__(self) -> GracefulStop:
        # In Python only the main thread can receive signals; in other threads the caller has to handle them.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._when = number, now
        elif now - self._when >= ECHO:
            # sys.exit would run handlers, which may be what hangs. Files are written by renaming, so none is
            # incomplete.
            os._exit(128 + number)
