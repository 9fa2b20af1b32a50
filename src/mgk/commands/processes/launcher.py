"""The command's side of its child processes: starting and stopping them, and their exit codes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import mgk

LOST = -signal.SIGKILL
"""Exit code of a child whose server has died. It is killed, because its end would not be reported."""


IMPORT_SECONDS = 300.0
"""Seconds after which a server that has not replied is given up."""


class Child:
    """A running child process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: int | None = None
        """Id of the process and of its group; ``None`` until the server has reported it."""
        self.code: int | None = None
        """Exit code, negative for a signal; ``None`` while it runs."""
        self._signals: list[int] = []

    def send(self, number: int) -> None:
        """Send a signal to this process only. At SIGTERM it saves and ends the processes that it has started."""
        if self.process is None:
            self._signals.append(number)
        elif self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    def begin(self, process: int) -> None:
        """Record the id of the process."""
        self.process = process
        for number in self._signals:
            self.send(number)

    def end(self, code: int) -> None:
        """Record the exit code, and end processes that the child has left behind."""
        self.code = code
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process, signal.SIGKILL)


class Launcher:
    """Starts child processes that call a function, forked from a server, or else each with its own interpreter.

    Args:
        target: the function, as ``module:name``. It takes one argument that JSON can represent, and returns the exit
            code.
        preload: modules that the server imports before it forks.
        environment: additional environment variables of the children.
        fork: whether to fork from a server; ``False`` starts an interpreter for each child.
    """

    def __init__(
        self, target: str, preload: Sequence[str], *, environment: Mapping[str, str] | None = None, fork: bool = True
    ) -> None:
        self.target, self.preload = target, tuple(preload)
        self.environment = dict(environment or {})
        self.children: dict[int, Child] = {}
        """Running children by number."""
        self._count = 0
        self._interpreters: dict[int, subprocess.Popen[bytes]] = {}
        self._lifeline, self._held = os.pipe()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._text = b""
        self._patience: float | None = None
        if fork and hasattr(os, "fork"):
            self._requests, self._replies = self._start_server()

    @property
    def has_server(self) -> bool:
        """Whether children are forked from a server."""
        return self._requests >= 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, argument: Mapping[str, Any], log: Path) -> Child:
        """Start a child whose output is written to ``log``."""
        child = Child(self._count)
        self._count += 1
        self.children[child.number] = child
        request = {
            "number": child.number, "target": self.target, "argument": dict(argument), "log": str(log),
            "environment": self.environment,
        }  # fmt: skip
        if self.has_server:
            try:
                _write_all(self._requests, json.dumps(request).encode() + b"\n")
                self._patience = self._patience or time.monotonic() + IMPORT_SECONDS
                return child
            except BrokenPipeError:
                del self.children[child.number]
                self.give_up_server()
                self.children[child.number] = child
        self._start_interpreter(child, request)
        return child

    def poll(self) -> None:
        """Record which children have started and ended, without waiting."""
        while self.has_server and select.select([self._replies], [], [], 0)[0]:
            piece = os.read(self._replies, 1 << 16)
            if not piece:
                self.give_up_server()
                break
            *lines, self._text = (self._text + piece).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
            self._patience = math.inf
        if self.has_server and self._patience is not None and time.monotonic() > self._patience:
            self.give_up_server()
        for number, process in list(self._interpreters.items()):
            code = process.poll()
            if code is not None:
                del self._interpreters[number]
                self.children.pop(number).end(code)

    def give_up_server(self) -> None:
        """End the server and its children. Later children get an interpreter of their own."""
        for number in [each for each in self.children if each not in self._interpreters]:
            self.children.pop(number).end(LOST)
        self._close_server()

    def close(self) -> None:
        """End everything. Running children stop as if the command had died."""
        os.close(self._held)
        os.close(self._lifeline)
        self._close_server()

    def _hear(self, reply: Mapping[str, int]) -> None:
        child = self.children.get(reply["number"])
        if child is None:
            return
        if "process" in reply:
            child.begin(reply["process"])
        else:
            del self.children[child.number]
            child.end(reply["code"])

    def _start_server(self) -> tuple[int, int]:
        """Start the server, and return the descriptors for writing requests and reading replies."""
        requests, ours = os.pipe()
        heard, replies = os.pipe()
        descriptors = (requests, replies, self._lifeline)
        # With this variable a module that looks for a GPU on import does not initialise CUDA, which would break in a
        # fork.
        environment = {**_environment(), **self.environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "mgk.commands.processes.fork_server", *map(str, descriptors), *self.preload],
            pass_fds=descriptors, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(requests)
        os.close(replies)
        return ours, heard

    def _start_interpreter(self, child: Child, request: Mapping[str, Any]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "mgk.commands.processes.child", str(self._lifeline), json.dumps(request)],
            pass_fds=(self._lifeline,), env={**_environment(), **self.environment}, start_new_session=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._interpreters[child.number] = process
        child.begin(process.pid)

    def _close_server(self) -> None:
        if self.has_server:
            os.close(self._requests)
            os.close(self._replies)
            self._requests = self._replies = -1
        if self._server is not None:
            # The server may still be importing, and has no state to save.
            self._server.kill()
            self._server.wait()
            self._server = None


def _environment() -> dict[str, str]:
    """Our environment, extended by the path of this mgk, which may be known only to this interpreter."""
    here = str(Path(mgk.__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *([known] if known else [])])}


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
