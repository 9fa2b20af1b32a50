"""The script that runs the suite by several processes, here on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "on_gpu.py"
FILE = "tests/training/test_schedule.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_test_runs_once(tmp_path):
    """Slow, since each process imports torch."""
    whole = run(FILE, "--processes", 1, "--logs", tmp_path / "whole")
    parts = run(FILE, "--processes", 3, "--logs", tmp_path / "parts")
    assert (whole.returncode, parts.returncode) == (0, 0), whole.stdout + parts.stdout
    count = whole.stdout.split(" passed")[0]
    assert int(count) > 5
    assert parts.stdout.startswith(f"{count} passed, 0 left")
    assert len(list((tmp_path / "parts").iterdir())) == 3


def test_a_run_that_was_cut_is_no_whole_one(tmp_path):
    found = run(FILE, "--processes", 1, "--seconds", 0.1, "--logs", tmp_path)
    assert found.returncode == 2
    assert "part-0.txt ended before its tests" in found.stdout


def test_what_a_process_printed_is_counted(tmp_path):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from on_gpu import read
    finally:
        sys.path.remove(str(SCRIPT.parent))
    log = tmp_path / "part-0.txt"
    log.write_text(
        "collecting ... collected 9 items / 4 deselected / 5 selected\n\n"
        "tests/ops/test_a.py::test_one[a b] PASSED [ 20%]\ntests/ops/test_a.py::test_two SKIPPED (no) [ 40%]\n"
        "tests/ops/test_a.py::test_three FAILED [ 60%]\ntests/ops/test_a.py::test_four "
    )
    count, outcomes, failed = read(log)
    assert (count, dict(outcomes), failed) == (
        5, {"passed": 1, "skipped": 1, "failed": 1}, ["tests/ops/test_a.py::test_three"]
    )  # fmt: skip
