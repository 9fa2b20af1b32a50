"""Reading a run from disk: its configuration, curves, result and best model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk.analysis.curves import read_measurements
from mgk.analysis.saved_model import MODEL_CONFIG, read_model_config
from mgk.training import checkpoint, result
from mgk.training.configuration import RunConfig, from_mapping, read_yaml
from mgk.training.errors import CheckpointError
from mgk.training.run import CONFIG
from mgk.training.run_checkpoints import BEST, CHECKPOINTS, STEP
from mgk.training.tracking import METRICS

EVALUATION = "evaluation-test.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on disk, finished or not."""

    place: Path
    """Folder of the run, or the file of its result."""
    config: RunConfig
    result: Mapping[str, Any] = field(default_factory=dict)
    """Result of the run; empty if there is none yet."""
    curves: tuple[Mapping[str, Any], ...] = ()
    """All measurements in order."""
    checkpoint: Path | None = None
    """Folder of the best checkpoint, or of the newest if none has been validated."""
    missing: str = ""
    """Reason why there is no checkpoint."""


def read_run(place: str | Path) -> Run:
    """Read a run, which must have a configuration, and a result, curves or a checkpoint.

    Args:
        place: folder of a run, or a result file copied from one.
    """
    place = Path(place)
    if place.is_file():
        found = _read_result(place)
        config = from_mapping(RunConfig, found["config"], "config")
        return Run(place=place, config=config, result=found, missing="only its result was given")
    if not place.is_dir():
        raise ValueError(f"{place} must be the folder of a run, got nothing there")
    if not (place / CONFIG).is_file():
        raise ValueError(f"{place} must be the folder of a run, got no {CONFIG} there{_what_it_is(place)}")
    config = from_mapping(RunConfig, read_yaml(place / CONFIG))
    found = _read_result(place / result.RESULT) if (place / result.RESULT).is_file() else {}
    if found and (place / EVALUATION).is_file():
        # mgk evaluate has tested the same model with the paper's protocol: a sliding window, BLEU with a wide beam.
        evaluated = _read_result(place / EVALUATION, by_split=False)
        if evaluated.get("best_step") == found.get("best_step"):
            metrics = found["metrics"]
            found = {**found, "metrics": {**metrics, "test": {**metrics.get("test", {}), **evaluated["metrics"]}}}
    curves = tuple(read_measurements(place / METRICS)) if (place / METRICS).is_file() else ()
    model, missing = _find_checkpoint(place)
    if not found and not curves and model is None:
        raise ValueError(f"{place} must hold a result, curves or a checkpoint, got none of them: has it begun?")
    return Run(place=place, config=config, result=found, curves=curves, checkpoint=model, missing=missing)


def _what_it_is(folder: Path) -> str:
    """Describe a folder that is not a run; most likely it is a saved model."""
    if not (folder / MODEL_CONFIG).is_file():
        return ""
    kind = read_model_config(folder).get("model_type")
    return f", but a saved model of model_type {kind!r}: give the run that trained it"


def _find_checkpoint(folder: Path) -> tuple[Path | None, str]:
    """Return the best checkpoint, else the newest, or the reason if there is none. A damaged one is an error."""
    for kind in (BEST, STEP):
        damaged: list[str] = []
        found = checkpoint.newest(folder / CHECKPOINTS, kind, damaged.append)
        if damaged:
            raise CheckpointError(f"{folder} must hold whole checkpoints, got a damaged one: {damaged[0]}")
        if found is not None:
            return found.folder, ""
    return None, f"there is no checkpoint in {folder / CHECKPOINTS}"


def _read_result(path: Path, *, by_split: bool = True) -> dict[str, Any]:
    """Read a result, and check the parts that the tables need."""
    found = result.read(path)
    metrics = found["metrics"]
    for key in ("config", "metrics", "corpus", "versions", "baselines"):
        if not isinstance(found.get(key, {}), dict):
            raise ValueError(f"{path} must have a mapping as {key}, got {type(found[key]).__name__}")
    numbers = {key: found[key] for key in ("steps", "best_step", "seconds", "tokens", "parameters") if key in found}
    for key, value in {**numbers, **found.get("baselines", {})}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path} must have a number as {key}, got {value!r}")
    if "config" not in found:
        raise ValueError(f"{path} must have the config of its run, got none")
    for split, values in metrics.items() if by_split else [("test", metrics)]:
        if not isinstance(values, dict):
            raise ValueError(f"{path} must have metrics by split, as mgk train writes them, got {values!r} for {split}")
    return found
