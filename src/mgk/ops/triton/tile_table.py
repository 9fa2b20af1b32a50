"""How the kernels are cut into blocks: one table for each architecture that has been measured."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple


class Tile(NamedTuple):
    """How a kernel is cut and scheduled."""

    rows: int
    """queries in a block"""
    columns: int
    """keys in a block"""
    warps: int
    """warps of a program; under warp specialisation, of each group that multiplies"""
    stages: int
    """blocks of keys in shared memory at a time: one is worked on, the others are being copied"""
    registers: int | None = None
    """most registers of a thread; fewer let more programs share a multiprocessor"""
    await_products: bool = False
    """forward: weights times values are done before the next block begins, which takes fewer registers"""
    direct: bool = False
    """forward: terms of columns go from memory to registers, not by way of shared memory; on Hopper only"""
    specialised: bool = False
    """forward: some warps copy, others multiply (:mod:`mgk.ops.triton.kernels.hopper.wide_forward`); on Hopper only"""
    ping_pong: bool = False
    """under warp specialisation: the two groups that multiply take turns"""
    dependent_launch: bool = False
    """under warp specialisation: the kernel is launched before the one that makes the terms ends, and waits for it
    itself; not in a table, since :mod:`mgk.ops.triton.passes` knows whether there are terms"""

    def settings(self) -> dict[str, int | None]:
        """What Triton calls them. A product and a sum make one instruction, which is no longer the default of 3.10."""
        settings = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        settings["enable_fp_fusion"] = True
        return {**settings, "launch_pdl": True} if self.dependent_launch else settings


class Kernel(NamedTuple):
    """What the tile of a kernel of softmax attention is chosen by."""

    name: str
    """``"forward"``, ``"key_value"``, ``"query"``, ``"responsibilities"``, or ``"repair"`` for the rare rows that are
    attended again"""
    width: int
    """the larger of D and Dv, rounded up to a power of two"""
    element_size: int
    """bytes of a number"""
    kind: str
    """``"one"`` key, ``"two shifts"`` of a key or ``"two keys"`` projected, both of one variance, or ``"many"`` of any
    other kind; where the choice is hard, ``"hard two shifts"`` and ``"hard two keys"``"""
    is_causal: bool
    """whether a query sees no later key"""
    has_mask: bool
    """whether there is an attention mask, read pair by pair"""
    has_level: bool
    """whether columns hold the level of the logits, so that forward need not look for one"""
    fits_specialised: bool
    """whether the forward kernel with warp specialisation can do the call"""


Row = tuple[Tile, Tile, Tile]
"""By width: 16 and 32, 64, 128."""


class Table(NamedTuple):
    """The tiles of one architecture, for half precision and heads of up to 128 numbers."""

    attention: dict[tuple[str, str, str], Row]
    """by name and kind of :class:`Kernel`, and the case: ``"no level"``, ``"causal"``, or ``""`` for every other"""
    specialised: dict[str, Tile]
    """by kind: forward with warp specialisation, for a width of 128"""
    decode: tuple[tuple[float, Tile], ...]
    """the first whose number is at least the width times the key tensors"""
    linear: dict[tuple[str, str], Row]
    """by kernel, and the case: ``"causal"``, ``"one key"``, or ``""`` for every other"""


INTERPRETED = Tile(16, 16, 4, 1)
"""Small, so that short sequences cross several blocks."""

_SHORT, _USUAL, _WIDE = Tile(0, 32, 2, 3), Tile(0, 64, 4, 3), Tile(0, 64, 8, 2)

# Measured on an H200.
HOPPER = Table(
    attention={
        ("forward", "one", ""): (
            Tile(64, 128, 4, 3, 128, await_products=True, direct=True),
            Tile(128, 64, 4, 3, 168, await_products=True, direct=True), Tile(128, 64, 8, 2, 128, await_products=True),
        ),
        ("forward", "two shifts", ""): (
            Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 64, 4, 2, 96, await_products=True),
            Tile(128, 64, 8, 2, 128, await_products=True),
        ),
        ("forward", "two shifts", "causal"): (
            Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 128, 4, 2, 168),
            Tile(128, 64, 8, 2, 128, await_products=True),
        ),
        ("forward", "two shifts", "no level"): (
            Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 128, 4, 2, 168),
            Tile(128, 64, 8, 2, 128, await_products=True),
        ),
        ("forward", "hard two shifts", ""): (
            Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 64, 4, 2, 96, await_products=True),
            Tile(128, 64, 4, 2, await_products=True),
        ),
        ("forward", "hard two shifts", "no level"): (
            Tile(64, 128, 4, 3, 128, await_products=True), Tile(64, 128, 4, 2, 168),
            Tile(128, 64, 8, 2, 128, await_products=True),
        ),
        ("forward", "two keys", ""): (
            Tile(64, 64, 4, 4, 128, await_products=True), Tile(64, 64, 4, 3, 168), Tile(128, 32, 4, 3, direct=True),
        ),
        ("forward", "two keys", "no level"): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        ("forward", "hard two keys", ""): (
            Tile(64, 64, 4, 3), Tile(128, 32, 4, 3, 168, await_products=True, direct=True),
            Tile(128, 32, 4, 3, await_products=True, direct=True),
        ),
        ("forward", "hard two keys", "no level"): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        ("forward", "many", ""): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        ("key_value", "one", ""): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        ("key_value", "two shifts", ""): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
        ("key_value", "two shifts", "causal"): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),
        ("key_value", "hard two shifts", ""): (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        ("key_value", "two keys", ""): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        ("key_value", "many", ""): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        ("query", "one", ""): (Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2)),
        ("query", "two shifts", ""): (Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2)),
        ("query", "two keys", ""): (Tile(64, 64, 4, 2, 168), Tile(64, 64, 4, 2, 168), Tile(128, 64, 8, 2)),
        # Eight keys of a block lie in shared memory at once.
        ("query", "many", ""): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    },
    # Narrower heads leave registers for more programs, which do better; two projected keys are faster without, too.
    specialised={
        "one": Tile(128, 128, 4, 2, specialised=True, ping_pong=True),
        "two shifts": Tile(128, 128, 4, 2, specialised=True, ping_pong=True),
        "hard two shifts": Tile(128, 128, 4, 2, specialised=True),
    },
    # A step waits for memory: as many bytes are on their way as registers have room for.
    decode=(
        (127, Tile(16, 64, 4, 2)), (128, Tile(16, 128, 4, 2)), (256, Tile(16, 64, 4, 2)),
        (float("inf"), Tile(16, 32, 4, 2)),
    ),
    # Blocks of 32 tokens with two warps leave more programs on a multiprocessor, which wait for memory by turns.
    linear={
        ("states", ""): (Tile(0, 64, 4, 3, 168), Tile(0, 64, 4, 3, 168), _WIDE),
        ("forward", ""): (_USUAL, _USUAL, _WIDE),
        ("forward", "causal"): (_SHORT, _SHORT, _WIDE),
        ("query", ""): (_SHORT, _USUAL, _WIDE),
        ("query", "causal"): (_SHORT, Tile(0, 32, 4, 3), Tile(0, 32, 8, 2)),
        ("reverse states", ""): (_SHORT, Tile(0, 32, 4, 3, 128), _WIDE),
        ("key_value", ""): (_USUAL, _USUAL, _WIDE),
        ("key_value", "one key"): (_SHORT, _SHORT, _WIDE),
        ("key_value", "causal"): (_SHORT, Tile(0, 32, 4, 3), Tile(0, 32, 8, 2)),
    },
)  # fmt: skip


def _all_with(row: Row, **changes: Any) -> Row:
    narrow, middle, wide = row
    return narrow._replace(**changes), middle._replace(**changes), wide._replace(**changes)


# Other matrix units leave products in other places, and their warps cannot be specialised.
UNMEASURED = HOPPER._replace(
    attention={key: _all_with(row, direct=False) for key, row in HOPPER.attention.items()}, specialised={}
)
"""For every architecture without a table of its own."""

# Not measured either. Triton 3.6 cannot pipeline these loops there: it does not know what to do with inline assembly.
BLACKWELL = UNMEASURED._replace(
    linear={
        key: _all_with(row, stages=1) if key[0] in ("states", "reverse states") else row
        for key, row in UNMEASURED.linear.items()
    }
)

TABLES = {"sm90": HOPPER, "sm100": BLACKWELL, "sm103": BLACKWELL}
"""By architecture."""


def table_of(architecture: str) -> Table:
    """The table of ``architecture``, such as ``"sm90"``."""
    return TABLES.get(architecture, UNMEASURED)


@functools.cache
def attention_tile(kernel: Kernel, architecture: str) -> Tile:
    """The tile of a kernel of softmax attention."""
    # Room first: fp32 products take no tensor cores; wide heads and masks fill registers and shared memory.
    if kernel.element_size == 4 or kernel.width > 128:
        return Tile(32, 32, 4, 1 if kernel.width > 64 else 2)
    if kernel.name == "repair":
        return Tile(64, 32, 4, 2)
    if kernel.name == "responsibilities":
        if table_of(architecture) is BLACKWELL:
            # With 64 rows its sums are in tensor memory, and Triton 3.6 fails over them.
            return Tile(32, 64, 4, 2)
        kernel = kernel._replace(name="query")
    table = table_of(architecture)
    if kernel.name == "forward" and kernel.width == 128 and kernel.fits_specialised:
        tile = table.specialised.get(kernel.kind)
        if tile is not None:
            return tile
    if kernel.has_mask:
        return Tile(64, 64 if kernel.width <= 64 else 32, 4, 2)
    for kind in (kernel.kind, kernel.kind.removeprefix("hard ")):
        for case, holds in (("no level", not kernel.has_level), ("causal", kernel.is_causal), ("", True)):
            row = table.attention.get((kernel.name, kind, case))
            if holds and row is not None:
                return _by_width(row, kernel.width)
    raise KeyError(f"no tile of {kernel}")


@functools.cache
def decode_tile(width: int, key_tensors: int, architecture: str) -> Tile:
    """The tile of a step of generation: ``width`` is the larger of D and Dv."""
    return next(tile for most, tile in table_of(architecture).decode if width * key_tensors <= most)


@functools.cache
def linear_tile(
    name: str, width: int, element_size: int, is_causal: bool, is_mixture: bool, architecture: str
) -> Tile:  # fmt: skip
    """The tile of a kernel of linear attention: ``columns`` tokens make a block."""
    if element_size == 4:
        return Tile(0, 32, 4, 1)
    table = table_of(architecture).linear
    case = "causal" if is_causal else "" if is_mixture else "one key"
    return _by_width(table.get((name, case)) or table[name, ""], width)


def _by_width(row: Row, width: int) -> Tile:
    narrow, middle, wide = row
    return narrow if width <= 32 else middle if width <= 64 else wide
