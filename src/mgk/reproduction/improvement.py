"""The probability that a run of one row is better than a run of another.

As in Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (2021), it is the share of
all pairs of runs, one of each row, in which the first is better; a tie counts as half, and several tasks are averaged.
It is robust where a difference of means is not: a failed run moves a mean far, but this number only by its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mgk.reproduction.statistics import mean, t_quantile


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """The probability that the first row is better, and its 95 % confidence interval."""

    probability: float
    low: float
    high: float


def improvement(tasks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Improvement:
    """Compute the probability that a run of the first row is above a run of the second.

    The interval is Newcombe's score interval (Statistics in Medicine 25, 2006, method 5). The bootstrap of the paper
    above degenerates to a point if all runs of one row are above those of the other, which with five runs each happens
    by chance once in 126 times. Over tasks the squared distances from the estimates to the limits are added.

    Args:
        tasks: values of the first and the second row for each task.
    """
    if not tasks or not all(first and second for first, second in tasks):
        raise ValueError("a probability of improvement needs values of both rows in every task, got none of one")
    shares = [_share(first, second) for first, second in tasks]
    limits = [
        _score_interval(share, len(first), len(second)) for share, (first, second) in zip(shares, tasks, strict=True)
    ]
    centre = mean(shares)
    below, above = (
        math.sqrt(math.fsum((share - limit[side]) ** 2 for share, limit in zip(shares, limits, strict=True)))
        / len(shares)
        for side in (0, 1)
    )
    return Improvement(probability=centre, low=max(0.0, centre - below), high=min(1.0, centre + above))


def _share(first: Sequence[float], second: Sequence[float]) -> float:
    wins = math.fsum(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0 for ours in first for theirs in second)
    return wins / (len(first) * len(second))


def _score_interval(share: float, first: int, second: int) -> tuple[float, float]:
    """Return the range of probabilities that are consistent with the observed share at the level of 95 %."""
    quantile = t_quantile(0.975, math.inf)
    degrees = (first + second) / 2 - 1

    def is_far(probability: float) -> bool:
        inner = 1 + degrees * ((1 - probability) / (2 - probability) + probability / (1 + probability))
        variance = probability * (1 - probability) * inner / (first * second)
        return (share - probability) ** 2 > quantile**2 * variance

    limits = []
    for end in (0.0, 1.0):
        near, far = share, end
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (near, middle) if is_far(middle) else (middle, far)
        limits.append((near + far) / 2)
    return limits[0], limits[1]
