"""EM on the line, and how the error falls with the number of Gaussians."""

import itertools
import math

import numpy as np
import pytest

from mgk.analysis import approximate, fit_mixture
from mgk.analysis.theorem import skewed_density


def gaussian(x, mean, variance):
    return np.exp(-0.5 * (x - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)


@pytest.fixture(scope="module")
def found():
    return approximate()


def test_the_density_is_one_and_skewed():
    x = np.linspace(-1, 1, 20001)
    p = skewed_density(x)
    assert np.trapezoid(p, x) == pytest.approx(1, abs=1e-6)
    mean = np.trapezoid(p * x, x)
    deviation = math.sqrt(np.trapezoid(p * (x - mean) ** 2, x))
    # That of Beta(3, 9), by its formula.
    assert np.trapezoid(p * ((x - mean) / deviation) ** 3, x) == pytest.approx(
        2 * 6 * math.sqrt(13) / (14 * math.sqrt(27)), abs=1e-4
    )


@pytest.mark.parametrize("variance", [None, 0.02])
def test_likelihood_never_falls(variance):
    x = np.linspace(-1, 1, 200)
    for components in (1, 2, 5):
        history = fit_mixture(x, skewed_density(x), components, variance=variance, steps=200).log_likelihood
        assert len(history) >= 2
        assert min(np.diff(history)) > -1e-12


def test_a_mixture_is_found_again():
    x = np.linspace(-6, 6, 1200)
    weight = 0.3 * gaussian(x, -2.0, 0.25) + 0.7 * gaussian(x, 1.5, 0.5)
    found = fit_mixture(x, weight, 2, steps=2000, tolerance=1e-14)
    assert found.prior == pytest.approx([0.3, 0.7], abs=1e-4)
    assert found.mean == pytest.approx([-2.0, 1.5], abs=1e-3)
    assert found.variance == pytest.approx([0.25, 0.5], abs=1e-3)
    assert np.abs(found.density(x) - weight).max() < 1e-3


def test_one_gaussian_has_the_moments_of_the_points():
    generator = np.random.default_rng(0)
    x = generator.normal(3.0, 2.0, 300)
    found = fit_mixture(x, np.ones(300), 1)
    assert float(found.mean[0]) == pytest.approx(x.mean())
    assert float(found.variance[0]) == pytest.approx(x.var())


def test_a_given_variance_is_kept():
    x = np.linspace(-1, 1, 100)
    assert fit_mixture(x, skewed_density(x), 4, variance=0.03).variance == pytest.approx([0.03] * 4)


def test_the_error_falls_with_the_number_of_gaussians(found):
    free = found.largest_error(found.free)
    assert all(more < less for less, more in itertools.pairwise(free))
    assert free[-1] < free[0] / 10


def test_a_fixed_width_has_a_floor(found):
    """What the theorem promises for any given variance, no mixture of that variance can do."""
    fixed = found.largest_error(found.fixed)
    assert fixed[2] < fixed[0] / 3
    assert fixed[-1] > 0.9 * fixed[2]
    assert fixed[-1] > 3 * found.largest_error(found.free)[-1]
    narrow = approximate(components=(12,), deviation=0.08, steps=400)
    assert narrow.largest_error(narrow.fixed)[0] < fixed[-1] / 2


def test_fits_are_densities(found):
    step = float(found.grid[1] - found.grid[0])
    for mixture in (*found.free, *found.fixed):
        assert float(mixture.prior.sum()) == pytest.approx(1)
        assert float(mixture.density(found.grid).sum() * step) == pytest.approx(1, abs=1e-3)


def test_bad_points():
    x = np.zeros(3)
    with pytest.raises(ValueError, match=r"got \[3\] and \[2\]"):
        fit_mixture(x, np.ones(2), 1)
    with pytest.raises(ValueError, match="not negative and not all 0, got a sum of 0"):
        fit_mixture(x, np.zeros(3), 1)
    with pytest.raises(ValueError, match="num_components must be at least 1, got 0"):
        fit_mixture(x, np.ones(3), 0)
    with pytest.raises(ValueError, match="variance must be above 0, got 0"):
        fit_mixture(x, np.ones(3), 1, variance=0)
    with pytest.raises(ValueError, match="low < high"):
        approximate(support=(1.0, 1.0))
