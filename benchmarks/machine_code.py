"""Whether the fused kernels still compile to the machine code that was measured, on a machine without a GPU.

Whoever rewrites a kernel so that it reads better wants to know that the GPU does the same as before. Every
specialisation that ``mgk bench attention`` launches, and some of decoding, linear attention, dropout and padding, is
compiled for Hopper and taken apart with the disassembler that Triton brings. The instructions are compared with those
of which ``machine_code.json`` keeps a fingerprint::

    python benchmarks/machine_code.py                                   # all of them: a few minutes
    python benchmarks/machine_code.py --only 'smgk.*attention_forward'  # seconds, while one works on a kernel
    python benchmarks/machine_code.py --only attention_delta --against HEAD~3

The pattern is searched in names such as ``smgk, head_dim 64, causal: attention_forward``. With ``--against`` another
revision is compiled as well, in a copy of its own, and the first differences are printed as a diff. The exit status is
1 where anything differs.

Kernels are compiled without line numbers: the assembler schedules a few of them otherwise when a comment moves a line.
Addresses, labels, names of symbols and places of parameters do not count; registers and the scheduler's notes (how long
to stall, which barrier to wait for) do, as do shared memory and warps. For some kernels the assembler gives one of two
codes for the same text, by chance. So a specialisation is the same, too, if the text (PTX) that the assembler gets is;
names of parameters, registers and labels do not count there. Code that differs may be as fast, but only a GPU
can say so: explain the difference, time it there, and renew the fingerprints with ``--write``. Where no GPU is at hand,
``untimed`` in ``machine_code.json`` keeps the new fingerprint and the explanation until somebody has timed it; such
differences are printed and do not count.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FINGERPRINTS = Path(__file__).with_suffix(".json")
# Below lie what the driver passes and the sizes of the grid; the kernel's own parameters follow. (sm90)
FIRST_PARAMETER = 0x210
MOST_DIFFS, MOST_LINES = 3, 120


class Code(NamedTuple):
    """One specialisation after the compiler."""

    instructions: list[str]
    shared: int
    """bytes of shared memory"""
    warps: int
    ptx: str
    """checksum of what the assembler got"""

    def fingerprint(self) -> dict[str, Any]:
        """What is kept of it."""
        text = "\n".join(self.instructions).encode()
        return {
            "instructions": len(self.instructions),
            "shared": self.shared,
            "warps": self.warps,
            "sha256": hashlib.sha256(text).hexdigest(),
            "ptx": self.ptx,
        }


def instructions_of(listing: str) -> list[str]:
    """The instructions of a listing of ``nvdisasm -c -hex``, one a line, with labels, and without what may change when
    nothing happens: addresses, names, where parameters lie, and the padding after the end."""
    met: dict[str, dict[str, int]] = {"parameter": {}, "label": {}, "symbol": {}}

    def in_order(kind: str, name: str) -> str:
        """Names are numbered as they are met."""
        return f"{kind}{met[kind].setdefault(name, len(met[kind]))}"

    def parameter(match: re.Match[str]) -> str:
        place = int(match[1], 16)
        return match[0] if place < FIRST_PARAMETER else f"c[0x0][{in_order('parameter', match[1])}]"

    def symbol(match: re.Match[str]) -> str:
        return f"`({in_order('label' if match[1].startswith('.L_') else 'symbol', match[1])})"

    found: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            found.append(f"{in_order('label', label[1])}:")
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/", line):
            text = re.sub(r"\s*;$", "", code[1])
            text = re.sub(r"c\[0x0\]\[(0x[0-9a-f]+)\]", parameter, text)
            found.append(re.sub(r"`\(([^()]+)\)", symbol, text))
        elif found and (high := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            # The upper half of an instruction says in 21 bits how it is scheduled, which no text shows.
            found[-1] += f"  /* {int(high[1], 16) >> 41 & 0x1FFFFF:06x} */"
    while found and (found[-1].endswith(":") or found[-1].startswith(("NOP ", "NOP;"))):
        found.pop()
    return found


def text_of(ptx: str) -> str:
    """The instructions of a PTX module with one kernel, where names are numbered as they are met."""
    (kernel,) = re.findall(r"\.entry\s+(\w+)", ptx)
    body = ptx[re.search(r"^\{", ptx, re.MULTILINE).start() :]  # type: ignore[union-attr]
    body = re.sub(r"//.*", "", body)
    met: dict[str, dict[str, int]] = {}

    def in_order(match: re.Match[str]) -> str:
        own = met.setdefault(match[1], {})
        return f"{match[1]}{own.setdefault(match[2], len(own))}"

    # %r12 and its like, parameters, and labels. A number in angle brackets is how many registers there are.
    names = rf"(%[a-z]+|{kernel}_param_|\$L__\w+?_)(\d+)\b"
    return "\n".join(re.sub(names, in_order, line.strip()) for line in body.splitlines() if line.strip())


def disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True, check=True).stdout


def compiled(pattern: str) -> dict[str, Code]:
    """All specialisations whose name the pattern is found in, of the library that Python finds."""
    import launched_kernels

    found: dict[str, Code] = {}
    made: dict[tuple[Any, ...], Code] = {}
    for call_name, call in launched_kernels.benchmark_calls():
        for name, one in _named(call_name, launched_kernels.launched(call)):
            if not re.search(pattern, name):
                continue
            if one.key() not in made:
                start = time.perf_counter()
                done = one.compile()
                code = instructions_of(disassembled(done.asm["cubin"]))
                text = hashlib.sha256(text_of(done.asm["ptx"]).encode()).hexdigest()
                made[one.key()] = Code(code, done.metadata.shared, done.metadata.num_warps, text)
                print(f"{name}: {len(code)} instructions, {time.perf_counter() - start:.1f} s", file=sys.stderr)
            found[name] = made[one.key()]
    return found


def _named(call_name: str, launches: list[Any]) -> list[tuple[str, Any]]:
    """A kernel that a call launches again, with other constants, gets a number."""
    counts: dict[str, int] = {}
    named = []
    for one in launches:
        counts[one.name] = counts.get(one.name, 0) + 1
        number = f" ({counts[one.name]})" if counts[one.name] > 1 else ""
        named.append((f"{call_name}: {one.name}{number}", one))
    return named


def compiled_at(revision: str, pattern: str) -> dict[str, Code]:
    """The same with the library as it was at ``revision``."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, "src"], capture_output=True, check=True
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        out = Path(folder) / "code.json"
        command = [sys.executable, __file__, "--only", pattern, "--into", str(out)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{folder}/src"}, check=True)
        return {name: Code(*code) for name, code in json.loads(out.read_text()).items()}


def versions() -> dict[str, str]:
    """Of what makes the machine code beside the kernels."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return {"triton": triton.__version__, "ptxas": re.findall(r"V(\d[\d.]*)", said)[0]}


def is_same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two fingerprints are of one code, or of two that the assembler may give for one text."""
    is_alike = old["sha256"] == new["sha256"] or old["ptx"] == new["ptx"]
    return bool(is_alike and (old["shared"], old["warps"]) == (new["shared"], new["warps"]))


def differences(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each specialisation that is not as it was, by name. A kernel may get another name."""
    lines = []
    added = [name for name in now if name not in before]
    for name, old in before.items():
        if name not in now:
            call_name = name.split(":")[0]
            renamed = [each for each in added if each.split(":")[0] == call_name and is_same(old, now[each])]
            if renamed:
                added.remove(renamed[0])
            else:
                lines.append(f"{name}: is launched no more")
        elif not is_same(old, now[name]):
            new, keys = now[name], ("instructions", "shared", "warps")
            what = [f"{key} {old[key]} -> {new[key]}" for key in keys if old[key] != new[key]]
            lines.append(f"{name}: " + (", ".join(what) or f"{new['instructions']} instructions, but not the same"))
    return sorted([*lines, *(f"{name}: was not launched before" for name in added)])


def print_diffs(before: dict[str, Code], now: dict[str, Code]) -> None:
    """Of the first that differ."""
    changed = [name for name in now if name in before and before[name].instructions != now[name].instructions]
    for name in changed[:MOST_DIFFS]:
        lines = list(
            difflib.unified_diff(before[name].instructions, now[name].instructions, "before", "now", lineterm="")
        )
        print(f"\n{name}", *lines[:MOST_LINES], sep="\n")
        if len(lines) > MOST_LINES:
            print(f"... {len(lines) - MOST_LINES} lines more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="specialisations in whose name this is found")
    parser.add_argument("--against", metavar="REVISION", help="compile this revision, too, and print what differs")
    parser.add_argument("--write", action="store_true", help=f"renew the fingerprints in {FINGERPRINTS.name}")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Triton reads it when it compiles, and so do the processes that are started here.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    if arguments.into is not None:
        arguments.into.write_text(json.dumps(compiled(arguments.only)))
        return
    if arguments.write:
        revision = arguments.against or _working_tree()
        found = compiled_at(revision, arguments.only) if arguments.against else compiled(arguments.only)
        write(found, revision, arguments.only)
        return
    now = compiled(arguments.only)
    if not now:
        parser.error(f"--only must be found in the name of a specialisation, got {arguments.only!r}")
    own = {name: code.fingerprint() for name, code in now.items()}
    if arguments.against is not None:
        other = compiled_at(arguments.against, arguments.only)
        before = {name: code.fingerprint() for name, code in other.items()}
        print_diffs(other, {name: now[name] for name in now if name in before and not is_same(before[name], own[name])})
    else:
        kept = json.loads(FINGERPRINTS.read_text())
        if kept["versions"] != versions():
            parser.error(f"the fingerprints are of {kept['versions']}, got {versions()}: use --against")
        before = {name: each for name, each in kept["kernels"].items() if re.search(arguments.only, name)}
    changes = differences(before, own)
    if arguments.against is None:
        waiting = [name for name, each in kept["untimed"].items() if own.get(name, {}).get("ptx") == each["ptx"]]
        for name in waiting:
            print(f"{name}: explained, but not timed yet: {kept['untimed'][name]['why']}")
        changes = [line for line in changes if line.rpartition(": ")[0] not in waiting]
    print("".join(f"{line}\n" for line in changes), end="")
    chance = [name for name, old in before.items() if name in own and old != own[name] and is_same(old, own[name])]
    print(f"{len(own)} specialisations of {len({each['ptx'] for each in own.values()})} codes, {len(changes)} differ")
    if chance:
        print(f"{len(chance)} have other instructions for the same text, by the assembler's chance")
    sys.exit(len(changes) > 0)


def write(found: dict[str, Code], revision: str, pattern: str) -> None:
    """Keep the fingerprints of ``found``, and those that were not asked for."""
    kept = json.loads(FINGERPRINTS.read_text())
    others = kept["kernels"] if pattern else {}
    untimed = {name: each for name, each in kept["untimed"].items() if name not in found}
    renewed = {**kept.get("renewed", {}), **dict.fromkeys(found, revision)} if pattern else {}
    kernels = {name: each for name, each in others.items() if not re.search(pattern, name)}
    kernels |= {name: code.fingerprint() for name, code in found.items()}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels))
    # Where only some are renewed, the others are still those of the revision of before.
    facts = f'  "revision": {json.dumps(kept["revision"] if pattern else revision)},\n'
    facts += f'  "versions": {json.dumps(versions())}'
    FINGERPRINTS.write_text(
        f'{{\n{facts},\n  "untimed": {_by_name(untimed)},\n  "renewed": {_by_name(renewed)},\n'
        f'  "kernels": {{\n{lines}\n  }}\n}}\n'
    )
    print(f"{len(found)} fingerprints written to {FINGERPRINTS.name}")


def _by_name(entries: dict[str, Any]) -> str:
    """An object of JSON with a line for each entry."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    return f"{{\n{lines}\n  }}" if entries else "{}"


def _working_tree() -> str:
    """The commit that is checked out, if the library is as it says."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True).stdout
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return "the working tree" if changed else head.strip()


if __name__ == "__main__":
    main()
