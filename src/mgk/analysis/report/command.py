"""The command that repeats a run."""

from __future__ import annotations

import json
import shlex
from typing import Any

import mgk.recipes
from mgk.analysis.report.settings import flatten
from mgk.training.configuration import RunConfig, parse_yaml, to_mapping


def reproduce(config: RunConfig) -> str:
    """Return the command for a run with this configuration: its recipe, row, seed and changes."""
    if config.name not in mgk.recipes.names():
        # For a user's own recipe, changes on the command line cannot be told from the content of the file.
        words = [
            "mgk",
            "train",
            f"{config.name}.yaml",
            *(["--row", config.row] if config.row else []),
            f"seed={config.seed}",
        ]
        return f"{shlex.join(words)}  # {config.name}.yaml is a recipe of your own; its settings are all listed above"
    # Most runs name a row, but a run without one, whose architecture decides, is another configuration.
    commands = [_of_recipe(config, row) for row in dict.fromkeys([config.row or None, None])]
    command, missed = next((each for each in commands if not each[1]), commands[0])
    return command + (f"  # the recipe has changed since: {', '.join(missed)}" if missed else "")


def _of_recipe(config: RunConfig, row: str | None) -> tuple[str, list[str]]:
    """Return a command, and the settings in which its configuration differs."""
    recipe = mgk.recipes.load(config.name)
    base, wanted = (flatten(to_mapping(each)) for each in (recipe.config(row), config))
    changed = {key: value for key, value in wanted.items() if key not in base or base[key] != value}
    changes = [f"{key}={yaml_value(value)}" for key, value in changed.items() if key not in ("row", "seed")]
    words = ["mgk", "train", config.name, *([] if row is None else ["--row", row]), f"seed={config.seed}", *changes]
    remade = flatten(to_mapping(recipe.config(row, [f"seed={config.seed}", *changes])))
    missed = [
        key for key in {**wanted, **remade} if key not in wanted or key not in remade or wanted[key] != remade[key]
    ]
    return shlex.join(words), missed


def yaml_value(value: Any) -> str:
    """Format a value for the command line: a word as it is, everything else as JSON, which YAML can read."""
    if isinstance(value, str) and value and value.split() == [value] and _reads_as(value, value):
        return value
    return json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        return bool(parse_yaml(text, "") == value)
    except ValueError:
        return False
