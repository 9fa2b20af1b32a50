"""A process that has imported what its children need, and forks them.

To import torch and all the rest takes seconds, many on some machines; a fork takes milliseconds. Requests come as lines
of JSON, each with a number; the answers are lines, too: the process that has been started, and later its exit code.
The server has an interpreter of its own, runs nothing itself, and so has no GPU and no threads at work to be copied.
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
"""Seconds between two looks at the children."""


def serve(requests: int, replies: int) -> dict[str, Any] | None:
    """Fork a child for each request, until there are no more requests: that is ``None``.

    In a child the request comes back that the child is for: what it does, it does from the top of the program, and ends
    as programs do. ``os._exit`` would leave a GPU's driver to find out by itself.

    Args:
        requests: a descriptor to read from.
        replies: one to write to.
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
    """The server: descriptors of requests, replies and the lifeline, and the modules to import."""
    requests, replies, lifeline = map(int, arguments[:3])
    for name in arguments[3:]:
        importlib.import_module(name)
    # What has been imported stays shared with the children: nobody goes through it again to collect it.
    gc.collect()
    gc.freeze()
    request = serve(requests, replies)
    if request is not None:
        raise SystemExit(child.run(request, lifeline))


if __name__ == "__main__":
    main(sys.argv[1:])
