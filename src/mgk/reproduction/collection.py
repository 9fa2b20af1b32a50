"""Collection of the results of finished runs into the folder from which pages are built."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import mgk.recipes
from mgk.reproduction.archive import MODES, is_archive, opened
from mgk.reproduction.filing import folder_of, refiled
from mgk.reproduction.results import ANALYSIS, CURVES, EVALUATIONS, run_files, run_name
from mgk.training import result
from mgk.training.tracking import METRICS


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The files of a finished run."""

    content: Mapping[str, Any]
    """Result of the run."""
    curves: Path
    evaluations: Mapping[str, Path]
    """Files of ``mgk evaluate`` by split."""
    analysis: Path
    """Folder of ``mgk analyze``."""


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy result, evaluations, curves and analysis of every finished run, and return the written files.

    A run is finished when it has a result. It is filed under the recipe that it agrees with today. Earlier copies are
    overwritten, except that an archive never replaces the result of another run.

    Args:
        runs: a folder with runs at any depth, another folder of results, or an archive of ``mgk sweep --archive``.
        results: folder of results.
    """
    if runs.is_file() and is_archive(runs):
        with opened(runs) as folder:
            packed = list(_in_results(folder))
            _check_same(runs, packed, results)
            return [path for run in packed for path in _bring(run, results)]
    if not runs.is_dir():
        found = "a file of another kind" if runs.is_file() else "nothing"
        raise ValueError(
            f"--collect must be a folder of runs, or an archive ({', '.join(MODES)}), got {runs}, where {found} is"
        )
    written: list[Path] = []
    for run in (*_in_run_folders(runs), *_in_results(runs)):
        written += _bring(run, results)
    return written


def result_file(results: Path, content: Mapping[str, Any]) -> Path:
    """Path of a result in the folder of results."""
    return results / folder_of(content) / f"{content['row']}-seed-{content['seed']}.json"


def write_result(results: Path, content: Mapping[str, Any]) -> Path:
    """Write a result into the folder of results, under the recipe that it agrees with."""
    path = result_file(results, content)
    result.write(path, _under(content, folder_of(content)))
    return path


def _check_same(archive: Path, runs: Sequence[Finished], results: Path) -> None:
    """Check that no result in an archive would replace that of another run. All that would are named at once."""
    differing = []
    for run in runs:
        present = result_file(results, run.content)
        if present.is_file() and result.read(present) != _under(run.content, folder_of(run.content)):
            differing.append(present)
    if differing:
        which = "that one" if len(differing) == 1 else "those"
        raise ValueError(
            f"{archive} must not replace the result of another run, got one that differs from "
            f"{', '.join(map(str, differing))}: remove {which} first if the archive is to be taken instead"
        )


def _bring(run: Finished, results: Path) -> Iterator[Path]:
    folder = folder_of(run.content)
    yield write_result(results, run.content)
    for name, source in _files(run, folder).items():
        copy = results / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".json":
            result.write(copy, _under(result.read_object(source), folder))
        else:
            shutil.copyfile(source, copy)
        yield copy


def _files(run: Finished, recipe: str) -> dict[PurePosixPath, Path]:
    """Return the files of a run beside its result, by their paths below the folder of results."""
    name = run_name(recipe, run.content["row"], run.content["seed"])
    files = {PurePosixPath(CURVES, f"{name}.jsonl"): run.curves}
    files |= {PurePosixPath(EVALUATIONS, f"{name}-{split}.json"): path for split, path in run.evaluations.items()}
    for path in sorted(run.analysis.glob("*")):
        if path.suffix in (".json", ".png") and not path.name.startswith("."):
            files[PurePosixPath(ANALYSIS, name, path.name)] = path
    return {name: path for name, path in files.items() if path.is_file()}


def _in_run_folders(runs: Path) -> Iterator[Finished]:
    """Yield the finished runs in folders of training runs."""
    for path in sorted(runs.rglob(result.RESULT)):
        yield _in_run_folder(path.parent)


def _in_run_folder(folder: Path) -> Finished:
    evaluations = sorted(folder.glob("evaluation-*.json"))
    return Finished(
        content=result.read(folder / result.RESULT),
        curves=folder / METRICS,
        evaluations={each.stem.removeprefix("evaluation-"): each for each in evaluations},
        # The default folder of `mgk analyze`.
        analysis=folder / ANALYSIS,
    )


def _in_results(folder: Path) -> Iterator[Finished]:
    """Yield the finished runs in another folder of results, filed there under the recipe that they named."""
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
    """Return a result, evaluation or analysis as it is filed under a folder. One of no recipe keeps its own name."""
    is_ours = "recipe" in content and folder in mgk.recipes.names()
    return refiled(content, folder) if is_ours else dict(content)


def copy_run(folder: Path, results: Path) -> list[Path]:
    """Copy the files of one finished run to the results, and return the written files."""
    return list(_bring(_in_run_folder(folder), results))


def files_of(folder: Path) -> dict[PurePosixPath, Path]:
    """Return the files of a finished run to collect, by their paths below the folder of results."""
    run = _in_run_folder(folder)
    recipe = run.content["recipe"]
    own = PurePosixPath(recipe, f"{run.content['row']}-seed-{run.content['seed']}.json")
    return {own: folder / result.RESULT, **_files(run, recipe)}
