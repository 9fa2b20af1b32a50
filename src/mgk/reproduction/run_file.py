"""The file of one run or of one evaluation: what it must hold, and which test items were right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgk.evaluation.items import unpack_items
from mgk.training import result


def read_run(path: Path) -> dict[str, Any]:
    """Read a file with recipe, row, seed, configuration and metrics, and check them."""
    content = result.read(path)
    kinds = {"recipe": str, "row": str, "seed": int, "metrics": Mapping, "config": Mapping}
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{path} must have a {name} of a run, got {content.get(name)!r}")
    _check_numbers(content["metrics"], path)
    _check_items(content, path)
    if not isinstance(content.get("parameters", 0), int):
        raise ValueError(f"{path} must have a whole number of parameters, got {content['parameters']!r}")
    return content


def _check_numbers(metrics: Mapping[str, Any], path: Path) -> None:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            _check_numbers(value, path)
        elif isinstance(value, str):
            continue  # the signature of BLEU is text
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{path} must have finite numbers as metrics, got {name}: {value!r}")


def _check_items(content: Mapping[str, Any], path: Path) -> None:
    """Raise an error for a record of items that is damaged or disagrees with the accuracy."""
    records = content.get("items", {})
    if not isinstance(records, Mapping) or not all(isinstance(record, Mapping) for record in records.values()):
        raise ValueError(f"{path} must have its items by split, got {str(records)[:40]}")
    for split, record in records.items():
        try:
            share = float(unpack_items(record).mean())
        except ValueError as error:
            raise ValueError(f"{path} must say which items were right, but {error}") from error
        accuracy = content["metrics"].get(split, content["metrics"]).get("accuracy")
        if accuracy is None or abs(share - accuracy) > 1e-6:
            raise ValueError(f"{path} must have items that agree with its accuracy of {accuracy}, got {share} right")
