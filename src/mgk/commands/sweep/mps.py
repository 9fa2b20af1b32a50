"""NVIDIA's multi-process service (MPS), with which processes on one GPU run at the same time and not in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRAM = "nvidia-cuda-mps-control"
USUAL_FOLDER = "/tmp/nvidia-mps"
"""Default folder of the service's pipes, without ``CUDA_MPS_PIPE_DIRECTORY``."""
SECONDS = 20.0
"""Seconds to wait for the service to start or to stop."""

# A guard process that reads until the command has ended, however it ended, and then stops the service.
_GUARD = f'cat > /dev/null; echo quit | {PROGRAM}; rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"'


def running_service() -> Path | None:
    """Return the folder of a running service that our processes would use, or ``None``."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", USUAL_FOLDER))
    try:
        os.kill(int((folder / f"{PROGRAM}.pid").read_text()), 0)
    except PermissionError:
        return folder  # the service runs and belongs to another user
    except (OSError, ValueError):
        return None
    return folder


class MultiProcessService:
    """Context with a service that the cells share; :attr:`environment` makes processes use it.

    It is the service that is already running, which is left running, or else one of our own, if its program is
    installed and starts.

    Args:
        say: called once with the reason if there is no service.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.environment: dict[str, str] = {}
        """Environment variables for processes that use the service; empty if it does not run."""
        self._say = say
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return bool(self.environment)

    def __enter__(self) -> MultiProcessService:
        running = running_service()
        if running is not None:
            self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(running)}
            return self
        if shutil.which(PROGRAM) is None:
            self._say(f"no multi-process service: there is no {PROGRAM}, so the cells take turns on the GPU")
            return self
        # The names are short because the paths of the sockets in these folders are limited in length.
        pipes, logs = tempfile.mkdtemp(prefix="mgk-mps-"), tempfile.mkdtemp(prefix="mgk-mps-log-")
        environment = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        try:
            subprocess.run(
                [PROGRAM, "-d"], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=SECONDS, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = " ".join(str(getattr(error, "stderr", None) or error).split())
            self._say(f"no multi-process service: {PROGRAM} did not start ({said}), so the cells take turns on the GPU")
            for folder in (pipes, logs):
                shutil.rmtree(folder, ignore_errors=True)
            return self
        self.environment = environment
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD], env={**os.environ, **environment}, stdin=subprocess.PIPE, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.environment = {}
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._say(f"the multi-process service did not stop within {SECONDS:g} s; {PROGRAM} is still at work")
        self._guard = None
