"""A lock that allows one writer per run folder."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from types import TracebackType

from mgk.training.errors import RunLockedError

try:
    import fcntl
except ImportError:  # pragma: no cover
    # Windows has no such locks, so there nothing prevents two jobs in one folder.
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


class RunLock:
    """Context that locks a folder for one process. The system releases the lock when the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK

    def __enter__(self) -> RunLock:
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is not None:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.read(self._handle, 64).decode(errors="replace").strip() or "unknown"
                os.close(self._handle)
                raise RunLockedError(
                    f"{self.path.parent} must have one writer, got a second: process {owner} is at work there"
                ) from error
            except OSError as error:
                # Some network file systems have no locks. The run then goes on without one, with a warning.
                warnings.warn(
                    f"{self.path} cannot be locked, so nobody watches over two writers: {error}", stacklevel=2
                )
        # On a full disk the second one is not told who is first, but it is told that there is one.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
