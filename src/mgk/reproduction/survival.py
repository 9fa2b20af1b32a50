"""Survival analysis: the time until an event, for runs of which some end before it.

A run is a pair of the time for which it was observed and whether the event happened at that time. Otherwise the run is
censored: it is known only that the event had not happened by then.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mgk.reproduction.statistics import t_quantile

T = TypeVar("T")
Run = tuple[float, bool]
"""Time, and whether the event happened at that time."""
FEWEST = 5
"""Fewest runs of which a median has a 95 % interval. It never begins before the first event, but all of n runs take
longer than the true median once in 2 to the power of n times: once in 8 for three."""
MOST_SUBSETS = 200_000
"""Most assignments of the runs of a stratum to groups that are enumerated."""
MOST_SUMS = 2_000_000
DRAWS = 20_000
"""Ways of sharing out the runs that a test for trend draws at random."""
_ROUNDED = 9
"""Decimals to which sums of scores are rounded before they are compared."""
_HALF = 0.5 + 1e-9
"""At most a half, where 23/24 x 22/23 x ... x 12/13 is a little more in floating point."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step of a survival curve."""

    time: float
    at_risk: int
    """Number of runs that were observed until then."""
    events: int
    survival: float
    """Estimated share of runs without the event from this time on."""
    error: float
    """Standard error of the share by Greenwood's formula."""

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the share, on the scale log(-log), which keeps it between 0 and 1."""
        if self.survival in (0.0, 1.0):
            return self.survival, self.survival
        spread = t_quantile(0.975, math.inf) * self.error / (self.survival * abs(math.log(self.survival)))
        return self.survival ** math.exp(spread), self.survival ** math.exp(-spread)


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median time to the event, and its confidence interval."""

    time: float | None
    """Median time; ``None`` if fewer than half of the runs had the event."""
    low: float | None
    """Lower limit; ``None`` for fewer than :data:`FEWEST` runs, which have no such interval."""
    high: float | None
    """Upper limit of the 95 % confidence interval by Brookmeyer and Crowley; ``None`` if the runs set no limit."""


@dataclass(frozen=True, kw_only=True)
class LogRank:
    """The log-rank test between two groups, over one or more strata."""

    excess: float
    """Observed less expected events of the first group under a common hazard; above 0 if it is faster."""
    variance: float
    chi_square: float
    p: float
    """Two-sided p value."""
    is_exact: bool
    """Whether p is the exact permutation p value; otherwise it is that of chi-square with one degree of freedom."""
    least: float
    """The smallest p value that so many runs could have had, whatever they did; 0 if p is not exact."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The log-rank test for trend over groups that have an order."""

    excess: float
    """Events more than expected, each group weighted by its place: above 0 where later groups are faster."""
    z: float
    """That, over its standard deviation if the order meant nothing; 0 where nothing varies."""
    p: float
    """Two-sided, by sharing out the runs of each stratum at random."""


def kaplan_meier(runs: Sequence[Run]) -> list[Point]:
    """Return the Kaplan-Meier curve, with a point for each time at which a run had the event."""
    _check(runs)
    points: list[Point] = []
    survival, greenwood = 1.0, 0.0
    for time in sorted({time for time, happened in runs if happened}):
        at_risk = sum(other >= time for other, _ in runs)
        events = sum(other == time and happened for other, happened in runs)
        survival *= 1 - events / at_risk
        greenwood += events / (at_risk * (at_risk - events)) if at_risk > events else 0.0
        error = survival * math.sqrt(greenwood)
        points.append(Point(time=time, at_risk=at_risk, events=events, survival=survival, error=error))
    return points


def median(runs: Sequence[Run]) -> Median:
    """Return the median and its confidence interval: the times at which the curve's own interval contains 0.5."""
    points = kaplan_meier(runs)
    limited = points if len(runs) >= FEWEST else []
    # Where the curve has reached 0 it has no interval, and sets no upper limit.
    inner = [point for point in limited if point.survival > 0]
    return Median(
        time=next((point.time for point in points if point.survival <= _HALF), None),
        low=next((point.time for point in limited if point.interval()[0] <= _HALF), None),
        high=next((point.time for point in inner if point.interval()[1] <= _HALF), None),
    )


def log_rank(strata: Sequence[tuple[Sequence[Run], Sequence[Run]]]) -> LogRank:
    """Test whether the hazards of two groups are equal in every stratum.

    The statistic is Mantel's: observed less expected events of the first group, summed over strata, divided by the
    square root of its hypergeometric variance. For few runs chi-square does not approximate its p value, so all
    assignments of the runs of each stratum to the groups are enumerated instead, unless there are too many.

    Args:
        strata: runs of the first and of the second group for each stratum.
    """
    excess = variance = 0.0
    scores: list[tuple[NDArray[np.float64], int]] = []
    for first, second in strata:
        _check(first)
        _check(second)
        own_excess, own_variance = _mantel(first, second)
        excess += own_excess
        variance += own_variance
        scores.append((_scores([*first, *second]), len(first)))
    if not scores:
        raise ValueError("a log-rank test needs at least one stratum, got none")
    least = _least_p([(len(first), len(second)) for first, second in strata])
    if variance == 0:
        return LogRank(excess=excess, variance=0.0, chi_square=0.0, p=1.0, is_exact=True, least=least)
    chi_square = excess**2 / variance
    exact = _permutation_p(scores, abs(excess))
    if exact is None:
        p = math.erfc(math.sqrt(chi_square / 2))
        return LogRank(excess=excess, variance=variance, chi_square=chi_square, p=p, is_exact=False, least=0.0)
    return LogRank(excess=excess, variance=variance, chi_square=chi_square, p=exact, is_exact=True, least=least)


def log_rank_of_units(first: Sequence[Mapping[T, Run]], second: Sequence[Mapping[T, Run]]) -> LogRank:
    """Test the same where several runs share their chance, so that they are not independent of each other.

    A unit has at most one run in each stratum, for example a seed with its runs under several settings. The statistic
    is that of :func:`log_rank`; its exact p value is over the assignments of whole units to the groups. Its variance
    counts runs as if they were independent, so without an exact p value the test is too eager.

    Args:
        first: the units of the first group: the run of each in every stratum where it has one.
        second: likewise of the second group. Strata without runs of both groups are left out.
    """
    strata = [
        stratum
        for stratum in dict.fromkeys(stratum for unit in first for stratum in unit)
        if any(stratum in unit for unit in second)
    ]
    both = [[unit[stratum] for unit in group if stratum in unit] for stratum in strata for group in (first, second)]
    apart = log_rank(list(zip(both[::2], both[1::2], strict=True)))
    sums = np.zeros(len(first) + len(second))
    for stratum in strata:
        places = [place for place, unit in enumerate((*first, *second)) if stratum in unit]
        sums[places] += _scores([(*first, *second)[place][stratum] for place in places])
    exact = _permutation_p([(sums, len(first))], abs(apart.excess))
    if exact is None:
        return apart
    return dataclasses.replace(apart, p=exact, is_exact=True, least=_least_p([(len(first), len(second))]))


def log_rank_trend(strata: Sequence[Sequence[Sequence[Run]]]) -> Trend:
    """Test whether it happens the faster, or the slower, the later a group stands in an order.

    The statistic is Tarone's: observed less expected events of each group, times the place of the group. Its p value is
    the share of random ways of sharing out the runs of each stratum that are at least as far from 0, with the one that
    was seen counted among them.

    Args:
        strata: the groups of each stratum in their order; a group without runs keeps its place.
    """
    if not strata or not all(any(groups) for groups in strata):
        raise ValueError("a test for trend needs runs in every stratum, got none")
    # The generator whose numbers numpy promises never to change: pages must come out the same everywhere.
    random = np.random.RandomState(0)
    excess, variance, drawn = 0.0, 0.0, np.zeros(DRAWS)
    for groups in strata:
        runs = [run for group in groups for run in group]
        _check(runs)
        places = np.array([place for place, group in enumerate(groups) for _ in group], dtype=np.float64)
        scores = _scores(runs)
        excess += float(places @ scores)
        if len(runs) > 1:
            spread = ((places - places.mean()) ** 2).sum() * ((scores - scores.mean()) ** 2).sum()
            variance += float(spread) / (len(runs) - 1)
        order = random.uniform(size=(DRAWS, len(runs))).argsort(axis=1)
        drawn += places[order] @ scores
    if variance == 0:
        return Trend(excess=excess, z=0.0, p=1.0)
    far = int((np.abs(drawn) >= abs(excess) - 10.0**-_ROUNDED).sum())
    return Trend(excess=excess, z=excess / math.sqrt(variance), p=(1 + far) / (1 + DRAWS))


def _check(runs: Sequence[Run]) -> None:
    if not runs:
        raise ValueError("a survival curve needs at least one run, got none")
    if any(not time > 0 or math.isinf(time) for time, _ in runs):
        raise ValueError(f"a run must last for a finite time above 0, got {[time for time, _ in runs]}")


def _mantel(first: Sequence[Run], second: Sequence[Run]) -> tuple[float, float]:
    """Return observed less expected events of the first group, and its variance."""
    excess = variance = 0.0
    for time in sorted({time for time, happened in (*first, *second) if happened}):
        own, other = (sum(each >= time for each, _ in group) for group in (first, second))
        events, own_events = (
            sum(each == time and happened for each, happened in group) for group in ((*first, *second), first)
        )
        total = own + other
        excess += own_events - events * own / total
        if total > 1:
            variance += events * own * other * (total - events) / (total**2 * (total - 1))
    return excess, variance


def _scores(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Return the contribution of each run to the excess of its group: 1 for an event, less the cumulative hazard.

    The excess of a group is the sum over its runs, so another assignment of the runs is another sum.
    """
    found = []
    for time, happened in runs:
        hazard = 0.0
        for when in {when for when, event in runs if event and when <= time}:
            events = sum(other == when and event for other, event in runs)
            hazard += events / sum(other >= when for other, _ in runs)
        found.append(happened - hazard)
    return np.array(found)


def _least_p(sizes: Sequence[tuple[int, int]]) -> float:
    """Return the share of the one way, or two, in which groups of these sizes are farthest apart.

    If the groups are equally large, the opposite of each way is as far from 0 on the other side.
    """
    ways = math.prod(math.comb(first + second, first) for first, second in sizes)
    return (2 if all(first == second for first, second in sizes) else 1) / ways


def _permutation_p(scores: Sequence[tuple[NDArray[np.float64], int]], observed: float) -> float | None:
    """Return the share of assignments of runs to groups whose excess is at least as far from 0 as the observed one.

    Returns ``None`` if there are too many assignments.
    """
    distributions = []
    for values, size in scores:
        if math.comb(len(values), size) > MOST_SUBSETS:
            return None
        sums = values[np.array(list(itertools.combinations(range(len(values)), size)))].sum(axis=1)
        distributions.append(_merge(sums, np.full(len(sums), 1 / len(sums))))
    *others, last = sorted(distributions, key=lambda each: len(each[0]))
    sums, shares = np.zeros(1), np.ones(1)
    for values, weights in others:
        if len(sums) * len(values) > MOST_SUMS:
            return None
        sums, shares = _merge(np.add.outer(sums, values).ravel(), np.multiply.outer(shares, weights).ravel())
    # The last stratum is not multiplied out: for each of its values only the share of the rest that goes far enough
    # matters.
    below = np.concatenate([[0.0], np.cumsum(shares)])
    limit = observed - 10.0 ** (2 - _ROUNDED)
    above = below[-1] - below[np.searchsorted(sums, limit - last[0], side="left")]
    under = below[np.searchsorted(sums, -limit - last[0], side="right")]
    return float(min(1.0, ((above + under) * last[1]).sum()))


def _merge(
    values: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distinct values in order, each with the total weight of the values equal to it."""
    unique, places = np.unique(np.round(values, _ROUNDED), return_inverse=True)
    totals: NDArray[np.float64] = np.bincount(places.ravel(), weights=weights).astype(np.float64)
    return unique, totals
