"""Results of several calls: resumed measurements, and joined results.

A ratio must come from one run, so a shape belongs to one call with everything that it is compared with: whole shapes
are joined, never rows. The top-level facts of a joined result are those of its first part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgk.benchmark import result
from mgk.benchmark.attention import Comparison
from mgk.benchmark.shape import Shape
from mgk.benchmark.yardstick import Record

RECORDS = ("baselines", "rows", "failures", "skipped")
SAME = ("benchmark", "device", "versions")
"""Keys that must agree in joined results, besides the dtype and whether they are quick ones."""


def measured(found: Mapping[str, Any], *, sweep: bool) -> dict[Shape, Comparison]:
    """Return the comparisons of a result by shape, either of its shapes or of the lengths of its sweep."""
    shapes: dict[Shape, Comparison] = {}
    # Every comparison has softmax with all heads.
    for name in ("baselines", "rows"):
        for record in found[name]:
            if bool(record.get("sweep")) == sweep:
                comparison = shapes.setdefault(Shape.of(record), Comparison())
                getattr(comparison, name).append(record)
    return shapes


def parts(found: Mapping[str, Any]) -> list[Record]:
    """Return the calls behind a result: their start, configuration, and shapes in the format of ``--shape``."""
    if "parts" in found:
        return list(found["parts"])
    shapes, lengths = ([each.option for each in measured(found, sweep=sweep)] for sweep in (False, True))
    return [{"written": found["written"], "config": found["config"], "shapes": shapes, "lengths": lengths}]


def join(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join results with different shapes; results without shapes are left out."""
    filled = [each for each in results if each["baselines"]] or results[:1]
    first = filled[0]
    for other in filled[1:]:
        _check_is_like(first, other)
    if len(filled) == 1:
        return dict(first)
    made = [part for each in filled for part in parts(each)]
    for kind in ("shapes", "lengths"):
        spelled = [shape for part in made for shape in part[kind]]
        for shape in dict.fromkeys(spelled):
            if spelled.count(shape) > 1:
                raise ValueError(f"{kind} must be measured in one of the results each, got {shape} in two")
    joined: dict[str, Any] = {}
    for each in reversed(filled):
        joined |= each
    for name in RECORDS:
        joined[name] = [record for each in filled for record in each[name]]
    return {**joined, "parts": made}


def only_lengths(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with only its sweep."""
    if not measured(found, sweep=True):
        raise ValueError(f"a result with a sweep is expected, got that of {found['written']} without one")
    kept = [{**part, "shapes": []} for part in parts(found) if part["lengths"]]
    return {
        **found,
        **{name: [record for record in found[name] if record.get("sweep")] for name in RECORDS},
        "written": kept[0]["written"],
        "config": kept[0]["config"],
        "parts": kept,
    }


def read_attention(path: Path) -> dict[str, Any]:
    """Read a result of ``mgk bench attention``, whose records have shapes."""
    found = result.read(path)
    if found["benchmark"] != "attention":
        raise ValueError(f"{path} must be the JSON of mgk bench attention, got mgk bench {found['benchmark']}")
    return found


def earlier_part(path: Path, new: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the earlier result at ``path`` for a call that resumes; ``None`` if there is none."""
    if not path.exists():
        return None
    found = read_attention(path)
    _check_is_like(found, new)
    if found["config"] != new["config"]:
        differing = [name for name in new["config"] if found["config"].get(name) != new["config"][name]]
        raise ValueError(
            f"--resume must go on with a result of the same configuration, got {path} with other "
            f"{' and '.join(differing) or 'settings'}: use another --output"
        )
    return found


def missing(wanted: Iterable[Shape], there: Iterable[Shape]) -> list[Shape]:
    """Return the shapes that are still to be measured."""
    known = set(there)
    return [shape for shape in wanted if shape not in known]


def _check_is_like(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that machine, versions and dtype agree, because otherwise times cannot be in one table."""
    facts = [(name, one[name], other[name]) for name in SAME]
    facts += [(name, one["config"].get(name), other["config"].get(name)) for name in ("dtype", "quick")]
    for name, mine, its in facts:
        if mine != its:
            raise ValueError(f"{name} of results that are joined must be the same, got {mine} and {its}")
