"""The results that are missing, and the commands that produce them."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mgk.reproduction.metrics import Metric, slide_of
from mgk.reproduction.recipe import bundled, home
from mgk.reproduction.results import ANALYSIS, Results, run_name

RUNS = "runs"
MEASURED = ("smgk", "mgk", "smlk", "mlk")
"""Mixtures of Table 7, with which their baselines are measured."""
SAMPLES = 32
"""Number of sequences in an analysis, which with 4 heads gives 128 attention matrices per layer."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something that a page needs of a row: a metric for a number of seeds, or a picture."""

    recipe: str
    row: str
    metric: Metric | None = None
    """The metric; ``None`` for a picture."""
    picture: str = ""
    """File that ``mgk analyze`` draws."""
    seeds: int = 1
    """Number of seeds: 0, 1, ..., or as many others."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A missing result."""

    what: str
    """Description: rows and seeds of a recipe."""
    commands: tuple[str, ...]
    """Commands that produce it, in order."""
    runs: int = 0
    """Number of training runs among it."""


def find_missing(results: Results, needs: Sequence[Need], page: str) -> list[Missing]:
    """Return the results that a page needs and that are missing.

    Args:
        results: our results.
        needs: what the page needs.
        page: the table or figure, or ``all``.
    """
    untrained: dict[str, dict[str, set[int]]] = {}
    after: dict[tuple[str, str], tuple[set[int], set[str]]] = {}
    unmeasured: dict[str, list[str]] = {}
    for need in needs:
        if need.metric is not None and need.metric.source == "benchmark":
            rows = unmeasured.setdefault(need.recipe, [])
            if results.measurement(need.recipe, need.row) is None and need.row not in rows:
                rows.append(need.row)
            continue
        recipe = home(need.recipe, need.row)
        absent = _absent_seeds(results, need)
        source = "analysis" if need.metric is None else need.metric.source
        if source in ("evaluation", "analysis") and absent:
            own, what = after.setdefault((recipe, need.row), (set(), set()))
            own |= absent
            what.add("analysis" if need.metric is None or source == "analysis" else _options(need.recipe, need.metric))
            absent -= results.trained(recipe, need.row)
        if absent:
            untrained.setdefault(recipe, {}).setdefault(need.row, set()).update(absent)
    listed = [missing for recipe, rows in untrained.items() for missing in _training(results, recipe, rows)]
    for (recipe, row), (seeds, what) in after.items():
        listed.append(_afterwards(results, recipe, row, sorted(seeds), what))
    listed += [_measuring(recipe, rows) for recipe, rows in unmeasured.items() if rows]
    sources = {need.metric.source for need in needs if need.metric is not None}
    if (untrained or after) and sources & {"evaluation", "curve"}:
        command = f"mgk reproduce {page} --collect {RUNS} --results {results.folder}"
        listed.append(Missing(what="the results of these runs, collected from their folders", commands=(command,)))
    return listed


def _options(recipe: str, metric: Metric) -> str:
    """Of ``mgk evaluate``: the split, and the stride where it is another than usual."""
    stride = slide_of(str(bundled(recipe).values["data"]["corpus"])) if metric.slides else 1
    return metric.split if stride == 1 else f"{metric.split} --stride {stride}"


def _absent_seeds(results: Results, need: Need) -> set[int]:
    if need.metric is None:
        if results.picture(need.recipe, need.row, need.picture) is not None:
            return set()
        # A picture needs only one run: an existing one, if there is any.
        return {min(results.trained(need.recipe, need.row), default=0)}
    found = results.values(need.recipe, need.row, need.metric)
    return set(sorted(set(range(need.seeds)) - found.keys())[: max(0, need.seeds - len(found))])


def seed_range(seeds: Sequence[int]) -> str:
    """Format seeds for ``mgk sweep --seeds``: ``0-4`` or ``0,3``."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(seeds)), key=lambda pair: pair[1] - pair[0]):
        run = [seed for _, seed in group]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(parts)


def _seeds_in_words(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {seed_range(seeds)}"


def _measurement_in_words(what: str) -> str:
    return what if what == "analysis" else f"evaluation on the {what.split()[0]} set"


def _training(results: Results, recipe: str, rows: dict[str, set[int]]) -> list[Missing]:
    """Return the missing training runs. Rows that lack the same seeds share one sweep."""
    together: dict[tuple[int, ...], list[str]] = {}
    for row, absent in rows.items():
        together.setdefault(tuple(sorted(absent)), []).append(row)
    listed = []
    for seeds, names in together.items():
        if len(seeds) == len(names) == 1:
            command = f"mgk train {recipe} --row {names[0]} seed={seeds[0]} --results {results.folder}"
        else:
            command = (
                f"mgk sweep {recipe} --rows {shlex.quote(' '.join(names))} --seeds {seed_range(seeds)} "
                f"--results {results.folder}"
            )
        count = len(seeds) * len(names)
        what = f"{recipe}: {count} run{'s' if count > 1 else ''}, {', '.join(names)}, {_seeds_in_words(seeds)}"
        listed.append(Missing(what=what, commands=(command,), runs=count))
    return listed


def _afterwards(results: Results, recipe: str, row: str, seeds: Sequence[int], what: set[str]) -> Missing:
    """Return what has to be measured on finished runs."""
    folder = f"{RUNS}/{recipe}/{row}/seed-"
    commands = [
        _for_each(seeds, f"mgk evaluate {folder}", f" --split {split}") for split in sorted(what - {"analysis"})
    ]
    if "analysis" in what:
        to = f"{results.folder}/{ANALYSIS}/{run_name(recipe, row, 0).removesuffix('0')}"
        commands.append(_for_each(seeds, f"mgk analyze {folder}", f" --samples {SAMPLES} --to {to}", ""))
    return Missing(
        what=f"{recipe}, {row}, {_seeds_in_words(seeds)}: {', '.join(map(_measurement_in_words, sorted(what)))}",
        commands=tuple(commands),
    )


def _for_each(seeds: Sequence[int], *parts: str) -> str:
    """Return a line of shell that runs a command for each seed, which is inserted between its parts."""
    if len(seeds) == 1:
        return str(seeds[0]).join(parts)
    return f"for seed in {' '.join(map(str, seeds))}; do {'$seed'.join(parts)}; done"


def _measuring(recipe: str, rows: Sequence[str]) -> Missing:
    # The result file is written as a whole, so rows that are already there are measured again.
    presets = " ".join(f"--preset {name}" for name in MEASURED)
    return Missing(what=f"{recipe}: time and memory of {', '.join(rows)}", commands=(f"mgk bench retrieval {presets}",))
