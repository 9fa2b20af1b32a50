"""The command that makes a run again."""

from __future__ import annotations

import json
import shlex
from typing import Any

import mgk.recipes
from mgk.training.configuration import RunConfig, differences, parse_yaml, to_mapping


def reproduce(config: RunConfig) -> str:
    """What to type to make a run with this configuration: its recipe, its row, its seed, and what was changed."""
    start = ["mgk", "train"]
    if config.name not in mgk.recipes.names():
        # Of somebody's own; what was changed on the command line cannot be told from what the file says.
        words = [*start, f"{config.name}.yaml", *(["--row", config.row] if config.row else []), f"seed={config.seed}"]
        return f"{shlex.join(words)}  # {config.name}.yaml is a recipe of your own; its settings are all listed above"
    recipe = mgk.recipes.load(config.name)
    base, wanted = to_mapping(recipe.config(config.row or None)), to_mapping(config)
    changed = {key: new for key, (_, new) in differences(base, wanted).items() if key not in ("seed", "row")}
    changes = [f"{key}={yaml_value(value)}" for key, value in changed.items()]
    words = [*start, config.name, *(["--row", config.row] if config.row else []), f"seed={config.seed}", *changes]
    remade = recipe.config(config.row or None, [f"seed={config.seed}", *changes])
    rest = differences(to_mapping(remade), wanted)
    return shlex.join(words) + (f"  # the recipe has changed since: {', '.join(rest)}" if rest else "")


def yaml_value(value: Any) -> str:
    """As the command line takes it: a word as it is, everything else as JSON, which YAML reads."""
    if isinstance(value, str) and value and value.split() == [value] and _reads_as(value, value):
        return value
    return json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        return bool(parse_yaml(text, "") == value)
    except ValueError:
        return False
