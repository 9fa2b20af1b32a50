"""The published numbers: they belong to rows of our recipes, agree with each other, and add up as the paper says."""

import math
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal

import pytest

from mgk.recipes import load, names, paper, parse_row, published, row_name

TASKS = ("listops", "text", "retrieval")
TABLES = paper()["tables"]
ENTRIES = [
    (table, recipe, row, metrics)
    for table, content in TABLES.items()
    for recipe, rows in content["recipes"].items()
    for row, metrics in rows.items()
]


def test_every_table_is_there():
    assert list(TABLES) == [*(f"T{number}" for number in range(1, 11)), "variances", "likelihood", "size"]
    for content in TABLES.values():
        assert content.keys() <= {"title", "averages", "truncated", "recipes"}
    assert len(ENTRIES) == 33 + 33 + 11 + 6 + 18 + 7 + 6 + 2 + 6 + 4 + 7 + 2 + 1


def test_every_number_belongs_to_a_row_of_a_recipe_and_has_a_unit():
    units = paper()["units"]
    used = set()
    for table, recipe, row, metrics in ENTRIES:
        assert recipe in names(), table
        assert row_name(parse_row(row), {}) == row
        assert row in load(recipe).rows, f"{table} {recipe}"
        for metric, value in metrics.items():
            assert isinstance(value, (int, float)), f"{table} {recipe} {row} {metric}"
            used.add(metric)
    assert used == set(units)


def test_tables_agree_where_they_overlap():
    seen = {}
    for table, recipe, row, metrics in ENTRIES:
        for metric, value in metrics.items():
            assert seen.setdefault((recipe, row, metric), value) == value, f"{table} {recipe} {row} {metric}"
    for row in ("softmax-8", "mgk-4"):
        assert published("wikitext103/multi-query", row) == published("wikitext103/small", row)
    # Table 4 has the ablation's model.
    row = "mgk-2+variance_scale=1,3"
    assert published("iwslt14", row) == published("iwslt14-variances", row) == {"test_bleu": 34.34}


def test_table_1_has_the_rows_of_the_paper():
    rows = {f"softmax-{heads}" for heads in (1, 2, 4, 8, 12)}
    rows |= {f"{attention}-{heads}" for attention in ("mgk", "smgk") for heads in (1, 2, 4)}
    for task in TASKS:
        assert set(TABLES["T1"]["recipes"][f"lra/{task}"]) == rows
    assert set(TABLES["T1"]["averages"]) == rows


@pytest.mark.parametrize("table", ["T1", "T2", "T5"])
def test_averages(table):
    content = TABLES[table]
    suffix = "-linear" if table == "T2" else ""
    truncated = set()
    for row, average in content["averages"].items():
        scores = [Decimal(str(content["recipes"][f"lra/{task}{suffix}"][row]["test_accuracy"])) for task in TASKS]
        rounded, cut = (
            (sum(scores) / 3).quantize(Decimal("0.01"), rounding) for rounding in (ROUND_HALF_UP, ROUND_FLOOR)
        )
        assert Decimal(str(average)) in (rounded, cut), row
        if Decimal(str(average)) != rounded:
            truncated.add(row)
    assert truncated == set(content.get("truncated", []))


def test_priors_are_probabilities():
    for row in ("mgk-1", "smgk-1"):
        numbers = published("lra/retrieval", row)
        for layer in (1, 2):
            assert math.isclose(sum(numbers[f"prior_{r}_layer_{layer}"] for r in (1, 2)), 1.0, abs_tol=1e-9)


def test_published():
    assert published("lra/text", "smgk-4") == {"test_accuracy": 65.51}
    assert published("lra/retrieval", "mgk-4") == {
        "test_accuracy": 82.23,
        "memory": 53.58,
        "seconds_per_iteration": 0.278,
    }
    assert published("iwslt14", "mgk-2+variance_scale=[1.0, 3.0]") == {"test_bleu": 34.34}
    assert published("wmt14", "softmax-16") == {"test_bleu": 29.38, "parameters": 201.0}
    assert all(isinstance(value, float) for value in published("wmt14", "softmax-16").values())
    assert published("lra/text", "smgk-4+qk_norm") == {}
    assert published("enwik8", "smgk-4") == {}
    assert published("mine", "smgk-4") == {}
    with pytest.raises(ValueError, match="did you mean 'smgk'"):
        published("lra/text", "smkg-4")


def test_nobody_can_change_the_paper():
    paper()["tables"].clear()
    assert published("lra/text", "smgk-4") == {"test_accuracy": 65.51}
