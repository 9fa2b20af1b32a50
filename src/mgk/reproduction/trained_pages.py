"""The pages of the paper's figures about trained models: curves, ranks, attention maps, keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mgk.reproduction import learning_curves, numbers, rank_histograms
from mgk.reproduction.claims import claims, judge, with_stand_ins
from mgk.reproduction.composition import compose
from mgk.reproduction.learning_curves import Panel
from mgk.reproduction.metrics import Metric, metric
from mgk.reproduction.missing import Need, find_missing
from mgk.reproduction.page import Grid, Page
from mgk.reproduction.results import Results
from mgk.reproduction.stand_ins import explain, in_place_of, name_stand_ins
from mgk.reproduction.statistics import show

RETRIEVAL = {"lra/retrieval": ("softmax-2", "mgk-1", "mgk-2"), "lra/retrieval-linear": ("linear-2", "mlk-1", "mlk-2")}
"""Rows of figures 1 and 11, with the baseline first."""
LANGUAGE = {
    "wikitext103/small": ("softmax-8", "mgk-4", "mgk-8"), "wikitext103/small-linear": ("linear-8", "mlk-4", "mlk-8"),
}  # fmt: skip
"""Rows of figures 5 and 12."""
RANKS = {
    "F2": ("lra/retrieval", ("softmax-4", "mgk-4", "mgk-2"), (1, 2)),
    "F7": ("wikitext103/small", ("softmax-8", "mgk-8", "mgk-4"), (1, 5)),
}
"""Recipe, rows and layers."""
PICTURES = {
    "F2": ("lra/retrieval", ("softmax-4", "mgk-4", "mgk-2"), "attention-maps.png", "Attention maps, Retrieval"),
    "F6": (
        "wikitext103/small", ("softmax-8", "mgk-8", "mgk-4"), "attention-maps.png", "Attention maps, WikiText-103",
    ),
    "F9": ("lra/retrieval-linear", ("linear-4", "mlk-4", "mlk-2"), "attention-maps.png", "Attention maps, Retrieval"),
    "F13": ("lra/retrieval", ("softmax-2", "mgk-1", "smgk-1"), "key-projections.png", "Key projections, Retrieval"),
    "F14": ("lra/retrieval", ("softmax-2", "mgk-1", "smgk-1"), "keys.png", "Keys of the first 100 tokens, Retrieval"),
}  # fmt: skip
"""Recipe, rows, the file that ``mgk analyze`` draws, and the title."""

_LOSS = Panel(title="training loss", label="cross-entropy, nats", kind="train", key="loss")
_ACCURACY = Panel(title="validation accuracy", label="accuracy, %", kind="valid", key="accuracy", scale=100.0)
_VALID_LOSS = Panel(title="validation loss", label="cross-entropy, nats", kind="valid", key="loss")
_PERPLEXITY = Panel(
    title="validation perplexity", label="perplexity, disjoint windows", kind="valid", key="loss", is_exponential=True
)
_CURVES: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]], tuple[Panel, ...], str]] = {
    "F1": (
        "Retrieval, training loss and accuracy, logarithmic axes", RETRIEVAL,
        tuple(replace(panel, log=True) for panel in (_LOSS, _ACCURACY)), "mean_valid_accuracy",
    ),
    "F5": (
        "WikiText-103, validation perplexity, second half of training", LANGUAGE, (replace(_PERPLEXITY, zoom=True),),
        "mean_valid_loss",
    ),
    "F11": (
        "Retrieval, loss and accuracy", RETRIEVAL, (_LOSS, _VALID_LOSS, _ACCURACY), "mean_valid_accuracy",
    ),
    "F12": ("WikiText-103, validation perplexity", LANGUAGE, (_PERPLEXITY,), "mean_valid_loss"),
}  # fmt: skip


def curve_page(name: str, results: Results, folder: Path, seeds: int) -> Page:
    """Build the page of figure 1, 5, 11 or 12."""
    title, published, panels, key = _CURVES[name]
    title = name_stand_ins(title, list(published), results)
    recipes = {in_place_of(recipe, results): rows for recipe, rows in published.items()}
    picture = folder / f"{name}.png"
    drawn = learning_curves.draw(
        [
            (panel, {row: results.curves(recipe, row) for row in rows})
            for recipe, rows in recipes.items()
            for panel in panels
        ],
        picture,
        title=title,
        columns=max(2, len(panels)),
    )
    chosen = with_stand_ins(claims(name), results)
    needs = [
        Need(recipe=recipe, row=row, metric=metric(key), seeds=seeds if chosen else 1)
        for recipe, rows in recipes.items()
        for row in rows
    ]
    lines = tuple((row, *_last(results, recipe, row, panels)) for recipe, rows in recipes.items() for row in rows)
    notes = ["Bands are standard errors over seeds."]
    if _LOSS.title in [panel.title for panel in panels]:
        notes.append(f"Training loss is the mean of the last {learning_curves.SMOOTHED} measurements.")
    if name in ("F1", "F11"):
        notes.append("The paper draws test accuracy; ours is that of the validation set, which chooses the checkpoint.")
    if name == "F1" and chosen:
        notes.append('"Throughout training" is tested as the accuracy\'s mean over all validations of a run.')
    return Page(
        name=name,
        title=title,
        text=explain(list(published), results),
        grids=(Grid(title="At the end", header=("row", *(panel.title for panel in panels)), lines=lines),)
        if drawn
        else (),
        pictures=(picture,) if drawn else (),
        verdicts=tuple(judge(chosen, results)),
        needs=tuple(needs),
        missing=tuple(find_missing(results, needs, name)),
        notes=(*notes, *results.notes_about(recipes)),
        numbers=drawn,
    )


def analysis_page(name: str, results: Results, folder: Path, seeds: int) -> Page:
    """Build the page of figure 2, 6, 7, 9, 13 or 14."""
    pictures: list[Path] = []
    grids: list[Grid] = []
    needs: list[Need] = []
    drawn, title, published = 0, "", ""
    if name in PICTURES:
        published, rows, file, title = PICTURES[name]
        recipe, title = in_place_of(published, results), name_stand_ins(title, [published], results)
        found = {row: results.picture(recipe, row, file) for row in rows}
        there = {row: path for row, path in found.items() if path is not None}
        if there:
            pictures.append(folder / f"{name}.png")
            compose(there, pictures[-1], title=title)
        drawn += len(there)
        needs += [Need(recipe=recipe, row=row, picture=file) for row in rows]
    if name in RANKS:
        published, rows, layers = RANKS[name]
        recipe = in_place_of(published, results)
        title = title or name_stand_ins("Ranks of attention matrices, WikiText-103", [published], results)
        picture = folder / f"{name}-ranks.png"
        count = rank_histograms.draw(_ranks(results, recipe, rows, layers), picture, title="Rank of attention matrices")
        metrics = [metric(f"rank_layer_{layer}") for layer in layers]
        if count:
            pictures.append(picture)
            grids.append(_rank_grid(results, recipe, rows, metrics))
        drawn += count
        needs += [Need(recipe=recipe, row=row, metric=each, seeds=seeds) for row in rows for each in metrics]
    return Page(
        name=name,
        title=title + (" and ranks" if name == "F2" else ""),
        text=explain([published], results),
        grids=tuple(grids),
        pictures=tuple(pictures),
        verdicts=tuple(judge(with_stand_ins(claims(name), results), results)),
        needs=tuple(needs),
        missing=tuple(find_missing(results, needs, name)),
        notes=(*_NOTES.get(name, ()), *results.notes_about({need.recipe for need in needs})),
        numbers=drawn,
    )


_RANK_NOTE = (
    "The paper's rank counts singular values above 1e-6, which lies near the noise of fp32; ours are computed in fp64. "
    "Of a long sequence `mgk analyze` takes 1024 evenly spaced rows, so its rank is a lower bound of that of the whole."
)
_NOTES = {"F2": (_RANK_NOTE,), "F7": (_RANK_NOTE,)}

PAGES: Mapping[str, Callable[[str, Results, Path, int], Page]] = {
    **dict.fromkeys(_CURVES, curve_page), **dict.fromkeys(("F2", "F6", "F7", "F9", "F13", "F14"), analysis_page),
}  # fmt: skip


def _last(results: Results, recipe: str, row: str, panels: Sequence[Panel]) -> list[str]:
    """Return the last point of each curve as text."""
    cells = []
    for panel in panels:
        steps, means, _ = learning_curves.points(results.curves(recipe, row), panel)
        cells.append(f"{means[-1]:.3f} at step {steps[-1]}" if steps else "")
    return cells


def _ranks(
    results: Results, recipe: str, rows: Sequence[str], layers: Sequence[int]
) -> dict[int, dict[str, list[float]]]:
    return {
        layer: {
            row: [rank for found in results.analysis(recipe, row).values() for rank in numbers.ranks(found, layer)]
            for row in rows
        }
        for layer in layers
    }


def _rank_grid(results: Results, recipe: str, rows: Sequence[str], metrics: Sequence[Metric]) -> Grid:
    lines = tuple(
        (row, *(show(list(results.values(recipe, row, each).values()), each.decimals) for each in metrics))
        for row in rows
    )
    return Grid(
        title="Mean over matrices, then over seeds", header=("row", *(each.title for each in metrics)), lines=lines
    )
