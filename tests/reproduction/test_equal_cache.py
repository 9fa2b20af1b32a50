"""The page of equal caches: from nothing, and from everything."""

import pytest
from reproduction_cases import write_curve, write_equal_cache, write_run, write_speeds

from mgk.models import MGKForCausalLM
from mgk.recipes import load
from mgk.reproduction import equal_cache
from mgk.reproduction.metrics import metric
from mgk.reproduction.page import markdown
from mgk.reproduction.recipe import home
from mgk.reproduction.results import read_results
from mgk.training.resolved_model import build_model_config

TABLE = [(home(equal_cache.RECIPE, row), row) for row in load(equal_cache.RECIPE).rows]
SEEDS = 3


def lines_of(grid):
    return {line[0]: dict(zip(grid.header, line, strict=True)) for line in grid.lines}


@pytest.fixture
def full(tmp_path):
    for recipe, row in TABLE:
        for seed in range(SEEDS):
            if recipe == "enwik8":
                level = {"smgk": 1.40, "gaussian": 1.46}.get(row.partition("-")[0], 1.48)
                write_run(tmp_path, recipe, row, seed, bits_per_token=level - 0.0004 * seed)
    write_equal_cache(tmp_path, SEEDS)
    return tmp_path


def test_nothing_is_there_yet(tmp_path):
    page = equal_cache.equal_cache_page(read_results(tmp_path), tmp_path, SEEDS)
    assert (page.state, page.pictures, page.numbers) == ("nothing yet", (), 0)
    found = lines_of(page.grids[0])
    assert list(found) == [row for _, row in TABLE]
    # Counted, so they need no runs.
    assert (
        found["smgk-4"]["cache, bytes a token"] == found["smgk-4+num_components=4"]["cache, bytes a token"] == "3,072"
    )
    assert found["mgk-4+num_key_value_heads=2"]["share of softmax-8"] == "0.375"
    commands = [command for missing in page.missing for command in missing.commands]
    assert "mgk sweep enwik8 --rows 'softmax-8+qk_norm softmax-4+qk_norm gaussian-4 smgk-4' --seeds 0-2" in commands[0]
    assert commands[1].startswith("mgk sweep enwik8-equal-cache --rows 'softmax-8+num_key_value_heads=4+qk_norm ")
    assert commands[-1] == "mgk bench rows enwik8-equal-cache"
    text = markdown(page)
    assert text.index("## Missing") < text.index("## Verdict") < text.index("## What this does not show")
    assert "There are not yet enough runs to judge any of these sentences." in text
    assert not list(tmp_path.glob("*.png"))


def test_parameters_are_those_of_the_model():
    run = load(equal_cache.RECIPE).config("smgk-4+num_components=4")
    model = MGKForCausalLM(build_model_config(run, vocab_size=256))
    assert equal_cache.count_parameters(run.row) == sum(each.numel() for each in model.parameters())


def test_everything_is_there(full):
    page = equal_cache.equal_cache_page(read_results(full), full, SEEDS)
    assert page.missing == ()
    assert [picture.name for picture in page.pictures] == ["equal-cache.png", "equal-cache-time.png"]
    assert all(picture.read_bytes()[1:4] == b"PNG" for picture in page.pictures)
    verdicts = {(each.claim.first, each.claim.second): each.outcome for each in page.verdicts}
    assert verdicts["smgk-4", "softmax-8+num_key_value_heads=4+qk_norm"] == "holds"
    assert verdicts["smgk-4", "gaussian-4"] == "holds"
    assert verdicts["smgk-4+num_components=4", "smgk-4"] == "not shown"
    assert page.ending.startswith(
        "Within 3,072 bytes smgk-4 has the lowest mean, 1.3996 bits per byte; softmax-8+qk_norm "
    )
    assert (
        "**The seeds do not decide these:** “Four components, which cost no cache, are better than two”" in page.ending
    )
    table = lines_of(page.grids[0])
    assert table["smgk-4"]["test bits per byte"] == "1.3996 ± 0.0002 (3 seeds)"
    assert (table["smgk-4"]["training tokens/s, alone"], table["smgk-4"]["times the first row"]) == (
        "1,400,000",
        "1.40x",
    )
    times = page.grids[1]
    assert times.header[2].endswith("(smgk-8+num_key_value_heads=4 is done)")
    seconds = {row: line["seconds of training"] for row, line in lines_of(times).items()}
    # 2,500 updates of 1,000 tokens.
    assert (seconds["softmax-8+qk_norm"], seconds["smgk-4"]) == ("2", f"{2.5e6 / 1.3e6:.0f}")


def test_at_the_time_of_the_fastest_row_the_slower_ones_are_not_done(tmp_path):
    """All have one curve: a row of half the speed has learned at that time what the other had at half its steps."""
    rows = ("softmax-8+qk_norm", "smgk-4")
    for row in rows:
        write_run(tmp_path, "enwik8", row, 0, bits_per_token=1.5)
        path = write_curve(tmp_path, "enwik8", "smgk-4", 0, steps=2500)
        path.rename(path.with_name(f"enwik8-{row}-seed-0.jsonl"))
    write_speeds(tmp_path, equal_cache.RECIPE, dict(zip(rows, (1e3, 2e3), strict=True)))
    page = equal_cache.equal_cache_page(read_results(tmp_path), tmp_path, SEEDS)
    slow, fast = (list(line.values()) for line in lines_of(page.grids[1]).values())
    assert (slow[1], fast[1]) == ("2,500", "1,250")
    assert float(slow[2].split()[0]) > float(fast[2].split()[0])
    # Both are done at the time of the slower one.
    assert slow[3] == fast[3] == fast[2]


def test_runs_of_enwik8_count_in_this_table(full):
    results, bits = read_results(full), metric("test_bits_per_token")
    for recipe, row in TABLE:
        assert len(results.values(equal_cache.RECIPE, row, bits)) == SEEDS
        assert results.values(equal_cache.RECIPE, row, bits) == results.values(recipe, row, bits)
    # A row that this table has not stays where it is.
    write_run(full, "enwik8", "mgk-4", 0, bits_per_token=1.5)
    assert read_results(full).values(equal_cache.RECIPE, "mgk-4", bits) == {}
