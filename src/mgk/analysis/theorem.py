"""An illustration of theorem 1: a skewed density, fitted by mixtures of K Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Density = Callable[[Array], Array]

COMPONENTS = (1, 2, 3, 4, 6, 8, 12)
# Lowest weight of a component without points, so that it can be a divisor.
TINY = 1e-300


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianMixture:
    """A mixture of K Gaussians on the line, fitted by EM."""

    prior: Array
    """``[K]``, sums to 1."""
    mean: Array
    """``[K]``."""
    variance: Array
    """``[K]``."""
    log_likelihood: Sequence[float]
    """Mean of ``log p_K(x)`` under the fitted density, before the first step of EM and after each step."""

    def density(self, x: Array) -> Array:
        """Compute ``p_K(x)``, in the shape of ``x``."""
        logits = _log_components(x.ravel(), self.prior, self.mean, self.variance)
        return np.exp(_log_sum_exp(logits)).reshape(x.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Approximation:
    """The approximations of one density by mixtures of Gaussians."""

    grid: Array
    """``[G]``: points at which densities are compared, beyond the support as well."""
    target: Array
    """``[G]``: the density itself."""
    components: Sequence[int]
    """The fitted numbers of components K."""
    fixed_deviation: float
    """Standard deviation of every Gaussian in ``fixed``."""
    fixed: Sequence[GaussianMixture]
    """A mixture for each K with a given variance and fitted priors and means, as in the theorem."""
    free: Sequence[GaussianMixture]
    """A mixture for each K with fitted variances as well."""

    def largest_error(self, mixtures: Sequence[GaussianMixture]) -> list[float]:
        """Return the theorem's epsilon of each mixture, ``max_x |p(x) - p_K(x)|`` over the grid."""
        return [float(np.abs(self.target - mixture.density(self.grid)).max()) for mixture in mixtures]


def skewed_density(x: Array) -> Array:
    """The density of Beta(3, 9) stretched over [-1, 1]: bounded, differentiable everywhere, skewed to the right."""
    alpha, beta = 3.0, 9.0
    unit = ((x + 1) / 2).clip(0.0, 1.0)
    constant = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return np.asarray(0.5 * math.exp(constant) * unit ** (alpha - 1) * (1 - unit) ** (beta - 1))


def fit_mixture(
    x: Array,
    weight: Array,
    num_components: int,
    *,
    variance: float | None = None,
    steps: int = 1000,
    tolerance: float = 1e-10,
) -> GaussianMixture:
    """Fit a mixture of Gaussians by EM to weighted points: a density on a grid, or data with equal weights.

    EM starts from the quantiles of the points, so the fit is deterministic. With the cells of a grid and their
    probabilities it is EM on the density itself, without sampling noise.

    Args:
        x: points ``[n]``.
        weight: weights ``[n]``, not negative.
        num_components: K.
        variance: variance of every component; ``None`` fits each.
        steps: most steps of EM.
        tolerance: gain in log-likelihood below which EM stops.
    """
    if x.ndim != 1 or x.shape != weight.shape or len(x) == 0:
        raise ValueError(f"x and weight must be [n] with n > 0, got {list(x.shape)} and {list(weight.shape)}")
    if num_components < 1:
        raise ValueError(f"num_components must be at least 1, got {num_components}")
    if variance is not None and not variance > 0:
        raise ValueError(f"variance must be above 0, got {variance}")
    total = float(weight.sum())
    if bool((weight < 0).any()) or not 0 < total < math.inf:
        raise ValueError(f"weight must be finite, not negative and not all 0, got a sum of {total}")
    weight = weight / total
    quantile = (np.arange(num_components) + 0.5) / num_components
    mean = np.sort(x)[np.searchsorted(weight[x.argsort()].cumsum(), quantile).clip(max=len(x) - 1)]
    whole = float((weight * np.square(x - (weight * x).sum())).sum())
    # The variance is bounded below, so that no component shrinks onto a single point of the grid.
    smallest = float(np.median(np.diff(np.sort(x)))) ** 2 if len(x) > 1 else 1.0
    prior = np.full(num_components, 1.0 / num_components)
    spread = np.full(num_components, max(whole / num_components**2, smallest) if variance is None else variance)

    likelihoods: list[float] = []
    while True:
        logits = _log_components(x, prior, mean, spread)
        normaliser = _log_sum_exp(logits)
        likelihoods.append(float((weight * normaliser).sum()))
        has_settled = len(likelihoods) > 1 and likelihoods[-1] - likelihoods[-2] < tolerance
        if has_settled or len(likelihoods) > steps:
            return GaussianMixture(prior=prior, mean=mean, variance=spread, log_likelihood=likelihoods)
        responsibility = weight[:, None] * np.exp(logits - normaliser[:, None])
        mass = responsibility.sum(axis=0).clip(min=TINY)
        prior = mass / mass.sum()
        mean = (responsibility * x[:, None]).sum(axis=0) / mass
        if variance is None:
            square = np.square(x[:, None] - mean)
            spread = ((responsibility * square).sum(axis=0) / mass).clip(min=smallest)


def approximate(
    density: Density = skewed_density,
    *,
    components: Sequence[int] = COMPONENTS,
    deviation: float = 0.15,
    support: tuple[float, float] = (-1.0, 1.0),
    points: int = 400,
    steps: int = 1000,
) -> Approximation:
    """Fit a density by K Gaussians for several K, once with a given variance and once with free variances.

    Theorem 1 promises any accuracy for any given variance. That is impossible: a mixture of Gaussians of one variance
    is a convolution with that Gaussian, so it cannot be sharper. With a fixed variance the error therefore falls until
    it reaches what the convolution cannot represent; with free variances (or a variance that shrinks as K grows) it
    keeps falling. The result shows both.

    Args:
        density: vectorised density; its integral over the support is assumed to be 1.
        components: the numbers K.
        deviation: the fixed standard deviation.
        support: support of the density.
        points: number of grid points within the support.
        steps: most steps of EM for each fit.
    """
    low, high = support
    if not low < high:
        raise ValueError(f"support must be (low, high) with low < high, got {support}")
    width = (high - low) / points
    cells: Array = low + width * np.arange(0.5, points, dtype=np.float64)
    weight = density(cells) * width
    margin = 0.25 * (high - low)
    grid = np.linspace(low - margin, high + margin, 2 * points)
    inside = (grid >= low) & (grid <= high)
    return Approximation(
        grid=grid,
        target=density(grid) * inside,
        components=list(components),
        fixed_deviation=deviation,
        fixed=[fit_mixture(cells, weight, count, variance=deviation**2, steps=steps) for count in components],
        free=[fit_mixture(cells, weight, count, steps=steps) for count in components],
    )


def _log_components(x: Array, prior: Array, mean: Array, variance: Array) -> Array:
    """``log prior_k + log N(x; mean_k, variance_k)``, ``[n, K]``."""
    square = np.square(x[:, None] - mean) / variance
    return np.asarray(np.log(prior) - 0.5 * (square + np.log(2 * math.pi * variance)))


def _log_sum_exp(logits: Array) -> Array:
    """Log-sum-exp over the last axis."""
    largest = logits.max(axis=-1)
    return np.asarray(largest + np.log(np.exp(logits - largest[..., None]).sum(axis=-1)))
