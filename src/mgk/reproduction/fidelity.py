"""The page ``fidelity``: the differences between our training and the published code, and the effect of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mgk.recipes
from mgk.reproduction import published_code, same_start, starts
from mgk.reproduction.controls import find_missing_controls, notes_about
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page
from mgk.reproduction.published_code import ACCURACY, NOT_RUN, escapes, fidelity
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import contrast, mean, show

NAME = "fidelity"
TITLE = "Fidelity: where our Long Range Arena training differs from the published code, and what that does"
CURVE = metric("mean_valid_accuracy")


def variants() -> list[str]:
    """Return the recipes that differ from another one in a single point."""
    return [variant for comparison in fidelity()["comparisons"] for variant in comparison["variants"]]


def fidelity_page(results: Results, seeds: int) -> Page:
    """Build the page.

    Args:
        results: our results.
        seeds: number of seeds that each row should have.
    """
    content = fidelity()
    controls = published_code.runs(results)
    settings = published_code.settings()
    pairs = same_start.pairs(controls, results)
    grids = [published_code.grid(controls, results)]
    if pairs:
        grids.append(same_start.grid(pairs))
    begun = starts.starts(results)
    if begun:
        grids.append(starts.grid(begun))
    grids.append(_differences(content["differences"]))
    needs: list[Need] = []
    numbers = len(controls) + len(pairs)
    for comparison in content["comparisons"]:
        recipes = [comparison["recipe"], *comparison["variants"]]
        rows = {recipe: _rows(recipe, comparison) for recipe in recipes}
        grids.append(_comparison(comparison, rows, results))
        shown = (ACCURACY, CURVE) if "plateau" in comparison else (ACCURACY,)
        needs += [
            Need(recipe=recipe, row=row, metric=each, seeds=seeds)
            for recipe in recipes
            for row in rows[recipe]
            for each in shown
        ]
        numbers += sum(bool(results.values(recipe, row, ACCURACY)) for recipe in recipes for row in rows[recipe])
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            "The paper follows mlpen/Nystromformer, and its released code is a fork of NVIDIA/transformer-ls. This "
            "page lists every difference between our training and theirs that an audit found. If a number may depend "
            "on a difference, there is a recipe with the published choice, or with our former one. A result belongs to "
            "the recipe that has its whole configuration, so runs of a variant never count for the tables of the "
            "paper.",
            "**The same as published:** " + " ".join(content["same"]),
            "A run of ListOps starts on a plateau, where it predicts the largest class. It leaves the plateau when it "
            "learns to read the outermost operator. We take that to be its first validation above "
            f'{100 * content["comparisons"][0]["plateau"]:.0f} %. The column "difference" is the mean of the variant '
            "minus the mean of its recipe, with the standard error of that, if both have runs.",
            content["control"]["text"],
            *published_code.sentences(controls, results),
            *same_start.sentences(pairs),
            *starts.sentences(begun),
        ),
        grids=tuple(grids),
        needs=tuple(needs),
        missing=(
            *find_missing(results, needs, NAME),
            *find_missing_controls(controls, list(dict.fromkeys((each.heads, each.dropout) for each in settings))),
            *same_start.find_missing_pairs(controls, pairs),
        ),
        notes=(
            *results.notes_about({need.recipe for need in needs}),
            *notes_about(controls, published_code.fingerprints(results)),
        ),
        numbers=numbers,
    )


def _differences(listed: Sequence[Mapping[str, Any]]) -> Grid:
    lines = tuple(
        (
            each["point"], each["ours"], each["published"], each["where"], each["why"],
            ", ".join(f"`{variant}`" for variant in each["variants"]),
        )
        for each in listed
    )  # fmt: skip
    return Grid(
        title="What differs",
        header=("point", "ours", "published", "where", "why ours", "recipes with the other choice"),
        lines=lines,
    )


def _rows(recipe: str, comparison: Mapping[str, Any]) -> Sequence[str]:
    """Return the rows of a variant; for the recipe itself, the rows that any variant has."""
    own = bundled(recipe).rows
    if recipe != comparison["recipe"] or not comparison["variants"]:
        return own
    compared = {row for variant in comparison["variants"] for row in bundled(variant).rows}
    return [row for row in own if row in compared]


def _comparison(comparison: Mapping[str, Any], rows: Mapping[str, Sequence[str]], results: Results) -> Grid:
    """Return a table with a line for each recipe and row with runs, and one line for a recipe without runs."""
    lines: list[tuple[str, ...]] = []
    threshold = comparison.get("plateau")
    for recipe, own in rows.items():
        shown = [row for row in own if results.values(recipe, row, ACCURACY)]
        for row in shown:
            accuracy = show(list(results.values(recipe, row, ACCURACY).values()), ACCURACY.decimals)
            published = mgk.recipes.published(comparison["recipe"], row).get("test_accuracy")
            effect = "" if recipe == comparison["recipe"] else _effect(results, recipe, comparison["recipe"], row)
            line = (recipe, row, accuracy, effect, "" if published is None else f"{published:.2f}")
            lines.append(line if threshold is None else (*line, *escapes(results, recipe, row, threshold)))
        absent = [row for row in own if row not in shown]
        if absent:
            listed = ", ".join(absent) if shown else "all rows"
            lines.append((recipe, listed, NOT_RUN, "", "", *(("", "") if threshold is not None else ())))
    header: tuple[str, ...] = ("recipe", "row", ACCURACY.title, "difference, points", "paper")
    if threshold is not None:
        header = (*header, "left the plateau", "at steps")
    title = f"{comparison['recipe']} and its variants" if comparison["variants"] else comparison["recipe"]
    return Grid(title=title, header=header, lines=tuple(lines))


def _effect(results: Results, variant: str, recipe: str, row: str) -> str:
    """Format the difference of the means, with its standard error if both have at least two seeds."""
    ours, other = (list(results.values(name, row, ACCURACY).values()) for name in (recipe, variant))
    if not ours or not other:
        return ""
    difference = f"{mean(other) - mean(ours):+.{ACCURACY.decimals}f}"
    if min(len(ours), len(other)) < 2:
        return difference
    return f"{difference} ± {contrast([(1, other), (-1, ours)]).error:.{ACCURACY.decimals}f}"
