"""The tables of the paper, with our numbers next to the paper's, and rows that only we have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mgk.recipes
from mgk.reproduction import beside, throughput
from mgk.reproduction.claims import MINIMUM_SEEDS, claims, judge, with_stand_ins
from mgk.reproduction.items import ACCURACY, accuracy_interval
from mgk.reproduction.metrics import Metric, metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page, verdict_in_words
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results
from mgk.reproduction.stand_ins import can_be_made, explain, in_place_of, is_gone
from mgk.reproduction.statistics import correlation, mean, show, standard_error, t_quantile
from mgk.reproduction.table_texts import LIMITS, TEXTS

Recipes = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Published numbers by recipe, row and metric."""
SEEDS = 5
"""Number of seeds, as in the paper for Long Range Arena."""

OURS = {
    "demo": "test_accuracy",
    "enwik8-small": "test_bits_per_token",
    "peerread": "test_accuracy",
    "enwik8": "test_bits_per_token",
    "enwik8-words": "test_perplexity",
    "wikitext2": "test_perplexity",
    "smollm2": "test_disjoint_perplexity",
    "multi30k": "test_bleu",
    "tatoeba": "test_bleu",
}
"""Our own experiments, on available data, with the metric of each."""

TIMED = ("enwik8", "wikitext2", "multi30k", "tatoeba")
"""Those whose rows are to be compared at equal time as well."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: a recipe and a metric."""

    recipe: str
    metric: Metric


def table_names() -> list[str]:
    """Return the names of the tables in ``paper.yaml``, in its order."""
    return list(mgk.recipes.paper()["tables"])


def table_page(name: str, results: Results, seeds: int = SEEDS) -> Page:
    """Build the page of a table of the paper.

    Args:
        name: ``T1`` ... ``T10``, ``variances``, ``likelihood`` or ``size``.
        results: our results.
        seeds: number of seeds that each row should have.
    """
    table = mgk.recipes.paper()["tables"][name]
    recipes: Recipes = table["recipes"]
    # Tasks that share rows are columns of one table; others have a table each.
    groups = [list(recipes)] if "averages" in table else [[recipe] for recipe in recipes]
    needs = list(
        dict.fromkeys(
            Need(
                recipe=recipe if metric(found).source == "benchmark" else in_place_of(recipe, results),
                row=row, metric=metric(found), seeds=1 if name == "size" else seeds,
            )
            for recipe, rows in recipes.items()
            for row, metrics in rows.items()
            for found in metrics
            if metric(found).source == "benchmark" or can_be_made(recipe, results)
        )
    )  # fmt: skip
    used = list(dict.fromkeys((*recipes, *(need.recipe for need in needs))))
    # A recipe without needs has no available corpus. Times and memory, which need none, are always needs.
    gone = [recipe for recipe in recipes if recipe not in {need.recipe for need in needs}]
    grids = [_grid(group, recipes, table.get("averages"), results) for group in groups]
    grids += [
        _stand_in_grid(recipe, recipes[recipe], results)
        for recipe in gone
        if in_place_of(recipe, results) not in recipes
    ]
    return Page(
        name=name,
        title=table["title"],
        text=(*TEXTS.get(name, ()), *explain(gone, results), *_seeds_in_common(used, results)),
        grids=(*grids, *interval_grids(used, results)),
        verdicts=tuple(judge(with_stand_ins(claims(name), results), results)),
        needs=tuple(needs),
        missing=tuple(find_missing(results, needs, name)),
        notes=(*(text for recipe in used for text in throughput.note(recipe, results)), *results.notes_about(used)),
        numbers=sum(bool(results.values(need.recipe, need.row, need.metric)) for need in needs if need.metric),
    )


def own_page(name: str, results: Results, seeds: int = SEEDS) -> Page:
    """Build the page of one of our own experiments.

    Args:
        name: one of :data:`OURS`, which is the name of a recipe.
        results: our results.
        seeds: number of seeds that each row should have.
    """
    recipe = bundled(name)
    shown = metric(OURS[name])
    heads, cells = beside.columns(name, [shown], recipe.rows, results)
    lines = tuple(
        (row, show(list(results.values(name, row, shown).values()), shown.decimals), *cells[row]) for row in recipe.rows
    )
    about = [shown, *beside.other_windows([shown])]
    needs = [Need(recipe=name, row=row, metric=each, seeds=seeds) for each in about for row in recipe.rows]
    untimed = throughput.find_untimed(name, recipe.rows, results) if name in TIMED else []
    verdicts = tuple(judge(claims(name), results))
    return Page(
        name=name,
        title=recipe.title,
        text=("The paper has no such table: this is our own experiment, with the comparisons that it leaves out.",),
        grids=(Grid(title="", header=("row", shown.title, *heads), lines=lines), *interval_grids([name], results)),
        verdicts=verdicts,
        needs=tuple(needs),
        missing=(*find_missing(results, needs, name), *untimed),
        notes=(*throughput.note(name, results), *results.notes_about([name])),
        numbers=sum(bool(line[1]) for line in lines),
        ending=verdict_in_words(verdicts) if name in LIMITS else "",
        limits=LIMITS.get(name, ()),
    )


def _grid(group: Sequence[str], recipes: Recipes, averages: Mapping[str, float] | None, results: Results) -> Grid:
    """Return a table with the rows of the paper, then the rows that only we have."""
    columns = [
        Column(recipe=recipe, metric=metric(found))
        for recipe in group
        for found in dict.fromkeys(key for metrics in recipes[recipe].values() for key in metrics)
    ]
    rows = list(dict.fromkeys(row for recipe in group for row in recipes[recipe]))
    trained = [row for recipe in group for row in results.rows(recipe)]
    ours = [
        row
        for row in dict.fromkeys(trained)
        if row not in rows and any(results.values(column.recipe, row, column.metric) for column in columns)
    ]
    header = ["row"]
    for column in columns:
        header += [f"{column.recipe}, {column.metric.title}" if len(group) > 1 else column.metric.title, "paper"]
    if averages is not None:
        header += ["average", "paper"]
    lines = [_line(row, columns, recipes, averages, results) for row in (*rows, *ours)]
    if len(group) == 1 and not any(column.metric.source == "benchmark" for column in columns):
        heads, cells = beside.columns(group[0], [column.metric for column in columns], [*rows, *ours], results)
        header += heads
        lines = [(*line, *cells[line[0]]) for line in lines]
    return Grid(title="" if len(group) > 1 or len(recipes) == 1 else group[0], header=tuple(header), lines=tuple(lines))


def interval_grids(recipes: Sequence[str], results: Results) -> list[Grid]:
    """Return tables of the intervals of accuracies over seeds and over test items."""
    lines = []
    for recipe in recipes:
        order = bundled(recipe).rows
        for row in sorted(results.rows(recipe), key=lambda row: order.index(row) if row in order else len(order)):
            values = list(results.values(recipe, row, ACCURACY).values())
            found = accuracy_interval(results, recipe, row)
            if found is None:
                continue
            error = standard_error(values)
            half = None if error is None else t_quantile(0.975, len(values) - 1) * error
            seeds = "" if half is None else f"[{mean(values) - half:.2f}, {mean(values) + half:.2f}]"
            lines.append(
                (recipe, row, f"{mean(values):.2f}", seeds, f"[{found.low:.2f}, {found.high:.2f}]", found.over)
            )
    if not lines:
        return []
    header = ("recipe", "row", ACCURACY.title, "other seeds", "other items", "drawn anew")
    return [Grid(title="95 % intervals of the mean accuracy", header=header, lines=tuple(lines))]


def _seeds_in_common(recipes: Sequence[str], results: Results) -> list[str]:
    """Describe the correlation of rows over common seeds, on which the power of a paired test depends."""
    said = []
    for recipe in recipes:
        values = {row: results.values(recipe, row, ACCURACY) for row in results.rows(recipe)}
        found = [
            correlation([first[seed] for seed in first], [second[seed] for seed in first])
            for first, second in itertools.combinations(values.values(), 2)
            if len(first) >= MINIMUM_SEEDS and first.keys() == second.keys()
        ]
        known = [each for each in found if each is not None]
        if known:
            said.append(
                f"{recipe}: over the seeds that rows share, accuracies of two rows have a correlation of "
                f"{mean(known):+.2f} on average ({len(known)} pairs of rows)."
            )
    return said


def _stand_in_grid(recipe: str, rows: Mapping[str, Mapping[str, float]], results: Results) -> Grid:
    """Return a table with the rows of the paper's table on a stand-in corpus, then the rows that only we have."""
    other = in_place_of(recipe, results)
    assert is_gone(recipe, results)
    assert other != recipe
    shown = [metric(found) for found in dict.fromkeys(key for metrics in rows.values() for key in metrics)]
    more = [row for row in results.rows(other) if row not in rows and results.values(other, row, shown[0])]
    heads, cells = beside.columns(other, shown, [*rows, *more], results)
    lines = tuple(
        (row, *(show(list(results.values(other, row, each).values()), each.decimals) for each in shown), *cells[row])
        for row in (*rows, *more)
    )
    header = ("row", *(each.title for each in shown), *heads)
    return Grid(title=f"{other}, in place of {recipe}", header=header, lines=lines)


def _line(
    row: str,
    columns: Sequence[Column],
    recipes: Recipes,
    averages: Mapping[str, float] | None,
    results: Results,
) -> tuple[str, ...]:
    line = [row]
    per_task: list[list[float]] = []
    for column in columns:
        values = list(results.values(column.recipe, row, column.metric).values())
        published = recipes[column.recipe].get(row, {}).get(column.metric.name)
        digits = column.metric.decimals
        shown = show(values, digits)
        if column.metric.source == "benchmark":
            shown = shown.replace(" (1 seed)", " (measured)")
        line += [shown, "" if published is None else f"{published:.{digits}f}"]
        per_task.append(values)
    if averages is not None:
        printed = averages.get(row)
        line += [show_average(per_task), "" if printed is None else f"{printed:.2f}"]
    return tuple(line)


def show_average(per_task: Sequence[Sequence[float]]) -> str:
    """Format the mean over the means of all tasks, with the error that follows from theirs."""
    if not all(per_task):
        return ""
    centre = mean([mean(values) for values in per_task])
    errors = [standard_error(values) for values in per_task]
    fewest = min(len(values) for values in per_task)
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return f"{centre:.2f} (1 seed)"
    combined = math.sqrt(math.fsum(error**2 for error in known)) / len(known)
    return f"{centre:.2f} ± {combined:.2f} ({fewest} seeds)"
