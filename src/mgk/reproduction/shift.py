"""Why sMGK leaves the plateau of ListOps early, part by part: the page ``shift``.

A mixture of shifted keys is a distance, a constant, and a mixture. The recipe ``lra/listops-shifts`` has each without
the others; ``benchmarks/shift.py`` measures on a CPU what they change before the first step, and on short lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgk.recipes import parse_row
from mgk.reproduction import plateau, shift_figure
from mgk.reproduction.claims import LEVEL, MINIMUM_SEEDS, claims, judge, show_p
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page, by_sentence, summary
from mgk.reproduction.plateau import Question
from mgk.reproduction.recipe import bundled, home
from mgk.reproduction.results import Results
from mgk.reproduction.shift_measurements import (
    GRADIENTS,
    SCRIPT,
    SHORT_LISTS,
    Measurement,
    derived_spread,
    find_missing_measurements,
    read_measurement,
    show_measured,
)  # fmt: skip
from mgk.reproduction.statistics import mean, show
from mgk.reproduction.survival import Run, Trend, log_rank_trend, median

NAME = "shift"
TITLE = "What the shift does: why sMGK leaves the plateau of ListOps early"
LISTOPS, ENWIK8 = "lra/listops-shifts", "enwik8-shifts"
HEADS = (4, 2)
SIZES = (0.0, 0.1, 0.3, 1.0, 2.0)
"""Standard deviations of the initial shifts."""
OTHER_STARTS = {"lra/listops-small-shifts": "0.25", "lra/listops-released-shifts": "0 and 0.5"}
"""Recipes whose shifts start in another way, and what stands for that."""
BESIDE = ("lra/listops-mean-over-tokens", "lra/listops-mean-over-tokens-dropout-0", "lra/listops-no-activation-dropout")
"""Recipes without some dropout, which have been run more: shifts of 1, and none."""
EARLY = (500, 1000)
"""Steps of enwik8 at which the bits are shown."""
WITHOUT_SHIFT = "the same constant, as a bias of the queries, makes the dot product leave earlier"
ACCURACY_CURVE, LOSS_CURVE = metric("mean_valid_accuracy"), metric("mean_valid_loss")
BITS = metric("test_bits_per_token")


def sized(size: float, heads: int) -> str:
    """The row of sMGK whose shifts start with this standard deviation."""
    return f"smgk-{heads}" if size == 1 else f"smgk-{heads}+shift_init_std={size:g}"


def _questions(asked: Mapping[str, tuple[str, str]], heads: Sequence[int]) -> list[Question]:
    return [
        Question(what=what, pairs=tuple((first.format(count), second.format(count)) for count in heads))
        for what, (first, second) in asked.items()
    ]


def premises(heads: Sequence[int]) -> list[Question]:
    """What the page sets out from, over several numbers of heads."""
    asked = {
        "two shifts leave earlier than the dot product": ("smgk-{}", "softmax-{}"),
        "two projected keys leave earlier than the dot product": ("mgk-{}", "softmax-{}"),
    }
    return _questions(asked, heads)


def questions(heads: Sequence[int]) -> list[Question]:
    """What each part is said to do, over several numbers of heads."""
    asked = {
        "the distance alone leaves earlier than the dot product": ("gaussian-{}", "softmax-{}"),
        "one shift, the same for all keys, makes the distance leave earlier": (
            "smgk-{}+num_components=1", "gaussian-{}",
        ),
        WITHOUT_SHIFT: (
            "softmax-{}+query_bias_init_std=1", "softmax-{}",
        ),
        "with this constant the distance leaves earlier than the dot product": (
            "smgk-{}+num_components=1", "softmax-{}+query_bias_init_std=1",
        ),
        "two shifts leave earlier than one": ("smgk-{}", "smgk-{}+num_components=1"),
        "two shifts that start at 1 leave earlier than two that start at 0": ("smgk-{}", "smgk-{}+shift_init_std=0"),
        "learned priors leave earlier than uniform ones": ("smgk-{}", "smgk-{}+prior=uniform"),
    }  # fmt: skip
    return _questions(asked, heads)


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
    enwik8 = _enwik8(results)
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            QUESTION,
            *(_premise(recipe, rows) for recipe, rows in {"lra/listops": own, **beside}.items() if rows),
            _verdict("Verdict on lra/listops", own, HEADS),
            *((_verdict("The proxy, short lists", lists, heads),) if lists else ()),
            _verdict_on_enwik8(verdicts),
            *((_gradients_in_words(gradients),) if gradients.runs else ()),
            NOT_SHOWN,
            *THEORY,
        ),
        grids=(
            _listops_grid(results, own, beside),
            _test_grid(
                "ListOps: log-rank tests",
                {
                    "lra/listops": (own, [*premises(HEADS), *questions(HEADS)]),
                    **{recipe: (rows, premises(HEADS)) for recipe, rows in beside.items() if rows},
                },
            ),
            *((enwik8,) if enwik8 is not None else ()),
            *((_ratio_grid(gradients),) if gradients.runs else ()),
            *(_gradient_grid(gradients, layer) for layer in (1, 2) if gradients.runs),
            *_short_grids(short, lists, heads),
        ),
        pictures=(picture,) if drawn else (),
        verdicts=tuple(verdicts),
        needs=tuple(needs),
        missing=(*find_missing(results, needs, NAME), *find_missing_measurements(measured)),
        notes=(*_notes(gradients, short), *results.notes_about({need.recipe for need in needs})),
        numbers=drawn + len(gradients.rows),
    )


QUESTION = (
    "On ListOps smgk leaves the plateau of the largest class earlier than softmax, and mgk is not shown to "
    "([plateau](plateau.md)). A mixture of shifted keys has three parts that softmax lacks: a distance in place of the "
    "dot product, a constant that is the same for every key, and the mixture. This page asks which of them does it."
)
NOT_SHOWN = (
    "**What this page does not show.** ListOps is one task, and the outermost operator, which is always the first "
    "token, is all that any row learns of it. The task asks for a weight of the keys that all queries share; a task "
    "that asks for something else may have no use for such a weight. A run that leaves early ends no higher than one "
    "that leaves late. Gradients before the first step say in which direction and how reliably a model starts, not "
    "where it arrives. The short lists are a proxy: in the lists of the task one token of a thousand matters, in these "
    "one of 75, so rows that are alike here may differ there, and the other way round. The options of the library "
    "cannot give a dot product the whole factor of two shifts; a bias of the queries is its case of one shift."
)
THEORY = (
    "**What one shift is.** With one shift b for all keys the logit is "
    r"$-|q - k - b|^2 / 2\sigma^2 = -|(q - b) - k|^2 / 2\sigma^2$, so the shift is a constant that is subtracted from "
    r"every query. Up to a term that is the same for all keys this is "
    r"$(q - b) \cdot k / \sigma^2 - |k|^2 / 2\sigma^2$: every key has a weight $-b \cdot k / \sigma^2$ that does not "
    r"depend on the query and is linear in the key. Under a dot product $q \cdot (k + b)$ the shift itself cancels "
    r"(softmax-smgk is softmax), but a bias of the queries gives the same weight.",
    r"**What several shifts are.** To second order in $q - k$ the logits of M shifts are those of one Gaussian with "
    r"two changes. It has the constant $\bar b = \sum_r \rho_r b_r$, where $\rho_r$ is proportional to "
    r"$\pi_r e^{-|b_r|^2 / 2\sigma^2}$. And it has $I - C / \sigma^2$ in place of $I$ between query and key, where C "
    r"is the covariance of the shifts under $\rho$, of rank M - 1. Shifts that start at 0 stay one component, since "
    "they and their priors get equal gradients: that row is one Gaussian whose bias of the keys learns faster.",
    r"**What that does to gradients.** The derivative of the logit with respect to the key is $(q - k - b) / "
    r"\sigma^2$, and $q / \sigma^2$ under a dot product. Where all queries ask for the same key, their sum keeps the "
    r"mean of the queries and the constant, and the rest averages out. The mean of the queries is small before it is "
    r"learned, and the gradient of $W_k$ vanishes with $W_q$ and that of $W_q$ with $W_k$: 0 is a saddle point. The "
    r"constant is there from the start, with a length of $s \sqrt{D / M}$ for M shifts of standard deviation s. The "
    r"distance alone adds $-k$, which makes keys shorter or longer and turns none. Torch starts entries of q and k "
    r"with the variance 1/3, and $\sigma^2 = \sqrt D$. Then the logits of a query have over its keys the variance 1/9 "
    r"for a dot product, 1/18 more for a distance, and $s^2 / 3M$ more for the shifts, whatever D is. A table below "
    "shows this (derived) beside what was measured.",
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


# Verdicts.


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
        parts.append(f"There are not yet enough runs for a test for trend over the sizes of the shifts ({sizes}).")
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


def _verdict_on_enwik8(verdicts: Sequence[Any]) -> str:
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


# Tables.


def _line(*start: str, runs: Sequence[Run]) -> tuple[str, ...]:
    left = sorted(int(step) for step, has_left in runs if has_left)
    half = median(runs).time
    return (
        *start, str(len(runs)), str(len(left)), "" if half is None else f"{half:,.0f}",
        ", ".join(f"{step:,}" for step in left),
    )  # fmt: skip


_OF_RUNS = ("runs", "of which left", "median step", "steps at which they left")


def _listops_grid(
    results: Results, own: Mapping[str, Sequence[Run]], beside: Mapping[str, Mapping[str, Sequence[Run]]]
) -> Grid:
    shown: list[tuple[str, str, str, Sequence[Run]]] = []
    for heads in HEADS:
        rows = [f"softmax-{heads}", f"mgk-{heads}", f"gaussian-{heads}", *(sized(size, heads) for size in SIZES)]
        rows += [
            row for row in bundled(LISTOPS).rows if row.partition("+")[0].endswith(f"-{heads}") and row not in rows
        ]
        for row in rows:
            recipe = home(LISTOPS, row) if row in bundled(LISTOPS).rows else "lra/listops"
            shown.append((recipe, row, _start(row), own.get(row, ())))
        for recipe, size in OTHER_STARTS.items():
            row = f"smgk-{heads}"
            shown.append((recipe, row, size, plateau.escapes(results, recipe).get(row, ())))
    lines = [_line(recipe, row, start, runs=runs) for recipe, row, start, runs in shown if runs]
    for recipe, found in beside.items():
        for row in (f"{kind}-{heads}" for heads in HEADS for kind in ("softmax", "mgk", "smgk")):
            if row in found:
                lines.append(_line(recipe, row, _start(row), runs=found[row]))
    absent: dict[str, list[str]] = {}
    for recipe, row, _, runs in shown:
        if not runs:
            absent.setdefault(recipe, []).append(row)
    lines += [(recipe, ", ".join(rows), "", "", "", "", "not run yet") for recipe, rows in absent.items()]
    header = ("recipe", "row", "shifts start at", *_OF_RUNS)
    return Grid(title="ListOps: leaving the plateau", header=header, lines=tuple(lines))


def _start(row: str) -> str:
    """How the shifts of a row start, in words."""
    if not row.startswith("smgk"):
        return ""
    return f"{parse_row(row).get('shift_init_std', 1):g}"


def _test_grid(title: str, asked: Mapping[str, tuple[Mapping[str, Sequence[Run]], Sequence[Question]]]) -> Grid:
    """A line for each question of each recipe; p values are adjusted over the premises and over the other questions."""
    lines = []
    for recipe, (rows, chosen) in asked.items():
        known = {each.what for each in premises(HEADS)}
        parts = [[each for each in chosen if (each.what in known) is is_premise] for is_premise in (True, False)]
        for each in (found for part in parts for found in plateau.answer(rows, part)):
            pairs = ", ".join(f"{first} and {second}" for first, second in each.tested or each.question.pairs)
            numbers = ("", "", "")
            if each.together is not None:
                numbers = (
                    plateau.left_of(rows, list(each.tested)), f"{each.together.chi_square:.2f}",
                    show_p(each.p) + ("" if each.together.is_exact else " (asymptotic)"),
                )  # fmt: skip
            lines.append((recipe, each.question.what, pairs, *numbers, each.outcome))
    header = ("recipe", "claim", "rows", "runs that left", "chi-square", "adjusted p", "verdict")
    return Grid(title=title, header=header, lines=tuple(lines))


def _enwik8(results: Results) -> Grid | None:
    lines = []
    for row in bundled(ENWIK8).rows:
        curves = results.curves(ENWIK8, row)
        early = [
            [line["loss"] / math.log(2) for lines in curves.values() for line in lines if _is_valid(line, step)]
            for step in EARLY
        ]
        last = list(results.values(ENWIK8, row, BITS).values())
        if last or any(early):
            lines.append((row, _start(row), *(show(values, 3) for values in (*early, last))))
    if not lines:
        return None
    header = ("row", "shifts start at", *(f"validation, step {step:,}" for step in EARLY), BITS.title)
    return Grid(title="enwik8: bits per byte", header=header, lines=tuple(lines))


def _is_valid(line: Mapping[str, Any], step: int) -> bool:
    return line.get("kind") == "valid" and line["step"] == step and "loss" in line


def _gradient_grid(found: Measurement, layer: int) -> Grid:
    lines = []
    for row in found.rows:
        derived = derived_spread(row) if layer == 1 else None
        whole, alone = (found.values(row, layer, name) for name in ("logits", "logits_of_the_key_alone"))
        share = [(own / all_of_it) ** 2 for own, all_of_it in zip(alone, whole, strict=True)]
        lines.append(
            (
                row, show_measured(whole), "" if derived is None else f"{derived:.3g}", show_measured(share),
                *(
                    show_measured(found.values(row, layer, f"{name}_{what}"))
                    for what in ("gradient", "in_common", "step")
                    for name in ("k_proj", "q_proj")
                ),
            )
        )  # fmt: skip
    header = (
        "row", "spread of the logits", "derived", "share of the key alone", "gradient of W_k", "gradient of W_q",
        "in common, W_k", "in common, W_q", "a step of W_k", "a step of W_q",
    )  # fmt: skip
    return Grid(title=f"Before the first step, layer {layer}", header=header, lines=tuple(lines))


def _ratio_grid(found: Measurement) -> Grid:
    """Of the first layer, where most of it is."""
    heads = found.options["heads"]
    rows = [kind.format(heads) for kind in ("gaussian-{}", "smgk-{}", "smgk-{}+num_components=1")]
    rows += [kind.format(heads) for kind in ("softmax-{}+query_bias_init_std=1", "mgk-{}")]

    def times(row: str, name: str) -> str:
        own, softmax = (found.values(each, 1, name) for each in (row, f"softmax-{heads}"))
        return f"{mean(own) / mean(softmax):.1f}x" if own and softmax else ""

    return Grid(
        title=f"Before the first step, layer 1, as multiples of softmax-{heads}",
        header=(
            "row",
            "size of the gradient of W_k",
            "how far a step of W_k moves the logits",
            "how far one of W_q does",
        ),
        lines=tuple(
            (row, *(times(row, name) for name in ("k_proj_gradient", "k_proj_step", "q_proj_step"))) for row in rows
        ),
    )


def _short_grids(short: Measurement, lists: Mapping[str, Sequence[Run]], heads: Sequence[int]) -> tuple[Grid, ...]:
    if not short.runs:
        return ()
    lines = tuple(_line(row, _start(row), runs=runs) for row, runs in lists.items())
    between = f"{short.options['longer_than']} to {short.options['shorter_than']}"
    asked = {"short lists": (lists, [*premises(heads), *questions(heads)])}
    return (
        Grid(
            title=f"A proxy: short lists, of {between} tokens, on a CPU",
            header=("row", "shifts start at", *_OF_RUNS),
            lines=lines,
        ),
        _test_grid("A proxy: log-rank tests", asked),
    )


def _notes(gradients: Measurement, short: Measurement) -> tuple[str, ...]:
    notes = [
        "Steps, medians and tests are those of [plateau](plateau.md). The p of a question is adjusted over the two "
        "premises or over the questions about the parts. The test for trend is Tarone's, with a stratum for each "
        "number of heads and the place of each size in their order; its p comes from sharing out the runs at random.",
        "Rows that both lra/listops-shifts and lra/listops have are the same runs. A row of smgk with num_components=1 "
        "is one Gaussian whose keys have one shift.",
    ]
    if gradients.runs:
        options = gradients.options
        notes.append(
            f"Before the first step: `{SCRIPT} gradients` takes the model of "
            f"{bundled(LISTOPS).title.partition(',')[0]} with {options['heads']} heads and without dropout, "
            f"{options['batches']} batches of {options['batch_size']} lists of {options['longer_than']} to "
            f"{options['shorter_than']} tokens, and {gradients.seeds} seeds. The biases of the output are the "
            "logarithms of the shares of the classes. The spread of the logits is their standard deviation over the "
            "keys of a query; the share of the key alone is the part of their variance that is the same for all "
            "queries. The size of a gradient is the root of its mean square over batches. What two batches have in "
            "common is their product over their squares; this estimate may be below 0. A step is how far the logits "
            f"move, over keys, if every weight goes {options['step']:g} against the sign of its mean gradient, "
            "as Adam's first step does."
        )
    if short.runs:
        options = short.options
        notes.append(
            f"Short lists: `{SCRIPT} short-lists` trains the same model with {options['heads']} head, batches of "
            f"{options['batch_size']}, AdamW at {options['learning_rate']:g} after {options['warmup']} steps of "
            f"warm-up, no dropout, and {short.seeds} seeds of each row. A run has left when its accuracy over the last "
            f"{options['window']} steps, on lists that it had not seen, exceeds {100 * options['threshold']:.1f} %, "
            f"half way between the largest class ({100 * options['largest_class']:.1f} %) and what the root operator "
            f"says ({100 * options['root_operator']:.1f} %)."
        )
    return tuple(notes)


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
