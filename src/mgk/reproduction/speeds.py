"""Results of ``mgk bench rows`` by recipe and row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgk.training import result


def read_speeds(folder: Path, notes: list[str]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Read the times of all recipes, by recipe and row.

    Of one device, since those of two do not compare: a GPU before a CPU, and more rows before fewer. A quick
    measurement, or one of a changed recipe, is none.
    """
    by_recipe: dict[str, dict[Path, dict[str, Mapping[str, Any]]]] = {}
    for path in sorted(folder.glob("rows-*.json")):
        recipe, rows = _read(path)
        if rows:
            by_recipe.setdefault(recipe, {})[path] = rows
        else:
            notes.append(f"{path.name} is set aside: it is quick, or of a recipe that was changed, or has no row")
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for recipe, files in by_recipe.items():
        chosen = max(files, key=lambda path: (not _is_of_cpu(files[path]), len(files[path])))
        others = [path.name for path in files if path != chosen]
        if others:
            notes.append(f"training speeds of {recipe} are of {chosen.name}, not of {', '.join(others)}")
        found |= {(recipe, row): record for row, record in files[chosen].items()}
    return found


def _read(path: Path) -> tuple[str, dict[str, Mapping[str, Any]]]:
    content = result.read_object(path)
    try:
        config = content["config"]
        recipe, is_whole = str(config["recipe"]), not (config["quick"] or config["changes"])
        records = [*content["baselines"], *content["rows"]]
        rows: dict[str, Mapping[str, Any]] = {}
        for record in records:
            # The first row is timed in every group, and counts by the first one.
            rows.setdefault(record["row"], record)
            for key in ("device", "dtype", "tokens_per_second", "training_ms", "training_ratio", "baseline"):
                record[key]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a result of mgk bench rows, got no {error}") from error
    return recipe, rows if is_whole else {}


def _is_of_cpu(rows: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(str(record["device"]).startswith("CPU") for record in rows.values())
