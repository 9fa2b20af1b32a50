"""Compiles the kernels that ``mgk bench attention`` asks for, ours and FlexAttention's, by many processes at a time.

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
from functools import partial

import torch
from fused_calls import passes_of

from mgk.benchmark import flex
from mgk.benchmark.correctness import SMALL
from mgk.benchmark.inputs import draw
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


def flex_tasks(presets: Sequence[str]) -> list[tuple[str, Shape]]:
    """What FlexAttention must be called with. Its kernels are made for one shape each: that which is timed, and that
    whose gradients are compared."""
    wanted = [preset for preset in presets if preset in flex.PRESETS]
    shapes = list(CUDA_SHAPES)
    for shape in CUDA_SHAPES:
        # Gradients are compared with as many heads for a preset as for softmax.
        small = replace(shape, batch=SMALL["batch"], heads=2 * SMALL["heads"], tokens=SMALL["tokens"])
        shapes += [] if small in shapes else [small]
    return [(preset, shape) for preset in wanted for shape in shapes]


def call_fused(preset: str, shape: Shape) -> None:
    """Forward and backward of our kernels."""
    _, backward = passes_of(preset, shape, DEVICE)
    backward()


def call_flex(preset: str, shape: Shape) -> None:
    """Forward without gradients, forward and backward; what it cannot do, the benchmark says."""
    inputs = draw(
        preset, batch=shape.batch, heads=shape.mixture_heads, tokens=shape.tokens, head_dim=shape.head_dim,
        is_causal=shape.is_causal, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    try:
        with torch.no_grad():
            flex.attention(inputs)
        out = flex.attention(inputs)
        torch.autograd.grad(out, list(inputs.leaves().values()), torch.randn_like(out))
    except Exception as error:
        print(f"{preset} through FlexAttention at {shape}: {type(error).__name__}: {str(error).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=USUAL_PRESETS, help="again for more; default: all")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    presets = arguments.preset or USUAL_PRESETS
    # What takes longest first.
    everything = [partial(call_flex, *task) for task in flex_tasks(presets)]
    everything += [partial(call_fused, *task) for task in tasks(presets)]
    if arguments.share is not None:
        for call in everything[arguments.share :: arguments.processes]:
            call()
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
