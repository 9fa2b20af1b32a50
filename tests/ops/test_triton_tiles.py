"""How the forward kernel for wide heads shares out its tiles: its own functions, called with numbers."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from mgk.ops.triton import tuning

if not tuning.HAS_WARP_SPECIALISATION:
    pytest.skip("warp specialisation is written for another version of Triton", allow_module_level=True)

from mgk.ops.triton.kernels.hopper import tile_scheduler


def tiles_of(monkeypatch, rows, blocks, section, programs, is_causal=True, earlier=0):
    """Rows and blocks of the tiles of each program, in order, as the kernel for wide heads would find them. There are
    so many ``earlier`` blocks of keys."""
    found = []
    numbers = {
        "where": lambda condition, first, second: first if condition else second,
        "minimum": min,
        "cast": lambda number, _: number,
        "int64": int,
    }
    monkeypatch.setattr(tile_scheduler, "TILE_ROWS", 128)
    for program in range(programs):
        known = {"program_id": lambda axis, program=program: program, "num_programs": lambda axis: programs}
        monkeypatch.setattr(tile_scheduler, "gl", SimpleNamespace(**numbers, **known))
        sizes = tile_scheduler.Sizes(
            num_heads=rows, group_size=1, num_queries=128 * blocks, num_keys=128 * (blocks + earlier),
            padded_queries=128 * blocks, num_tiles=rows * blocks, num_rows=rows, num_blocks=blocks, section=section,
            width=128,
        )  # fmt: skip
        own = range(tile_scheduler.count_tiles.fn(rows * blocks, is_causal))
        found.append([tile_scheduler.find_tile.fn(i_own, sizes, is_causal, 128) for i_own in own])
    return found


@pytest.mark.parametrize(("is_causal", "earlier"), [(True, 0), (True, 2), (False, 0), (False, 1)])
@pytest.mark.parametrize("section", [1, 3, 16, 64])
@pytest.mark.parametrize(("rows", "blocks"), [(64, 32), (7, 9), (21, 9), (5, 3), (1, 1), (2, 512), (1, 133), (3, 88)])
def test_every_tile_of_wide_heads_has_one_program(rows, blocks, section, is_causal, earlier, monkeypatch):
    found = tiles_of(monkeypatch, rows, blocks, section, min(132, rows * blocks), is_causal, earlier)
    places = [(tile.i_head, tile.i_block) for tiles in found for tile in tiles]
    assert sorted(places) == [(head, block) for head in range(rows) for block in range(blocks)]
    for tile in itertools.chain(*found):
        seen = tile.i_block + earlier if is_causal else blocks + earlier
        assert (tile.full, tile.count) == (seen, seen + is_causal)


@pytest.mark.parametrize(("rows", "blocks", "section"), [(64, 32, 16), (64, 32, 64), (2, 512, 1), (32, 128, 4)])
def test_programs_of_wide_heads_have_as_much_to_do(rows, blocks, section, monkeypatch):
    """Under causality: at most a pair of tiles more than the mean."""
    found = tiles_of(monkeypatch, rows, blocks, section, 132)
    work = [sum(tile.count for tile in tiles) for tiles in found]
    assert max(work) <= sum(work) / 132 + blocks + 1
