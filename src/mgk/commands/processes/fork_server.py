"""A process that imports what its children need, and forks them.

Importing torch and the rest takes seconds, on some machines many; a fork takes milliseconds. Requests are lines of
JSON, each with a number. So are the replies: the id of the process that was started, and later its exit code. The
server has an interpreter of its own and does no work itself, so it holds no GPU and no running threads that a fork
would copy.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from mgk.commands.processes import child

OFTEN = 0.05
"""Seconds between two checks of the children."""


def serve(requests: int, replies: int) -> dict[str, Any] | None:
    """Fork a child for each request. Return ``None`` in the server, after the last request, and the request in a child.

    A child returns to the top of the program, does its work there and exits normally: ``os._exit`` would skip the
    clean-up of the GPU's driver.

    Args:
        requests: descriptor to read requests from.
        replies: descriptor to write replies to.
    """
    children: dict[int, int] = {}
    text = b""
    while True:
        if select.select([requests], [], [], OFTEN if children else None)[0]:
            piece = os.read(requests, 1 << 16)
            if not piece:
                return None
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                request: dict[str, Any] = json.loads(line)
                process = os.fork()
                if process == 0:
                    os.close(requests)
                    os.close(replies)
                    return request
                children[process] = request["number"]
                _reply(replies, number=request["number"], process=process)
        while children:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process in children:
                _reply(replies, number=children.pop(process), code=os.waitstatus_to_exitcode(status))


def _reply(replies: int, **content: int) -> None:
    os.write(replies, json.dumps(content).encode() + b"\n")


def main(arguments: Sequence[str]) -> None:
    """Run the server. Its arguments are the descriptors of requests, replies and lifeline, and modules to import."""
    requests, replies, lifeline = map(int, arguments[:3])
    for name in arguments[3:]:
        importlib.import_module(name)
    # Freeze the imported objects, so that garbage collection in the children does not touch the shared memory.
    gc.collect()
    gc.freeze()
    request = serve(requests, replies)
    if request is not None:
        raise SystemExit(child.run(request, lifeline))


if __name__ == "__main__":
    main(sys.argv[1:])
