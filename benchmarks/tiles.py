"""Times of the fused kernels with other tiles than those of the table, on this GPU: what to write into the table.

Everything is compiled first, by many processes at a time, then timed by one: a whole forward pass for tiles of the
forward kernel, else a whole backward pass, so that differences are those of the kernel. What does not fit is left out::

    python benchmarks/tiles.py --preset smgk --shape 32,4,4096,64 --kernel key_value --tile 64,64,4,3 --tile 64,64,4,2
    python benchmarks/tiles.py --preset gaussian --shape 4,8,16384,64,causal --kernel forward      # some usual ones
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from fused_calls import passes_of

from mgk.benchmark.plan import USUAL_PRESETS
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Candidate, StreamClock
from mgk.ops.triton import tuning

KERNELS = ("forward", "key_value", "query")
DEVICE = torch.device("cuda")
SAMPLES = 11
usual_tile = tuning.choose_tile


def parse(text: str) -> tuning.Tile:
    """``rows,columns,warps,stages``, perhaps ``registers`` (0: any number), and what else of a tile shall be true."""
    parts = text.split(",")
    numbers = [int(part) or None for part in parts if part.isdigit()]
    words = dict.fromkeys((part for part in parts if not part.isdigit()), True)
    return tuning.Tile(*numbers, **words)  # type: ignore[arg-type]


def text_of(tile: tuning.Tile) -> str:
    """What :func:`parse` takes."""
    words = [name for name in ("await_products", "direct", "specialised", "ping_pong") if getattr(tile, name)]
    return ",".join(map(str, [*tile[:4], *([] if tile.registers is None else [tile.registers]), *words]))


def use(kernel: str, tile: tuning.Tile | None) -> None:
    """From now on; ``None``: as usual."""
    vars(tuning)["choose_tile"] = lambda asked, device: (
        tile if tile and asked.name == kernel else usual_tile(asked, device)
    )


def tried(arguments: argparse.Namespace) -> list[tuning.Tile | None]:
    return [None, *(map(parse, arguments.tile) if arguments.tile else tuning.CANDIDATES)]


def compile_some(arguments: argparse.Namespace, preset: str, share: Iterable[tuning.Tile | None]) -> None:
    """In a process of its own: on few tokens, for which the same is compiled."""
    few = replace(Shape.parse(arguments.shape), batch=2, tokens=512)
    for tile in share:
        use(arguments.kernel, tile)
        try:
            _, backward = passes_of(preset, few, DEVICE, arguments.dropout)
            backward()
        except Exception as error:  # what does not fit is found again when it is timed
            print(f"{tile}: {error!r}"[:120], file=sys.stderr)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=USUAL_PRESETS, required=True, help="again for more")
    parser.add_argument("--shape", required=True, help="B,H,N,D or B,H,N,D,causal; H are the heads of the preset")
    parser.add_argument("--kernel", choices=KERNELS, required=True)
    parser.add_argument(
        "--tile",
        action="append",
        help="rows,columns,warps,stages[,registers][,await_products][,direct][,specialised][,ping_pong]; or more",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    everything = tried(arguments)
    if arguments.share is not None:
        for preset in arguments.preset:
            compile_some(arguments, preset, everything[arguments.share :: arguments.processes])
        return
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*command, "--share", str(share)]) for share in range(arguments.processes)]
    for process in running:
        process.wait()
    shape, clock = Shape.parse(arguments.shape), StreamClock(DEVICE)
    for preset in arguments.preset:
        use(arguments.kernel, None)
        call = passes_of(preset, shape, DEVICE, arguments.dropout)[0 if arguments.kernel == "forward" else 1]
        times: list[tuple[float, str]] = []
        for tile in everything:
            use(arguments.kernel, tile)
            try:
                call()
            except Exception as error:
                print(f"{preset}: {tile} left out, {type(error).__name__}")
                continue
            samples = sorted(clock.sample(Candidate(name="", call=call), 1.0) for _ in range(SAMPLES))
            times.append((samples[SAMPLES // 2], "of the table" if tile is None else text_of(tile)))
        for time, name in sorted(times):
            print(f"{preset}, {arguments.kernel}, {shape}: {time:.3f} ms  {name}")


if __name__ == "__main__":
    main()
