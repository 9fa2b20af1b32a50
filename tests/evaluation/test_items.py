"""Which items were right, as a few letters and back."""

import math

import numpy as np
import pytest

from mgk.evaluation import pack_items, unpack_items


@pytest.mark.parametrize("count", [1, 7, 8, 9, 2000, 25_000])
def test_there_and_back(count):
    right = np.random.default_rng(count).random(count) < 0.37
    record = pack_items(right)
    assert record["count"] == count
    assert len(record["right"]) == 4 * math.ceil(math.ceil(count / 8) / 3)
    np.testing.assert_array_equal(unpack_items(record), right)


def test_the_first_item_is_the_first_bit():
    """The form of the file is a promise to those who read it with other tools."""
    assert pack_items(np.array([True, False, False, True, False, False, False, False, True])) == {
        "count": 9, "right": "kIA=",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, "must have a count and base64 of their bits, got None and None"),
        ({"count": True, "right": "gA=="}, "must have a count and base64"),
        ({"count": 3, "right": "no base64!"}, "must have base64 of their bits, got"),
        ({"count": 3, "right": "gAA="}, "a record of 3 items must have 1 bytes, got 2"),
        ({"count": 3, "right": "8A=="}, "a record of 3 items must have no bits beyond them, got 1"),
    ],
)
def test_a_damaged_record(record, sentence):
    with pytest.raises(ValueError, match=r"a record of .*items must") as caught:
        unpack_items(record)
    assert sentence in str(caught.value)


def test_only_truth_values_are_packed():
    with pytest.raises(ValueError, match=r"a truth value for each item, got float64 of shape \(2,\)"):
        pack_items(np.ones(2))
