"""The tables of a comparison: the metrics of the runs, and the costs of their models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

import mgk.recipes
from mgk.analysis.cost import cache_bytes_per_token, embedding_parameters, forward_flops, parameters
from mgk.analysis.report.page import ABSENT, Table, TableRow
from mgk.analysis.report.run import Run
from mgk.training.configuration import RunConfig

FIRST = ("accuracy", "bleu", "tokenised_lowercase_bleu", "sliding_perplexity", "perplexity")
# Length for which the operations of a translation model are counted, because sentences differ in length.
SENTENCE = 32
COSTS = (
    "parameters", "of which embeddings", "forward MFLOPs a token", "key and value bytes a token", "training tokens",
    "training time",
)  # fmt: skip


def results_table(rows: Mapping[str, Sequence[Run]]) -> Table:
    """Return the table of means and standard errors over seeds, next to the paper's numbers and simple baselines."""
    every = [run for members in rows.values() for run in members]
    names = [
        (split, name)
        for split in ("test", "valid")
        for name in _in_order(dict.fromkeys(name for run in every for name in _metrics(run, split)))
    ]
    # Of the validation, only the metric that chose the model is shown.
    chosen = {run.config.validation.metric for run in every}
    names = [(split, name) for split, name in names if split == "test" or name in chosen]
    papers = {row: _published(members[0].config) for row, members in rows.items()}
    published = list(dict.fromkeys(name for found in papers.values() for name in found))
    columns = [
        "seeds",
        *(_heading(split, name) for split, name in names),
        *(f"the paper's {name.replace('_', ' ')}" for name in published),
    ]
    lines = []
    for row, members in rows.items():
        done = sum(bool(run.result) for run in members)
        cells = [str(done) if done == len(members) else f"{done} of {len(members)} done"]
        for split, name in names:
            values = [found[name] for run in members if name in (found := _metrics(run, split))]
            cells.append(_mean(name, values))
        cells += [papers[row].get(name, ABSENT) for name in published]
        lines.append(TableRow(name=row, cells=cells))
    for name, value in {key: value for run in every for key, value in run.result.get("baselines", {}).items()}.items():
        what, _, metric = name.rpartition(", ")
        known = _of_nats(value) if metric == "nats per token" else {metric: value}
        cells = [_number(name, known[name]) if split == "test" and name in known else "" for split, name in names]
        if any(cells):
            lines.append(TableRow(name=what, cells=["", *cells, *[""] * len(published)], is_reference=True))
    notes = []
    if any(len(members) > 1 for members in rows.values()):
        notes.append("± is the standard error of the mean over seeds.")
    waiting = [str(run.place) for run in every if not run.result]
    if waiting:
        notes.append(f"No result yet, so curves only: {', '.join(waiting)}.")
    return Table(columns=columns, rows=lines, notes=notes)


def _published(config: RunConfig) -> dict[str, str]:
    """Return the paper's numbers for this row, whose accuracies are already in percent."""
    found = mgk.recipes.published(config.name, config.row) if config.row else {}
    return {name: f"{value:.2f}{' %' if name.endswith('accuracy') else ''}" for name, value in found.items()}


def _of_nats(value: float) -> dict[str, float]:
    """Convert a loss in nats to the metrics of a language model."""
    return {"loss": value, "bits_per_token": value / math.log(2), "perplexity": math.exp(value)}


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics by importance."""
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _metrics(run: Run, split: str) -> dict[str, float]:
    found = run.result.get("metrics", {}).get(split, {})
    return {
        name: float(value)
        for name, value in found.items()
        if name != "count" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _heading(split: str, metric: str) -> str:
    return f"{split if split == 'test' else 'best validation'} {metric.replace('_', ' ')}"


def _mean(metric: str, values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    mean = _number(metric, statistics.fmean(values))
    if len(values) < 2:
        return mean
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean.removesuffix(' %')} ± {_number(metric, error)}"


def _number(metric: str, value: float) -> str:
    """Format a metric. Accuracies are in percent, as in the paper."""
    return (
        f"{100 * value:.2f} %" if metric.endswith("accuracy") else f"{value:,.4g}" if value >= 100 else f"{value:.3f}"
    )


def cost_row(row: str, members: Sequence[Run], model: PreTrainedModel | None) -> TableRow:
    """Return the cost of a row, given one of its models or none."""
    done = [run.result for run in members if run.result]
    seconds = [found["seconds"] for found in done if "seconds" in found]
    read = [found["tokens"] for found in done if "tokens" in found]
    if model is None:
        known = f"{done[0]['parameters']:,}" if done and "parameters" in done[0] else ABSENT
        cells = [known, ABSENT, ABSENT, ABSENT]
    else:
        cells = [
            f"{parameters(model):,}",
            f"{embedding_parameters(model):,}",
            f"{_flops_per_token(members[0].config, model) / 1e6:,.3g}",
            f"{cache_bytes_per_token(model.config):,}",
        ]
    cells.append(f"{statistics.fmean(read):,.0f}" if read else ABSENT)
    cells.append(_duration(statistics.fmean(seconds)) if seconds else ABSENT)
    return TableRow(name=row, cells=cells)


def _flops_per_token(config: RunConfig, model: PreTrainedModel) -> float:
    """Operations per token for a sequence of the run's longest length, counted without running the model."""
    length = SENTENCE if config.task == "translation" else config.data.longest
    with torch.device("meta"):
        twin = type(model)(model.config).to(torch.float32).eval()
        ids = torch.zeros(1, length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids}
    if config.task == "translation":
        inputs |= {"decoder_input_ids": ids, "use_cache": False}
    elif config.task == "pairs":
        inputs["pair_input_ids"] = ids
    elif config.task == "language":
        inputs["use_cache"] = False
    return forward_flops(twin, **inputs) / (length * (2 if config.task in ("pairs", "translation") else 1))


def cost_notes(runs: Sequence[Run]) -> list[str]:
    """Return sentences that explain the numbers of the costs."""
    lengths = sorted({run.config.data.longest for run in runs if run.config.task != "translation"})
    notes = ["FLOPs are those of all matrix products of a forward pass, 2mnk each, as the algebra needs them."]
    if lengths:
        notes[0] = notes[0].removesuffix(".") + f", in a sequence of {' or '.join(f'{n:,}' for n in lengths)} tokens."
    if any(run.config.task == "translation" for run in runs):
        notes.append(f"Translation: {SENTENCE} tokens of source and as many of target.")
    notes.append("Bytes are those of bf16, over all layers; linear attention keeps a state of constant size instead.")
    if len({run.result.get("device") for run in runs if run.result}) > 1:
        notes.append("The times come from different machines, and do not compare.")
    return notes


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
