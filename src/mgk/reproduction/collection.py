"""What finished runs hold, brought to where results are read."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath

from mgk.reproduction.archive import is_archive, unpack
from mgk.reproduction.results import ANALYSIS, CURVES, EVALUATIONS, run_name
from mgk.training import result
from mgk.training.tracking import METRICS


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy the result, the evaluations, the curves and the analysis of every finished run; the files that were written.

    A run is finished when it has a result. What it had brought here before is overwritten. An archive of
    ``mgk sweep --archive`` is unpacked instead, which overwrites no other result.

    Args:
        runs: a folder with runs in it, at any depth, or an archive.
        results: where results are.
    """
    if runs.is_file() and is_archive(runs):
        return unpack(runs, results)
    if not runs.is_dir():
        raise ValueError(f"--collect must be a folder of runs, got {runs}, where no folder is, and no archive either")
    written: list[Path] = []
    for path in sorted(runs.rglob(result.RESULT)):
        written += copy_run(path.parent, results)
    return written


def copy_run(folder: Path, results: Path) -> list[Path]:
    """Bring what one finished run holds to the results; the files that were written."""
    written: list[Path] = []
    for name, source in files_of(folder).items():
        target = results / name
        if source.name == result.RESULT:
            result.write(target, result.read(source))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        written.append(target)
    return written


def files_of(folder: Path) -> dict[PurePosixPath, Path]:
    """The files of a finished run that results are made of, by where they go below the folder of the results."""
    found = result.read(folder / result.RESULT)
    recipe, row, seed = found["recipe"], found["row"], found["seed"]
    name = run_name(recipe, row, seed)
    files = {PurePosixPath(recipe, f"{row}-seed-{seed}.json"): folder / result.RESULT}
    if (folder / METRICS).is_file():
        files[PurePosixPath(CURVES, f"{name}.jsonl")] = folder / METRICS
    for evaluation in sorted(folder.glob("evaluation-*.json")):
        split = evaluation.stem.removeprefix("evaluation-")
        files[PurePosixPath(EVALUATIONS, f"{name}-{split}.json")] = evaluation
    # Where `mgk analyze` puts it unless told otherwise.
    for analysis in sorted((folder / ANALYSIS).glob("*")):
        if analysis.suffix in (".json", ".png") and not analysis.name.startswith("."):
            files[PurePosixPath(ANALYSIS, name, analysis.name)] = analysis
    return files
