"""NVIDIA's service, by a program that only writes down what it is asked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_cases import wait_for

from mgk.commands.sweep.mps import PROGRAM, MultiProcessService

FAKE = """#!/bin/sh
if [ "$1" = "-d" ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "$FAKE_LOG"
  if [ -n "$FAKE_FAILS" ]; then echo "no device" >&2; exit 1; fi
else
  read -r line
  echo "$line $CUDA_MPS_PIPE_DIRECTORY" >> "$FAKE_LOG"
fi
"""

COMMAND = """
import time
from mgk.commands.sweep.mps import MultiProcessService
with MultiProcessService(print) as service:
    print("running", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What the program was asked."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / PROGRAM
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    return tmp_path / "log"


def test_a_service_of_its_own(log):
    said = []
    with MultiProcessService(said.append) as service:
        assert service.is_running
        pipes, logs = service.environment["CUDA_MPS_PIPE_DIRECTORY"], service.environment["CUDA_MPS_LOG_DIRECTORY"]
        assert Path(pipes).is_dir()
        assert pipes != logs
        assert log.read_text() == f"start {pipes} {logs}\n"
    assert log.read_text().splitlines()[1:] == [f"quit {pipes}"]
    assert not Path(pipes).exists()
    assert not Path(logs).exists()
    assert not service.is_running
    assert said == []
    # Ours is not changed, and another one has other folders.
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] != pipes
    with MultiProcessService(said.append) as other:
        assert other.environment["CUDA_MPS_PIPE_DIRECTORY"] != pipes


def test_one_that_runs_already_is_used_and_left_running(log, tmp_path):
    """A second service on the same GPU would take turns with the first."""
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    (pipes / f"{PROGRAM}.pid").write_text(f"{os.getpid()}\n")
    with MultiProcessService(print) as service:
        assert service.environment == {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    assert not service.is_running
    assert not log.exists()
    # What a service left behind that has died is none.
    gone = subprocess.Popen(["true"])
    gone.wait()
    (pipes / f"{PROGRAM}.pid").write_text(str(gone.pid))
    with MultiProcessService(print) as service:
        assert service.environment["CUDA_MPS_PIPE_DIRECTORY"] != str(pipes)
    assert log.read_text().startswith("start ")


def test_one_that_does_not_start(log, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "1")
    said = []
    with MultiProcessService(said.append) as service:
        assert not service.is_running
        assert service.environment == {}
    assert len(said) == 1
    assert "did not start (no device), so the cells take turns on the GPU" in said[0]
    assert "quit" not in log.read_text()


def test_no_such_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    said = []
    with MultiProcessService(said.append) as service:
        assert not service.is_running
    assert said == [f"no multi-process service: there is no {PROGRAM}, so the cells take turns on the GPU"]


@pytest.mark.slow
def test_it_does_not_outlive_a_command_that_is_killed(log):
    """Slow, since the command has to import torch."""
    command = subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True)
    assert command.stdout.readline() == "running\n"
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    wait_for(lambda: "quit" in log.read_text())
    command.stdout.close()
