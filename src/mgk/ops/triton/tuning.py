"""Block sizes, warps and pipeline stages of the kernels: a table, measured once, so that no call ever waits for a trial.

``MGK_AUTOTUNE=1`` tries the candidates the first time a kind of kernel is met (never again for another length) and keeps
the fastest of this process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """How a kernel is cut and scheduled."""

    rows: int
    """queries in a block"""
    columns: int
    """keys in a block"""
    warps: int
    stages: int
    registers: int | None = None
    """most registers of a thread; fewer let more programs share a multiprocessor"""

    def settings(self) -> dict[str, int | None]:
        """What Triton calls them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class Kernel(NamedTuple):
    """What a tile is chosen by."""

    name: str
    """``"forward"``, ``"key_value"``, ``"query"``, or ``"repair"`` for the rare rows and heads that are done again"""
    width: int
    """the larger of D and Dv, rounded up to a power of two"""
    element_size: int
    """bytes of a number"""
    products: int
    """matrix products of query and key: M for projected keys, 1 for shifted ones"""
    is_causal: bool
    has_mask: bool
    """an attention mask, read pair by pair"""


INTERPRETED = Tile(16, 16, 4, 1)
"""Small, so that short sequences cross several blocks."""

# Half precision on Hopper, by (kernel, width, one product or several), measured on an H200.
HOPPER: dict[tuple[str, int, bool], Tile] = {
    ("forward", 16, True): Tile(64, 128, 4, 3, 128),
    ("forward", 32, True): Tile(64, 128, 4, 3, 128),
    ("forward", 64, True): Tile(64, 128, 4, 2),
    ("forward", 128, True): Tile(128, 64, 8, 2, 128),
    ("forward", 16, False): Tile(64, 64, 4, 3),
    ("forward", 32, False): Tile(64, 64, 4, 3),
    ("forward", 64, False): Tile(64, 64, 4, 2),
    ("forward", 128, False): Tile(64, 64, 4, 2),
    ("key_value", 16, True): Tile(64, 64, 4, 2, 168),
    ("key_value", 32, True): Tile(64, 64, 4, 2, 168),
    ("key_value", 64, True): Tile(64, 64, 4, 2, 168),
    ("key_value", 128, True): Tile(64, 64, 4, 2),
    ("query", 16, True): Tile(64, 64, 4, 2, 128),
    ("query", 32, True): Tile(64, 64, 4, 2, 128),
    ("query", 64, True): Tile(64, 64, 4, 2, 128),
    ("query", 128, True): Tile(64, 64, 4, 2),
}

CANDIDATES = [
    Tile(rows, columns, warps, stages)
    for rows, columns in ((64, 128), (128, 64), (64, 64), (128, 128), (32, 64), (64, 32))
    for warps in (4, 8)
    for stages in (2, 3)
    if rows * columns >= warps * 512
]

_tuned: dict[tuple[Kernel, str], Tile] = {}


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def choose_tile(kernel: Kernel, device: torch.device) -> Tile:
    """The tile of ``kernel`` on ``device``."""
    if is_interpreted():
        return INTERPRETED
    tuned = _tuned.get((kernel, _architecture(device.index or 0)))
    return tuned or _from_table(kernel)


def tune(kernel: Kernel, device: torch.device, launch: Callable[[Tile], object]) -> None:
    """With ``MGK_AUTOTUNE=1``, time ``launch`` for every candidate and remember the fastest."""
    if os.environ.get("MGK_AUTOTUNE") != "1" or is_interpreted():
        return
    key = (kernel, _architecture(device.index or 0))
    if key in _tuned or torch.cuda.is_current_stream_capturing():
        return
    _tuned[key] = _from_table(kernel)
    times: dict[Tile, float] = {}
    for tile in dict.fromkeys([_from_table(kernel), *CANDIDATES]):
        try:
            times[tile] = triton.testing.do_bench(functools.partial(launch, tile), warmup=5, rep=20)
        except triton.runtime.errors.OutOfResources:
            continue
    if times:
        _tuned[key] = min(times, key=times.__getitem__)


def _from_table(kernel: Kernel) -> Tile:
    one_product = kernel.products == 1
    if kernel.name == "repair" and kernel.width <= 128 and kernel.element_size == 2:
        return Tile(64, 32, 4, 2)
    if kernel.element_size == 4 or kernel.width > 128 or kernel.has_mask:
        # Room first: fp32 products take no tensor cores, wide heads and masks fill registers and shared memory.
        if kernel.width > 128 or kernel.element_size == 4:
            return Tile(32, 32, 4, 1) if kernel.width > 64 else Tile(32, 32, 4, 2)
        return Tile(64, 64, 4, 2) if kernel.width <= 64 else Tile(64, 32, 4, 2)
    found = HOPPER.get((kernel.name, kernel.width, one_product)) or HOPPER[(kernel.name, kernel.width, True)]
    return found


@functools.cache
def _architecture(index: int) -> str:
    return f"sm{''.join(map(str, torch.cuda.get_device_capability(index)))}"
