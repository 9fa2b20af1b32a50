"""How our training differs from the published code, and what each difference does: the page ``fidelity``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import mgk.recipes
from mgk.recipes.recipe import FOLDER
from mgk.reproduction.controls import Control, find_missing_controls, notes_about, read_controls
from mgk.reproduction.escape import step_of_escape
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import contrast, mean, show
from mgk.training.configuration import read_yaml

NAME = "fidelity"
TITLE = "Fidelity: where our Long Range Arena training differs from the published code, and what that does"
NOT_RUN = "not run yet"
ACCURACY = metric("test_accuracy")
CURVE = metric("mean_valid_accuracy")


@functools.cache
def fidelity() -> dict[str, Any]:
    """``fidelity.yaml``: what is the same, what differs, and which recipes are compared."""
    return read_yaml(FOLDER / "fidelity.yaml")


def variants() -> list[str]:
    """The recipes that differ from another one in a single point."""
    return [variant for comparison in fidelity()["comparisons"] for variant in comparison["variants"]]


def fidelity_page(results: Results, seeds: int) -> Page:
    """The page.

    Args:
        results: what we have.
        seeds: how many each row should have.
    """
    content = fidelity()
    controls = read_controls(results.folder)
    compared = _compared(content["control"])
    of_control = [each for each in controls if each.name == content["control"]["name"]]
    grids = [_controls(content["control"], compared, of_control, results), _differences(content["differences"])]
    needs: list[Need] = []
    numbers = len(of_control)
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
            "The paper follows mlpen/Nystromformer, and its released code is a fork of NVIDIA/transformer-ls. "
            "Everything that an audit of these found to be different from ours is listed here; where a number may "
            "depend on it, a recipe has the published choice, or ours of before. Results belong to the recipe whose "
            "configuration they were made with, the model in full included, so runs of a variant never count for the "
            "tables of the paper.",
            "**The same as published:** " + " ".join(content["same"]),
            "A run of ListOps starts on a plateau, where it predicts the majority class, and leaves it for what the "
            "outermost operator says. The step at which it does so is that of the first validation above "
            f"{100 * content['comparisons'][0]['plateau']:.0f} %. A difference is that of the means of a variant and "
            "of the recipe that it is a variant of, in points, where both have runs.",
            content["control"]["text"],
        ),
        grids=tuple(grids),
        needs=tuple(needs),
        missing=(
            *find_missing(results, needs, NAME),
            *find_missing_controls(of_control, [(heads, dropout) for heads, dropout, _, _ in compared]),
        ),
        notes=(
            *results.notes_about({need.recipe for need in needs}),
            *notes_about(of_control, _fingerprints(compared, results)),
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


def _compared(control: Mapping[str, Any]) -> list[tuple[int, float, str, str]]:
    """Heads and dropout of each control that there should be, and our recipe and row with the same."""
    return [
        (heads, float(each["dropout"]), each["recipe"], f"{control['row']}-{heads}")
        for heads in control["heads"]
        for each in control["recipes"]
    ]


def _controls(
    described: Mapping[str, Any],
    compared: Sequence[tuple[int, float, str, str]],
    controls: Sequence[Control],
    results: Results,
) -> Grid:
    """Two lines for each number of heads and dropout: the published code, and ours."""
    lines: list[tuple[str, ...]] = []
    for heads, dropout, recipe, row in compared:
        own = [each for each in controls if (each.heads, each.dropout) == (heads, dropout)]
        tested = [ACCURACY.scale * each.accuracy for each in own if each.is_complete and each.accuracy is not None]
        # One that was stopped on the plateau may have left it later.
        known = [
            each.curve
            for each in own
            if each.is_complete or step_of_escape(each.curve, described["plateau"]) is not None
        ]
        escapes = _left(known, described["plateau"]) if known else ("", "")
        theirs = show(tested, ACCURACY.decimals) if tested else "" if own else NOT_RUN
        setting = (str(heads), f"{dropout:g}")
        seeds = [str(each.seed) if each.is_complete else f"{each.seed} (stopped at {each.steps:,})" for each in own]
        lines.append(("published", *setting, ", ".join(seeds), theirs, *escapes))
        values = results.values(recipe, row, ACCURACY)
        accuracy = show(list(values.values()), ACCURACY.decimals) if values else NOT_RUN
        escapes = _escapes(results, recipe, row, described["plateau"]) if values else ("", "")
        lines.append((f"{recipe}, {row}", *setting, ", ".join(map(str, values)), accuracy, *escapes))
    header = ("code", "heads", "dropout", "seeds", ACCURACY.title, "left the plateau", "at step")
    return Grid(title=described["title"], header=header, lines=tuple(lines))


def _fingerprints(compared: Sequence[tuple[int, float, str, str]], results: Results) -> set[str]:
    """Those of the data of our runs that stand beside a control."""
    wanted = {(recipe, row) for _, _, recipe, row in compared}
    return {results.corpus(key) for key in results.runs if key[:2] in wanted} - {""}


def _rows(recipe: str, comparison: Mapping[str, Any]) -> Sequence[str]:
    """The rows of a variant; of the recipe itself those that any variant has."""
    own = mgk.recipes.load(recipe).rows
    if recipe != comparison["recipe"] or not comparison["variants"]:
        return own
    compared = {row for variant in comparison["variants"] for row in mgk.recipes.load(variant).rows}
    return [row for row in own if row in compared]


def _comparison(comparison: Mapping[str, Any], rows: Mapping[str, Sequence[str]], results: Results) -> Grid:
    """A line for each recipe and row that has a run; a recipe without any has one line."""
    lines: list[tuple[str, ...]] = []
    threshold = comparison.get("plateau")
    for recipe, own in rows.items():
        shown = [row for row in own if results.values(recipe, row, ACCURACY)]
        for row in shown:
            accuracy = show(list(results.values(recipe, row, ACCURACY).values()), ACCURACY.decimals)
            published = mgk.recipes.published(comparison["recipe"], row).get("test_accuracy")
            effect = "" if recipe == comparison["recipe"] else _effect(results, recipe, comparison["recipe"], row)
            line = (recipe, row, accuracy, effect, "" if published is None else f"{published:.2f}")
            lines.append(line if threshold is None else (*line, *_escapes(results, recipe, row, threshold)))
        absent = [row for row in own if row not in shown]
        if absent:
            listed = ", ".join(absent) if shown else "all rows"
            lines.append((recipe, listed, NOT_RUN, "", "", *(("", "") if threshold is not None else ())))
    header: tuple[str, ...] = ("recipe", "row", ACCURACY.title, "difference", "paper")
    if threshold is not None:
        header = (*header, "left the plateau", "at step")
    title = f"{comparison['recipe']} and its variants" if comparison["variants"] else comparison["recipe"]
    return Grid(title=title, header=header, lines=tuple(lines))


def _effect(results: Results, variant: str, recipe: str, row: str) -> str:
    """The difference of the means, with its standard error where both have two seeds at least."""
    ours, other = (list(results.values(name, row, ACCURACY).values()) for name in (recipe, variant))
    if not ours or not other:
        return ""
    difference = f"{mean(other) - mean(ours):+.{ACCURACY.decimals}f}"
    if min(len(ours), len(other)) < 2:
        return difference
    return f"{difference} ± {contrast([(1, other), (-1, ours)]).error:.{ACCURACY.decimals}f}"


def _escapes(results: Results, recipe: str, row: str, threshold: float) -> tuple[str, str]:
    """How many runs left the plateau, and when each did."""
    curves = results.curves(recipe, row)
    return _left(list(curves.values()), threshold) if curves else ("no curves", "")


def _left(curves: Sequence[Sequence[Mapping[str, Any]]], threshold: float) -> tuple[str, str]:
    steps = [step_of_escape(lines, threshold) for lines in curves]
    left = sorted(step for step in steps if step is not None)
    return f"{len(left)} of {len(steps)}", ", ".join(f"{step:,}" for step in left)
