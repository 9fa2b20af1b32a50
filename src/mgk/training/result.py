"""The result of a run: one JSON file with everything that is needed to judge it and to make it again."""

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
"""1 had no ``model`` and no ``packed``: see :mod:`mgk.training.resolved_model`."""


def describe(
    config: RunConfig,
    *,
    metrics: Mapping[str, Any],
    model: Mapping[str, Any],
    corpus: str,
    device: torch.device,
    **facts: Any,
) -> dict[str, Any]:
    """The content of a result.

    Args:
        config: of the run.
        metrics: by split.
        model: its configuration in full.
        corpus: fingerprint of the data.
        device: where it ran.
        facts: whatever else is worth keeping: steps, seconds, parameters.
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
    """What a result says of single items: ``items``, by split, where any split has them."""
    known = {split: record for split, record in by_split.items() if record is not None}
    return {"items": known} if known else {}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path, what: str) -> Any:
    """Read JSON; ``what`` it should be is said where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be {what}, got {error}") from error


def read_object(path: Path, what: str = "JSON of an object") -> dict[str, Any]:
    """Likewise, of what has names and values."""
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
    """In words: which GPU, or how many threads of which CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """What the numbers may depend on."""
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
