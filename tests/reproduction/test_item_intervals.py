"""Intervals over test items: printed ones of shares, and what resampling must give."""

import json

import numpy as np
import pytest
from reproduction_cases import write_evaluation, write_run

from mgk.evaluation import pack_items
from mgk.reproduction.items import BINOMIAL, RESAMPLED, accuracy_interval, difference_interval, resample, wilson
from mgk.reproduction.results import read_results

RECIPE = "lra/text"


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe, Statistics in Medicine 17, 1998, page 861, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_printed_intervals_of_a_share(right, count, low, high):
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


def test_printed_interval_of_a_difference(tmp_path):
    """56 of 70 against 48 of 80 (Newcombe 1998, page 876, method 10): 0.20, from 0.0524 to 0.3339."""
    write_run(tmp_path, RECIPE, "smgk-1", 0, accuracy=56 / 70, count=70.0)
    write_run(tmp_path, RECIPE, "softmax-2", 0, accuracy=48 / 80, count=80.0)
    found = difference_interval(read_results(tmp_path), [RECIPE], "smgk-1", "softmax-2")
    assert found.over == BINOMIAL
    assert (found.low, found.high) == pytest.approx((5.24, 33.39), abs=5e-3)


def test_resampled_items_spread_as_a_binomial():
    right = np.random.default_rng(0).random((1, 2000)) < 0.37
    found = resample(right)[0]
    share = right.mean()
    assert found.mean() == pytest.approx(share, abs=1e-3)
    assert found.std() == pytest.approx(np.sqrt(share * (1 - share) / 2000), rel=0.06)


def test_rows_are_compared_item_by_item():
    """Two runs that are right on the same items never differ, whatever is drawn; the pages of two days agree."""
    right = np.random.default_rng(0).random(500) < 0.5
    first, second = resample(np.stack([right, right]), draws=50)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[:3], resample(right[None], draws=3)[0])
    # The draws are a promise: other ones would change every page.
    assert resample(np.arange(10)[None] < 4, draws=4)[0].tolist() == pytest.approx([0.5, 0.2, 0.4, 0.8], abs=1e-6)


def write_items(folder, row, seeds, share, *, common=None, count=2000, recipe=RECIPE):
    """Runs that are right on a share of the items, of which ``common`` says which are hard for everybody."""
    for seed in seeds:
        noise = np.random.default_rng([seed, len(row)]).random(count)
        write_run(folder, recipe, row, seed, right=(noise if common is None else 0.9 * common + 0.1 * noise) < share)


def test_with_records_seeds_and_items_are_drawn(tmp_path):
    write_items(tmp_path, "smgk-1", range(5), 0.4)
    results = read_results(tmp_path)
    found = accuracy_interval(results, RECIPE, "smgk-1")
    assert found.over == RESAMPLED
    # Independent answers of five seeds: the error of 10,000 answers over items, and over seeds about as much again.
    width = found.high - found.low
    assert 1.0 < width / (2 * 1.96 * 100 * np.sqrt(0.24 / 10_000)) < 2.0


def test_rows_that_a_recipe_has_from_another_have_their_items(tmp_path):
    """They are kept under the recipe that is extended, and so is the record of what they got right."""
    write_items(tmp_path, "smgk-4", range(3), 0.4, recipe="lra/listops")
    results = read_results(tmp_path)
    assert accuracy_interval(results, "lra/listops-shifts", "smgk-4").over == RESAMPLED
    write_run(tmp_path, "lra/listops", "smgk-2", 0, accuracy=0.3, count=2000.0)
    assert accuracy_interval(read_results(tmp_path), "lra/listops-shifts", "smgk-2").over == BINOMIAL


def test_with_one_seed_only_items_are_drawn(tmp_path):
    write_items(tmp_path, "smgk-1", [0], 0.4)
    assert accuracy_interval(read_results(tmp_path), RECIPE, "smgk-1").over == "items"


def test_hard_items_are_shared(tmp_path):
    """Where the same items are hard for both rows, their difference is known better than either of them."""
    common = np.random.default_rng(5).random(2000)
    write_items(tmp_path, "smgk-1", range(3), 0.42, common=common)
    write_items(tmp_path, "softmax-2", range(3), 0.40, common=common)
    results = read_results(tmp_path)
    found = difference_interval(results, [RECIPE], "smgk-1", "softmax-2")
    alone = accuracy_interval(results, RECIPE, "smgk-1")
    assert found.over == RESAMPLED
    assert 0 < found.low < found.high
    assert found.high - found.low < 0.7 * (alone.high - alone.low)


def test_seeds_that_differ_widen_it(tmp_path):
    """Seeds far apart, on the same items: the interval must reach from seed to seed."""
    common = np.random.default_rng(5).random(2000)
    for seed, share in enumerate((0.2, 0.4, 0.6)):
        write_run(tmp_path, RECIPE, "smgk-1", seed, right=common < share)
    found = accuracy_interval(read_results(tmp_path), RECIPE, "smgk-1")
    assert found.high - found.low > 20


def test_one_record_that_is_missing_makes_it_binomial(tmp_path):
    write_items(tmp_path, "smgk-1", range(2), 0.4)
    write_items(tmp_path, "softmax-2", range(2), 0.4)
    write_run(tmp_path, RECIPE, "softmax-2", 2, accuracy=0.4, count=2000.0)
    results = read_results(tmp_path)
    assert accuracy_interval(results, RECIPE, "smgk-1").over == RESAMPLED
    assert accuracy_interval(results, RECIPE, "softmax-2").over == BINOMIAL
    assert difference_interval(results, [RECIPE], "smgk-1", "softmax-2").over == BINOMIAL


def test_runs_of_another_corpus_share_no_items(tmp_path):
    write_items(tmp_path, "smgk-1", range(2), 0.4)
    write_items(tmp_path, "softmax-2", range(1), 0.4)
    path = tmp_path / RECIPE / "softmax-2-seed-0.json"
    path.write_text(path.read_text().replace("0" * 64, "1" * 64))
    results = read_results(tmp_path)
    assert difference_interval(results, [RECIPE], "smgk-1", "softmax-2").over == BINOMIAL


def test_without_a_count_there_is_none(tmp_path):
    write_run(tmp_path, RECIPE, "smgk-1", 0, accuracy=0.4)
    results = read_results(tmp_path)
    assert accuracy_interval(results, RECIPE, "smgk-1") is None
    assert accuracy_interval(results, RECIPE, "mgk-1") is None
    assert difference_interval(results, [RECIPE], "smgk-1", "softmax-2") is None


def test_tasks_are_averaged(tmp_path):
    for recipe in (RECIPE, "lra/listops"):
        write_items(tmp_path, "smgk-1", range(3), 0.45, recipe=recipe)
        write_items(tmp_path, "softmax-2", range(3), 0.40, recipe=recipe)
    results = read_results(tmp_path)
    both = difference_interval(results, [RECIPE, "lra/listops"], "smgk-1", "softmax-2")
    alone = difference_interval(results, [RECIPE], "smgk-1", "softmax-2")
    assert 1 < both.low < both.high < 8
    # Their items and seeds have nothing to do with each other, though the answers are the same here: errors fall by
    # the root of two.
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2**0.5, rel=0.12)


def test_an_evaluation_has_items_as_well(tmp_path):
    right = np.arange(100) < 60
    path = write_evaluation(tmp_path, RECIPE, "smgk-1", 0, stride=None, accuracy=0.6, count=100.0)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"items": {"test": pack_items(right)}}))
    results = read_results(tmp_path)
    np.testing.assert_array_equal(results.right[RECIPE, "smgk-1", 0], right)


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([], "must have its items by split, got []"),
        ({"test": {"count": 3, "right": "?"}}, "must say which items were right, but a record of items must"),
        ({"test": pack_items(np.arange(10) < 3)}, "items that agree with its accuracy of 0.4, got 0.3 right"),
    ],
)
def test_a_damaged_record_names_its_file(tmp_path, items, sentence):
    path = write_run(tmp_path, RECIPE, "smgk-1", 0, accuracy=0.4)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"items": items}))
    with pytest.raises(ValueError, match="must") as caught:
        read_results(tmp_path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)
