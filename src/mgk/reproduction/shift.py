"""Why sMGK leaves the plateau of ListOps early, part by part: the page ``shift``.

A mixture of shifted keys is a distance, a constant, and a mixture. The recipe ``lra/listops-shifts`` has each without
the others; ``benchmarks/shift.py`` measures on a CPU what they change before the first step, and on short lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgk.reproduction import plateau, shift_figure
from mgk.reproduction.claims import LEVEL, MINIMUM_SEEDS, claims, judge, show_p
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Page, by_sentence, summary
from mgk.reproduction.recipe import bundled, home
from mgk.reproduction.results import Results
from mgk.reproduction.shift_measurements import (
    GRADIENTS,
    SHORT_LISTS,
    Measurement,
    find_missing_measurements,
    read_measurement,
    show_measured,
)  # fmt: skip
from mgk.reproduction.shift_questions import (
    ENWIK8,
    HEADS,
    LISTOPS,
    OTHER_STARTS,
    SIZES,
    WITHOUT_SHIFT,
    premises,
    questions,
    sized,
)  # fmt: skip
from mgk.reproduction.shift_tables import (
    BITS,
    enwik8_grid,
    gradient_grid,
    listops_grid,
    log_rank_grid,
    ratio_grid,
    short_grids,
)  # fmt: skip
from mgk.reproduction.shift_texts import NOT_SHOWN, QUESTION, THEORY, notes
from mgk.reproduction.survival import Run, Trend, log_rank_trend

NAME = "shift"
TITLE = "What the shift does: why sMGK leaves the plateau of ListOps early"
BESIDE = ("lra/listops-mean-over-tokens", "lra/listops-mean-over-tokens-dropout-0", "lra/listops-no-activation-dropout")
"""Recipes without some dropout, which have been run more: shifts of 1, and none."""
ACCURACY_CURVE, LOSS_CURVE = metric("mean_valid_accuracy"), metric("mean_valid_loss")


def shift_page(results: Results, folder: Path, seeds: int) -> Page:
    """The page.

    Args:
        results: what we have.
        folder: of the pages, for the figure.
        seeds: how many each row should have.
    """
    measured = {name: read_measurement(results.folder, name) for name in (GRADIENTS, SHORT_LISTS)}
    gradients, short = measured[GRADIENTS], measured[SHORT_LISTS]
    own = {**_runs(results, LISTOPS), **plateau.escapes(results, "lra/listops", _projected())}
    beside = {recipe: plateau.escapes(results, recipe) for recipe in BESIDE}
    lists = short.escapes()
    heads = [int(short.options.get("heads", 1))]
    verdicts = judge(claims(NAME), results)
    picture = folder / f"{NAME}.png"
    drawn = shift_figure.draw(_panels(results, {"lra/listops": own, **beside}, lists, heads[0]), picture)
    needs = _needs(seeds)
    enwik8 = enwik8_grid(results)
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            QUESTION,
            *(_premise(recipe, rows) for recipe, rows in {"lra/listops": own, **beside}.items() if rows),
            _verdict("Verdict on lra/listops", own, HEADS),
            *((_verdict("The proxy, short lists", lists, heads),) if lists else ()),
            _verdict_onenwik8_grid(verdicts),
            *((_gradients_in_words(gradients),) if gradients.runs else ()),
            NOT_SHOWN,
            *THEORY,
        ),
        grids=(
            listops_grid(results, own, beside),
            log_rank_grid(
                "ListOps: log-rank tests",
                {
                    "lra/listops": (own, [*premises(HEADS), *questions(HEADS)]),
                    **{recipe: (rows, premises(HEADS)) for recipe, rows in beside.items() if rows},
                },
            ),
            *((enwik8,) if enwik8 is not None else ()),
            *((ratio_grid(gradients),) if gradients.runs else ()),
            *(gradient_grid(gradients, layer) for layer in (1, 2) if gradients.runs),
            *short_grids(short, lists, heads),
        ),
        pictures=(picture,) if drawn else (),
        verdicts=tuple(verdicts),
        needs=tuple(needs),
        missing=(*find_missing(results, needs, NAME), *find_missing_measurements(measured)),
        notes=(*notes(gradients, short), *results.notes_about({need.recipe for need in needs})),
        numbers=drawn + len(gradients.rows),
    )


def _runs(results: Results, recipe: str) -> dict[str, list[Run]]:
    return plateau.escapes(results, recipe, bundled(recipe).rows)


def _projected() -> list[str]:
    return [f"mgk-{heads}" for heads in HEADS]


def _needs(seeds: int) -> list[Need]:
    wanted = [(LISTOPS, row, ACCURACY_CURVE) for row in bundled(LISTOPS).rows]
    wanted += [("lra/listops", row, ACCURACY_CURVE) for row in _projected()]
    wanted += [(recipe, f"smgk-{heads}", ACCURACY_CURVE) for recipe in OTHER_STARTS for heads in HEADS]
    wanted += [(ENWIK8, row, shown) for row in bundled(ENWIK8).rows for shown in (BITS, LOSS_CURVE)]
    return [Need(recipe=home(recipe, row), row=row, metric=shown, seeds=seeds) for recipe, row, shown in wanted]


def _premise(recipe: str, rows: Mapping[str, Sequence[Run]]) -> str:
    answers = plateau.answer(rows, premises(HEADS))
    return " ".join([f"**{recipe}** ({plateau.left(rows)}).", *plateau.said(answers)])


def _verdict(start: str, rows: Mapping[str, Sequence[Run]], heads: Sequence[int]) -> str:
    """What holds of the questions, what does not, and what nobody knows yet."""
    answers = plateau.answer(rows, questions(heads))
    trend = _trend(rows, heads)
    if trend is None and all(each.outcome == plateau.WAITING for each in answers):
        return f"**{start}:** open. None of the {len(answers)} questions about the parts has enough runs yet."
    parts = [f"**{start}** ({plateau.left(rows)}).", *plateau.said(answers)]
    if any(each.question.what == WITHOUT_SHIFT and each.outcome == "holds" for each in answers):
        parts.append("So plain softmax can have this part at no cost, by biases of the queries that start larger.")
    sizes = ", ".join(f"{size:g}" for size in SIZES)
    if trend is None:
        parts.append(f"There are too few runs for a test for trend over the sizes of the shifts ({sizes}).")
    else:
        found = f"the larger the shifts start, the {'earlier' if trend.z > 0 else 'later'} a run leaves"
        found = found if trend.p < LEVEL else "no trend is shown"
        parts.append(f"Over shifts that start at {sizes}, {found} (z {trend.z:+.2f}, p {show_p(trend.p)}).")
    return " ".join(parts)


def _trend(rows: Mapping[str, Sequence[Run]], heads: Sequence[int]) -> Trend | None:
    """Over the sizes of the shifts, a stratum for each number of heads that has them all."""
    strata = [[rows.get(sized(size, count), ()) for size in SIZES] for count in heads]
    whole = [groups for groups in strata if all(len(group) >= MINIMUM_SEEDS for group in groups)]
    return log_rank_trend(whole) if whole else None


def _verdict_onenwik8_grid(verdicts: Sequence[Any]) -> str:
    said = [f"{sentence.removesuffix('.')}: {summary(found)}" for (sentence, _), found in by_sentence(verdicts).items()]
    return f"**enwik8**, by bits per byte of the test set. {'. '.join(said)}."


def _gradients_in_words(found: Measurement) -> str:
    softmax, smgk = (f"{kind}-{found.options['heads']}" for kind in ("softmax", "smgk"))
    in_common = [show_measured(found.values(row, 1, "k_proj_in_common")) for row in (softmax, smgk)]
    return (
        "**Before the first step.** A table below compares gradients and steps of the first layer with those of "
        f"{softmax}. Adam divides the size of a gradient out, so what counts is how far a step moves the logits, and "
        "how much of the gradient two batches have in common. Of the gradient of $W_k$ that is a share of "
        f"{in_common[0]} for {softmax} and {in_common[1]} for {smgk}."
    )


def _panels(
    results: Results,
    recipes: Mapping[str, Mapping[str, Sequence[Run]]],
    lists: Mapping[str, Sequence[Run]],
    heads_of_lists: int,
) -> list[tuple[str, shift_figure.Series]]:
    """Of the figure: a title, and by the name of a series what stands at each place of the axis."""
    listops: dict[str, list[tuple[str, Sequence[Run]]]] = {}
    for recipe, rows in recipes.items():
        for heads in HEADS:
            series = _series(rows, heads)
            if recipe == "lra/listops":
                for other, size in OTHER_STARTS.items():
                    series.append((size, plateau.escapes(results, other).get(f"smgk-{heads}", ())))
            listops[f"{recipe.removeprefix('lra/')}, {heads} heads"] = series
    plural = "s" if heads_of_lists > 1 else ""
    proxy = {f"short lists, {heads_of_lists} head{plural}": _series(lists, heads_of_lists)}
    return [("ListOps", listops), ("Short lists, a proxy", proxy)]


def _series(rows: Mapping[str, Sequence[Run]], heads: int) -> list[tuple[str, Sequence[Run]]]:
    places = {
        shift_figure.DOT: f"softmax-{heads}",
        shift_figure.ONE: f"gaussian-{heads}",
        **{f"{size:g}": sized(size, heads) for size in SIZES},
        shift_figure.SINGLE: f"smgk-{heads}+num_components=1",
    }
    return [(place, rows.get(row, ())) for place, row in places.items()]
