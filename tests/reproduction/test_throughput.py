"""What `mgk bench rows` measured: which file counts, the columns of tables, and equal clocks."""

import json

import pytest
from reproduction_cases import write_evaluation, write_run, write_speeds

from mgk.reproduction import beside, throughput
from mgk.reproduction.metrics import metric
from mgk.reproduction.pages import build
from mgk.reproduction.results import read_results

TOKENS = {"softmax-8": 1_000_000.0, "smgk-4": 1_500_000.0, "mgk-4": 1_200_000.0}


def test_columns_of_a_table(tmp_path):
    write_speeds(tmp_path, "enwik8", TOKENS)
    results = read_results(tmp_path)
    assert throughput.cells("enwik8", "smgk-4", results) == ("1,500,000", "1.50x")
    assert throughput.cells("enwik8", "gaussian-4", results) == ("", "")
    assert throughput.has_speed("enwik8", results)
    assert not throughput.has_speed("wikitext2", results)
    assert "(none, bfloat16)" in throughput.note("enwik8", results)[0]
    assert throughput.note("wikitext2", results) == ()


def test_a_clock_that_drifts_between_groups_is_taken_out(tmp_path):
    """The second group ran a tenth slower, the first row as well: by ratio both rows are as in one group."""
    write_speeds(tmp_path, "enwik8", TOKENS, groups=2)
    results = read_results(tmp_path)
    assert results.speeds["enwik8", "mgk-4"]["tokens_per_second"] == pytest.approx(1_200_000 / 1.1)
    for row, tokens in TOKENS.items():
        assert throughput.seconds_per_update("enwik8", row, results) == pytest.approx(1000 / tokens)


def test_one_device_counts(tmp_path):
    """A GPU, though a CPU has timed more rows; and nothing that is quick or changed."""
    write_speeds(tmp_path, "enwik8", {"softmax-8": 2.0, "smgk-4": 3.0}, device="H200")
    write_speeds(tmp_path, "enwik8", TOKENS, device="CPU, x86_64, 2 threads")
    write_speeds(tmp_path, "wikitext2", TOKENS, quick=True)
    write_speeds(tmp_path, "multi30k", TOKENS, changes=["training.max_tokens=8"])
    results = read_results(tmp_path)
    assert {key: found["device"] for key, found in results.speeds.items()} == {
        ("enwik8", "softmax-8"): "H200", ("enwik8", "smgk-4"): "H200",
    }  # fmt: skip
    assert any("training speeds of enwik8 are of rows-enwik8-h200.json, not of" in note for note in results.notes)
    assert sum("is set aside: it is quick, or of a recipe that was changed" in note for note in results.notes) == 2


def test_a_damaged_file_is_named(tmp_path):
    path = write_speeds(tmp_path, "enwik8", TOKENS)
    content = json.loads(path.read_text())
    del content["rows"][0]["training_ms"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"rows-enwik8-none\.json must be a result of mgk bench rows, got no 'training_ms'"
    ):
        read_results(tmp_path)


def test_what_is_missing_is_a_command(tmp_path):
    rows = list(TOKENS)
    found = throughput.find_untimed("enwik8", rows, read_results(tmp_path))
    assert found[0].commands == ("mgk bench rows enwik8",)
    write_speeds(tmp_path, "enwik8", {"softmax-8": 2.0})
    found = throughput.find_untimed("enwik8", [*rows, "mgk-2"], read_results(tmp_path))
    assert found[0].what == "enwik8: training tokens per second of smgk-4, mgk-4, mgk-2"
    assert found[0].commands[0].startswith("mgk bench rows enwik8 --rows 'softmax-8 softmax-8+qk_norm gaussian-8")
    assert found[0].commands[0].endswith(" mgk-2' --resume")
    write_speeds(tmp_path, "enwik8", TOKENS)
    assert throughput.find_untimed("enwik8", rows, read_results(tmp_path)) == []


def test_columns_that_nothing_is_in_are_left_out(tmp_path):
    shown = [metric("valid_perplexity"), metric("test_perplexity")]
    rows = ["softmax-8", "smgk-4"]
    assert beside.columns("wikitext2", shown, rows, read_results(tmp_path)) == ((), dict.fromkeys(rows, ()))
    write_run(tmp_path, "wikitext2", "smgk-4", 0, perplexity=90.0)
    write_speeds(tmp_path, "wikitext2", TOKENS)
    heads, lines = beside.columns("wikitext2", shown, rows, read_results(tmp_path))
    assert heads == ("test perplexity, disjoint windows", "training tokens/s, alone", "times the first row")
    assert lines == {"softmax-8": ("", "1,000,000", "1.00x"), "smgk-4": ("90.00 (1 seed)", "1,500,000", "1.50x")}


@pytest.mark.parametrize(
    ("page", "recipe"),
    [("T3", "wikitext103/small"), ("T10", "wikitext103/multi-query"), ("multi30k", "multi30k"), ("T4", "iwslt14")],
)
def test_speeds_stand_in_the_tables_that_they_are_of(page, recipe, tmp_path):
    """And in those only."""
    results = read_results(tmp_path)
    before = build(page, results, tmp_path)
    assert not any("tokens/s" in head for grid in before.grids for head in grid.header)
    rows = [line[0] for grid in before.grids for line in grid.lines if grid.title in ("", recipe)]
    write_speeds(tmp_path, recipe, dict.fromkeys(rows, 1e6))
    after = build(page, read_results(tmp_path), tmp_path)
    timed = [grid for grid in after.grids if "training tokens/s, alone" in grid.header]
    assert [grid.title for grid in timed] == [grid.title for grid in before.grids if grid.title in ("", recipe)]
    assert {line[-2:] for line in timed[0].lines} == {("1,000,000", "1.00x")}
    assert any("Each row has the device" in note for note in after.notes)


def test_a_window_of_bytes_slides_by_more(tmp_path):
    """enwik8 has millions of bytes: by 64, and by one token as the paper everywhere else."""
    write_evaluation(tmp_path, "enwik8", "smgk-4", 0, stride=64, sliding_bits_per_token=1.4)
    write_evaluation(tmp_path, "enwik8", "mgk-4", 0, stride=1, sliding_bits_per_token=1.4)
    write_evaluation(tmp_path, "wikitext2", "smgk-4", 0, stride=64, sliding_perplexity=80.0)
    results = read_results(tmp_path)
    sliding = metric("test_sliding_bits_per_token")
    assert results.values("enwik8", "smgk-4", sliding) == {0: 1.4}
    assert results.values("enwik8", "mgk-4", sliding) == {}
    assert results.values("wikitext2", "smgk-4", metric("test_perplexity")) == {}
    assert "evaluations/wikitext2-smgk-4-seed-0-test.json slid its window by 64; wanted is 1" in results.notes
    page = build("enwik8", results, tmp_path)
    commands = [command for missing in page.missing for command in missing.commands]
    assert (
        "for seed in 0 1 2 3 4; do mgk evaluate runs/enwik8/mgk-4/seed-$seed --split test --stride 64; done" in commands
    )
    assert "enwik8, mgk-4, seeds 0-4: evaluation on the test set" in [missing.what for missing in page.missing]
