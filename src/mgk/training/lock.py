"""One writer for a run folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import TracebackType

from mgk.training.errors import RunLockedError

try:
    import fcntl
except ImportError:  # pragma: no cover
    # Windows has no such locks: there two jobs in one folder are on their own.
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


class RunLock:
    """Held while a process writes to a folder. The system lets go of it when the process ends, however it ends."""

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
                # Some network file systems have no locks. A run is worth more than the warning against a second one.
                warnings.warn(
                    f"{self.path} cannot be locked, so nobody watches over two writers: {error}", stacklevel=2
                )
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
