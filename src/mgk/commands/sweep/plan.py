"""Plans: YAML files that list the cells of a sweep by descending priority.

::

    title: What the runs are for.
    cells:
      - recipe: lra/listops
        rows: [softmax-8, smgk-4]      # left out: all rows of the recipe
        seeds: 0-4                     # as on the command line, or a list
        changes: [training.steps=100]  # left out: none

Priority follows the order of the file, and within an entry the order of the rows. A cell that several entries name has
the priority of the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk.commands.sweep.cell import Cell, cells_of
from mgk.commands.training import parse_seeds
from mgk.training.configuration import differences, read_yaml, to_mapping

KEYS, ENTRY_KEYS = ("title", "cells"), ("recipe", "rows", "seeds", "changes")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a plan: rows of one recipe."""

    recipe: str
    """Name of the recipe, or path of a YAML file."""
    rows: tuple[str, ...] | None = None
    """Rows to run; ``None`` is all."""
    seeds: tuple[int, ...] = (0,)
    changes: tuple[str, ...] = ()
    """Values of the recipe to override, as ``key=value``."""


def read_plan(path: Path) -> list[Entry]:
    """Read the entries of a plan in their order."""
    content = read_yaml(path)
    _check_keys(content, KEYS, f"{path}")
    entries = content.get("cells")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"cells must be a list of entries, got {entries!r} in {path}")
    return [_entry(each, f"entry {number} of {path}") for number, each in enumerate(entries, start=1)]


def plan_cells(path: Path, folder: Path) -> list[Cell]:
    """Return all cells of a plan by descending priority, each once. A wrong entry is an error before anything starts.

    Args:
        path: path of the plan.
        folder: folder for the runs.
    """
    cells: dict[Path, Cell] = {}
    for number, entry in enumerate(read_plan(path), start=1):
        recipe = entry.recipe
        # The path of a user's recipe is relative to the plan.
        if recipe.endswith(".yaml"):
            recipe = str(path.parent / recipe)
        try:
            found = cells_of(recipe, entry.rows, entry.seeds, entry.changes, folder)
        except (TypeError, ValueError) as error:
            raise ValueError(f"entry {number} of {path}: {error}") from error
        for cell in found:
            _check_same(cells.setdefault(cell.folder, cell), cell, f"entry {number} of {path}")
    return list(cells.values())


def _entry(content: Any, where: str) -> Entry:
    if not isinstance(content, Mapping):
        raise TypeError(f"{where} must have recipe, rows, seeds and changes, got {content!r}")
    _check_keys(content, ENTRY_KEYS, where)
    recipe = content.get("recipe")
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be the name of one, got {recipe!r} in {where}")
    rows = None if content.get("rows") is None else _texts(content["rows"], "rows", where)
    return Entry(
        recipe=recipe, rows=rows, seeds=_seeds(content.get("seeds", 0), where),
        changes=_texts(content.get("changes", []), "changes", where),
    )  # fmt: skip


def _texts(found: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a list of text, got {found!r} in {where}")
    return tuple(found)


def _seeds(found: Any, where: str) -> tuple[int, ...]:
    if isinstance(found, list) and found and all(type(each) is int and each >= 0 for each in found):
        return tuple(found)
    if type(found) not in (int, str):
        raise TypeError(f"seeds must be a list of numbers, or look like 0-4 or 0,3,7, got {found!r} in {where}")
    try:
        return tuple(parse_seeds(str(found)))
    except ValueError as error:
        raise ValueError(f"seeds must look like 0-4 or 0,3,7, got {found!r} in {where}") from error


def _check_keys(content: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"a key must be one of {', '.join(known)}, got {key!r}{hint} in {where}")


def _check_same(one: Cell, other: Cell, where: str) -> None:
    """Check that two cells with one name are the same run, because they would share a folder."""
    changed = differences(to_mapping(one.config), to_mapping(other.config))
    if changed:
        raise ValueError(
            f"{where} must not have another {other.config.name} {other.title} than an entry before it, "
            f"got one that differs in {', '.join(changed)}: give it a recipe of its own"
        )
