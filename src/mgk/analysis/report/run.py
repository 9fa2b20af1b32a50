"""What a run has left on disk: its configuration, its curves, its result and its best model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

import mgk.models
from mgk.training import checkpoint, result
from mgk.training.configuration import RunConfig, from_mapping, read_yaml
from mgk.training.errors import CheckpointError
from mgk.training.loop import BEST, CHECKPOINTS, STEP
from mgk.training.run import CONFIG
from mgk.training.tracking import METRICS

EVALUATION = "evaluation-test.json"
MODELS: tuple[type[PreTrainedModel], ...] = (
    mgk.models.MGKForSequenceClassification,
    mgk.models.MGKForSequencePairClassification,
    mgk.models.MGKForCausalLM,
    mgk.models.MGKForSeq2SeqLM,
)


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
    curves = _read_curves(place / METRICS) if (place / METRICS).is_file() else ()
    model, missing = _find_checkpoint(place)
    if not found and not curves and model is None:
        raise ValueError(f"{place} must hold a result, curves or a checkpoint, got none of them: has it begun?")
    return Run(place=place, config=config, result=found, curves=curves, checkpoint=model, missing=missing)


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint, for evaluation on the CPU, if it is one of ours."""
    described = _read_json(folder / "config.json", "the configuration of a saved model")
    names = described.get("architectures") or ["none"]
    if described.get("model_type") != mgk.models.MGKConfig.model_type:
        raise ValueError(f"{folder} must hold a model of mgk, got model_type {described.get('model_type')!r}")
    for kind in MODELS:
        if kind.__name__ in names:
            was_on = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                return kind.from_pretrained(folder).eval()
            finally:
                if was_on:
                    logging.enable_progress_bar()
    known = ", ".join(kind.__name__ for kind in MODELS)
    raise ValueError(f"{folder} must hold one of {known}, got {', '.join(map(str, names))}")


def _what_it_is(folder: Path) -> str:
    """A saved model is the likeliest mistake."""
    if not (folder / "config.json").is_file():
        return ""
    kind = _read_json(folder / "config.json", "the configuration of a saved model").get("model_type")
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


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be the JSON of {what}, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be the JSON of {what}, got a {type(found).__name__}")
    return found


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


def _read_curves(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Every line. Only the last may be cut short, by a process that died; another that is damaged is an error."""
    lines: list[Mapping[str, Any]] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        line = _parse_line(text)
        if line is not None:
            lines.append(line)
        elif text.strip() and number < len(texts):
            raise ValueError(
                f"{path} must have a measurement as JSON in every line, got {text[:60]!r} in line {number}"
            )
    return tuple(lines)


def _parse_line(text: str) -> Mapping[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not isinstance(line.get("kind"), str):
        return None
    values = {key: value for key, value in line.items() if key not in ("step", "kind")}
    if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
        return None
    # Null is what a measurement that is not finite is written as.
    return {**line, **{key: math.nan if value is None else float(value) for key, value in values.items()}}
