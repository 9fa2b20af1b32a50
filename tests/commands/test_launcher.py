"""Child processes: forked by a server or with an interpreter each, and none outlives the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweep_cases import is_alive, wait_for

from mgk.commands.processes.launcher import LOST, Launcher

TESTS = Path(__file__).parents[1]

# What children do, in a module that imports nothing: they begin before anybody could say that torch has been imported.
TARGETS = """
import os, signal, subprocess, sys, time

def work(argument):
    print("to the log", flush=True)
    with open(argument["says"], "w") as file:
        file.write(f"{os.getpid()} {os.getsid(0)} {os.environ['EXTRA']} {'torch' in sys.modules}")
    os.rename(argument["says"], argument["says"] + ".done")
    if argument["does"] == "start":
        subprocess.Popen(["sleep", "1000"])
    if argument["does"] == "fail":
        raise ValueError("no")
    if argument["does"] in ("wait", "start"):
        time.sleep(1000)
    return argument["does"]
"""

# A command that has children, to be killed.
COMMAND = """
import json, sys, time
from pathlib import Path
from mgk.commands.processes.launcher import Launcher

launcher = Launcher("targets:work", ["targets"], environment={"EXTRA": "x"}, fork=sys.argv[1] == "fork")
for number in range(2):
    launcher.start({"says": f"{number}", "does": "wait"}, Path(f"log-{number}"))
while True:
    launcher.poll()
    time.sleep(0.02)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TESTS.parent / "src")]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(launcher, child):
    def look():
        launcher.poll()
        return child.code is not None

    wait_for(look, 100)
    return child.code


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_children(place, fork):
    def start(name, does):
        return launcher.start({"says": name, "does": does}, place / f"{name}.log")

    with Launcher("targets:work", ["targets"], environment={"EXTRA": "hello"}, fork=fork) as launcher:
        good, bad, stopped = start("good", 0), start("bad", "fail"), start("stopped", "wait")
        # Before anybody knows its number: it is kept until then.
        stopped.send(signal.SIGTERM)
        assert ended(launcher, good) == 0
        number, session, extra, _ = (place / "good.done").read_text().split()
        assert int(number) == int(session) == good.process
        assert extra == "hello"
        assert (place / "good.log").read_text() == "to the log\n"
        assert ended(launcher, bad) == 1
        assert "ValueError: no" in (place / "bad.log").read_text()
        assert ended(launcher, stopped) in (143, -signal.SIGTERM)

        killed = start("killed", "start")
        wait_for((place / "killed.done").exists)
        launcher.poll()
        # It has started something of its own by then, or will not any more.
        time.sleep(0.1)
        os.kill(killed.process, signal.SIGKILL)
        assert ended(launcher, killed) == -signal.SIGKILL
        # What it had started is gone as well.
        wait_for(lambda: not members_of(killed.process))
        assert launcher.has_server == fork

        if fork:
            # Without the server it goes on with interpreters.
            orphan = start("orphan", "wait")
            wait_for((place / "orphan.done").exists)
            launcher.poll()
            launcher._server.kill()
            assert ended(launcher, orphan) == LOST
            wait_for(lambda: not is_alive(orphan.process))
            assert not launcher.has_server
            assert ended(launcher, start("last", 3)) == 3


def members_of(group):
    """The processes of a group that are at work."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(number) == group and state != "Z":
            found.append(path)
    return found


@pytest.mark.parametrize("way", ["fork", pytest.param("interpreters", marks=pytest.mark.slow)])
def test_no_child_outlives_the_command(place, way):
    (place / "command.py").write_text(COMMAND)
    with subprocess.Popen([sys.executable, "command.py", way]) as command:
        try:
            wait_for(lambda: all((place / f"{number}.done").exists() for number in range(2)), 100)
            children = [int((place / f"{number}.done").read_text().split()[0]) for number in range(2)]
            time.sleep(0.1)
            assert all(map(is_alive, children))
        finally:
            command.kill()
        wait_for(lambda: not any(map(is_alive, children)), 30)


def test_a_server_that_does_not_start(place):
    """Nothing but time is lost."""
    with Launcher("targets:work", ["there_is_no_such_module"], environment={"EXTRA": "hello"}) as launcher:
        wait_for(lambda: launcher._server is None or launcher._server.poll() is not None, 100)
        child = launcher.start({"says": "one", "does": 4}, place / "one.log")
        assert ended(launcher, child) == 4
        assert not launcher.has_server


def test_a_server_that_says_nothing_is_given_up(place, monkeypatch):
    monkeypatch.setattr("mgk.commands.processes.launcher.IMPORT_SECONDS", 0.01)
    (place / "sleeps.py").write_text("import time; time.sleep(1000)")
    with Launcher("targets:work", ["sleeps"], environment={"EXTRA": "hello"}) as launcher:
        child = launcher.start({"says": "one", "does": 0}, place / "one.log")
        time.sleep(0.02)
        launcher.poll()
        assert child.code == LOST
        assert not launcher.has_server
