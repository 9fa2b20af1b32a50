"""Sweeps of tiny cells in processes that may be killed, shared by the tests of `mgk sweep`."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager

import yaml
from training_cases import _CONTEXT, make_values, process

import mgk.cli
import mgk.commands.sweep.at_once
import mgk.commands.sweep.cell_process
from mgk.commands.processes import child, fork_server, launcher
from mgk.training import status
from mgk.training.configuration import merge
from mgk.training.status import read_status

# Where tests of sweeps come first, the server that processes are forked from has this as well.
_CONTEXT.set_forkserver_preload(["training_cases", "sweep_cases"])

LISTS = {"train": 60, "valid": 12, "test": 12, "minimum": 5, "maximum": 16}
TIMES = {"seconds", "written"}
"""What differs between two results of one run."""


def write_recipe(folder, name="tiny", rows=("softmax-2", "smgk-1"), **changes):
    """A recipe of 40 small steps, with a checkpoint every four."""
    short = {
        "training": {"steps": 40, "log_every": 4, "checkpoint_every": 4, "batch_size": 4},
        "validation": {"every": 10}, "data": {"options": LISTS},
    }  # fmt: skip
    values = make_values(**merge(short, changes))
    del values["name"]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"title": "A tiny one", **values, "rows": list(rows)}))
    return path


def _fork_server(self):
    """As `Launcher._start_server`, but forked: this process has imported everything, and has run nothing."""
    requests, ours = os.pipe()
    heard, replies = os.pipe()
    if os.fork() == 0:
        for descriptor in (ours, heard, self._held):
            os.close(descriptor)
        os.setsid()
        code = 0
        request = fork_server.serve(requests, replies)
        if request is not None:
            try:
                code = child.run(request, self._lifeline)
            except SystemExit as stop:
                code = stop.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(requests)
    os.close(replies)
    return ours, heard


def run_command(pipe, folder, cache, arguments):
    """The command ``mgk``, as if typed in a folder; what it prints goes to files there."""
    os.chdir(folder)
    os.environ |= {"MGK_CACHE": str(cache), "COLUMNS": "200"}
    os.environ.pop("MGK_DATA", None)
    for name, standard in (("out.txt", 1), ("err.txt", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), standard)
    launcher.Launcher._start_server = _fork_server
    status.EVERY = 0.02
    sys.argv = ["mgk", *map(str, arguments)]
    mgk.cli.main()


@contextmanager
def sweep(folder, cache, *arguments):
    """``mgk sweep`` in a process of its own."""
    with process(run_command, folder, cache, ["sweep", *arguments]) as (running, _):
        yield running


def finish(folder, cache, *arguments, code=0, seconds=120):
    """A whole sweep; what it printed."""
    before = printed(folder)
    with sweep(folder, cache, *arguments) as running:
        running.join(seconds)
        said = [after[len(old) :] for after, old in zip(printed(folder), before, strict=True)]
        assert running.exitcode == code, said
    return said


def printed(folder):
    """All that was printed there: what is for programs, and what is for people."""
    return [path.read_text() if (path := folder / name).exists() else "" for name in ("out.txt", "err.txt")]


def statuses(folder):
    """What the runs below a folder say, by their folders."""
    # RECIPE/ROW/seed-N. To look deeper would be to stumble over checkpoints that are being written or removed.
    found = {path.parent: read_status(path.parent) for path in sorted(folder.glob(f"runs/*/*/*/{status.STATUS}"))}
    return {path: said for path, said in found.items() if said is not None}


def wait_for(condition, seconds=60):
    """Wait until something is so; what it is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it must come to that in time, and did not")


def is_alive(number):
    """Whether a process is there, and more than a name that nobody has asked for yet."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def results_of(folder):
    """The results below a folder, by the names of the runs, without what time does to them."""
    found = {}
    for path in sorted(folder.rglob("result.json")):
        content = json.loads(path.read_text())
        found[str(path.parent.relative_to(folder))] = {key: value for key, value in content.items() if key not in TIMES}
    return found
