"""A cell of a sweep: one row of a recipe with one seed, and its result if it has been run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mgk.recipes
from mgk.commands.training import default_run, train_command
from mgk.reproduction.filing import folders_of
from mgk.reproduction.recipe import home
from mgk.training import result
from mgk.training.agreement import record_of, run_differences
from mgk.training.configuration import RunConfig


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    config: RunConfig
    folder: Path
    """Folder of its run, which need not exist yet."""
    command: str
    """Command that makes this run alone."""

    @property
    def title(self) -> str:
        """Name of the cell within its recipe."""
        return f"{self.config.row}, seed {self.config.seed}"

    @property
    def row(self) -> tuple[str, str]:
        """Recipe and row, which the seeds of a row share."""
        return self.config.name, self.config.row


def cells_of(
    name: str, rows: Sequence[str] | None, seeds: Sequence[int], changes: Sequence[str], folder: Path
) -> list[Cell]:
    """Return the cells of a recipe, seed by seed: a sweep that is cut short leaves all rows with as many seeds.

    Args:
        name: name of the recipe.
        rows: rows to run; ``None`` is all.
        seeds: seeds of each row.
        changes: values of the recipe to override, as ``key=value``.
        folder: folder for the runs, each in ``RECIPE/ROW/seed-N``.
    """
    recipe = mgk.recipes.load(name)
    # A row that the recipe shares with the one it extends is a run of that one, and is trained once.
    owners = {row: home(name, row) for row in (recipe.rows if rows is None else rows)}
    cells = []
    for seed in seeds:
        for row in recipe.rows if rows is None else rows:
            config = mgk.recipes.load(owners[row]).config(row, changes, seed)
            command = train_command(owners[row], [*changes, f"seed={config.seed}", "--row", config.row])
            cells.append(Cell(config=config, folder=default_run(config, folder), command=command))
    if not cells:
        raise ValueError(f"a sweep must have rows and seeds, got none of {name}")
    titles = [cell.title for cell in cells]
    for title in titles:
        # A change such as seed=3 makes several cells the same run, which counted twice would make the standard error
        # too small.
        if titles.count(title) > 1:
            raise ValueError(f"the runs of a sweep must be different from each other, got {title} twice")
    return cells


def finished(folder: Path, config: RunConfig, device: str) -> dict[str, Any] | None:
    """Return the result in the folder of a cell, or ``None``. Raises an error if its configuration differs."""
    path = folder / result.RESULT
    if not path.is_file():
        return None
    found = result.read(path)
    changed = changes_since(found, config, device)
    if changed:
        raise ValueError(
            f"{folder} must hold a run of this configuration, got one that differs in {', '.join(sorted(changed))}"
        )
    return found


def kept(results: Path, config: RunConfig, device: str) -> dict[str, Any] | None:
    """Return the result of a cell from the folder of results, wherever it is filed there, or ``None``."""
    for folder in folders_of(config.name):
        path = results / folder / f"{config.row}-seed-{config.seed}.json"
        found = result.read(path) if path.is_file() else None
        if found is None or config.name not in (found["recipe"], found.get("ran_as")):
            continue
        if not changes_since(found, config, device):
            return found
    return None


def changes_since(found: dict[str, Any], config: RunConfig, device: str) -> set[str]:
    """Settings that affect the numbers and have changed since a result was made."""
    changed = set(run_differences(found, record_of(config)))
    if found["precision"] not in _precisions(config, device, found["device"]):
        changed.add("precision")
    return changed


def _precisions(config: RunConfig, device: str, made_on: str) -> tuple[str, ...]:
    """Precisions that a run may have here. The GPU is not queried, because that would take some of its memory."""
    named = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if config.training.precision != "auto":
        return (named[config.training.precision],)
    if device == "cpu" or not torch.cuda.is_available():
        return ("float32",)
    # A GPU without bf16 computes in fp32; a CPU always has bf16.
    return ("bfloat16",) if made_on.startswith("CPU") else ("bfloat16", "float32")
