"""The tables of the page ``shift``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mgk.recipes import parse_row
from mgk.reproduction import plateau
from mgk.reproduction.claims import show_p
from mgk.reproduction.metrics import metric
from mgk.reproduction.page import Grid
from mgk.reproduction.plateau import Question
from mgk.reproduction.recipe import bundled, home
from mgk.reproduction.results import Results
from mgk.reproduction.shift_measurements import Measurement, derived_spread, show_measured
from mgk.reproduction.shift_questions import ENWIK8, HEADS, LISTOPS, OTHER_STARTS, SIZES, premises, questions, sized
from mgk.reproduction.statistics import mean, show
from mgk.reproduction.survival import Run, median

EARLY = (500, 1000)
"""Steps of enwik8 at which the bits are shown."""
BITS = metric("test_bits_per_token")


def _line(*start: str, runs: Sequence[Run]) -> tuple[str, ...]:
    left = sorted(int(step) for step, has_left in runs if has_left)
    half = median(runs).time
    return (
        *start, str(len(runs)), str(len(left)), "" if half is None else f"{half:,.0f}",
        ", ".join(f"{step:,}" for step in left),
    )  # fmt: skip


_OF_RUNS = ("runs", "of which left", "median step", "steps at which they left")


def listops_grid(
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


def log_rank_grid(title: str, asked: Mapping[str, tuple[Mapping[str, Sequence[Run]], Sequence[Question]]]) -> Grid:
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


def enwik8_grid(results: Results) -> Grid | None:
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


def gradient_grid(found: Measurement, layer: int) -> Grid:
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


def ratio_grid(found: Measurement) -> Grid:
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


def short_grids(short: Measurement, lists: Mapping[str, Sequence[Run]], heads: Sequence[int]) -> tuple[Grid, ...]:
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
        log_rank_grid("A proxy: log-rank tests", asked),
    )
