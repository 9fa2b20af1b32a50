"""Filing of results: the recipe that a result belongs to is its own, another one that it agrees with, or none.

A recipe may change after its runs. Earlier results are then no results of today's recipe. They must neither count as
such nor be lost, so they are filed under the recipe of the library that describes what was run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mgk.recipes
from mgk.reproduction.recipe import bundled, home
from mgk.training.agreement import recipe_differences, was_packed
from mgk.training.configuration import RunConfig
from mgk.training.resolved_model import model_of_record

OTHER = "other"
"""Folder of results that name a recipe of the library but agree with none."""


@dataclass(frozen=True, kw_only=True)
class Filing:
    """The recipe of a result, and its differences from the recipe that it names."""

    recipe: str | None
    """Recipe of the library that it agrees with; ``None`` if there is none."""
    differences: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Differences from the recipe that it names, by key: the value of the run and today's value of the recipe."""

    @property
    def reason(self) -> str:
        """Describe the differences in words."""
        return ", ".join(
            f"{key} ({ran!r} where the recipe has {now!r})" for key, (ran, now) in self.differences.items()
        )


def file_result(content: Mapping[str, Any]) -> Filing:
    """Find the recipe of a result, an evaluation or another record with recipe, row, seed and config.

    The recipe that it names comes first. Another one must have its row, so that one run never belongs to two; and what
    a recipe has from the one that it extends belongs to that one.
    """
    name, row, seed = content["recipe"], content["row"], content["seed"]
    if name not in mgk.recipes.names():
        return Filing(recipe=None)
    changed = recipe_differences(content, _config(name, row, seed))
    if not changed:
        return Filing(recipe=home(name, row))
    for other in _relatives(name):
        if row in bundled(other).rows and not recipe_differences(content, _config(other, row, seed)):
            return Filing(recipe=home(other, row), differences=changed)
    return Filing(recipe=None, differences=changed)


def folder_of(content: Mapping[str, Any]) -> str:
    """Return the folder of a result below ``results/``, which is the name of its recipe.

    A result that names a recipe of the library but agrees with none is kept in a separate folder, where it overwrites
    nothing.
    """
    filed = file_result(content)
    if filed.recipe is None and content["recipe"] in mgk.recipes.names():
        return f"{OTHER}/{content['recipe']}"
    return filed.recipe or str(content["recipe"])


def folders_of(name: str) -> tuple[str, ...]:
    """Return all folders below ``results/`` that may hold a result of runs that named this recipe."""
    if name not in mgk.recipes.names():
        return (name,)
    # A run that changed values of its recipe belongs to another one, or to none.
    return (name, *_relatives(name), f"{OTHER}/{name}")


def refiled(content: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """Return a result, evaluation or analysis under the recipe that it belongs to, with its full model.

    Its original recipe and row are kept in ``ran_as``.
    """
    found = dict(content)
    if "config" in content:
        # Stored from now on, so that later changes of the architectures do not matter.
        found |= {"model": model_of_record(content), "packed": was_packed(content)}
        found["config"] = {**content["config"], "name": recipe}
    if content["recipe"] != recipe:
        found |= {"recipe": recipe, "ran_as": content.get("ran_as", content["recipe"])}
    return found


@functools.cache
def _row_config(name: str, row: str) -> RunConfig:
    return bundled(name).config(row)


def _config(name: str, row: str, seed: int) -> RunConfig:
    return dataclasses.replace(_row_config(name, row), seed=seed)


@functools.cache
def _relatives(name: str) -> tuple[str, ...]:
    """Return the other recipes on the same corpus."""
    corpora = {each: bundled(each).values["data"]["corpus"] for each in mgk.recipes.names()}
    return tuple(each for each, corpus in corpora.items() if each != name and corpus == corpora[name])
