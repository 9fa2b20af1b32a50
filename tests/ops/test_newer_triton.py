"""Versions of Triton other than the one that the kernels were measured with."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from mgk.ops.triton import tile_table, tuning
from mgk.ops.triton.kernels import gradient_sums

ROOT = Path(__file__).parents[2]
WIDE = tile_table.Kernel(
    name="forward", width=128, element_size=2, kind="two shifts", is_causal=False, has_mask=False, has_level=True,
    fits_specialised=True,
)  # fmt: skip
GPU = torch.device("cuda", 0)


@pytest.fixture
def on(monkeypatch):
    """Tiles as on a GPU of an architecture, with or without a Triton that the specialised kernel is written for."""

    def pretend(architecture, has_specialised):
        monkeypatch.setattr(tuning, "is_interpreted", lambda: False)
        monkeypatch.setattr(tuning, "_architecture", lambda index: architecture)
        monkeypatch.setattr(tuning, "HAS_WARP_SPECIALISATION", has_specialised)
        tuning._say_what_is_lost.cache_clear()

    yield pretend
    tuning._say_what_is_lost.cache_clear()


def test_an_unknown_triton_takes_the_portable_kernel_and_says_so_once(on):
    on("sm90", False)
    with pytest.warns(UserWarning, match=rf"Triton 3\.6 to 3\.9, and this is Triton {triton.__version__}") as said:
        tiles = [tuning.choose_tile(WIDE._replace(is_causal=is_causal), GPU) for is_causal in (False, True)]
    assert len(said) == 1
    assert not any(tile.specialised for tile in tiles)
    assert tiles[0] == tuning.choose_tile(WIDE._replace(fits_specialised=False), GPU)


@pytest.mark.parametrize(
    ("architecture", "has_specialised", "kernel"),
    [("sm90", True, WIDE), ("sm80", False, WIDE), ("sm120", False, WIDE),
     ("sm90", False, WIDE._replace(fits_specialised=False)), ("sm90", False, WIDE._replace(width=64))],
)  # fmt: skip
def test_nothing_is_said_where_nothing_is_lost(on, architecture, has_specialised, kernel):
    on(architecture, has_specialised)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tile = tuning.choose_tile(kernel, GPU)
    assert tile.specialised == (architecture == "sm90" and has_specialised)


def test_products_and_sums_are_fused_whatever_the_default(monkeypatch, tmp_path):
    """Triton 3.9 warns that 3.10 will no longer do it unless asked."""
    if not isinstance(gradient_sums.attention_delta, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    specialise = importlib.import_module("launched_kernels").specialise
    out, row = torch.empty(2, 2, 128, 32, dtype=torch.bfloat16), torch.empty(2, 2, 128)
    strides, numbers = out.stride()[:3], (2, 1, 128, 128, 1, 32)
    arguments = (out, out, row, None, None, None, row, row, *strides, *strides, 1.0, *numbers)
    tile = tuning.Tile(0, 0, 2, 1)
    one = specialise(gradient_sums.attention_delta, arguments, (128, 32), tile)
    assert one.compile().metadata.enable_fp_fusion


def test_the_table_of_versions_is_what_was_compiled(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    command = importlib.import_module("compile_everywhere")
    results = json.loads(command.RESULTS.read_text())
    assert command.table(results) in command.PAGE.read_text(), "run benchmarks/compile_everywhere.py --write"

    # The newest of which the library takes it for granted; the oldest is what the other tests compile with.
    versions = {tuple(int(part) for part in name.split(".")[:2]): each for name, each in results["versions"].items()}
    wide = versions[tuning.SPECIALISED_VERSIONS[1]]["attention_forward_wide"]["sm90"]
    assert wide["compiled"] == wide["of"] > 0


def test_what_is_not_compiled_again_stays_on_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    command = importlib.import_module("compile_everywhere")
    kept = {"versions": {"3.9": {"f": {"sm80": 1}}, "3.6": {"f": {"sm80": 2, "sm90": 3}, "g": {"sm80": 4}}}}
    found = {"versions": {"3.6": {"f": {"sm90": 5, "sm100": 6}}}}
    assert command.with_kept(kept, found) == {
        "versions": {"3.6": {"f": {"sm80": 2, "sm90": 5, "sm100": 6}, "g": {"sm80": 4}}, "3.9": {"f": {"sm80": 1}}}
    }


def everywhere(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_everywhere.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 of" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_kernels_compile_for_another_architecture():
    out = everywhere("--only", "^softmax, head_dim 64, causal$", "--architecture", "120")
    assert f"| `attention_forward` | - | - | - | {triton.__version__} |" in out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_another_triton_compiles_the_kernels():
    """``MGK_OTHER_PYTHON`` is the interpreter of an environment with another Triton, and torch."""
    other = os.environ.get("MGK_OTHER_PYTHON")
    if other is None:
        pytest.skip("MGK_OTHER_PYTHON names no interpreter of an environment with another version of Triton")
    out = everywhere("--only", "^smgk, head_dim 128", "--python", other)
    assert "| `attention_forward_wide` | - | 3." in out
