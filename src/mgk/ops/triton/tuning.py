"""Block sizes, warps and pipeline stages of the kernels: a table, measured once, so that no call waits for a trial.

``MGK_AUTOTUNE=1`` tries the candidates the first time a kind of kernel is met (never again for another length) and
keeps the fastest of this process.
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
    await_products: bool = False
    """forward: weights times values are done before the next block begins; takes fewer registers"""
    direct: bool = False
    """forward: terms of columns go from memory to registers, not by way of shared memory; on Hopper only"""
    specialised: bool = False
    """forward: some warps copy, others multiply (:mod:`mgk.ops.triton.wide_forward`); on Hopper only"""
    ping_pong: bool = False
    """with roles: those who multiply do it in turn"""
    dependent_launch: bool = False
    """with roles: launched before the kernel that makes the terms ends, for which it waits itself; not in the table:
    :mod:`mgk.ops.triton.passes` knows whether there are terms"""

    def settings(self) -> dict[str, int | None]:
        """What Triton calls them."""
        settings = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        return {**settings, "launch_pdl": True} if self.dependent_launch else settings


class Kernel(NamedTuple):
    """What a tile is chosen by."""

    name: str
    """``"forward"``, ``"key_value"``, ``"query"``, or ``"repair"`` for the rare rows and heads that are done again"""
    width: int
    """the larger of D and Dv, rounded up to a power of two"""
    element_size: int
    """bytes of a number"""
    kind: str
    """``"one"`` key, a ``"two shifts"`` of shifted keys or ``"two keys"`` projected ones of one variance, ``"many"`` of any other
    kind; where the choice is hard, ``"hard two shifts"`` and ``"hard two keys"``"""
    is_causal: bool
    has_mask: bool
    """an attention mask, read pair by pair"""
    has_level: bool
    """columns hold the level of the logits, so that forward need not look for one"""
    is_plain: bool
    """forward: warps with roles can do it"""


INTERPRETED = Tile(16, 16, 4, 1)
"""Small, so that short sequences cross several blocks."""

# Half precision on Hopper, measured on an H200. By kernel and kind, then by width: 16 and 32, 64, 128.
HOPPER: dict[tuple[str, str], tuple[Tile, Tile, Tile]] = {
    ("forward", "one"): (
        Tile(64, 128, 4, 3, 128, await_products=True, direct=True), Tile(128, 64, 4, 3, 168, await_products=True, direct=True),
        Tile(128, 64, 8, 2, 128, await_products=True),
    ),
    ("forward", "two shifts"): (
        Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 64, 4, 2, 96, await_products=True), Tile(128, 64, 8, 2, 128, await_products=True),
    ),
    ("forward", "hard two shifts"): (
        Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 64, 4, 2, 96, await_products=True), Tile(128, 64, 4, 2, await_products=True),
    ),
    ("forward", "two keys"): (
        Tile(64, 64, 4, 4, 128, await_products=True), Tile(64, 64, 4, 3, 168), Tile(128, 32, 4, 3, direct=True),
    ),
    ("forward", "hard two keys"): (
        Tile(64, 64, 4, 3), Tile(128, 32, 4, 3, 168, await_products=True, direct=True),
        Tile(128, 32, 4, 3, await_products=True, direct=True),
    ),
    ("forward", "many"): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    ("key_value", "one"): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    ("key_value", "two shifts"): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
    ("key_value", "hard two shifts"): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    ("key_value", "two keys"): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    ("key_value", "many"): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    ("query", "one"): (Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2)),
    ("query", "two shifts"): (Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2)),
    ("query", "two keys"): (Tile(64, 64, 4, 2, 168), Tile(64, 64, 4, 2, 168), Tile(128, 64, 8, 2)),
    # Eight keys of a block lie in shared memory at once.
    ("query", "many"): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
}  # fmt: skip

# Of forward kernels whose warps have roles, for the width of 128. Narrower heads leave registers for more programs,
# which do better; two projected keys are faster without, too.
WARP_SPECIALISED = {
    "one": Tile(128, 128, 4, 2, specialised=True, ping_pong=True),
    "two shifts": Tile(128, 128, 4, 2, specialised=True, ping_pong=True),
    "hard two shifts": Tile(128, 128, 4, 2, specialised=True),
}
# What of the keys and values of a section of heads stays in the L2 cache while it is worked on.
SECTION_BYTES = 2**25

CANDIDATES = [
    Tile(rows, columns, warps, stages)
    for rows, columns in ((64, 128), (128, 64), (64, 64), (128, 128), (32, 64), (64, 32))
    for warps in (4, 8)
    for stages in (2, 3)
    if rows * columns >= warps * 512
] + [Tile(64, 128, 4, 3, 128, await_products=True), Tile(128, 64, 4, 3, 168, await_products=True), Tile(128, 64, 8, 2, 128, await_products=True)]

_tuned: dict[tuple[Kernel, str], Tile] = {}


# Read once, as Triton does when it meets a kernel; a compiler could not trace the question.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
# Gluon, in which they are written, is an experiment of Triton's and changes with each version.
HAS_WARP_SPECIALISATION = triton.__version__.split(".")[:2] == ["3", "6"]


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return _INTERPRETED


def choose_tile(kernel: Kernel, device: torch.device) -> Tile:
    """The tile of ``kernel`` on ``device``."""
    if is_interpreted():
        return INTERPRETED
    architecture = _architecture(device.index or 0)
    return _tuned.get((kernel, architecture)) or _from_table(kernel, architecture)


def starts_from_bias(width: int, element_size: int) -> bool:
    """Whether the products of a hard pair are added to the larger bias, instead of the bias to the product.

    Measured: faster but for narrow heads. In fp32 the bias would cost the product digits, though not in the
    interpreter, which adds it last.
    """
    return width >= 64 and (element_size == 2 or is_interpreted())


def choose_decode_tile(width: int, key_tensors: int) -> Tile:
    """For a few queries, which wait for memory: as many bytes on their way as registers have room for."""
    if is_interpreted():
        return INTERPRETED
    columns = 128 if width * key_tensors == 128 else 64 if width * key_tensors <= 256 else 32
    return Tile(16, columns, 4, 2)


def linear_unit() -> int:
    """Tokens of linear attention of which every tile makes whole blocks."""
    return INTERPRETED.columns if is_interpreted() else 64


def choose_linear_tile(name: str, width: int, element_size: int, is_causal: bool, is_mixture: bool) -> Tile:
    """Of linear attention: ``columns`` tokens make a block."""
    if is_interpreted():
        return INTERPRETED
    if element_size == 4:
        return Tile(0, 32, 4, 1)
    if width > 64:
        return Tile(0, 32 if is_causal and name in ("query", "key_value") else 64, 8, 2)
    # Blocks of 32 tokens with two warps leave more programs on a multiprocessor, which wait for memory by turns.
    short, usual = Tile(0, 32, 2, 3), Tile(0, 64, 4, 3)
    if name == "states":
        return Tile(0, 64, 4, 3, 168)
    if name == "reverse states":
        return Tile(0, 32, 4, 3, 128) if width == 64 else short
    if is_causal and width == 64 and name != "forward":
        return Tile(0, 32, 4, 3)
    if is_causal or (name == "query" and width < 64):
        return short
    return short if name == "key_value" and not is_mixture else usual


def tune(kernel: Kernel, device: torch.device, launch: Callable[[Tile], object]) -> None:
    """With ``MGK_AUTOTUNE=1``, time ``launch`` for every candidate and remember the fastest."""
    if os.environ.get("MGK_AUTOTUNE") != "1" or is_interpreted():
        return
    key = (kernel, _architecture(device.index or 0))
    if key in _tuned or torch.cuda.is_current_stream_capturing():
        return
    _tuned[key] = _from_table(*key)
    times: dict[Tile, float] = {}
    for tile in dict.fromkeys([_from_table(*key), *CANDIDATES]):
        try:
            times[tile] = triton.testing.do_bench(functools.partial(launch, tile), warmup=5, rep=20)
        except triton.runtime.errors.OutOfResources:
            continue
    if times:
        _tuned[key] = min(times, key=times.__getitem__)


def heads_in_section(keys: int, width: int) -> int:
    """``width``: bytes of a key and its value together."""
    return max(1, SECTION_BYTES // (keys * width))


@functools.cache
def multiprocessors(index: int) -> int:
    """Of a GPU: as many programs of warps with roles run at a time."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _from_table(kernel: Kernel, architecture: str) -> Tile:
    if architecture != "sm90":
        # Elsewhere the matrix units leave products in other places.
        return _without_specialisation(kernel)._replace(direct=False)
    is_wide = kernel.name == "forward" and kernel.width == 128 and kernel.element_size == 2
    if HAS_WARP_SPECIALISATION and is_wide and kernel.is_plain and kernel.kind in WARP_SPECIALISED:
        return WARP_SPECIALISED[kernel.kind]
    return _without_specialisation(kernel)


def _without_specialisation(kernel: Kernel) -> Tile:
    # Room first: fp32 products take no tensor cores; wide heads and masks fill registers and shared memory.
    if kernel.element_size == 4 or kernel.width > 128:
        return Tile(32, 32, 4, 1 if kernel.width > 64 else 2)
    if kernel.name == "repair":
        return Tile(64, 32, 4, 2)
    if kernel.has_mask:
        return Tile(64, 64 if kernel.width <= 64 else 32, 4, 2)
    if kernel.name == "key_value" and kernel.kind == "two shifts" and kernel.width == 64 and kernel.is_causal:
        return Tile(64, 64, 4, 2)
    if kernel.name == "forward" and (tile := _forward_exception(kernel)) is not None:
        return tile
    tiles = HOPPER.get((kernel.name, kernel.kind)) or HOPPER[kernel.name, kernel.kind.removeprefix("hard ")]
    return tiles[{16: 0, 32: 0, 64: 1, 128: 2}[kernel.width]]


def _forward_exception(kernel: Kernel) -> Tile | None:
    """Where the table's tile of this kind and width was found to be slower, or to leave too few registers."""
    if kernel.kind.endswith("two keys") and not kernel.has_level:
        return Tile(64, 64, 4, 2 if kernel.width >= 64 else 3)
    if kernel.kind == "hard two shifts" and kernel.width == 128 and not kernel.has_level:
        return Tile(128, 64, 8, 2, 128, await_products=True)
    if kernel.kind.endswith("two shifts") and kernel.width == 64 and not kernel.has_level:
        return Tile(64, 128, 4, 2, 168)
    if kernel.kind == "two shifts" and kernel.width == 64 and kernel.is_causal:
        return Tile(64, 128, 4, 2, 168)
    return None


@functools.cache
def _architecture(index: int) -> str:
    return f"sm{''.join(map(str, torch.cuda.get_device_capability(index)))}"
