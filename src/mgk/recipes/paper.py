"""The numbers that the paper published, as data."""

from __future__ import annotations

import copy
import functools
from typing import Any

from mgk.recipes.recipe import FOLDER
from mgk.recipes.row import parse_row, row_name
from mgk.training.configuration import read_yaml


def paper() -> dict[str, Any]:
    """Read ``paper.yaml``: ``units`` of the metrics, and in ``tables`` numbers by table, recipe, row and metric."""
    return copy.deepcopy(_read())


def published(recipe: str, row: str) -> dict[str, float]:
    """Return the paper's numbers for one row of a recipe, by metric; empty if it has none."""
    name = row_name(parse_row(row), {})
    found: dict[str, float] = {}
    for table in _read()["tables"].values():
        metrics = table["recipes"].get(recipe, {}).get(name, {})
        found |= {metric: float(value) for metric, value in metrics.items()}
    return found


@functools.cache
def _read() -> dict[str, Any]:
    return read_yaml(FOLDER / "paper.yaml")
