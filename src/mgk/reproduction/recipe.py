"""The recipes that come with the library, each read once: pages ask for them hundreds of times."""

from __future__ import annotations

import functools

import mgk.recipes


@functools.cache
def bundled(name: str) -> mgk.recipes.Recipe:
    """A recipe by its name."""
    return mgk.recipes.load(name)
