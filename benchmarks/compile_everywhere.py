"""Which versions of Triton compile the fused kernels for which GPUs, on a machine without one.

Triton changes with each version, Gluon, in which the kernel for wide heads on Hopper is written, most of all; and
kernels that fit one GPU may take more shared memory than another has. Everything is compiled to the end with the Triton
of this Python and, if asked, of others::

    python benchmarks/compile_everywhere.py --only softmax --architecture 90
    python benchmarks/compile_everywhere.py --python newer/bin/python --write   # and into docs/kernels.md

The other needs what the library needs for training beside its Triton; the library is the one beside this file. What is
on record of versions and architectures that are not asked for stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "bench" / "compilation.json"
PAGE = ROOT / "docs" / "kernels.md"
MARKERS = ("<!-- written by benchmarks/compile_everywhere.py -->", "<!-- end of what it wrote -->")
ROOM = {80: 163, 90: 227, 100: 227, 120: 99}
"""Kilobytes of shared memory that a program may have, by architecture: compute capability times ten."""
# Every kernel there is, and every kind of key in the widths of the benchmark.
CALLS = (
    r"(softmax|smgk|mgk|smgk-hard), head_dim 64, causal$",
    r"(softmax|gaussian|smgk|smgk-hard|mgk), head_dim 128, causal$",
    r"smgk, head_dim 64, full, (dropout|padding|packed|fp32|E-step)$",
    r"(softmax|mgk), head_dim 64, full, decode$",
    r"(linear|smlk|mlk), head_dim 64, (full|causal)$",
)
Outcome = dict[str, Any]


def compiled(architectures: list[int], pattern: str) -> dict[str, dict[str, Outcome]]:
    """By kernel and architecture: how many specialisations compile and fit, of how many, the most shared memory that
    one takes, and what went wrong with the first that does not."""
    import launched_kernels

    found: dict[str, dict[str, Outcome]] = {}
    for architecture in architectures:
        done = set()
        for call_name, call in launched_kernels.benchmark_calls():
            if not any(re.match(each, call_name) for each in CALLS) or not re.search(pattern, call_name):
                continue
            for one in launched_kernels.launched(call, f"sm{architecture}"):
                if one.key() in done:
                    continue
                done.add(one.key())
                error, shared = tried(one, architecture)
                cell = found.setdefault(one.name, {}).setdefault(
                    f"sm{architecture}", {"compiled": 0, "of": 0, "shared": 0, "error": None}
                )
                cell["of"] += 1
                cell["compiled"] += error is None
                cell["shared"] = max(cell["shared"], shared)
                cell["error"] = cell["error"] or (error and f"{call_name}: {error}")
                print(f"sm{architecture}, {call_name}: {one.name}: {error or 'ok'}", file=sys.stderr, flush=True)
    return found


def tried(one: Any, architecture: int) -> tuple[str | None, int]:
    """What is wrong with a specialisation, and its shared memory."""
    try:
        shared = int(one.compile(architecture).metadata.shared)
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        return f"{type(causes[-1]).__name__}: {str(causes[-1]).strip().splitlines()[-1]}", 0
    too_much = shared > ROOM[architecture] * 1024
    return (
        f"takes {shared:,} bytes of shared memory, and there are {ROOM[architecture]} kB" if too_much else None,
        shared,
    )


def compiled_with(python: str, arguments: list[str]) -> Outcome:
    """The same by another Python, and the version of its Triton."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run([python, __file__, *arguments, "--into", str(out)], env=environment, check=True)
        found: Outcome = json.loads(out.read_text())
        return found


def table(results: Outcome) -> str:
    """Of each kernel and architecture the versions that compile it."""
    versions: dict[str, Any] = results["versions"]
    names = list(dict.fromkeys(name for each in versions.values() for name in each))
    columns = [f"sm{architecture}" for architecture in ROOM]
    lines = [f"| kernel | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for kernel in names:
        cells = []
        for column in columns:
            own = {version: each.get(kernel, {}).get(column) for version, each in versions.items()}
            good = [version for version, cell in own.items() if cell and cell["compiled"] == cell["of"]]
            bad = [f"not {version}" for version, cell in own.items() if cell and cell["compiled"] < cell["of"]]
            cells.append(", ".join([*good, *bad]) or "-")
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    counts = [
        f"{sum(cell['of'] for each in kernels.values() for cell in each.values())} with Triton {version}"
        for version, kernels in versions.items()
    ]
    return f"Specialisations: {', '.join(counts)}.\n\n" + "\n".join(lines)


def with_kept(kept: Outcome, results: Outcome) -> Outcome:
    """What has been compiled now, and of what has not what is on record."""
    versions: dict[str, Any] = {}
    for found in (kept["versions"], results["versions"]):
        for version, kernels in found.items():
            for kernel, columns in kernels.items():
                versions.setdefault(version, {}).setdefault(kernel, {}).update(columns)
    return {"versions": dict(sorted(versions.items()))}


def write(results: Outcome) -> None:
    if RESULTS.is_file():
        results = with_kept(json.loads(RESULTS.read_text()), results)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    PAGE.write_text(f"{before}{MARKERS[0]}\n{table(results)}\n{MARKERS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", type=int, action="append", choices=ROOM, help="again for more; default: all")
    parser.add_argument("--only", default="", metavar="REGEX", help="calls in whose name this is found")
    parser.add_argument("--python", action="append", default=[], help="another environment's; again for more")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name} and {PAGE.name}")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    architectures = arguments.architecture or list(ROOM)
    import triton

    versions = {triton.__version__: compiled(architectures, arguments.only)}
    if arguments.into is not None:
        arguments.into.write_text(json.dumps({"versions": versions}))
        return
    for python in arguments.python:
        same = ["--only", arguments.only, *(f"--architecture={each}" for each in architectures)]
        versions |= compiled_with(python, same)["versions"]
    results = {"versions": dict(sorted(versions.items()))}
    print(table(results))
    cells = [
        (f"{kernel}, {column}, Triton {version}", cell)
        for version, kernels in results["versions"].items()
        for kernel, columns in kernels.items()
        for column, cell in columns.items()
    ]
    failed = [f"{name}: {cell['error']}" for name, cell in cells if cell["error"]]
    print("\n".join(["", *failed, f"{len(failed)} of {len(cells)} do not compile or fit"]))
    if arguments.write:
        write(results)
    sys.exit(len(failed) > 0)


if __name__ == "__main__":
    main()
