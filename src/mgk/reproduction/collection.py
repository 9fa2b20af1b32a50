"""What finished runs hold, brought to where results are read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mgk.recipes
from mgk.reproduction.filing import folder_of, refiled
from mgk.reproduction.results import ANALYSIS, CURVES, EVALUATIONS, run_files, run_name
from mgk.training import result
from mgk.training.tracking import METRICS


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished run, and what it left besides."""

    content: Mapping[str, Any]
    """Its result."""
    curves: Path
    evaluations: Mapping[str, Path]
    """By split."""
    analysis: Path
    """The folder."""


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy the result, the evaluations, the curves and the analysis of every finished run; the files that were written.

    A run is finished when it has a result. Each goes under the recipe that it agrees with today, and what had been
    brought there before is overwritten.

    Args:
        runs: a folder with runs in it, at any depth, or another folder of results.
        results: where results are.
    """
    if not runs.is_dir():
        raise ValueError(f"--collect must be a folder of runs, got {runs}, where no folder is")
    written: list[Path] = []
    for run in (*_in_run_folders(runs), *_in_results(runs)):
        written += _bring(run, results)
    return written


def result_file(results: Path, content: Mapping[str, Any]) -> Path:
    """Where a result is kept."""
    return results / folder_of(content) / f"{content['row']}-seed-{content['seed']}.json"


def write_result(results: Path, content: Mapping[str, Any]) -> Path:
    """Put a result where those of many runs are, under the recipe that it agrees with."""
    path = result_file(results, content)
    result.write(path, _under(content, folder_of(content)))
    return path


def _bring(run: Finished, results: Path) -> Iterator[Path]:
    folder = folder_of(run.content)
    name = run_name(folder, run.content["row"], run.content["seed"])
    yield write_result(results, run.content)
    copies = {run.curves: results / CURVES / f"{name}.jsonl"}
    for split, path in run.evaluations.items():
        copies[path] = results / EVALUATIONS / f"{name}-{split}.json"
    # Where `mgk analyze` puts it unless told otherwise.
    for path in sorted(run.analysis.glob("*")):
        if path.suffix in (".json", ".png"):
            copies[path] = results / ANALYSIS / name / path.name
    for source, copy in copies.items():
        if not source.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".json":
            result.write(copy, _under(result.read_object(source), folder))
        else:
            shutil.copyfile(source, copy)
        yield copy


def _in_run_folders(runs: Path) -> Iterator[Finished]:
    """As training leaves them."""
    for path in sorted(runs.rglob(result.RESULT)):
        evaluations = sorted(path.parent.glob("evaluation-*.json"))
        yield Finished(
            content=result.read(path),
            curves=path.parent / METRICS,
            evaluations={each.stem.removeprefix("evaluation-"): each for each in evaluations},
            analysis=path.parent / ANALYSIS,
        )


def _in_results(folder: Path) -> Iterator[Finished]:
    """As they are kept, there under whatever recipe they named."""
    for path in run_files(folder):
        if re.search(r"-seed-\d+\.json$", path.name) is None:
            continue
        name = path.relative_to(folder).with_suffix("").as_posix().replace("/", "-")
        evaluations = sorted((folder / EVALUATIONS).glob(f"{name}-*.json"))
        yield Finished(
            content=result.read(path),
            curves=folder / CURVES / f"{name}.jsonl",
            evaluations={each.stem.removeprefix(f"{name}-"): each for each in evaluations},
            analysis=folder / ANALYSIS / name,
        )


def _under(content: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A result, evaluation or analysis as it is kept there; one that stands apart keeps the name that it had."""
    is_ours = "recipe" in content and folder in mgk.recipes.names()
    return refiled(content, folder) if is_ours else dict(content)
