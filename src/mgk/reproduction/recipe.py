"""A cache of the library's recipes, because pages need them hundreds of times."""

from __future__ import annotations

import functools

import mgk.recipes


@functools.cache
def bundled(name: str) -> mgk.recipes.Recipe:
    """Return a recipe of the library by its name."""
    return mgk.recipes.load(name)
