"""The result of a run: one JSON file with everything that is needed to judge and to repeat it."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mgk
from mgk.training.configuration import RunConfig, to_mapping

RESULT = "result.json"
FORMAT = 2
"""Version of the format. Format 1 had neither ``model`` nor ``packed``: see :mod:`mgk.training.resolved_model`."""


def describe(
    config: RunConfig,
    *,
    metrics: Mapping[str, Any],
    model: Mapping[str, Any],
    corpus: str,
    device: torch.device,
    **facts: Any,
) -> dict[str, Any]:
    """Return the content of a result.

    Args:
        config: configuration of the run.
        metrics: metrics by split.
        model: full configuration of the model.
        corpus: fingerprint of the data.
        device: device of the run.
        facts: further facts, such as steps, seconds and parameters.
    """
    return {
        "format": FORMAT,
        "recipe": config.name,
        "row": config.row,
        "seed": config.seed,
        "metrics": dict(metrics),
        "config": to_mapping(config),
        "model": dict(model),
        "corpus": {"name": config.data.corpus, "fingerprint": corpus},
        "device": device_name(device),
        "versions": versions(),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **facts,
    }


def items(by_split: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return ``items`` of a result, which holds by split which items were right, or nothing if no split has them."""
    known = {split: record for split, record in by_split.items() if record is not None}
    return {"items": known} if known else {}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path, what: str) -> Any:
    """Read JSON. ``what`` it should be is named in the error if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be {what}, got {error}") from error


def read_object(path: Path, what: str = "JSON of an object") -> dict[str, Any]:
    """Read a JSON object."""
    found = read_json(path, what)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be {what}, got a {type(found).__name__}")
    return found


def read(path: Path) -> dict[str, Any]:
    """Read a result."""
    found = read_json(path, "the JSON of a result")
    if not isinstance(found, dict) or not {"recipe", "row", "seed", "metrics"} <= found.keys():
        raise ValueError(f"{path} must have recipe, row, seed and metrics, got something else")
    return found


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of the software that may affect the numbers."""
    import lightning
    import numpy
    import transformers

    return {
        "mgk": mgk.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "numpy": numpy.__version__,
        "transformers": transformers.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
