"""What other test items would have changed: intervals of an accuracy and of a difference, over items and seeds.

A result that says which items were right is resampled: items with replacement, the same items for every run of a
recipe, so that two rows are compared item by item; and seeds with replacement, the same seeds for both rows where they
have the same. A result without such a record has the interval of a binomial share, over its items alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mgk.reproduction.metrics import METRICS
from mgk.reproduction.results import Key, Results
from mgk.reproduction.statistics import mean, t_quantile

DRAWS = 2000
LEVEL = 0.95
ACCURACY = METRICS["test_accuracy"]
RESAMPLED, BINOMIAL = "seeds and items", "items, binomial"


@dataclass(frozen=True, kw_only=True)
class ItemInterval:
    """An interval that other test items, and other seeds, would have moved within."""

    low: float
    high: float
    """In percent."""
    over: str
    """:data:`RESAMPLED`, or :data:`BINOMIAL` where some result has no record of items."""


def accuracy_interval(results: Results, recipe: str, row: str) -> ItemInterval | None:
    """Of the mean accuracy of a row; ``None`` where it has none, or nobody knows of how many items."""
    draws = _draws(results, recipe, row)
    if draws is not None:
        weights = _seed_weights(len(draws), 0)
        return _percentiles((draws * weights).sum(axis=0))
    found = _binomial(results, recipe, row)
    if found is None:
        return None
    low, high = wilson(*found)
    return ItemInterval(low=100 * low, high=100 * high, over=BINOMIAL)


def difference_interval(results: Results, recipes: Sequence[str], first: str, second: str) -> ItemInterval | None:
    """Of the difference between the mean accuracies of two rows, over several recipes of their mean difference.

    Args:
        results: what we have.
        recipes: of which the mean is taken.
        first: the row whose accuracy counts.
        second: the row whose accuracy is taken off.
    """
    resampled = [(_draws(results, recipe, first), _draws(results, recipe, second)) for recipe in recipes]
    total = np.zeros(DRAWS)
    for number, (recipe, (ours, theirs)) in enumerate(zip(recipes, resampled, strict=True)):
        if ours is None or theirs is None:
            return _binomial_difference(results, recipes, first, second)
        # Seeds of two tasks have nothing to do with each other: each task draws its own.
        are_pairs = _seeds(results, recipe, first) == _seeds(results, recipe, second)
        own = _seed_weights(len(ours), 2 * number)
        other = own if are_pairs else _seed_weights(len(theirs), 2 * number + 1)
        total += (ours * own).sum(axis=0) - (theirs * other).sum(axis=0)
    return _percentiles(total / len(recipes))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's score interval of a binomial share."""
    if count <= 0 or not 0 <= share <= 1:
        raise ValueError(f"a share must lie in [0, 1] and be of at least one item, got {share} of {count}")
    square = t_quantile((1 + LEVEL) / 2, math.inf) ** 2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(square * (share * (1 - share) / count + square / (4 * count**2))) / (1 + square / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def resample(right: NDArray[np.bool_], draws: int = DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """Accuracies of runs on other items, ``[runs, draws]``: items are drawn with replacement, the same for all runs.

    Args:
        right: ``[runs, items]``.
        draws: how often.
        seed: of the draws.
    """
    count = right.shape[1]
    # The generator whose numbers numpy promises never to change: pages must come out the same everywhere.
    random = np.random.RandomState(seed)
    answers = right.T.astype(np.float32)
    found = np.empty((len(right), draws))
    for draw in range(draws):
        times = np.bincount(random.randint(0, count, count), minlength=count).astype(np.float32)
        found[:, draw] = times @ answers / count
    return found


def _draws(results: Results, recipe: str, row: str) -> NDArray[np.float64] | None:
    """Accuracies in percent on items drawn anew, ``[seeds, draws]``; ``None`` where a seed has no record of items."""
    seeds = _seeds(results, recipe, row)
    known = _resampled(results, recipe)
    if not seeds or any((recipe, row, seed) not in known for seed in seeds):
        return None
    return np.stack([known[recipe, row, seed] for seed in seeds])


def _resampled(results: Results, recipe: str) -> Mapping[Key, NDArray[np.float64]]:
    """All runs of a recipe that have a record of the same items."""
    if recipe not in results.resampled:
        records = {key: right for key, right in results.right.items() if key[0] == recipe}
        kept: dict[Key, NDArray[np.float64]] = {}
        # Runs on another corpus share no items with the others. Which corpus most of them had is that of the recipe.
        sizes = [(results.corpus(key), len(right)) for key, right in records.items()]
        if sizes:
            usual = max(dict.fromkeys(sizes), key=sizes.count)
            keys = [key for key, size in zip(records, sizes, strict=True) if size == usual]
            # Corpora of the same size share no items either, so each recipe has draws of its own.
            found = 100 * resample(np.stack([records[key] for key in keys]), seed=zlib.crc32(recipe.encode()))
            kept = dict(zip(keys, found, strict=True))
        results.resampled[recipe] = kept
    return results.resampled[recipe]


def _seeds(results: Results, recipe: str, row: str) -> list[int]:
    return sorted(results.values(recipe, row, ACCURACY))


def _seed_weights(seeds: int, stream: int) -> NDArray[np.float64]:
    """How much each seed counts in each draw, ``[seeds, draws]``."""
    random = np.random.RandomState(1 + stream)
    return random.multinomial(seeds, [1 / seeds] * seeds, DRAWS).T / seeds


def _percentiles(draws: NDArray[np.float64]) -> ItemInterval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return ItemInterval(low=float(low), high=float(high), over=RESAMPLED)


def _binomial(results: Results, recipe: str, row: str) -> tuple[float, float] | None:
    """The mean share of right answers, and of how many items. Seeds read the same items, so they do not add any."""
    values = results.values(recipe, row, ACCURACY)
    counts = [results.test_items((recipe, row, seed)) for seed in values]
    known = [count for count in counts if count is not None]
    if not values or len(known) < len(counts):
        return None
    return min(1.0, max(0.0, mean(list(values.values())) / 100)), min(known)


def _binomial_difference(results: Results, recipes: Sequence[str], first: str, second: str) -> ItemInterval | None:
    """Newcombe's interval, which adds the distances to the limits of both shares as squares, as if the rows had read
    different items. Since they read the same, it is wider than it need be."""
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
