"""``benchmarks/step_profile.py`` on a tiny recipe; on a CPU there are no kernels to trace."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_profile.py"
TINY = ["demo", "softmax-2", "data.options.train=640", "data.options.valid=20", "training.batch_size=4"]
FEW = ["--warmup", "2", "--steps", "3"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MGK_CACHE", str(tmp_path / "cache"))


def test_where_the_time_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    file = tmp_path / "out" / "profile.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *TINY, *FEW, "--device", "cpu", "--to", str(file)])
    importlib.import_module("step_profile").main()
    found = json.loads(file.read_text())
    assert (found["recipe"], found["row"], found["changes"]) == ("demo", "softmax-2", TINY[2:])
    assert 0 < found["update"]["host_ms"] <= 1.5 * found["update"]["ms"]
    assert found["validation"]["ms"] > 0
    assert "update: " in capsys.readouterr().out


@pytest.mark.slow
def test_several_at_once():
    command = [sys.executable, str(SCRIPT), *TINY, *FEW, "--device", "cpu", "--at-once", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert printed.startswith("2 at once: ")
