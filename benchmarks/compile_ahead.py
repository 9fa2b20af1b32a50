"""Compiles the kernels that ``mgk bench attention`` asks for, by many processes at a time.

The benchmark would compile one after the other, which takes long. Triton keeps what has been compiled::

    python benchmarks/compile_ahead.py
    python benchmarks/compile_ahead.py --preset smgk --processes 4
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from fused_calls import passes_of

from mgk.benchmark.plan import CUDA_SHAPES, USUAL_PRESETS
from mgk.benchmark.shape import Shape

DEVICE = torch.device("cuda")
WHOLE_BLOCKS, OTHERS = 512, 299
"""Lengths: softmax has no columns in whole blocks of keys, and so a kernel of its own for others."""


def tasks(presets: Sequence[str]) -> list[tuple[str, Shape]]:
    """What must be called once. No kernel depends on the numbers of sequences, heads or tokens."""
    lengths = [(preset, WHOLE_BLOCKS) for preset in presets] + [("softmax", OTHERS)] * ("softmax" in presets)
    return [
        (preset, replace(shape, batch=2, heads=2, tokens=tokens)) for preset, tokens in lengths for shape in CUDA_SHAPES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=USUAL_PRESETS, help="again for more; default: all")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    everything = tasks(arguments.preset or USUAL_PRESETS)
    if arguments.share is not None:
        for preset, shape in everything[arguments.share :: arguments.processes]:
            _, backward = passes_of(preset, shape, DEVICE)
            backward()
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*command, "--share", str(share)]) for share in range(arguments.processes)]
    failed = sum(process.wait() != 0 for process in running)
    print(f"{len(everything)} calls compiled in {time.perf_counter() - start:.0f} s, {failed} processes failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
