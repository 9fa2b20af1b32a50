"""Reading the JSON that ``mgk analyze`` writes. Fields that are not named here are ignored.

Each of these is a list with one entry for each layer, or ``null`` if it does not apply to the model::

    rank       rank       [samples][heads]           singular values above 1e-6
    density    mixture    [heads]                    NLL of the queries in nats, without the Gaussian's constant
    mixture    prior      [key heads][components]    the learned prior
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgk.reproduction.metrics import Metric

FIELDS = {"rank": ("rank", 2), "density": ("mixture", 1), "mixture": ("prior", 2)}
"""The field that is read of each section, and the depth of its nested lists."""


def check(content: Mapping[str, Any], path: Path) -> None:
    """Check the sections of an analysis. A section may be absent, but not malformed."""
    for section, (name, depth) in FIELDS.items():
        layers = content.get(section)
        if layers is None:
            continue
        if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
            raise ValueError(f"{path} must have a list of layers as {section}, got {type(layers).__name__}")
        for number, layer in enumerate(layers, start=1):
            if not _is_nested(layer.get(name), depth):
                raise ValueError(
                    f"{path} must have {name} of layer {number} in {section}, numbers in {depth} nested lists, got "
                    f"{str(layer.get(name))[:40]}"
                )


def value(content: Mapping[str, Any], metric: Metric) -> float | None:
    """Return a metric of one layer, averaged over heads and samples; ``None`` if it is absent or not finite."""
    assert metric.layer is not None
    if metric.key == "rank":
        return _mean(ranks(content, metric.layer))
    if metric.key == "query_nll":
        return _mean(_layer(content, "density", metric.layer))
    assert metric.key == "prior"
    assert metric.component is not None
    heads = _layer(content, "mixture", metric.layer)
    return _mean([head[metric.component - 1] for head in heads if len(head) >= metric.component])


def ranks(content: Mapping[str, Any], layer: int) -> list[float]:
    """Return the rank of every attention matrix of a layer, counted from 1."""
    return [rank for sample in _layer(content, "rank", layer) for rank in sample if rank is not None]


def _layer(content: Mapping[str, Any], section: str, layer: int) -> Sequence[Any]:
    layers = content.get(section) or ()
    return layers[layer - 1][FIELDS[section][0]] if layer <= len(layers) else ()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _is_nested(found: Any, depth: int) -> bool:
    if depth == 0:
        if found is None:
            return True
        return isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    return isinstance(found, list) and all(_is_nested(item, depth - 1) for item in found)
