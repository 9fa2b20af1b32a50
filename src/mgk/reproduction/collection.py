"""What finished runs hold, brought to where results are read."""

from __future__ import annotations

import shutil
from pathlib import Path

from mgk.reproduction.results import ANALYSIS, CURVES, EVALUATIONS, run_name
from mgk.training import result
from mgk.training.tracking import METRICS


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy the result, the evaluations, the curves and the analysis of every finished run; the files that were written.

    A run is finished when it has a result. What it had brought here before is overwritten.

    Args:
        runs: a folder with runs in it, at any depth.
        results: where results are.
    """
    if not runs.is_dir():
        raise ValueError(f"--collect must be a folder of runs, got {runs}, where no folder is")
    written: list[Path] = []
    for path in sorted(runs.rglob(result.RESULT)):
        found = result.read(path)
        recipe, row, seed = found["recipe"], found["row"], found["seed"]
        name = run_name(recipe, row, seed)
        target = results / recipe / f"{row}-seed-{seed}.json"
        result.write(target, found)
        written.append(target)
        copies = {path.parent / METRICS: results / CURVES / f"{name}.jsonl"}
        for evaluation in sorted(path.parent.glob("evaluation-*.json")):
            split = evaluation.stem.removeprefix("evaluation-")
            copies[evaluation] = results / EVALUATIONS / f"{name}-{split}.json"
        # Where `mgk analyze` puts it unless told otherwise.
        for analysis in sorted((path.parent / ANALYSIS).glob("*")):
            if analysis.suffix in (".json", ".png"):
                copies[analysis] = results / ANALYSIS / name / analysis.name
        for source, copy in copies.items():
            if source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
                written.append(copy)
    return written
