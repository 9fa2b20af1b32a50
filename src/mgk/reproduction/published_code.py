"""Comparison of the published code on our data with our own runs, to tell whether our training does the same.

Final accuracies hardly tell, because most runs end at the accuracy that the outermost operator alone gives. The step at
which a run leaves the plateau does.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mgk.recipes.recipe import FOLDER
from mgk.reproduction.claims import LEVEL, show_p
from mgk.reproduction.controls import Control, read_controls
from mgk.reproduction.escape import run_of, step_of_escape
from mgk.reproduction.metrics import metric
from mgk.reproduction.page import Grid
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import show
from mgk.reproduction.survival import LogRank, Run, log_rank_of_units
from mgk.training.configuration import read_yaml

NOT_RUN = "not run yet"
ACCURACY = metric("test_accuracy")


@functools.cache
def fidelity() -> dict[str, Any]:
    """Read ``fidelity.yaml``: what agrees, what differs, which recipes are compared, and with which published code."""
    return read_yaml(FOLDER / "fidelity.yaml")


class Setting(NamedTuple):
    """What a run of the published code and runs of ours have in common."""

    heads: int
    dropout: float
    recipe: str
    row: str


def groups() -> dict[str, list[Setting]]:
    """Return the settings of our runs to compare with the published code, by the name of their group."""
    control = fidelity()["control"]
    return {
        group["with"]: [
            Setting(heads, float(each["dropout"]), each["recipe"], f"{control['row']}-{heads}")
            for heads in control["heads"]
            for each in group["recipes"]
        ]
        for group in control["ours"]
    }


def settings() -> list[Setting]:
    """Return the settings of all groups."""
    return [setting for group in groups().values() for setting in group]


def runs(results: Results) -> list[Control]:
    """Return the runs of the published code."""
    return [each for each in read_controls(results.folder) if each.name == fidelity()["control"]["name"]]


def grid(controls: Sequence[Control], results: Results) -> Grid:
    """Build the table: a line for the published code and one per group of ours, by heads and dropout."""
    threshold = fidelity()["control"]["plateau"]
    lines: list[tuple[str, ...]] = []
    for heads, dropout in dict.fromkeys((each.heads, each.dropout) for each in settings()):
        own = [each for each in controls if (each.heads, each.dropout) == (heads, dropout)]
        tested = [ACCURACY.scale * each.accuracy for each in own if each.is_complete and each.accuracy is not None]
        # One that was stopped on the plateau may have left it later.
        known = [each.curve for each in own if each.is_complete or step_of_escape(each.curve, threshold) is not None]
        left = show_escapes(known, threshold) if known else ("", "")
        theirs = show(tested, ACCURACY.decimals) if tested else "" if own else NOT_RUN
        shown = (str(heads), f"{dropout:g}")
        seeds = [str(each.seed) if each.is_complete else f"{each.seed} (stopped at {each.steps:,})" for each in own]
        lines.append(("published", *shown, ", ".join(seeds), theirs, *left))
        for setting in settings():
            if (setting.heads, setting.dropout) == (heads, dropout):
                values = results.values(setting.recipe, setting.row, ACCURACY)
                accuracy = show(list(values.values()), ACCURACY.decimals) if values else NOT_RUN
                left = escapes(results, setting.recipe, setting.row, threshold) if values else ("", "")
                name = f"{setting.recipe}, {setting.row}"
                lines.append((name, *shown, ", ".join(map(str, values)), accuracy, *left))
    header = ("code", "heads", "dropout", "seeds", ACCURACY.title, "left the plateau", "at steps")
    return Grid(title=fidelity()["control"]["title"], header=header, lines=tuple(lines))


class Comparison(NamedTuple):
    """A log-rank test between the published code and ours, and what it counts."""

    test: LogRank
    runs: tuple[int, int]
    """Runs of the published code and of ours."""
    seeds: tuple[int, int]


def compare_escapes(group: Sequence[Setting], controls: Sequence[Control], results: Results) -> Comparison | None:
    """Compare a group of ours with the published code by a log-rank test, with a stratum for each setting.

    Runs of one code that share a seed take the same batches, and with as many heads they start from the same weights.
    They are no independent draws, so the test shares out seeds and not runs.

    Returns:
        The test; ``None`` if no setting has runs of both.
    """
    threshold = fidelity()["control"]["plateau"]
    theirs: defaultdict[int, dict[Setting, Run]] = defaultdict(dict)
    own_runs: defaultdict[int, dict[Setting, Run]] = defaultdict(dict)
    for setting in group:
        published = _of(setting, controls)
        own = curves_of_ours(results, setting.recipe, setting.row)
        if published and own:
            for found, by_seed in ((theirs, {each.seed: each.curve for each in published}), (own_runs, own)):
                for seed, lines in by_seed.items():
                    run = run_of(lines, threshold)
                    if run is not None:
                        found[seed][setting] = run
    if not theirs:
        return None
    units = [list(runs.values()) for runs in (theirs, own_runs)]
    first, second = (sum(map(len, each)) for each in units)
    return Comparison(log_rank_of_units(*units), (first, second), (len(theirs), len(own_runs)))


def sentences(controls: Sequence[Control], results: Results) -> tuple[str, ...]:
    """Describe the comparison for each group that has runs."""
    said = []
    for name, group in groups().items():
        compared = compare_escapes(group, controls, results)
        if compared is None:
            continue
        found = compared.test
        theirs, ours = (
            f"{runs} runs of {whose} from {seeds} seed{'s' if seeds > 1 else ''}"
            for whose, runs, seeds in zip(("the published code", "ours"), compared.runs, compared.seeds, strict=True)
        )
        test = (
            f"log-rank test with a stratum for each number of heads and dropout, {theirs} and {ours}; it shares out "
            f"whole seeds, since runs of one seed have the same batches; {'exact ' if found.is_exact else ''}p "
            f"{show_p(found.p)}{_least(compared)}"
        )
        if found.p >= LEVEL:
            decided = "There are too few seeds to say" if found.least >= LEVEL else "The runs do not show"
            said.append(
                f"{decided} whether the published code leaves the plateau earlier than ours with {name}, or later "
                f"({test})."
            )
        elif found.excess > 0:
            said.append(f"**The published code leaves the plateau earlier than ours with {name}** ({test}).")
        else:
            said.append(f"**Our training with {name} leaves the plateau earlier than the published code** ({test}).")
    return tuple(said)


def _least(compared: Comparison) -> str:
    """Say so if no result with as many seeds could have had a smaller p."""
    test = compared.test
    return ", the smallest that so few seeds allow" if test.p < 1.5 * test.least and test.least >= LEVEL else ""


def fingerprints(results: Results) -> set[str]:
    """Return the fingerprints of the data of our runs in the comparison."""
    wanted = {(each.recipe, each.row) for each in settings()}
    return {results.corpus(key) for key in results.runs if key[:2] in wanted} - {""}


def escapes(results: Results, recipe: str, row: str, threshold: float) -> tuple[str, str]:
    """Describe how many of our runs left the plateau, and at which steps."""
    curves = curves_of_ours(results, recipe, row)
    return show_escapes(list(curves.values()), threshold) if curves else ("no curves", "")


def curves_of_ours(results: Results, recipe: str, row: str) -> dict[int, list[dict[str, Any]]]:
    """Return the curves of our runs that have ended, by seed."""
    ended = results.values(recipe, row, ACCURACY)
    return {seed: lines for seed, lines in results.curves(recipe, row).items() if seed in ended}


def show_escapes(curves: Sequence[Sequence[Mapping[str, Any]]], threshold: float) -> tuple[str, str]:
    """Describe how many runs left the plateau, and at which steps."""
    steps = [step_of_escape(lines, threshold) for lines in curves]
    left = sorted(step for step in steps if step is not None)
    return f"{len(left)} of {len(steps)}", ", ".join(f"{step:,}" for step in left)


def _of(setting: Setting, controls: Sequence[Control]) -> list[Control]:
    return [each for each in controls if (each.heads, each.dropout) == (setting.heads, setting.dropout)]
