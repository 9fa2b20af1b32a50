"""What a run has left on disk: its configuration, its curves, its result and its best model."""

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
from mgk.training.loop import BEST, CHECKPOINTS, STEP
from mgk.training.run import CONFIG
from mgk.training.tracking import METRICS

EVALUATION = "evaluation-test.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, finished or not."""

    place: Path
    """Its folder, or the file of its result."""
    config: RunConfig
    result: Mapping[str, Any] = field(default_factory=dict)
    """Empty where it has none yet."""
    curves: tuple[Mapping[str, Any], ...] = ()
    """Every measurement, in order."""
    checkpoint: Path | None = None
    """Folder of the best model, or of the newest where none has been validated."""
    missing: str = ""
    """Why there is no checkpoint."""


def read_run(place: str | Path) -> Run:
    """Read what is there. A run needs its configuration and, besides, a result, curves or a checkpoint.

    Args:
        place: folder of a run, or a result that was copied out of one.
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
        # The same model, tested as the paper tests: a sliding window, BLEU with a wide beam.
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
    """A saved model is the likeliest mistake."""
    if not (folder / MODEL_CONFIG).is_file():
        return ""
    kind = read_model_config(folder).get("model_type")
    return f", but a saved model of model_type {kind!r}: give the run that trained it"


def _find_checkpoint(folder: Path) -> tuple[Path | None, str]:
    """The best model, else the newest; or why there is none. A damaged one is an error, never passed over."""
    for kind in (BEST, STEP):
        damaged: list[str] = []
        found = checkpoint.newest(folder / CHECKPOINTS, kind, damaged.append)
        if damaged:
            raise CheckpointError(f"{folder} must hold whole checkpoints, got a damaged one: {damaged[0]}")
        if found is not None:
            return found.folder, ""
    return None, f"there is no checkpoint in {folder / CHECKPOINTS}"


def _read_result(path: Path, *, by_split: bool = True) -> dict[str, Any]:
    """A result whose parts are what the tables need."""
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
