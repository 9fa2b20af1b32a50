"""Settings by the names of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flatten nested settings to paths, which are their names on the command line."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{where}{key}.") if isinstance(value, Mapping) and value else {f"{where}{key}": value}
    return flat
