"""The probability that one run is better than another, and how sure it is."""

import random

import pytest

from mgk.reproduction.improvement import improvement
from mgk.reproduction.statistics import correlation


def test_share_of_pairs():
    """Of six pairs the first wins three, and ties in two."""
    found = improvement([([1.0, 3.0], [1.0, 2.0, 3.0])])
    assert found.probability == pytest.approx((0 + 1 + 1 + 0.5 + 0.5) / 6)
    assert found.low < found.probability < found.high


def test_the_mean_over_tasks():
    one, other = ([2.0, 3.0], [1.0, 1.5]), ([1.0, 2.0], [1.0, 2.0])
    both = improvement([one, other])
    assert both.probability == pytest.approx(0.75)
    alone = [improvement([task]) for task in (one, other)]
    below = sum((each.probability - each.low) ** 2 for each in alone) ** 0.5 / 2
    assert both.low == pytest.approx(0.75 - below)
    assert both.high <= 1


def test_sides_are_alike():
    first, second = [3.0, 4.0, 5.0, 1.0], [2.0, 2.5, 3.5]
    ours, theirs = improvement([(first, second)]), improvement([(second, first)])
    assert ours.probability == pytest.approx(1 - theirs.probability)
    assert (ours.low, ours.high) == pytest.approx((1 - theirs.high, 1 - theirs.low))


@pytest.mark.parametrize(("runs", "low"), [(3, 0.501), (5, 0.643), (10, 0.800)])
def test_all_runs_better_is_not_certain(runs, low):
    """A bootstrap would say [1, 1] of three runs as of a hundred."""
    found = improvement([([1.0 + run for run in range(runs)], [-float(run) for run in range(runs)])])
    assert (found.probability, found.high) == (1.0, pytest.approx(1.0))
    assert found.low == pytest.approx(low, abs=5e-4)


def test_the_score_interval_by_hand():
    """At its limits, what was found is 1.96 standard errors away: Newcombe's variance, with n* = (m + n) / 2 - 1."""
    first, second = [1.0, 4.0, 5.0, 6.0, 9.0], [0.0, 2.0, 3.0, 7.0]
    found = improvement([(first, second)])
    for limit in (found.low, found.high):
        spread = 1 + 3.5 * ((1 - limit) / (2 - limit) + limit / (1 + limit))
        error = (limit * (1 - limit) * spread / 20) ** 0.5
        assert abs(found.probability - limit) == pytest.approx(1.959964 * error, rel=1e-5)


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.0])
def test_it_covers(shift):
    """Of normal runs the true probability is known; five runs of each."""
    import math

    true = 0.5 * math.erfc(-shift / 2)
    draw = random.Random(7)
    trials = 800
    inside = 0
    for _ in range(trials):
        found = improvement([([draw.gauss(shift, 1) for _ in range(5)], [draw.gauss(0, 1) for _ in range(5)])])
        inside += found.low <= true <= found.high
    assert 0.92 < inside / trials <= 1


def test_bad_input():
    with pytest.raises(ValueError, match="values of both rows in every task"):
        improvement([([1.0], [])])


def test_correlation():
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert correlation([1, 2, 3], [5, 5, 5]) is None
    with pytest.raises(ValueError, match="needs pairs, got 2 and 1"):
        correlation([1, 2], [1])
