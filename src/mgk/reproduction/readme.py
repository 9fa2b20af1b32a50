"""The results in the README: one line for each recipe with results, and the claims that do not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mgk.recipes
from mgk.reproduction import plateau, published_code, same_start
from mgk.reproduction.metrics import Metric, metric
from mgk.reproduction.page import Grid, Page, by_sentence, markdown_table, summary
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import mean, show, standard_error, t_quantile
from mgk.reproduction.survival_curves import split_row
from mgk.reproduction.tables import OURS

BEGIN = "<!-- results: written by `mgk reproduce all` from results/, do not edit up to the end of results -->"
END = "<!-- end of results -->"
PAGES = "docs/results"
"""Folder of the pages, relative to the README."""

_METRICS = {
    "classification": "test_accuracy", "pairs": "test_accuracy", "language": "test_perplexity",
    "translation": "test_bleu",
    "uptraining": "test_disjoint_perplexity",
}  # fmt: skip
_COLUMNS = {
    "all heads": (("softmax", ""), ("linear", "")),
    "all heads, q and k normalised": (("softmax", "+qk_norm"),),
    "half the heads, one Gaussian": (("gaussian", ""),),
    "half the heads, shifted keys": (("smgk", ""), ("smlk", "")),
    "half the heads, projected keys": (("mgk", ""), ("mlk", "")),
}
"""Columns, with their kinds of attention and options."""


def fill(path: Path, text: str) -> bool:
    """Write the results between the marks of the README, and return whether it has marks."""
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in content:
        return False
    before, rest = content.split(BEGIN, 1)
    if END not in rest:
        raise ValueError(f"{path} must say where its results end, got no {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    return True


def results_text(pages: Sequence[Page], results: Results) -> str:
    """Return the text between the marks.

    Args:
        pages: all pages.
        results: our results.
    """
    parts = [
        f"The paper's tables and figures are made again from the runs in `results/`, each with a verdict on what the "
        f"paper says: [all pages]({PAGES}/README.md). Below: mean ± standard error over seeds."
    ]
    lines = [line for recipe in _shown_recipes(results) if (line := _line(recipe, results)) is not None]
    header = ("experiment", "test", *_COLUMNS)
    if lines:
        shown = [place for place in range(len(header)) if any(line[place] for line in lines)]
        kept = tuple(tuple(line[place] for place in shown) for line in lines)
        parts.append(markdown_table(Grid(title="", header=tuple(header[place] for place in shown), lines=kept)))
    else:
        parts.append("There are no results yet.")
    parts += _sentences(pages, results)
    return "\n\n".join(parts)


def _shown_recipes(results: Results) -> list[str]:
    """Return the recipes of the table.

    A variant, such as a former choice of ours, has its place on the page ``fidelity``. Here it stands only while the
    recipe itself has no runs, and then of all variants the one that differs least.
    """
    left_out: set[str] = set()
    for comparison in published_code.fidelity()["comparisons"]:
        recipe, variants = comparison["recipe"], comparison["variants"]
        trained = [name for name in (recipe, *variants) if results.rows(name)]
        shown = min(trained, key=lambda name: _count_differences(recipe, name), default=recipe)
        left_out |= {recipe, *variants} - {shown}
    return [name for name in mgk.recipes.names() if name not in left_out]


def _count_differences(one: str, other: str) -> int:
    first, second = (_leaves(bundled(name).values) for name in (one, other))
    return sum(first.get(key) != second.get(key) for key in first.keys() | second.keys())


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by names such as ``model.pooling``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = {f"{key}.{name}": leaf for name, leaf in _leaves(value).items()} if isinstance(value, Mapping) else None
        found |= {key: value} if inner is None else inner
    return found


def _line(recipe: str, results: Results) -> tuple[str, ...] | None:
    """Return the rows of a recipe at the number of heads that fills most cells; among several, the largest."""
    loaded = bundled(recipe)
    shown = metric(OURS.get(recipe, _METRICS[str(loaded.values.get("task"))]))
    rows = [row for row in results.rows(recipe) if results.values(recipe, row, shown)]
    if not rows:
        return None
    choices = {heads if split_row(row)[0] in _BASELINES else 2 * heads for row in rows for heads in [split_row(row)[1]]}
    best = max(choices, key=lambda heads: (len(_cells(recipe, heads, rows)), heads))
    cells = _cells(recipe, best, rows)
    if not cells:
        return None
    return (
        f"{loaded.title} (`{recipe}`)",
        shown.title.removeprefix("test "),
        *(_cell(recipe, cells[column], shown, results) if column in cells else "" for column in _COLUMNS),
    )


_BASELINES = ("softmax", "linear", "softmax+qk_norm")


def _cells(recipe: str, heads: int, rows: Sequence[str]) -> dict[str, str]:
    """Return the row of each column, for a baseline with so many heads."""
    found: dict[str, str] = {}
    for column, kinds in _COLUMNS.items():
        count = heads if column.startswith("all heads") else heads // 2
        wanted = [f"{kind}-{count}{changes}" for kind, changes in kinds]
        # For translation the paper uses other variances.
        wanted += [f"{row}+variance_scale=1,3" for row in wanted if "mgk" in row]
        there = [row for row in wanted if row in rows]
        if there:
            found[column] = there[0]
    return found if heads % 2 == 0 or any(column.startswith("all heads") for column in found) else {}


def _cell(recipe: str, row: str, shown: Metric, results: Results) -> str:
    values = list(results.values(recipe, row, shown).values())
    published = _published(recipe, row, shown)
    beside = "" if published is None else f"; paper {published:.{shown.decimals}f}"
    return f"{row}: {show(values, shown.decimals).removesuffix(')')}{beside})"


def _published(recipe: str, row: str, shown: Metric) -> float | None:
    """Return the paper's number; for a variant such as lra/listops-dropout-0, that of its base, lra/listops."""
    names = [name for name in mgk.recipes.names() if f"{recipe}-".startswith(f"{name}-")]
    for name in sorted(names, key=len, reverse=True):
        found = mgk.recipes.published(name, row).get(shown.name)
        if found is not None:
            return found
    return None


def _sentences(pages: Sequence[Page], results: Results) -> list[str]:
    outcomes: dict[str, list[str]] = {}
    refuted: dict[str, list[str]] = {}
    for page in pages:
        found = [(what, summary(verdicts)) for (what, _), verdicts in by_sentence(page.verdicts).items()]
        found += [(what, "holds" if holds else "does not hold") for what, holds, _ in page.statements]
        for what, outcome in found:
            outcomes.setdefault(outcome, []).append(what)
            if outcome == "does not hold":
                refuted.setdefault(what.removesuffix("."), []).append(f"[{page.name}]({PAGES}/{page.name}.md)")
    counts = {
        "hold": len(outcomes.get("holds", [])) + len(outcomes.get("holds where its corpus can be had", [])),
        "do not hold": len(outcomes.get("does not hold", [])),
        "are not shown either way": len(outcomes.get("not shown", [])),
        "wait for runs": len(outcomes.get("not yet enough seeds", [])) + len(outcomes.get("not yet measured", [])),
        "cannot be judged, because their corpus is not available": len(outcomes.get("corpus not to be had", [])),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    parts = [f"These pages test claims of the paper and questions of our own: {told}."]
    listed = [f"“{what}” ({', '.join(dict.fromkeys(links))})" for what, links in refuted.items()]
    parts.append(
        f"**What does not hold:** {'; '.join(listed)}." if listed else "Nothing that was tested has been refuted."
    )
    missed = _missed(results)
    if missed:
        parts.append(
            "**Not the paper's number** (outside the 95 % interval of our seeds, by more than the margin of the "
            f"metric): {'; '.join(missed)}. [Fidelity]({PAGES}/fidelity.md) lists how our training differs from the "
            "published code."
        )
    controls = published_code.runs(results)
    same = same_start.finding(same_start.pairs(controls, results))
    parts += [same] if same else []
    # What the runs leave open is on the page fidelity.
    parts += [said for said in published_code.sentences(controls, results) if said.startswith("**")]
    chosen = {recipe: plateau.escapes(results, recipe) for recipe in plateau.recipes(results)}
    if chosen:
        # The recipe with most runs is chosen; among equals the first, which is the recipe itself.
        recipe = max(chosen, key=lambda name: sum(map(len, chosen[name].values())))
        answers = plateau.answer(chosen[recipe], plateau.questions(recipe))
        said = plateau.findings(recipe, chosen[recipe], answers)
        parts.append(f"When a model [leaves the plateau]({PAGES}/{plateau.NAME}.md) of ListOps: {said}")
    return parts


def _missed(results: Results) -> list[str]:
    """Return the rows whose number differs significantly from the paper's."""
    found = []
    for recipe in _shown_recipes(results):
        shown = metric(OURS.get(recipe, _METRICS[str(bundled(recipe).values.get("task"))]))
        own = []
        for row in results.rows(recipe):
            values = list(results.values(recipe, row, shown).values())
            published, error = _published(recipe, row, shown), standard_error(values)
            if published is None or error is None or len(values) < 3:
                continue
            away = abs(mean(values) - published)
            if away > max(shown.margin, t_quantile(0.975, len(values) - 1) * error):
                own.append(f"{row} {mean(values):.{shown.decimals}f} ({published:.{shown.decimals}f})")
        if own:
            found.append(f"{recipe} {', '.join(own)}")
    return found
