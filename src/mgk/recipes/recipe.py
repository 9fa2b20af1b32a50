"""An experiment: everything that decides its runs, except the row of the table and the seed."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk.recipes.row import parse_row, row_name
from mgk.training.configuration import RunConfig, from_mapping, merge, override, read_yaml

FOLDER = Path(__file__).resolve().parent
SECTIONS = ("data", "model", "conversion", "optimizer", "schedule", "training", "validation")
KEYS = ("title", "source", "base", "rows", "task", *SECTIONS)

_NO_RECIPES = ("paper", "claims", "fidelity")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One experiment, as its YAML file describes it."""

    name: str
    """Name on the command line, such as ``lra/text``."""
    title: str
    """Description in one line."""
    source: tuple[str, ...]
    """Sources of its values, one sentence each; those of its base come first."""
    rows: tuple[str, ...]
    """The rows of its table, in the form of :func:`mgk.recipes.row_name`."""
    values: dict[str, Any]
    """The keys of :class:`mgk.training.configuration.RunConfig`, except ``name``, ``row`` and ``seed``."""

    def config(self, row: str | None = None, changes: Sequence[str] = (), seed: int = 0) -> RunConfig:
        """Return the configuration of a run of one row.

        Args:
            row: a row such as ``smgk-4``, one of :attr:`rows` or any other; ``None`` is the model of the recipe.
            changes: ``key.key=value``, applied after the row; ``seed=3`` is allowed, too.
            seed: seed of the run.
        """
        values = {"name": self.name, "seed": seed, **copy.deepcopy(self.values)}
        if row is not None:
            values = merge(values, {"model": parse_row(row)})
        values = override(values, changes)
        # Without a model there is no row to name, and from_mapping reports the missing key.
        if "model" in values:
            values["row"] = row_name(values["model"], self.values.get("model", {}))
            # An unknown preset or field is refused now, and not after hours of preparing the data.
            parse_row(values["row"])
        return from_mapping(RunConfig, values)


def names() -> list[str]:
    """Names of the recipes that come with the library."""
    return list(_bundled())


def load(name_or_path: str | Path) -> Recipe:
    """Load a recipe of the library by its name, or your own by a path that ends in ``.yaml``."""
    path = _find(name_or_path, Path())
    name = _name(path)
    content = _with_base(path, ())
    title, source, rows = content.get("title"), content.get("source", []), content.get("rows", [])
    if not isinstance(title, str) or not title:
        raise ValueError(f"title must be one line of text, got {title!r} in {path}")
    values = {key: content[key] for key in ("task", *SECTIONS) if key in content}
    canonical = [row_name(parse_row(row), values.get("model", {})) for row in rows]
    for row in canonical:
        if canonical.count(row) > 1:
            raise ValueError(f"rows must be different from each other, got {row} twice in {path}")
    return Recipe(name=name, title=title, source=tuple(source), rows=tuple(canonical), values=values)


@functools.cache
def _bundled() -> dict[str, Path]:
    """Return the files of the library's recipes by name, sorted by name."""
    files = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*.yaml")}
    return {name: files[name] for name in sorted(files) if name not in _NO_RECIPES}


def _find(name_or_path: str | Path, folder: Path) -> Path:
    """Return the file of a recipe; a relative path starts in ``folder``."""
    if not isinstance(name_or_path, (str, Path)):
        raise TypeError(f"a recipe must be given by its name or by a path, got {name_or_path!r}")
    text = str(name_or_path)
    if text.endswith(".yaml"):
        return (folder / text).resolve()
    if text not in _bundled():
        raise ValueError(
            f"a recipe must be one of {', '.join(names())}, or a path that ends in .yaml, "
            f"got {text!r}{_nearest(text, names())}"
        )
    return _bundled()[text]


def _name(path: Path) -> str:
    for name, bundled in _bundled().items():
        if path == bundled:
            return name
    if path.stem in _bundled():
        # Its runs would be taken for those of our recipe, and be compared with the published numbers.
        raise ValueError(f"a recipe of your own must have a name of its own, got {path}, but {path.stem} is bundled")
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", path.stem) is None:
        raise ValueError(f"the name of a recipe must have letters, digits, '_', '.' and '-' only, got {path.stem!r}")
    return path.stem


def _with_base(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file, and merge it over its base."""
    if path in below:
        chain = " -> ".join(file.stem for file in (*below, path))
        raise ValueError(f"base must not lead back to where it started, got {chain}")
    content = read_yaml(path)
    _check(content, path)
    base = content.pop("base", None)
    if base is None:
        return content
    under = _with_base(_find(base, path.parent), (*below, path))
    return {**merge(under, content), "source": [*under.get("source", []), *content.get("source", [])]}


def _check(content: Mapping[str, Any], path: Path) -> None:
    for key in content:
        if key not in KEYS:
            hint = _nearest(str(key), KEYS)
            raise ValueError(f"a key of a recipe must be one of {', '.join(KEYS)}, got {key!r}{hint} in {path}")
    for key in SECTIONS:
        if key in content and not isinstance(content[key], Mapping):
            raise TypeError(f"{key} must be a mapping, got {content[key]!r} in {path}")
    for key in ("source", "rows"):
        found = content.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise TypeError(f"{key} must be a list of text, got {found!r} in {path}")


def _nearest(name: str, known: Sequence[str]) -> str:
    # A likely mistake is the end of a name, such as text for lra/text.
    ends = [full for full in known if full.rpartition("/")[2] == name]
    close = ends or difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
