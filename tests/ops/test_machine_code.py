"""The guard of the kernels' machine code notices what a GPU would notice, and nothing else."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from mgk.ops.triton import tuning
from mgk.ops.triton.kernels import gradient_sums

ROOT = Path(__file__).parents[2]
LISTING = """
	.section	.text.{name},"ax",@progbits
{name}:
.text.{name}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/                   ULDC UR7, c[0x0][{first}] ;           /* 0x00009d0000077ab9 */
                                                                         /* {control} */
{label}:
        /*0020*/               @P0 FADD R3, R3, c[0x0][{second}] ;       /* 0x0000000000037919 */
                                                                         /* 0x000e220000002500 */
        /*0030*/                   FADD R4, R3, c[0x0][{first}] ;        /* 0x0000000000037919 */
                                                                         /* 0x000e220000002500 */
        /*0040*/                   BRA `({label}) ;                      /* 0x0000000000037919 */
                                                                         /* 0x000e220000002500 */
        /*0050*/                   NOP;                                  /* 0x0000000000007918 */
                                                                         /* 0x000fc00000000000 */
.L_x_9:
"""
USUAL = {"name": "f", "first": "0x210", "second": "0x218", "control": "0x000fe20000000800", "label": ".L_x_1"}


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def run(*arguments, tree=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "machine_code.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_listings_without_what_may_change(benchmarks):
    read = benchmarks("machine_code").instructions_of
    usual = read(LISTING.format(**USUAL))
    assert [line.split("  /*")[0] for line in usual] == [
        "LDC R1, c[0x0][0x28]",
        "ULDC UR7, c[0x0][parameter0]",
        "label0:",
        "@P0 FADD R3, R3, c[0x0][parameter1]",
        "FADD R4, R3, c[0x0][parameter0]",
        "BRA `(label0)",
    ]
    elsewhere = {"name": "other", "first": "0x320", "second": "0x228", "label": ".L_x_77"}
    assert read(LISTING.format(**{**USUAL, **elsewhere})) == usual
    # Another parameter than before, another stall, another register.
    assert read(LISTING.format(**{**USUAL, "second": "0x210"})) != usual
    assert read(LISTING.format(**{**USUAL, "control": "0x000fc20000000800"})) != usual
    assert read(LISTING.format(**USUAL).replace("R4", "R5")) != usual


def test_differences_are_told(benchmarks):
    machine_code = benchmarks("machine_code")
    one, two, three = (machine_code.Code([f"FADD R{i}"] * i, 128, 4).fingerprint() for i in (1, 2, 3))
    differences = machine_code.differences
    assert differences({"a: f": one, "a: g": two}, {"a: f": one, "a: g": two}) == []
    assert differences({"a: f": one}, {"a: f": two}) == ["a: f: instructions 1 -> 2"]
    assert differences({"a: f": one}, {"a: f": {**one, "shared": 64}}) == ["a: f: shared 128 -> 64"]
    assert differences({"a: f": one}, {"a: f": {**one, "sha256": ""}}) == ["a: f: 1 instructions, but not the same"]
    # A kernel of the same code may get another name, but not another call's.
    assert differences({"a: f": one}, {"a: h": one}) == []
    assert differences({"a: f": one}, {"b: f": one}) == ["a: f: is launched no more", "b: f: was not launched before"]
    assert differences({"a: f": one}, {"a: f": one, "a: g": three}) == ["a: g: was not launched before"]


def test_a_renamed_argument_is_no_difference_and_an_instruction_is(benchmarks, tmp_path, monkeypatch):
    if not isinstance(gradient_sums.attention_delta, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    machine_code, launched_kernels = benchmarks("machine_code"), benchmarks("launched_kernels")
    source = Path(gradient_sums.__file__).read_text()
    first = gradient_sums.attention_delta.arg_names[0]
    texts = {
        "as_it_is": source,
        "renamed": "# A line more.\n" + re.sub(rf"\b{first}\b", "p_of_another_name", source),
        "changed": source.replace("tl.sum(b_out", "tl.max(b_out"),
    }
    assert len(set(texts.values())) == 3
    out, row = torch.empty(2, 2, 128, 32, dtype=torch.bfloat16), torch.empty(2, 2, 128)
    strides, numbers = out.stride()[:3], (2, 1, 128, 128, 1, 32)
    arguments = (out, out, row, None, None, None, row, row, *strides, *strides, 1.0, *numbers)
    found = {}
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in texts.items():
        (tmp_path / f"sums_{name}.py").write_text(text)
        kernel = importlib.import_module(f"sums_{name}").attention_delta
        one = launched_kernels.specialise(kernel, arguments, (1, False, False, False, 128, 32), tuning.Tile(0, 0, 2, 1))
        found[name] = machine_code.instructions_of(machine_code.disassembled(one.compile().asm["cubin"]))
    assert len(found["as_it_is"]) > 100
    assert found["renamed"] == found["as_it_is"]
    assert found["changed"] != found["as_it_is"]


def test_one_kernel_has_the_machine_code_that_was_measured():
    done = run("--only", "smgk, head_dim 64, full: attention_delta")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 specialisations of 1 codes, 0 differ" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_has_the_machine_code_that_was_measured():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((ROOT / "benchmarks" / "machine_code.json").read_text())["kernels"]
    assert f"{len(kept)} specialisations" in done.stdout


def test_fingerprints_of_some_are_renewed(benchmarks, tmp_path, monkeypatch):
    guard = benchmarks("machine_code")
    file = tmp_path / "machine_code.json"
    old = {"instructions": 1, "shared": 0, "warps": 4, "sha256": "0"}
    content = {
        "revision": "abc", "versions": {}, "untimed": {"f": {"sha256": "1", "why": "registers"}, "g": {}},
        "kernels": {"f": old, "g": old},
    }  # fmt: skip
    file.write_text(json.dumps(content))
    monkeypatch.setattr(guard, "FINGERPRINTS", file)
    code = guard.Code(["FADD R3", "EXIT"], 128, 8)
    guard.write({"f": code}, "def", "^f")
    found = json.loads(file.read_text())
    # The other one is still that of the revision of before, and still waits for its time.
    assert (found["revision"], found["renewed"], found["untimed"]) == ("abc", {"f": "def"}, {"g": {}})
    assert found["kernels"] == {"f": code.fingerprint(), "g": old}
    guard.write({"f": code, "g": code}, "fed", "")
    found = json.loads(file.read_text())
    assert (found["revision"], found["renewed"], found["untimed"]) == ("fed", {}, {})
