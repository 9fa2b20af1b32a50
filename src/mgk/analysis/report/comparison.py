"""Building a report from runs on disk, grouped by row, with their costs and commands."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import mgk.recipes
from mgk.analysis.report.command import reproduce, yaml_value
from mgk.analysis.report.examples import Example, find_examples, look
from mgk.analysis.report.page import AttentionMaps, Report, RunReport, Table, TableRow
from mgk.analysis.report.run import Run, read_run
from mgk.analysis.report.settings import flatten
from mgk.analysis.report.tables import COSTS, cost_notes, cost_row, results_table
from mgk.analysis.saved_model import load_model
from mgk.data.errors import DataError
from mgk.data.kind import Progress, no_progress
from mgk.data.store import Corpus
from mgk.nn import PRESETS
from mgk.training.agreement import free_to_change
from mgk.training.configuration import differences, to_mapping
from mgk.training.corpora import open_or_prepare
from mgk.training.resolved_model import with_model_of_record

# Most points of a curve, about as many as a screen can show.
MOST_POINTS = 400


def compare_runs(
    places: Sequence[str | Path],
    *,
    title: str | None = None,
    examples: int = 2,
    tokens: int = 64,
    source: str | Path | None = None,
    command: str = "",
    progress: Progress = no_progress,
) -> Report:
    """Build the report of runs. Runs that differ only in their seed share a row, with mean and standard error.

    The explorer shows the first run of each row that has a checkpoint. Runs without a checkpoint are reported as well,
    and the page says what is missing.

    Args:
        places: folders of runs, or result files copied from them.
        title: title of the page; ``None`` is that of the recipe.
        examples: number of sequences in the explorer; 0 leaves it out.
        tokens: most tokens of each sequence.
        source: folder of the raw files, needed if a corpus is not prepared yet.
        command: command that writes this page again.
        progress: shows the progress.
    """
    if not places:
        raise ValueError("a report must have at least one run, got none")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    runs = [read_run(place) for place in places]
    rows = _group(runs)
    seeing = _Seeing(examples, tokens, source, progress)
    shown: list[RunReport] = []
    costs: list[TableRow] = []
    missing: list[str] = []
    for row, members in progress(list(rows.items()), "runs"):
        found = next((run for run in members if run.checkpoint is not None), members[0])
        model = None if found.checkpoint is None else load_model(found.checkpoint)
        costs.append(cost_row(row, members, model))
        maps, lack = seeing.look(found, model)
        if lack:
            missing.append(f"{row} is not in the explorer: {lack}.")
        for run in members:
            shown.append(_describe(run, row, members, maps if run is found else (), model))
    several = [row for row, members in rows.items() if len(members) > 1]
    if several and examples > 0:
        missing.append(
            f"To keep this file small, the explorer shows one seed of each row; {_count(len(runs) - len(rows), 'run')} "
            f"of {', '.join(several)} {'is' if len(runs) - len(rows) == 1 else 'are'} left out of it."
        )
    metric, baselines = _baselines(runs)
    return Report(
        title=_title(runs) if title is None else title,
        subtitle=_subtitle(runs, rows),
        runs=shown,
        results=results_table(rows),
        costs=Table(columns=COSTS, rows=costs, notes=cost_notes(runs)),
        baselines=baselines if any(metric in run.curves for run in shown) else {},
        metric=metric if any(metric in run.curves for run in shown) else None,
        missing=missing,
        notes=_notes(runs),
        command=command,
    )


class _Seeing:
    """Computes attention maps of the same examples with every model of a corpus, which is opened once."""

    def __init__(self, count: int, tokens: int, source: str | Path | None, progress: Progress) -> None:
        self.count, self.tokens, self.source, self.progress = count, tokens, source, progress
        self._corpora: dict[str, Corpus] = {}

    def look(self, run: Run, model: PreTrainedModel | None) -> tuple[list[AttentionMaps], str]:
        """Return the maps of the examples, and the reason if there are none."""
        if self.count == 0:
            return [], ""
        if model is None:
            return [], run.missing
        try:
            examples = self._examples(run, min(self.tokens, run.config.data.longest))
        except DataError as error:
            return [], f"its corpus is not at hand, {error}"
        return [look(model, example) for example in examples], ""

    def _examples(self, run: Run, longest: int) -> list[Example]:
        key = json.dumps([run.config.data.corpus, run.config.data.options], sort_keys=True)
        if key not in self._corpora:
            self._corpora[key] = open_or_prepare(run.config.data, source=self.source, progress=self.progress)
        corpus = self._corpora[key]
        trained_on = run.result.get("corpus", {}).get("fingerprint")
        if trained_on is not None and trained_on != corpus.fingerprint:
            raise DataError(
                f"it must have the checksum {trained_on[:12]}... that the run was trained on, "
                f"got {corpus.fingerprint[:12]}..."
            )
        return find_examples(corpus, count=self.count, longest=longest)


def _group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seed, by the name of their row."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    members = list(groups.values())
    for group in members:
        seeds = [run.config.seed for run in group]
        for seed in seeds:
            # A run that is counted twice would make the standard error too small.
            if seeds.count(seed) > 1:
                places = ", ".join(str(run.place) for run in group if run.config.seed == seed)
                raise ValueError(f"runs of one row must have different seeds, got seed {seed} in {places}")
    recipes = {run.config.name for run in runs}
    names = [
        group[0].config.row if len(recipes) == 1 else f"{group[0].config.name} {group[0].config.row}"
        for group in members
    ]
    return {_distinct(number, names, members): group for number, group in enumerate(members)}


def _distinct(number: int, names: Sequence[str], members: Sequence[list[Run]]) -> str:
    """Return a name of a row that is unique: if another row has the same name, its differences are added."""
    name, own = names[number] or "run", _settings(members[number][0])
    changed: dict[str, Any] = {}
    for other, group in zip(names, members, strict=True):
        if other == names[number] and group is not members[number]:
            changed |= {key: new for key, (_, new) in differences(_settings(group[0]), own).items()}
    return (
        name if not changed else f"{name} ({', '.join(f'{key}={yaml_value(value)}' for key, value in changed.items())})"
    )


def _settings(run: Run) -> dict[str, Any]:
    """Settings that affect the numbers, without the seed. The model is the one that the run had at the time."""
    config = with_model_of_record(run.config, run.result) if run.result else run.config
    kept = {key: value for key, value in to_mapping(config).items() if key != "seed"}
    for path in free_to_change(config.task):
        group, _, key = path.partition(".")
        if key:
            kept[group] = {name: value for name, value in kept[group].items() if name != key}
    return kept


def _describe(
    run: Run, row: str, members: Sequence[Run], maps: Sequence[AttentionMaps], model: PreTrainedModel | None
) -> RunReport:
    is_linear = model is not None and PRESETS[model.config.attention].feature_map is not None
    is_hard = model is not None and PRESETS[model.config.attention].assignment == "hard"
    what = "part of the linear attention (a kernel, not a density)" if is_linear else "responsibility, p(r | i, j)"
    return RunReport(
        name=row if len(members) == 1 else f"{row}, seed {run.config.seed}",
        row=row,
        curves=_curves(run),
        maps=maps,
        shares_are="being the nearest one" if is_hard else what,
        configuration=flatten(to_mapping(run.config)),
        facts=_facts(run),
        command=reproduce(run.config),
    )


def _curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """Return the curves to show: the training loss and the main validation metrics."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.curves:
        if line["kind"] == "train":
            names = {"loss": "training loss"}
        else:
            # Bits per token show the same as the loss.
            hidden = {"step", "kind", "count", "bits_per_token", "validation_seconds"}
            hidden |= {"loss"} if "perplexity" in line else set()
            names = {key: f"validation {key}" for key in line if key not in hidden}
        for key, name in names.items():
            if key in line:
                curves.setdefault(name, []).append((line["step"], line[key]))
    return {name: _thinned(points) for name, points in curves.items()}


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Replace points by means of neighbours if there are more than a screen can show."""
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups] if size > 1 else points


def _facts(run: Run) -> dict[str, str]:
    found = run.result
    corpus = found.get("corpus", {})
    facts = {
        "folder": str(run.place),
        "data": f"{run.config.data.corpus}, SHA-256 {corpus['fingerprint']}" if "fingerprint" in corpus else "",
        "best step": f"{found['best_step']:,} of {found['steps']:,}" if {"best_step", "steps"} <= found.keys() else "",
        "skipped updates": str(found["skipped"]) if found.get("skipped") else "",
        "device": str(found.get("device", "")),
        "precision": str(found.get("precision", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items()),
        "written": str(found.get("written", "")),
        "explored model": run.checkpoint.name if run.checkpoint is not None else "",
    }
    return {key: value for key, value in facts.items() if value}


def _title(runs: Sequence[Run]) -> str:
    recipes = list(dict.fromkeys(run.config.name for run in runs))
    if len(recipes) > 1:
        return f"Runs of {', '.join(recipes)}"
    return mgk.recipes.load(recipes[0]).title if recipes[0] in mgk.recipes.names() else f"Runs of {recipes[0]}"


def _subtitle(runs: Sequence[Run], rows: Mapping[str, Sequence[Run]]) -> str:
    recipes = ", ".join(dict.fromkeys(run.config.name for run in runs))
    corpora = ", ".join(dict.fromkeys(run.config.data.corpus for run in runs))
    return f"{_count(len(runs), 'run')} in {_count(len(rows), 'row')} of the recipe {recipes}, on {corpora}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _baselines(runs: Sequence[Run]) -> tuple[str, dict[str, float]]:
    """Return baselines without a model for the curve of accuracy. (Those of perplexity would squeeze the curves.)"""
    found = {key: value for run in runs for key, value in run.result.get("baselines", {}).items()}
    kept = {key.removesuffix(", accuracy"): value for key, value in found.items() if key.endswith(", accuracy")}
    return "validation accuracy", kept


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    counts = {run.result["metrics"]["test"]["count"] for run in runs if "count" in _test(run)}
    if len(counts) == 1 and any("accuracy" in _test(run) for run in runs):
        (count,) = counts
        error = math.sqrt(0.25 / count)
        notes.append(
            f"{count:,.0f} test samples: differences of accuracy below {2 * error:.1%} may come from the choice of "
            f"samples, whatever the seeds say."
        )
    if any(len(run.curves) > MOST_POINTS for run in runs):
        notes.append(f"Curves with more than {MOST_POINTS} points are drawn as means of neighbouring points.")
    fingerprints = {run.result.get("corpus", {}).get("fingerprint") for run in runs if run.result}
    if len(fingerprints) > 1:
        notes.append("The runs were trained on different data: see the checksums under Reproduce.")
    return notes


def _test(run: Run) -> Mapping[str, Any]:
    return run.result.get("metrics", {}).get("test", {})
