"""The child's side of a child process: its setup, its work and its end.

A child leads its own session, so that signals to the command's process group do not reach it, and the processes that it
starts can be ended with it. It holds one end of a pipe, the lifeline, whose other end only the command has. When that
end closes, however the command died, the child stops as if by SIGTERM, and is killed a minute later in any case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

PATIENCE = 60.0
"""Seconds that a child has for saving after the command has died."""


def run(request: Mapping[str, Any], lifeline: int) -> int:
    """Do the work of a request in this process, and return the exit code.

    Args:
        request: ``target``, the function to call as ``module:name``; its ``argument``; the path of its ``log``; and
            additional variables for its ``environment``.
        lifeline: descriptor of the lifeline, to read from.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    _redirect(request["log"])
    os.environ.update(request["environment"])
    # The default action would end the process at any point, which a GPU under MPS treats as a fault that ends the work
    # of all processes on it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    module, _, name = request["target"].partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(request["argument"]) or 0)
    except Exception:
        traceback.print_exc()
        return 1


def _redirect(log: str) -> None:
    """Close standard input, and redirect all output to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for ours, standard in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(ours, standard)
    os.close(nothing)
    os.close(file)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _watch(lifeline: int) -> None:
    """Wait until the command has ended, then stop this process."""
    with contextlib.suppress(OSError):
        while os.read(lifeline, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run a child in an interpreter of its own. Its arguments are the lifeline and the request."""
    lifeline, request = sys.argv[1:]
    raise SystemExit(run(json.loads(request), int(lifeline)))


if __name__ == "__main__":
    main()
