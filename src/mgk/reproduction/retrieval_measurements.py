"""Results of ``mgk bench retrieval`` by recipe and row: time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgk.training import result


def read_retrieval_measurements(folder: Path, notes: list[str]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Read the measurements of the device with most rows, since times of two machines cannot be compared."""
    found = {path: _measurements_of(path) for path in sorted(folder.glob("retrieval-*.json"))}
    if not found:
        return {}
    chosen = max(found, key=lambda path: len(found[path]))
    others = [path.name for path in found if path != chosen]
    if others:
        notes.append(
            f"times of lra/retrieval and lra/retrieval-linear are of {chosen.name}, not of {', '.join(others)}"
        )
    return found[chosen]


def _measurements_of(path: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the fastest measurement of each row in the paper's shape: 32 pairs of 4096 bytes, without dropout."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    content = result.read_object(path)
    for group in ("baselines", "rows"):
        if not isinstance(content.get(group), list):
            raise ValueError(f"{path} must be a result of mgk bench retrieval, got no {group}")
        for record in content[group]:
            try:
                is_ours = (record["pairs"], record["tokens"], record["attention_dropout"]) == (32, 4096, 0)
                time, noise, size = record["evaluation_ms"], record["noise"], record["peak_bytes"]
                row = f"{record['preset']}-{record['heads']}"
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} must be a result of mgk bench retrieval, got no {error}") from error
            if not is_ours or not time or not size or noise is None:
                continue
            key = (_recipe_of(record["preset"]), row)
            if key not in found or time < found[key]["evaluation_ms"]:
                found[key] = record
    return found


def _recipe_of(preset: str) -> str:
    from mgk.nn.presets import LINEAR_PRESETS

    return "lra/retrieval-linear" if preset in LINEAR_PRESETS else "lra/retrieval"
