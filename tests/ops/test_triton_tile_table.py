"""Every kernel has a tile on every architecture, and what only Hopper can do is asked of no other."""

import itertools

import pytest

pytest.importorskip("triton")

import torch

from mgk.ops.triton import tile_table, tuning
from mgk.ops.triton.tile_table import Kernel

KINDS = ("one", "two shifts", "two keys", "many", "hard two shifts", "hard two keys")
ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100", "sm120")
KERNELS = [
    Kernel(*each)
    for each in itertools.product(
        ("forward", "key_value", "query", "repair", "responsibilities"),
        (16, 32, 64, 128, 256),
        (2, 4),
        KINDS,
        *[(True, False)] * 4,
    )
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_has_a_tile(architecture):
    for kernel in KERNELS:
        tile = tile_table.attention_tile(kernel, architecture)
        assert tile.rows * tile.columns >= tile.warps * 256, kernel
        assert architecture == "sm90" or not (tile.direct or tile.specialised), kernel
        assert not tile.specialised or (kernel.name == "forward" and kernel.fits_specialised), kernel
        assert not tile.dependent_launch


def test_a_row_of_the_table_is_reached():
    """A row that no kernel asks for is a mistake in its key."""
    reached = {tile_table.attention_tile(kernel, "sm90") for kernel in KERNELS}
    for key, row in tile_table.HOPPER.attention.items():
        assert set(row) <= reached, key


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        (("forward", 64, 2, "two shifts", True, False, True, False), (64, 128, 4, 2, 168)),
        (("forward", 64, 2, "two shifts", False, False, True, False), (64, 64, 4, 2, 96)),
        (("forward", 64, 2, "hard two shifts", True, False, True, False), (64, 64, 4, 2, 96)),
        (("forward", 64, 2, "hard two shifts", True, False, False, False), (64, 128, 4, 2, 168)),
        (("key_value", 64, 2, "two shifts", True, False, False, False), (64, 64, 4, 2, None)),
        (("query", 128, 2, "hard two keys", True, False, False, False), (128, 64, 8, 2, None)),
        (("forward", 128, 2, "one", True, True, True, False), (64, 32, 4, 2, None)),
        (("forward", 128, 4, "one", True, True, True, True), (32, 32, 4, 1, None)),
    ],
)
def test_cases_come_before_the_rest(kernel, tile):
    assert tile_table.attention_tile(Kernel(*kernel), "sm90")[:5] == tile


def test_what_triton_cannot_compile_for_blackwell_has_other_tiles():
    """``benchmarks/compile_everywhere.py`` compiles them; the E-step elsewhere has the tile of the query's gradient."""
    for kernel in KERNELS:
        if kernel.name == "responsibilities":
            usual = tile_table.attention_tile(kernel._replace(name="query"), "sm90")
            assert tile_table.attention_tile(kernel, "sm90") == usual
            assert tile_table.attention_tile(kernel, "sm100").rows == 32
    for name, width, is_causal in itertools.product(("states", "reverse states"), (16, 64, 128), (False, True)):
        stages = [
            tile_table.linear_tile(name, width, 2, is_causal, True, architecture).stages
            for architecture in ("sm80", "sm100")
        ]
        assert stages[0] > stages[1] == 1


def test_a_measured_architecture_has_a_table_of_its_own(monkeypatch):
    """The device is asked: for softmax attention, for a step and for linear attention."""
    if tuning.is_interpreted():
        pytest.skip("TRITON_INTERPRET=1: there is one tile for all")
    other = tile_table.Tile(16, 16, 1, 1)
    table = tile_table.Table(
        {("query", "one", ""): (other, other, other)}, {}, ((float("inf"), other),), {("states", ""): (other,) * 3}
    )
    monkeypatch.setitem(tile_table.TABLES, "sm999", table)
    monkeypatch.setattr(tuning, "_architecture", lambda index: "sm999" if index == 1 else "sm90")
    kernel = Kernel("query", 64, 2, "one", True, False, False, False)
    for index, is_other in ((0, False), (1, True)):
        device = torch.device("cuda", index)
        tiles = [
            tuning.choose_tile(kernel, device),
            tuning.choose_decode_tile(64, 1, device),
            tuning.choose_linear_tile("states", 64, 2, True, True, device),
        ]
        assert [tile is other for tile in tiles] == [is_other] * 3
