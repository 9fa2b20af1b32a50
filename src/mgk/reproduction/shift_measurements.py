"""Results of ``benchmarks/shift.py`` in ``results/shift/``: gradients before the first step, and short lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk.recipes import parse_row
from mgk.reproduction.missing import Missing
from mgk.reproduction.results import SHIFT
from mgk.reproduction.statistics import mean, standard_error
from mgk.reproduction.survival import Run
from mgk.training import result

SCRIPT = "benchmarks/shift.py"
GRADIENTS, SHORT_LISTS = "gradients", "short-lists"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One file: its options, and its runs, each with a row and a seed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[Mapping[str, Any]] = ()

    @property
    def rows(self) -> list[str]:
        """Return the rows that have runs, in the order in which they were made."""
        return list(dict.fromkeys(run["row"] for run in self.runs))

    @property
    def seeds(self) -> int:
        """Return the number of seeds that every row has."""
        return min((sum(run["row"] == row for run in self.runs) for row in self.rows), default=0)

    def escapes(self) -> dict[str, list[Run]]:
        """Return the step at which each run on short lists left the plateau, or its last step, by row."""
        return {
            row: [(int(run["step"]), bool(run["left"])) for run in self.runs if run["row"] == row] for row in self.rows
        }

    def values(self, row: str, layer: int, name: str) -> list[float]:
        """Return a measured number of a row and a layer (counted from 1), one value per seed."""
        return [float(run["layers"][layer - 1][name]) for run in self.runs if run["row"] == row]


def read_measurement(folder: Path, name: str) -> Measurement:
    """Read a measurement from a folder of results; a missing one is empty."""
    path = folder / SHIFT / f"{name}.json"
    if not path.is_file():
        return Measurement()
    content = result.read_object(path)
    wanted = {"row", "seed", "layers"} if name == GRADIENTS else {"row", "seed", "step", "left"}
    runs, options = content.get("runs"), content.get("options")
    is_whole = isinstance(options, Mapping) and isinstance(runs, list) and all(wanted <= set(run) for run in runs)
    if content.get("measurement") != name or not is_whole:
        raise ValueError(f"{path} must be a result of {SCRIPT} {name}, got {content.get('measurement')!r}")
    assert isinstance(options, Mapping)
    assert isinstance(runs, list)
    return Measurement(options=options, runs=runs)


def find_missing_measurements(found: Mapping[str, Measurement]) -> list[Missing]:
    """Find the measurements that are missing."""
    return [
        # It is no command of mgk, so it stands in words.
        Missing(what=f"{SCRIPT} {name}, on a CPU", commands=())
        for name, measurement in found.items()
        if not measurement.runs
    ]


def derived_spread(row: str) -> float | None:
    """The standard deviation over keys of the logits of a query before the first step; ``None``: not derived.

    Entries of queries and keys have the variance 1/3 there (weights uniform within 1/sqrt(d), states normalised), and
    the variance of the Gaussian is sqrt(D). Then ``q . k`` gives 1/9 whatever D is; ``|k|^2 / 2`` gives 1/18; a
    constant in the query of standard deviation s gives s^2 / 3, and the mean of M shifts s^2 / 3M.
    """
    fields = parse_row(row)
    kind = fields["attention"]
    if kind not in ("softmax", "gaussian", "smgk"):
        return None
    variance = 1 / 9 + float(fields.get("query_bias_init_std", 0.0)) ** 2 / 3
    if kind != "softmax":
        variance += 1 / 18
    if kind == "smgk":
        variance += float(fields.get("shift_init_std", 1.0)) ** 2 / (3 * int(fields.get("num_components", 2)))
    return math.sqrt(variance)


def show_measured(values: Sequence[float]) -> str:
    """``0.0372 ± 0.0011``, with three digits."""
    if not values:
        return ""
    error = standard_error(values)
    return f"{mean(values):.3g}" if error is None else f"{mean(values):.3g} ± {error:.1g}"
