"""Leaving the plateau of ListOps: how many steps each row takes, as survival curves with tests between them.

Accuracy after a fixed number of steps mixes how fast a model learns with how well: a run that leaves the plateau a step
after the last one counts as a bad model. Here it counts as one that was watched for so long and had not left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mgk.recipes
from mgk.reproduction import survival_curves
from mgk.reproduction.claims import LEVEL, MINIMUM_SEEDS, show_p
from mgk.reproduction.escape import run_of
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page
from mgk.reproduction.recipe import bundled, is_extension
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import holm
from mgk.reproduction.survival import FEWEST, LogRank, Run, log_rank, median

NAME = "plateau"
THRESHOLD = 0.3
"""Between the largest class (17 to 19 %) and what the outermost operator gives (36 to 37 %)."""
MAIN = "lra/listops"
WAITING = "too few runs"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which kind of attention is said to leave earlier than which, over several numbers of heads."""

    what: str
    """A clause with "earlier" in it, that follows "that" or "whether"."""
    pairs: tuple[tuple[str, str], ...]
    """The row that is said to leave earlier comes first."""


def _question(first: str, second: str, factor: int, changes: str = "") -> Question:
    heads = "as many heads" if factor == 1 else "twice as many heads"
    return Question(
        what=f"{first} leaves earlier than {second}{changes} with {heads}",
        pairs=tuple((f"{first}-{count}", f"{second}-{factor * count}{changes}") for count in (1, 2, 4)),
    )


QUESTIONS = (
    _question("smgk", "softmax", 1),
    _question("smgk", "softmax", 2),
    _question("mgk", "softmax", 1),
    _question("mgk", "softmax", 2),
    _question("smgk", "gaussian", 1),
    _question("smgk", "softmax", 2, "+qk_norm"),
    _question("smlk", "linear", 1),
    _question("smlk", "linear", 2),
    _question("mlk", "linear", 1),
    _question("mlk", "linear", 2),
)
"""Those of a recipe are the ones that its table has rows for."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the runs of a recipe say about a question."""

    question: Question
    tested: Mapping[tuple[str, str], LogRank]
    """Those pairs of rows that have runs enough."""
    adjusted: Mapping[tuple[str, str], float]
    """Their p values, adjusted by Holm over the pairs of the question."""
    together: LogRank | None
    """All those pairs at once, each a stratum; ``None`` where no pair has runs enough."""
    p: float
    """Of all at once, adjusted by Holm over the questions."""

    @property
    def outcome(self) -> str:
        return WAITING if self.together is None else _outcome(self.together, self.p)


def plateau_page(results: Results, folder: Path, seeds: int) -> Page:
    """The page: a section for each recipe of ListOps that has curves, none mixed with another."""
    pictures: list[Path] = []
    grids: list[Grid] = []
    sentences: list[str] = []
    numbers = 0
    for recipe in recipes(results):
        rows = escapes(results, recipe)
        picture = folder / f"{NAME}-{recipe.replace('/', '-')}.png"
        numbers += survival_curves.draw(rows, picture, title=f"{recipe}: runs that are still on the plateau")
        pictures.append(picture)
        answers = answer(rows, questions(recipe))
        sentences.append(sentence(recipe, rows, answers))
        grids += [_row_grid(recipe, rows), _test_grid(recipe, rows, answers)]
    wanted = dict.fromkeys(row for question in questions(MAIN) for pair in question.pairs for row in pair)
    needs = [Need(recipe=MAIN, row=row, metric=metric("mean_valid_accuracy"), seeds=seeds) for row in wanted]
    return Page(
        name=NAME,
        title="Leaving the plateau of ListOps",
        text=(_what(), *sentences),
        grids=tuple(grids),
        pictures=tuple(pictures),
        needs=tuple(needs),
        missing=tuple(find_missing(results, needs, NAME)),
        notes=(*NOTES, *results.notes_about(recipes(results) or [MAIN])),
        numbers=numbers,
    )


def recipes(results: Results) -> list[str]:
    """Those of the ListOps of the Long Range Arena of which there are finished runs with their curves."""
    found = []
    for name in mgk.recipes.names():
        data = bundled(name).values.get("data", {})
        # Short lists have no such plateau; what only adds rows to another recipe has a page of its own.
        is_ours = data.get("corpus") == "listops" and not data.get("options") and not is_extension(name)
        if is_ours and escapes(results, name):
            found.append(name)
    return found


def escapes(results: Results, recipe: str, wanted: Sequence[str] | None = None) -> dict[str, list[Run]]:
    """By row: the step at which each run left, or the last at which it was tried and had not. Curves of runs whose
    result is not here do not count: nobody knows what they were made with.

    Args:
        results: what we have.
        recipe: of the runs.
        wanted: rows, also those that the recipe has from the one that it extends; ``None``: all of its own.
    """
    found: dict[str, list[Run]] = {}
    for row in results.rows(recipe) if wanted is None else wanted:
        trained = results.trained(recipe, row)
        for seed, lines in results.curves(recipe, row).items():
            run = run_of(lines, THRESHOLD) if seed in trained else None
            if run is not None:
                found.setdefault(row, []).append(run)
    order = bundled(recipe).rows
    return dict(sorted(found.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))


def questions(recipe: str) -> list[Question]:
    """Those that a recipe has rows for: no table has both softmax and linear attention."""
    known = set(bundled(recipe).rows)
    return [question for question in QUESTIONS if any(known >= set(pair) for pair in question.pairs)]


def answer(rows: Mapping[str, Sequence[Run]], asked: Sequence[Question]) -> list[Answer]:
    """Answers to questions. Those that cannot be tested yet count in the adjustment, too: more runs take none back."""
    strata = [
        [pair for pair in question.pairs if all(len(rows.get(row, ())) >= MINIMUM_SEEDS for row in pair)]
        for question in asked
    ]
    together = [log_rank([(rows[first], rows[second]) for first, second in own]) if own else None for own in strata]
    over_questions = holm([1.0 if tested is None else tested.p for tested in together])
    found = []
    for question, own, whole, p in zip(asked, strata, together, over_questions, strict=True):
        tested = {pair: log_rank([(rows[pair[0]], rows[pair[1]])]) for pair in own}
        over_pairs = holm([tested[pair].p if pair in tested else 1.0 for pair in question.pairs])
        adjusted = {pair: each for pair, each in zip(question.pairs, over_pairs, strict=True) if pair in tested}
        found.append(Answer(question=question, tested=tested, adjusted=adjusted, together=whole, p=p))
    return found


def said(answers: Sequence[Answer]) -> list[str]:
    """What the tests show, what they leave open, and what has too few runs: a sentence each."""

    def clauses(outcome: str, start: str, replaced: str = "earlier") -> list[str]:
        return [
            f"{start} {each.question.what.replace('earlier', replaced)} (p {show_p(each.p)})"
            for each in answers
            if each.outcome == outcome
        ]

    waiting = [f"whether {each.question.what}" for each in answers if each.outcome == WAITING]
    found = {
        "The tests show": clauses("holds", "that") + clauses("does not hold", "that", "later"),
        "The tests do not decide": clauses("not shown", "whether"),
        "There are too few runs to say": waiting,
    }
    return [f"{start} {_listed(own)}." for start, own in found.items() if own]


def _listed(clauses: Sequence[str]) -> str:
    *others, last = clauses
    word = "or" if last.startswith("whether") else "and"
    return f"{', '.join(others)}, {word} {last}" if others else last


def left(rows: Mapping[str, Sequence[Run]]) -> str:
    """``45 of 55 runs left the plateau``."""
    runs = [run for own in rows.values() for run in own]
    return f"{sum(has_left for _, has_left in runs)} of {len(runs)} runs left the plateau"


def findings(recipe: str, rows: Mapping[str, Sequence[Run]], answers: Sequence[Answer]) -> str:
    """What the runs of a recipe show, and what they do not."""
    return " ".join([f"**{recipe}**: {left(rows)}.", *said([each for each in answers if each.outcome != WAITING])])


def sentence(recipe: str, rows: Mapping[str, Sequence[Run]], answers: Sequence[Answer]) -> str:
    """Likewise, with the questions that are still open, and the rows whose runs did not all leave."""
    stayed = {row: sum(not has_left for _, has_left in own) for row, own in rows.items()}
    never = [f"{count} of {len(rows[row])} of {row}" for row, count in stayed.items() if count]
    end = f"Still there at their last step: {', '.join(never)}." if never else "No run stayed there."
    return " ".join([f"**{recipe}**: {left(rows)}.", *said(answers), end])


NOTES = (
    "In the figures a + marks a run that was still on the plateau at its last step. Such a run is censored there: it "
    "does not count as leaving.",
    "A median is that of the survival curve, with the 95 % interval of Brookmeyer and Crowley. Where fewer than half "
    f"of the runs have left there is no median. Fewer than {FEWEST} runs set no limits, and a few more no upper one.",
    "The p of a log-rank test is exact: it counts all ways of sharing out the runs between the two rows. The test of "
    "all heads together has a stratum for each pair of rows, and its p is adjusted by Holm's method over the questions "
    "of the recipe; the p of a single pair is adjusted over the pairs of its question. Where no result of so few runs "
    f'could have a p below {LEVEL}, as with three runs in each row, the verdict is "{WAITING}".',
    "A step is that of a validation, so it is known to one interval between validations. "
    "[Leaving the plateau](../reproduction.md#leaving-the-plateau) explains all of this.",
)


def _what() -> str:
    return (
        "A model of ListOps first predicts the largest class, which is right for 17 to 19 % of the samples, and then, "
        "within a few hundred steps, what the outermost operator says, which is right for 36 to 37 %. A run has left "
        f"the plateau at its first validation above {100 * THRESHOLD:.0f} %. Each recipe stands for itself: runs of "
        "different recipes are never put together. [Shift](shift.md) asks which part of smgk makes it leave early."
    )


def _outcome(tested: LogRank, p: float) -> str:
    if tested.least >= LEVEL:
        # Three runs against three have but 20 ways, so no result of theirs could have shown anything.
        return WAITING
    if p >= LEVEL:
        return "not shown"
    return "holds" if tested.excess > 0 else "does not hold"


def _row_grid(recipe: str, rows: Mapping[str, Sequence[Run]]) -> Grid:
    lines = []
    for row, runs in rows.items():
        steps = sorted(time for time, happened in runs if happened)
        half = median(runs)
        reach = "" if not steps else _step(steps[0]) if len(steps) == 1 else f"{_step(steps[0])} to {_step(steps[-1])}"
        lines.append(
            (row, str(len(runs)), str(len(steps)), _step(half.time), _limits(half.low, half.high), reach)
        )  # fmt: skip
    header = ("row", "runs", "of which left", "median step", "its 95 % interval", "steps at which they left")
    return Grid(title=f"{recipe}, by row", header=header, lines=tuple(lines))


def _test_grid(recipe: str, rows: Mapping[str, Sequence[Run]], answers: Sequence[Answer]) -> Grid:
    lines: list[tuple[str, ...]] = []
    for each in answers:
        pairs = list(each.tested)
        for first, second in pairs:
            found, p = each.tested[first, second], each.adjusted[first, second]
            lines.append(
                (
                    f"{first} earlier than {second}", left_of(rows, [(first, second)]), *_numbers(found), show_p(p),
                    _outcome(found, p),
                )
            )  # fmt: skip
        if each.together is None:
            lines.append((each.question.what, "", "", "", "", each.outcome))
        else:
            lines.append(
                (
                    f"**{each.question.what}, all heads together**", left_of(rows, pairs), *_numbers(each.together),
                    show_p(each.p), each.outcome,
                )
            )  # fmt: skip
    header = ("comparison", "runs that left", "chi-square", "p", "adjusted p", "verdict")
    return Grid(title=f"{recipe}, log-rank tests", header=header, lines=tuple(lines))


def _numbers(found: LogRank) -> tuple[str, str]:
    return f"{found.chi_square:.2f}", show_p(found.p) + ("" if found.is_exact else " (asymptotic)")


def left_of(rows: Mapping[str, Sequence[Run]], pairs: Sequence[tuple[str, str]]) -> str:
    """How many runs of the first rows left the plateau, and of the second."""
    sides = []
    for side in (0, 1):
        runs = [run for pair in pairs for run in rows[pair[side]]]
        sides.append(f"{sum(has_left for _, has_left in runs)} of {len(runs)}")
    return " against ".join(sides)


def _step(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _limits(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f"{_step(low)} or later" if high is None else f"{_step(low)} to {_step(high)}"
