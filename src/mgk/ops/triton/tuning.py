"""Which tile a kernel gets on a device: that of the table, so that no call waits for a trial, or of a trial if asked.

``MGK_AUTOTUNE=1`` tries the candidates the first time a kind of kernel is met (never again for another length) and
keeps the fastest of this process.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable

import torch
import triton

from mgk.ops.triton import tile_table
from mgk.ops.triton.tile_table import INTERPRETED, Kernel
from mgk.ops.triton.tile_table import Tile as Tile

CANDIDATES = [
    Tile(rows, columns, warps, stages)
    for rows, columns in ((64, 128), (128, 64), (64, 64), (128, 128), (32, 64), (64, 32))
    for warps in (4, 8)
    for stages in (2, 3)
    if rows * columns >= warps * 512
] + [
    Tile(64, 128, 4, 3, 128, await_products=True),
    Tile(128, 64, 4, 3, 168, await_products=True),
    Tile(128, 64, 8, 2, 128, await_products=True),
]
# Bytes of the keys and values of a section of heads, which stay in the L2 cache while the section is worked on.
SECTION_BYTES = 2**25
# Where shapes are inferred without a GPU: as an H200 has.
MULTIPROCESSORS_ELSEWHERE = 132

# Warp specialisation is written in Gluon, an experiment of Triton's that changes with each version: the first and the
# last with which benchmarks/compile_everywhere.py has compiled it.
SPECIALISED_VERSIONS = ((3, 6), (3, 9))
HAS_WARP_SPECIALISATION = (
    SPECIALISED_VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= SPECIALISED_VERSIONS[1]
)
# Read once, as Triton does when it meets a kernel; a compiler could not trace the question.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_tuned: dict[tuple[Kernel, str], Tile] = {}


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return _INTERPRETED


def choose_tile(kernel: Kernel, device: torch.device) -> Tile:
    """The tile of ``kernel`` on ``device``."""
    if is_interpreted():
        return INTERPRETED
    architecture = _architecture(device.index or 0)
    return _tuned.get((kernel, architecture)) or _from_table(kernel, architecture)


def _from_table(kernel: Kernel, architecture: str) -> Tile:
    tile = tile_table.attention_tile(kernel, architecture)
    if tile.specialised and not HAS_WARP_SPECIALISATION:
        _say_what_is_lost()
        tile = tile_table.attention_tile(kernel._replace(fits_specialised=False), architecture)
    return tile


@functools.cache
def _say_what_is_lost() -> None:
    """Once in a process."""
    first, last = (".".join(map(str, version)) for version in SPECIALISED_VERSIONS)
    warnings.warn(
        f"the fused forward kernel for wide heads on Hopper GPUs is written for Triton {first} to {last}, and this is "
        f"Triton {triton.__version__}: attention with heads of 128 takes the kernel for all GPUs, which is right but "
        f"slower; install one of those versions for the faster one",
        stacklevel=2,
    )


def choose_decode_tile(width: int, key_tensors: int, device: torch.device) -> Tile:
    """The tile of a step of generation."""
    if is_interpreted():
        return INTERPRETED
    return tile_table.decode_tile(width, key_tensors, _architecture(device.index or 0))


def linear_unit() -> int:
    """How many tokens of linear attention make whole blocks of every tile."""
    return INTERPRETED.columns if is_interpreted() else 64


def choose_linear_tile(
    name: str, width: int, element_size: int, is_causal: bool, is_mixture: bool, device: torch.device
) -> Tile:
    """The tile of a kernel of linear attention: ``columns`` tokens make a block."""
    if is_interpreted():
        return INTERPRETED
    architecture = _architecture(device.index or 0)
    return tile_table.linear_tile(name, width, element_size, is_causal, is_mixture, architecture)


def starts_from_bias(width: int, element_size: int) -> bool:
    """Whether the products of two shifted keys are added to the larger bias, where the choice is hard, instead of the
    bias to the product.

    This was measured to be faster but for narrow heads. In fp32 the bias would cost the product digits, though not in
    the interpreter, which adds it last.
    """
    return width >= 64 and (element_size == 2 or is_interpreted())


def programs(device: torch.device, waves: int = 1) -> int:
    """How many programs keep ``device`` busy: two for each multiprocessor, so many times.

    In the interpreter there are two, so that short sequences are cut as well.
    """
    if is_interpreted():
        return 2
    count = multiprocessors(device.index or 0) if device.type == "cuda" else MULTIPROCESSORS_ELSEWHERE
    return 2 * waves * count


@functools.cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def heads_in_section(keys: int, width: int) -> int:
    """How many heads make a section, where ``width`` are the bytes of a key and its value together."""
    return max(1, SECTION_BYTES // (keys * width))


def tune(kernel: Kernel, device: torch.device, launch: Callable[[Tile], object]) -> None:
    """With ``MGK_AUTOTUNE=1``, time ``launch`` for every candidate and remember the fastest."""
    if os.environ.get("MGK_AUTOTUNE") != "1" or is_interpreted():
        return
    key = (kernel, _architecture(device.index or 0))
    if key in _tuned or torch.cuda.is_current_stream_capturing():
        return
    _tuned[key] = usual = _from_table(*key)
    times: dict[Tile, float] = {}
    for tile in dict.fromkeys([usual, *CANDIDATES]):
        try:
            times[tile] = triton.testing.do_bench(functools.partial(launch, tile), warmup=5, rep=20)
        except triton.runtime.errors.OutOfResources:
            continue
    if times:
        _tuned[key] = min(times, key=times.__getitem__)


@functools.cache
def _architecture(index: int) -> str:
    return f"sm{''.join(map(str, torch.cuda.get_device_capability(index)))}"
