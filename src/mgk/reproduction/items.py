"""Intervals of an accuracy and of a difference of accuracies over test items and seeds.

Results that record which items were right are resampled with replacement: items, the same for every run of a recipe, so
that two rows are compared item by item; and seeds, the same for both rows if they have the same seeds. A result without
such a record has the interval of a binomial share, over its items alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mgk.reproduction.metrics import METRICS
from mgk.reproduction.recipe import home
from mgk.reproduction.results import Key, Results
from mgk.reproduction.statistics import mean, t_quantile

DRAWS = 2000
LEVEL = 0.95
ACCURACY = METRICS["test_accuracy"]
RESAMPLED, ITEMS, BINOMIAL = "seeds and items", "items", "items, binomial"


@dataclass(frozen=True, kw_only=True)
class ItemInterval:
    """A confidence interval over resampled test items and seeds."""

    low: float
    high: float
    """Upper limit in percent."""
    over: str
    """What was drawn: :data:`RESAMPLED`, :data:`ITEMS` of one seed, or :data:`BINOMIAL` without a record of items."""


def accuracy_interval(results: Results, recipe: str, row: str) -> ItemInterval | None:
    """Interval of the mean accuracy of a row; ``None`` without an accuracy or if the number of items is unknown."""
    draws = _draws(results, recipe, row)
    if draws is not None:
        weights = _seed_weights(len(draws), 0)
        return _percentiles((draws * weights).sum(axis=0), RESAMPLED if len(draws) > 1 else ITEMS)
    found = _binomial(results, recipe, row)
    if found is None:
        return None
    low, high = wilson(*found)
    return ItemInterval(low=100 * low, high=100 * high, over=BINOMIAL)


def difference_interval(results: Results, recipes: Sequence[str], first: str, second: str) -> ItemInterval | None:
    """Interval of the difference between the mean accuracies of two rows, averaged over recipes.

    Args:
        results: our results.
        recipes: recipes to average over.
        first: row whose accuracy is the minuend.
        second: row whose accuracy is the subtrahend.
    """
    resampled = [(_draws(results, recipe, first), _draws(results, recipe, second)) for recipe in recipes]
    total = np.zeros(DRAWS)
    for number, (recipe, (ours, theirs)) in enumerate(zip(recipes, resampled, strict=True)):
        if ours is None or theirs is None:
            return _binomial_difference(results, recipes, first, second)
        # Seeds of different tasks are unrelated, so each task draws its own.
        are_pairs = _seeds(results, recipe, first) == _seeds(results, recipe, second)
        own = _seed_weights(len(ours), 2 * number)
        other = own if are_pairs else _seed_weights(len(theirs), 2 * number + 1)
        total += (ours * own).sum(axis=0) - (theirs * other).sum(axis=0)
    return _percentiles(total / len(recipes), RESAMPLED)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Compute Wilson's score interval of a binomial share."""
    if count <= 0 or not 0 <= share <= 1:
        raise ValueError(f"a share must lie in [0, 1] and be of at least one item, got {share} of {count}")
    square = t_quantile((1 + LEVEL) / 2, math.inf) ** 2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(square * (share * (1 - share) / count + square / (4 * count**2))) / (1 + square / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def resample(right: NDArray[np.bool_], draws: int = DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """Compute the accuracies of runs on items drawn with replacement, the same for all runs, ``[runs, draws]``.

    Args:
        right: ``[runs, items]``, which items were right.
        draws: number of draws.
        seed: seed of the draws.
    """
    count = right.shape[1]
    # numpy guarantees that the numbers of this generator never change, so pages are the same everywhere.
    random = np.random.RandomState(seed)
    answers = right.T.astype(np.float32)
    found = np.empty((len(right), draws))
    for draw in range(draws):
        times = np.bincount(random.randint(0, count, count), minlength=count).astype(np.float32)
        found[:, draw] = times @ answers / count
    return found


def _draws(results: Results, recipe: str, row: str) -> NDArray[np.float64] | None:
    """Accuracies in percent on resampled items, ``[seeds, draws]``; ``None`` if a seed has no record of items."""
    seeds = _seeds(results, recipe, row)
    recipe = home(recipe, row)
    known = _resampled(results, recipe)
    if not seeds or any((recipe, row, seed) not in known for seed in seeds):
        return None
    return np.stack([known[recipe, row, seed] for seed in seeds])


def _resampled(results: Results, recipe: str) -> Mapping[Key, NDArray[np.float64]]:
    """Resampled accuracies of all runs of a recipe that have a record of the same items."""
    if recipe not in results.resampled:
        records = {key: right for key, right in results.right.items() if key[0] == recipe}
        kept: dict[Key, NDArray[np.float64]] = {}
        # Runs on another corpus have other items. The corpus of most runs is taken to be that of the recipe.
        sizes = [(results.corpus(key), len(right)) for key, right in records.items()]
        if sizes:
            usual = max(dict.fromkeys(sizes), key=sizes.count)
            keys = [key for key, size in zip(records, sizes, strict=True) if size == usual]
            # Corpora of the same size have different items, so each recipe has its own draws.
            found = 100 * resample(np.stack([records[key] for key in keys]), seed=zlib.crc32(recipe.encode()))
            kept = dict(zip(keys, found, strict=True))
        results.resampled[recipe] = kept
    return results.resampled[recipe]


def _seeds(results: Results, recipe: str, row: str) -> list[int]:
    return sorted(results.values(recipe, row, ACCURACY))


def _seed_weights(seeds: int, stream: int) -> NDArray[np.float64]:
    """Weight of each seed in each draw, ``[seeds, draws]``."""
    random = np.random.RandomState(1 + stream)
    return random.multinomial(seeds, [1 / seeds] * seeds, DRAWS).T / seeds


def _percentiles(draws: NDArray[np.float64], over: str) -> ItemInterval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return ItemInterval(low=float(low), high=float(high), over=over)


def _binomial(results: Results, recipe: str, row: str) -> tuple[float, float] | None:
    """Return the mean share of right answers and the number of items, which further seeds do not increase."""
    values = results.values(recipe, row, ACCURACY)
    counts = [results.test_items((home(recipe, row), row, seed)) for seed in values]
    known = [count for count in counts if count is not None]
    if not values or len(known) < len(counts):
        return None
    return min(1.0, max(0.0, mean(list(values.values())) / 100)), min(known)


def _binomial_difference(results: Results, recipes: Sequence[str], first: str, second: str) -> ItemInterval | None:
    """Newcombe's interval, which adds the squared distances to the limits of both shares.

    It assumes that the rows have read different items. They have read the same, so it is wider than necessary.
    """
    centre = below = above = 0.0
    for recipe in recipes:
        pair = (_binomial(results, recipe, first), _binomial(results, recipe, second))
        if pair[0] is None or pair[1] is None:
            return None
        (ours, theirs), limits = (pair[0][0], pair[1][0]), (wilson(*pair[0]), wilson(*pair[1]))
        centre += ours - theirs
        below += (ours - limits[0][0]) ** 2 + (limits[1][1] - theirs) ** 2
        above += (limits[0][1] - ours) ** 2 + (theirs - limits[1][0]) ** 2
    scale = 100 / len(recipes)
    return ItemInterval(
        low=scale * (centre - math.sqrt(below)), high=scale * (centre + math.sqrt(above)), over=BINOMIAL
    )
