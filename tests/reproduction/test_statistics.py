"""Against tables of Student's t, textbook cases, and against what the definitions say."""

import math
import random

import pytest

from mgk.reproduction.statistics import (
    contrast,
    holm,
    incomplete_beta,
    mean,
    standard_error,
    t_quantile,
    t_tail,
)


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    # The critical values of any printed table.
    [
        (12.706205, 1, 0.025), (4.302653, 2, 0.025), (2.776445, 4, 0.025), (2.306004, 8, 0.025), (2.042272, 30, 0.025),
        (3.746947, 4, 0.01), (1.859548, 8, 0.05), (31.820516, 1, 0.01), (1.959964, math.inf, 0.025),
    ],
)  # fmt: skip
def test_printed_tables_of_t(t, degrees, tail):
    assert t_tail(t, degrees) == pytest.approx(tail, rel=2e-6)
    assert t_tail(-t, degrees) == pytest.approx(1 - tail, rel=1e-6)
    assert t_quantile(1 - tail, degrees) == pytest.approx(t, rel=1e-6)
    assert t_quantile(tail, degrees) == pytest.approx(-t, rel=1e-6)


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 5.0, 1e6])
def test_degrees_with_a_closed_form(t):
    """One degree is Cauchy's distribution; two have a square root."""
    assert t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)
    assert t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-3 if t == 1e6 else 1e-9)


def test_tails_far_out():
    """Where 1 - cdf would be 0: one degree falls as 1 / (pi t)."""
    assert t_tail(1e12, 1) == pytest.approx(1 / (math.pi * 1e12), rel=1e-9)
    assert 0 < t_tail(50, 30) < 1e-25


@pytest.mark.parametrize(("a", "b", "x"), [(2, 3, 0.4), (5, 1, 0.9), (1, 1, 0.25), (4, 7, 0.05), (3, 2, 0.99)])
def test_incomplete_beta_of_whole_numbers_is_a_binomial_sum(a, b, x):
    n = a + b - 1
    exact = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
    assert incomplete_beta(a, b, x) == pytest.approx(exact, rel=1e-12)


def test_standard_error():
    assert mean([1, 2, 3, 4]) == 2.5
    assert standard_error([1, 2, 3, 4]) == pytest.approx(math.sqrt(5 / 3) / 2)
    assert standard_error([7.0]) is None
    with pytest.raises(ValueError, match="at least one value"):
        mean([])


def test_welch_by_hand():
    """Means 4 and 2, variances 4 and 1 of three values: degrees (5/3)^2 / ((4/3)^2/2 + (1/3)^2/2)."""
    found = contrast([(1, [2, 4, 6]), (-1, [1, 2, 3])])
    assert found.estimate == pytest.approx(2)
    assert found.error == pytest.approx(math.sqrt(5 / 3))
    assert found.degrees == pytest.approx(50 / 17)
    assert found.t == pytest.approx(2 / math.sqrt(5 / 3))
    assert found.p == pytest.approx(2 * t_tail(found.t, 50 / 17))
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(2)
    assert (high - low) / 2 == pytest.approx(t_quantile(0.975, 50 / 17) * math.sqrt(5 / 3))
    assert contrast([(1, [2, 4, 6]), (-1, [1, 2, 3])], value=2).p == pytest.approx(1)


def test_equal_sizes_and_variances_are_students_test():
    """n = 5 twice, the same spread: 8 degrees of freedom, so |t| > 2.306 is p < 0.05."""
    base = [-2.0, -1.0, 0.0, 1.0, 2.0]
    step = 2.306004 * math.sqrt(2 * 2.5 / 5)
    found = contrast([(1, [value + step for value in base]), (-1, base)])
    assert found.degrees == pytest.approx(8)
    assert found.p == pytest.approx(0.05, rel=1e-5)
    assert found.interval()[0] == pytest.approx(0, abs=1e-6)


def test_an_average_of_differences_is_one_contrast():
    first, second = [[1, 2, 3], [10, 12, 11]], [[0, 1, 1], [9, 9, 12]]
    found = contrast([(0.5, values) for values in first] + [(-0.5, values) for values in second])
    assert found.estimate == pytest.approx((2 + 11) / 2 - (2 / 3 + 10) / 2)
    errors = [standard_error(values) / 2 for values in (*first, *second)]
    assert found.error == pytest.approx(math.sqrt(sum(error**2 for error in errors)))


@pytest.mark.parametrize("first", [[3.0, 3.0, 3.0], [31.85, 31.85, 31.85], [0.05] * 6])
def test_samples_that_do_not_vary_decide_nothing(first):
    """Without any spread there is nothing to hold a difference against, be it large or one of rounding.

    The mean of equal numbers is often not that number: a test would see a spread of 1e-17.
    """
    second = [value - 0.01 for value in first]
    for margin in (0.0, -0.5):
        found = contrast([(1, first), (-1, second)], margin)
        assert (found.error, found.degrees, found.t, found.p) == (0, 0, 0, 1)
        assert found.estimate == pytest.approx(0.01)
        assert found.interval() == (-math.inf, math.inf)


def test_equal_differences_do_not_vary_either():
    """Three runs that are better by 0.3 each, but for rounding."""
    differences = [36.9 - 36.6, 80.3 - 80.0, 0.9 - 0.6]
    assert len(set(differences)) > 1
    assert standard_error(differences) == 0
    assert contrast([(1, differences)]).p == 1


def test_one_sample_that_does_not_vary_counts_with_the_degrees_of_the_other():
    found = contrast([(1, [3.0, 3.0, 3.0]), (-1, [1.0, 2.0, 3.0])])
    assert found.degrees == pytest.approx(2)
    assert found.p == pytest.approx(2 * t_tail(math.sqrt(3), 2))


def test_a_sample_of_one_is_refused():
    with pytest.raises(ValueError, match="at least two values in each sample, got 1"):
        contrast([(1, [3]), (-1, [2, 2])])


def test_level_is_kept_where_nothing_differs():
    """Five seeds from one distribution: p below 0.05 in about 5 % of 2,000 trials."""
    draw = random.Random(0)
    trials = 2000
    hits = sum(
        contrast([(1, [draw.gauss(0, 1) for _ in range(5)]), (-1, [draw.gauss(0, 3) for _ in range(5)])]).p < 0.05
        for _ in range(trials)
    )
    assert 0.035 < hits / trials < 0.065


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.2]) == [0.2]
    assert holm([]) == []
