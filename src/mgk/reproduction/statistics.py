"""The statistics behind the verdicts.

One test serves all claims: Welch's t for a difference of means of samples with unequal variances. In its general form
it tests any weighted sum of means, so that an average over three tasks is tested in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TINY = 1e-300
_ROUNDING = 1e-12
"""Spread of a sample, relative to its values where these are above 1, that comes from floating point alone."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A weighted sum of means, tested against a value."""

    estimate: float
    """The weighted sum."""
    error: float
    """Its standard error."""
    degrees: float
    """Degrees of freedom by Welch and Satterthwaite; 0 if no sample varies, so that there is no test."""
    t: float
    """(estimate - value) / error."""
    p: float
    """Two-sided p value."""

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the weighted sum, which is without limits where there is no test."""
        half = t_quantile(0.975, self.degrees) * self.error if self.degrees else math.inf
        return self.estimate - half, self.estimate + half


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean: ``None`` for a single value, and 0 for values that differ by rounding at most."""
    if len(values) < 2:
        return None
    if max(values) - min(values) <= _ROUNDING * max(1.0, *map(abs, values)):
        # The mean of equal values is often not that value, and a spread of 1e-17 would make any difference certain.
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values))


def contrast(samples: Sequence[tuple[float, Sequence[float]]], value: float = 0.0) -> Contrast:
    """Test whether a weighted sum of means equals ``value``.

    If no sample varies, there is no test and p is 1: runs that end at the same number, such as the share of the largest
    class, say nothing about how far others would be from it.

    Args:
        samples: weight and values of each sample, at least two values. Welch's test has the weights 1 and -1.
        value: the sum under the null hypothesis.
    """
    variances, estimate = [], 0.0
    for weight, values in samples:
        error = standard_error(values)
        if error is None:
            raise ValueError(f"a test needs at least two values in each sample, got {len(values)}")
        variances.append((weight * error) ** 2)
        estimate += weight * mean(values)
    variance = math.fsum(variances)
    if variance == 0:
        return Contrast(estimate=estimate, error=0.0, degrees=0.0, t=0.0, p=1.0)
    shares = [each**2 / (len(values) - 1) for each, (_, values) in zip(variances, samples, strict=True)]
    degrees = variance**2 / math.fsum(shares)
    error = math.sqrt(variance)
    t = (estimate - value) / error
    return Contrast(estimate=estimate, error=error, degrees=degrees, t=t, p=2 * t_tail(abs(t), degrees))


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation; ``None`` if one of the samples does not vary."""
    if len(first) != len(second):
        raise ValueError(f"a correlation needs pairs, got {len(first)} and {len(second)} values")
    ours, theirs = [value - mean(first) for value in first], [value - mean(second) for value in second]
    scale = math.sqrt(math.fsum(each**2 for each in ours) * math.fsum(each**2 for each in theirs))
    return math.fsum(a * b for a, b in zip(ours, theirs, strict=True)) / scale if scale > 0 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values by Holm's method, which controls the error rate over all of them."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def t_tail(t: float, degrees: float) -> float:
    """Probability that Student's t with these degrees of freedom exceeds ``t``."""
    if degrees <= 0:
        raise ValueError(f"degrees must be above 0, got {degrees}")
    if math.isinf(degrees):
        return math.erfc(t / math.sqrt(2)) / 2
    tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return tail if t >= 0 else 1 - tail


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > 1 - probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_tail(middle, degrees) > 1 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Compute the regularised incomplete beta function I_x(a, b) by its continued fraction."""
    if not 0 <= x <= 1:
        raise ValueError(f"x must be between 0 and 1, got {x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        # The fraction converges fast only on the other side.
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d1/(1 + d2/(1 + ...)) from the front by Lentz's method."""
    value, numerator, denominator = 1.0, 1.0, 0.0
    for index in range(1, 10_000):
        m = index // 2
        if index % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator = 1 / _away_from_zero(1 + term * denominator)
        numerator = _away_from_zero(1 + term / numerator)
        factor = numerator * denominator
        value *= factor
        if abs(factor - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def show(values: Sequence[float], digits: int) -> str:
    """``65.10 ± 0.12 (5 seeds)``."""
    if not values:
        return ""
    error = standard_error(values)
    centre = f"{mean(values):.{digits}f}"
    return f"{centre} (1 seed)" if error is None else f"{centre} ± {error:.{digits}f} ({len(values)} seeds)"
