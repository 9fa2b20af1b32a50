"""A cache of the library's recipes, because pages need them hundreds of times."""

from __future__ import annotations

import functools

import mgk.recipes


@functools.cache
def bundled(name: str) -> mgk.recipes.Recipe:
    """Return a recipe of the library by its name."""
    return mgk.recipes.load(name)


@functools.cache
def home(name: str, row: str) -> str:
    """The recipe under which the runs of a row are kept.

    A recipe that only adds rows to another, ``lra/listops-shifts`` to ``lra/listops``, repeats some of them for its
    table. These are the same runs: they are trained once, and belong to the recipe that is extended.
    """
    if name not in mgk.recipes.names():
        return name
    for other in mgk.recipes.names():
        if (
            name.startswith(f"{other}-")
            and row in bundled(other).rows
            and row in bundled(name).rows
            and bundled(other).values == bundled(name).values
        ):
            return other
    return name


def is_extension(name: str) -> bool:
    """Whether a recipe only adds rows to another one, with some of whose rows they are compared."""
    return any(home(name, row) != name for row in bundled(name).rows)
