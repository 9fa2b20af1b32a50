"""Results with rows of other recipes under the name of a recipe whose table shows them: nothing is trained twice."""

from __future__ import annotations

from dataclasses import replace

from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results, run_name


def with_rows_beside(recipe: str, results: Results) -> Results:
    """The same results; what belongs to a row beside a recipe's own counts as that recipe's, too.

    Both recipes have the same values, which is checked when the recipe is read: a run of the one is a run of the other.
    """
    homes = {row: name for name, row in bundled(recipe).table if name != recipe}
    lent = [(name, row, seed) for name, row, seed in results.runs if homes.get(row) == name]
    evaluated = [(key, split) for key, split in results.evaluations if homes.get(key[1]) == key[0]]
    trained = [key for key in lent if run_name(*key) in results.trainings]
    return replace(
        results,
        runs={**results.runs, **{(recipe, row, seed): results.runs[name, row, seed] for name, row, seed in lent}},
        evaluations={
            **results.evaluations,
            **{((recipe, *key[1:]), split): results.evaluations[key, split] for key, split in evaluated},
        },
        trainings={
            **results.trainings,
            **{run_name(recipe, *key[1:]): results.trainings[run_name(*key)] for key in trained},
        },
    )
