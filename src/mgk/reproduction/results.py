"""The folder ``results/``: the runs, evaluations, curves, analyses and measurements from which pages are built.

::

    results/RECIPE/ROW-seed-N.json              the result of a run: mgk train --results results
    results/evaluations/NAME*.json              mgk evaluate, NAME as in lra-text-smgk-4-seed-0
    results/curves/NAME.jsonl                   the metrics.jsonl of a run
    results/analysis/NAME/analysis.json         the numbers of mgk analyze, next to its pictures
    results/bench/retrieval-DEVICE.json         mgk bench retrieval
    results/bench/rows-RECIPE-DEVICE.json       mgk bench rows
    results/controls/NAME.json                  benchmarks/published_control.py, see :mod:`mgk.reproduction.controls`
    results/shift/NAME.json                     benchmarks/shift.py, see :mod:`mgk.reproduction.shift_measurements`

A damaged file is an error that names it. A run whose configuration differs from today's recipe counts, with its curves
and analysis, under the recipe that it agrees with, or not at all, and a note lists the differences: see
:mod:`mgk.reproduction.filing`. An analysis of another text, or of the random tokens that ``mgk analyze`` uses without
data, is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import mgk.recipes
from mgk.analysis.curves import read_measurements
from mgk.evaluation.items import unpack_items
from mgk.reproduction import numbers
from mgk.reproduction.filing import OTHER, file_result
from mgk.reproduction.metrics import Metric, slide_of
from mgk.reproduction.recipe import home
from mgk.reproduction.retrieval_measurements import read_retrieval_measurements
from mgk.reproduction.run_file import read_run
from mgk.reproduction.speeds import read_speeds
from mgk.training import result

EVALUATIONS, CURVES, ANALYSIS, BENCH, CONTROLS = "evaluations", "curves", "analysis", "bench", "controls"
SHIFT = "shift"
_OTHER_FOLDERS = (EVALUATIONS, CURVES, ANALYSIS, BENCH, CONTROLS, SHIFT, "accuracy", "conversions")

T = TypeVar("T")
Key = tuple[str, str, int]
"""Recipe, row and seed."""


def run_name(recipe: str, row: str, seed: int) -> str:
    """Return the name of a run's files, such as ``lra-text-smgk-4-seed-0``."""
    return f"{recipe.replace('/', '-')}-{row}-seed-{seed}"


@dataclass(frozen=True, kw_only=True)
class Results:
    """All results by recipe, row and seed.

    A row that a recipe shares with the recipe it extends is found under both: :func:`mgk.reproduction.recipe.home`.
    """

    folder: Path
    runs: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    """Results of finished runs."""
    evaluations: Mapping[tuple[Key, str], Mapping[str, Any]] = field(default_factory=dict)
    """Results of ``mgk evaluate`` by run and split."""
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Results of ``mgk analyze`` by the name of the run."""
    pictures: Mapping[str, Path] = field(default_factory=dict)
    """Folders with the pictures of analyses, by the name of the run."""
    trainings: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Measurements during training by the name of the run."""
    measurements: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Results of ``mgk bench retrieval`` by recipe and row."""
    speeds: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Results of ``mgk bench rows`` by recipe and row."""
    right: Mapping[Key, NDArray[np.bool_]] = field(default_factory=dict)
    """Test items that each run got right, ``[items]``, for runs that record them."""
    notes: tuple[str, ...] = ()
    """Notes on ignored results, with reasons."""
    resampled: dict[str, Mapping[Key, NDArray[np.float64]]] = field(default_factory=dict, init=False, repr=False)
    """Cache of accuracies on resampled items, by recipe: see :mod:`.items`."""

    def values(self, recipe: str, row: str, metric: Metric) -> dict[int, float]:
        """Return a metric of a row by seed, in the paper's unit."""
        found: dict[int, float] = {}
        if metric.source == "benchmark":
            measured = self.measurement(recipe, row)
            return {} if measured is None else {0: metric.scale * float(measured[metric.key])}
        recipe = home(recipe, row)
        for seed in self._seeds(recipe, row):
            value = self._value((recipe, row, seed), metric)
            if value is not None:
                found[seed] = metric.scale * value
        return found

    def rows(self, recipe: str) -> list[str]:
        """Return the rows with a run or an evaluation."""
        keys = [*self.runs, *(key for key, _ in self.evaluations)]
        return list(dict.fromkeys(row for name, row, _ in keys if name == recipe))

    def trained(self, recipe: str, row: str) -> set[int]:
        """Return the seeds of finished runs."""
        recipe = home(recipe, row)
        return {seed for name, own, seed in self.runs if (name, own) == (recipe, row)}

    def has_any(self, recipe: str) -> bool:
        """Whether there are any results of a recipe."""
        start = f"{recipe.replace('/', '-')}-"
        named = [name for name in (*self.trainings, *self.analyses) if name.startswith(start)]
        return bool(self.rows(recipe)) or recipe in map(_recipe_of_name, named)

    def corpus(self, key: Key) -> str:
        """Return the fingerprint of a run's data; empty if it is unknown."""
        found = self._tested(key).get("corpus")
        return str(found.get("fingerprint", "")) if isinstance(found, Mapping) else ""

    def test_items(self, key: Key) -> int | None:
        """Return the number of items behind a run's accuracy."""
        if key in self.right:
            return len(self.right[key])
        metrics = self._tested(key).get("metrics", {})
        count = metrics.get("test", metrics).get("count")
        return int(count) if count else None

    def _tested(self, key: Key) -> Mapping[str, Any]:
        return self.runs.get(key) or self.evaluations.get((key, "test"), {})

    def measurement(self, recipe: str, row: str) -> Mapping[str, Any] | None:
        """Return the time and memory of a row."""
        return self.measurements.get((recipe, row))

    def curves(self, recipe: str, row: str) -> dict[int, list[dict[str, Any]]]:
        """Return the measurements during training by seed."""
        return _by_seed(self.trainings, home(recipe, row), row)

    def analysis(self, recipe: str, row: str) -> dict[int, Mapping[str, Any]]:
        """Return the results of ``mgk analyze`` by seed."""
        return _by_seed(self.analyses, home(recipe, row), row)

    def picture(self, recipe: str, row: str, name: str) -> Path | None:
        """Return a picture of ``mgk analyze`` for a row, from the first seed that has it."""
        for seed in self.analysis(recipe, row):
            path = self.pictures[run_name(home(recipe, row), row, seed)] / name
            if path.is_file():
                return path
        return None

    def notes_about(self, recipes: Iterable[str]) -> tuple[str, ...]:
        """Return the notes that name one of these recipes, or one of their files."""
        wanted = set(recipes)
        return tuple(note for note in self.notes if wanted & _recipes_in(note))

    def _seeds(self, recipe: str, row: str) -> list[int]:
        keys = {*self.runs, *(key for key, _ in self.evaluations)}
        seeds = {seed for name, own, seed in keys if (name, own) == (recipe, row)}
        return sorted(seeds | self.curves(recipe, row).keys() | self.analysis(recipe, row).keys())

    def _value(self, key: Key, metric: Metric) -> float | None:
        if metric.source in ("analysis", "curve") and key not in self.runs:
            # Nobody knows with which configuration it was trained, nor whether it has ended.
            return None
        if metric.source == "analysis":
            content = self.analyses.get(run_name(*key))
            return None if content is None else numbers.value(content, metric)
        if metric.source == "curve":
            lines = self.curves(key[0], key[1]).get(key[2], [])
            found = [line.get(metric.key, math.nan) for line in lines if line["kind"] == metric.split]
            found = [value for value in found if math.isfinite(value)]
            return math.fsum(found) / len(found) if found else None
        if metric.name == "parameters":
            return float(self.runs[key]["parameters"]) if key in self.runs else None
        evaluated = self.evaluations.get((key, metric.split))
        if metric.source == "evaluation":
            return None if evaluated is None else evaluated["metrics"].get(metric.key)
        # Without the result of the run, an evaluation of its best model has the same metric.
        if key in self.runs:
            return self.runs[key]["metrics"].get(metric.split, {}).get(metric.key)
        return None if evaluated is None else evaluated["metrics"].get(metric.key)


def read_results(folder: Path) -> Results:
    """Read a folder of results. A folder that does not exist counts as empty."""
    notes: list[str] = []
    runs: dict[Key, Mapping[str, Any]] = {}
    # The name of a run's files, and the name under which they count; ``None`` if they are ignored with their run.
    names: dict[str, str | None] = {}
    found = {path: read_run(path) for path in run_files(folder)}
    filed = {path: _file(content, path, folder, notes) for path, content in found.items()}
    # A run that names its recipe has priority over one that was refiled.
    for path in sorted(found, key=lambda path: filed[path] != found[path]["recipe"]):
        recipe, content = filed[path], found[path]
        key = None if recipe is None else (recipe, content["row"], content["seed"])
        if key in runs:
            notes.append(f"{path.relative_to(folder)} is set aside: there is another result of {run_name(*key)}")
            key = None
        elif key is not None and (other := _copied_from(content, key, runs)) is not None:
            # Counted twice it would make the spread between seeds smaller than it is.
            notes.append(f"{path.relative_to(folder)} is set aside: all its numbers are those of {run_name(*other)}")
            key = None
        elif key is not None:
            runs[key] = content
        names[path.relative_to(folder).with_suffix("").as_posix().replace("/", "-")] = key and run_name(*key)
    evaluations: dict[tuple[Key, str], Mapping[str, Any]] = {}
    for path in sorted((folder / EVALUATIONS).glob("*.json")):
        content = read_run(path)
        if content.get("stride") not in (None, usual := slide_of(_corpus_of(content))):
            notes.append(f"{path.relative_to(folder)} slid its window by {content['stride']}; wanted is {usual}")
            continue
        recipe = _file(content, path, folder, notes)
        if recipe is not None:
            key = (recipe, content["row"], content["seed"])
            evaluations[key, str(content.get("split", "test"))] = content
            names.setdefault(run_name(*_key(content)), run_name(*key))
            if key not in runs:
                notes.append(f"{path.relative_to(folder)} is an evaluation of a run whose own result is not here")
    curves = {path.stem: path for path in sorted((folder / CURVES).glob("*.jsonl"))}
    analyses = dict(_read_analyses(folder, notes))
    for kind, found_names in ((CURVES, curves), (ANALYSIS, analyses)):
        # Without the run, its recipe is not known.
        alone = [name for name in found_names if name not in names]
        notes += [f"{kind}/{name} is of a run whose own result is not here" for name in alone]
    measurements = read_retrieval_measurements(folder / BENCH, notes)
    return Results(
        folder=folder,
        runs=runs,
        evaluations=evaluations,
        analyses=_renamed(analyses, names),
        pictures=_renamed({name: folder / ANALYSIS / name for name in analyses}, names),
        trainings={name: _read_curve(path) for name, path in _renamed(curves, names).items()},
        measurements=measurements,
        speeds=read_speeds(folder / BENCH, notes),
        right=_read_items(runs, evaluations),
        notes=(*notes, *_corpora(runs)),
    )


def _copied_from(content: Mapping[str, Any], key: Key, runs: Mapping[Key, Mapping[str, Any]]) -> Key | None:
    """Return the run of the same row whose metrics are the same to the last digit of a loss; ``None`` if none is."""
    metrics = content["metrics"]
    if not any("loss" in found for found in metrics.values() if isinstance(found, Mapping)):
        return None
    return next((other for other, found in runs.items() if other[:2] == key[:2] and found["metrics"] == metrics), None)


def _renamed(files: Mapping[str, T], names: Mapping[str, str | None]) -> dict[str, T]:
    """Rename files of runs to the names under which the runs count; files that already have such a name win."""
    own = {name: file for name, file in files.items() if names.get(name, name) == name}
    moved = {names[name]: file for name, file in files.items() if name not in own}
    return {**{name: file for name, file in moved.items() if name is not None}, **own}


def run_files(folder: Path) -> list[Path]:
    """Return the files of runs in a folder of results."""
    paths = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    return [path for path in paths if path.relative_to(folder).parts[0] not in _OTHER_FOLDERS]


def _key(content: Mapping[str, Any]) -> Key:
    return content["recipe"], content["row"], content["seed"]


def _file(content: Mapping[str, Any], path: Path, folder: Path, notes: list[str]) -> str | None:
    """Return the recipe of a run, and add a note if it is not the one that the run names."""
    try:
        filed = file_result(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold the configuration of a run, got one where {error}") from error
    where, named = path.relative_to(folder), content["recipe"]
    if filed.recipe is None and not filed.differences:
        notes.append(f"{where} is set aside: its recipe, {named}, is none of the library's")
    elif filed.recipe is None:
        notes.append(
            f"{where} is of another configuration and counts nowhere: it differs from {named} in {filed.reason}"
        )
    elif filed.recipe != named and filed.differences:
        notes.append(f"{where} counts as {filed.recipe}: it differs from {named} in {filed.reason}")
    return filed.recipe


def _read_items(
    runs: Mapping[Key, Mapping[str, Any]], evaluations: Mapping[tuple[Key, str], Mapping[str, Any]]
) -> dict[Key, NDArray[np.bool_]]:
    """Return the test items that were right, for runs, and for evaluations without a run."""
    tested = {key: content for (key, split), content in evaluations.items() if split == "test"} | dict(runs)
    return {
        key: unpack_items(found["items"]["test"]) for key, found in tested.items() if "test" in found.get("items", {})
    }


def _corpus_of(content: Mapping[str, Any]) -> str:
    return str(content["config"].get("data", {}).get("corpus", ""))


def _corpora(runs: Mapping[Key, Mapping[str, Any]]) -> Iterator[str]:
    fingerprints: dict[str, set[str]] = {}
    for (recipe, _, _), content in runs.items():
        corpus = content.get("corpus")
        if isinstance(corpus, Mapping):
            fingerprints.setdefault(recipe, set()).add(str(corpus.get("fingerprint")))
    for recipe, found in fingerprints.items():
        if len(found) > 1:
            yield f"runs of {recipe} come from {len(found)} corpora that differ from each other"


def _read_curve(path: Path) -> list[dict[str, Any]]:
    lines = read_measurements(path)
    if not lines:
        raise ValueError(f"{path} must hold the measurements of a run, a line of JSON each, got none")
    return lines


def _read_analyses(folder: Path, notes: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the analyses on the run's own corpus. For others, of random tokens or another text, add a note."""
    for path in sorted((folder / ANALYSIS).glob("*/analysis.json")):
        content = result.read_object(path)
        numbers.check(content, path)
        name = path.parent.name.removeprefix(f"{OTHER}-")
        if {"recipe", "row", "seed"} <= content.keys():
            about = run_name(content["recipe"], content["row"], content["seed"])
            if about != name:
                raise ValueError(f"{path} must be about the run that its folder names, got {about}")
        if "corpus" in content:
            yield path.parent.name, content
        else:
            read = content.get("batch", "nobody knows what")
            notes.append(f"{path.relative_to(folder)} is set aside: its model read {read}, not the data of its recipe")


def _recipes_in(note: str) -> set[str]:
    found = set()
    for word in note.replace(",", " ").split():
        folder, _, file = word.partition("/")
        name = file if folder in _OTHER_FOLDERS else word.replace("/", "-")
        found |= {_recipe_of_name(name)} - {""}
    return found


def _recipe_of_name(name: str) -> str:
    """Return the recipe of a run by the name of its files."""
    # The longest match is right, since lra-retrieval-linear also begins with lra-retrieval.
    recipes = [each for each in mgk.recipes.names() if f"{name}-".startswith(f"{each.replace('/', '-')}-")]
    return max(recipes, key=len, default="")


def _by_seed(named: Mapping[str, T], recipe: str, row: str) -> dict[int, T]:
    """Select the entries of one row by seed, from entries by the name of the run."""
    start = run_name(recipe, row, 0).removesuffix("0")
    ends = {name.removeprefix(start): found for name, found in named.items() if name.startswith(start)}
    return {seed: ends[str(seed)] for seed in sorted(int(end) for end in ends if end.isdecimal())}
