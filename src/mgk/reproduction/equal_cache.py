"""Rows that keep equally many bytes of cache for a token: what each is worth, by memory and by time of training."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mgk.analysis.cost import cache_bytes_of_run, parameters
from mgk.models import MGKForCausalLM
from mgk.reproduction import throughput
from mgk.reproduction.claims import claims, judge
from mgk.reproduction.equal_cache_figures import draw_over_cache, draw_over_time
from mgk.reproduction.equal_time import Curve, at_time, curves, duration
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page, verdict_in_words
from mgk.reproduction.recipe import bundled, home
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import mean, show
from mgk.training.resolved_model import build_model_config

NAME = "equal-cache"
RECIPE = "enwik8-equal-cache"
FULL = "softmax-8"
"""Whose cache is the whole one; the budget is half of it."""
BYTES = 256
BITS = metric("test_bits_per_token")
CURVE = metric("mean_valid_loss")

LIMITS = (
    "Other corpora, larger models and longer trainings: all rows have one size, one corpus and as many updates, far "
    "from the end of learning.",
    "How fast a model writes with such a cache: bytes are counted here, steps of generation are timed in "
    "[benchmarks](../benchmarks.md).",
    "What a row would reach if its training were planned for less time: at the time of the fastest row the slower ones "
    "are read in the middle of a cosine schedule, at a learning rate that a shorter one would have lowered by then. "
    "That is to their disadvantage.",
    "Whether normalised queries and keys would help the mixtures as well: shifted keys that are normalised after the "
    "shift cannot share one key in the cache, so at equal cache no mixture has them.",
    "How far another test text would move a number: seeds vary the start of a training, not what it is tested on.",
)


def equal_cache_page(results: Results, folder: Path, seeds: int) -> Page:
    """The page.

    Args:
        results: what we have.
        folder: of the pages, for the figures.
        seeds: how many each row should have.
    """
    recipe = bundled(RECIPE)
    rows = recipe.rows
    values = {row: list(results.values(RECIPE, row, BITS).values()) for row in rows}
    learned = {row: curves(RECIPE, home(RECIPE, row), row, results) for row in rows}
    sizes = {row: cache_bytes(row) for row in rows}
    pictures = []
    title = f"enwik8, {recipe.values['training']['steps']:,} updates"
    over_cache, over_time = folder / f"{NAME}.png", folder / f"{NAME}-time.png"
    if draw_over_cache({row: (sizes[row], values[row]) for row in rows}, over_cache, title=title):
        pictures.append(over_cache)
    if draw_over_time(learned, over_time, title=title):
        pictures.append(over_time)
    needs = [Need(recipe=RECIPE, row=row, metric=each, seeds=seeds) for each in (BITS, CURVE) for row in rows]
    verdicts = tuple(judge(claims(NAME), results))
    return Page(
        name=NAME,
        title="enwik8 at equal cache: what half of softmax-8's memory is best spent on",
        text=(_what(sizes),),
        grids=(_cost_grid(rows, sizes, values, results), *_time_grids(rows, learned, results)),
        pictures=tuple(pictures),
        verdicts=verdicts,
        needs=tuple(needs),
        missing=(*find_missing(results, needs, NAME), *throughput.find_untimed(RECIPE, rows, results)),
        notes=(*throughput.note(RECIPE, results), *results.notes_about({home(RECIPE, row) for row in rows})),
        ending=" ".join(part for part in (_best(sizes, values), verdict_in_words(verdicts)) if part),
        limits=LIMITS,
        numbers=sum(map(bool, values.values())),
    )


@functools.cache
def cache_bytes(row: str) -> int:
    """Of one token in all layers, in bf16."""
    return cache_bytes_of_run(bundled(RECIPE).config(row))


@functools.cache
def count_parameters(row: str) -> int:
    """Of the model of a row, which is built without its numbers."""
    with torch.device("meta"):
        return parameters(MGKForCausalLM(build_model_config(bundled(RECIPE).config(row), vocab_size=BYTES)))


def _what(sizes: Mapping[str, int]) -> str:
    full, budget = cache_bytes(FULL), cache_bytes(FULL) // 2
    less = [f"{row} keeps {size:,}" for row, size in sizes.items() if size < budget]
    return (
        f"{FULL} keeps {full:,} bytes for each token in bf16, keys and values of all layers. All rows here but the "
        f"reference with that cache keep {budget:,} bytes or less ({', '.join(less)}, since no number of its heads "
        f"comes closer). Rows that the recipe enwik8 has as well are its runs. The others are runs of {RECIPE}, which "
        "has the same settings. The paper has no such table."
    )


def _cost_grid(
    rows: Sequence[str], sizes: Mapping[str, int], values: Mapping[str, Sequence[float]], results: Results
) -> Grid:
    full = cache_bytes(FULL)
    lines = tuple(
        (
            row, f"{sizes[row]:,}", f"{sizes[row] / full:.3g}", f"{count_parameters(row):,}",
            show(values[row], BITS.decimals), *throughput.cells(RECIPE, row, results),
        )
        for row in rows
    )  # fmt: skip
    header = ("row", "cache, bytes a token", f"share of {FULL}", "parameters", "test bits per byte", *throughput.HEADER)
    return Grid(title="", header=header, lines=lines)


def _time_grids(rows: Sequence[str], learned: Mapping[str, Mapping[int, Curve]], results: Results) -> list[Grid]:
    """What each row has learned at the time that the fastest row needs, and that the slowest needs."""
    took = {row: duration(RECIPE, row, results) for row in rows if any(learned[row].values())}
    known = {row: seconds for row, seconds in took.items() if seconds is not None}
    if len(known) < 2:
        return []
    fastest, slowest = min(known, key=lambda row: known[row]), max(known, key=lambda row: known[row])
    lines = []
    for row, seconds in known.items():
        cells = []
        for time in (known[fastest], known[slowest]):
            found = [at_time(curve, time) for curve in learned[row].values()]
            cells.append(show([each for each in found if each is not None], BITS.decimals))
        lines.append((row, f"{seconds:,.0f}", *cells))
    header = (
        "row", "seconds of training", f"valid bits after {known[fastest]:,.0f} s ({fastest} is done)",
        f"after {known[slowest]:,.0f} s ({slowest} is done)",
    )  # fmt: skip
    return [Grid(title="At equal time of training, alone on the device", header=header, lines=tuple(lines))]


def _best(sizes: Mapping[str, int], values: Mapping[str, Sequence[float]]) -> str:
    """Which row within the budget has the lowest mean, as a sentence; empty where there is nothing to compare."""
    budget = cache_bytes(FULL) // 2
    means = {row: mean(values[row]) for row, size in sizes.items() if size <= budget and values[row]}
    if len(means) < 2:
        return ""
    best = min(means, key=lambda row: means[row])
    beside = [
        f"; {row} with the whole cache has {mean(values[row]):.{BITS.decimals}f}"
        for row, size in sizes.items()
        if size > budget and values[row]
    ]
    return (
        f"Within {budget:,} bytes {best} has the lowest mean, {means[best]:.{BITS.decimals}f} bits per byte"
        f"{''.join(beside)}. The claims above say which differences are more than chance."
    )
