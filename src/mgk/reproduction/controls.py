"""Runs that belong to no recipe, in ``results/controls/``, and count for no table of the paper.

``benchmarks/published_control.py`` writes those of the published code on our data, and ``benchmarks/same_start.py``
those of our training from the weights and in the batches of one of them. The page ``fidelity`` shows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk.reproduction.missing import Missing
from mgk.reproduction.results import CONTROLS
from mgk.training import result

SCRIPT = "benchmarks/published_control.py"


@dataclass(frozen=True, kw_only=True)
class Control:
    """A run of published code, or of ours from its start."""

    file: str
    name: str
    """Name of the code, task and attention."""
    heads: int
    dropout: float
    seed: int
    is_complete: bool
    """Whether it ran all its steps; otherwise it was stopped."""
    steps: int
    """Step of its last validation."""
    accuracy: float | None
    """Test accuracy in [0, 1]; ``None`` if it was stopped before there was a model to test."""
    curve: Sequence[Mapping[str, Any]]
    """Measurements, as in ``results/curves``."""
    corpus: str
    """Fingerprint of its data."""
    machine: str
    """Device and precision, as far as the file says them."""
    takes: frozenset[str] = frozenset({"weights", "batches"})
    """What a run of ours takes from the published code."""


def read_controls(folder: Path) -> list[Control]:
    """Read all controls in a folder of results, sorted by heads, dropout and seed."""
    found = [_read(path) for path in (folder / CONTROLS).glob("*.json")]
    return sorted(found, key=lambda each: (each.name, each.heads, each.dropout, each.seed, each.file))


def _read(path: Path) -> Control:
    content = result.read_object(path)
    try:
        accuracy = content["metrics"].get("test_accuracy")
        return Control(
            file=f"{CONTROLS}/{path.name}",
            name=str(content["control"]),
            heads=int(content["heads"]),
            dropout=float(content["dropout"]),
            seed=int(content["seed"]),
            is_complete=content["complete"] is True,
            steps=int(content["steps"]),
            accuracy=None if accuracy is None else float(accuracy),
            curve=[{**line, "step": int(line["step"]), "kind": str(line["kind"])} for line in content["curve"]],
            corpus=str(content["corpus"]["fingerprint"]),
            machine=", ".join(str(content[key]) for key in ("device", "precision") if key in content),
            takes=frozenset(map(str, content.get("takes", ("weights", "batches")))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a result of {SCRIPT}, got {error!r}") from error


def notes_about(controls: Sequence[Control], fingerprints: set[str]) -> list[str]:
    """Return notes on controls that are incomplete or not comparable.

    Args:
        controls: the controls that are shown.
        fingerprints: fingerprints of the data of our runs next to them.
    """
    notes = [
        f"{each.file} was stopped at step {each.steps:,}: its accuracy does not count, and it counts among those that "
        f"left the plateau only if it had left by then"
        for each in controls
        if not each.is_complete
    ]
    for each in controls:
        if fingerprints and each.corpus not in fingerprints:
            notes.append(f"{each.file} was trained on another corpus than our runs")
    return notes


def find_missing_controls(controls: Sequence[Control], wanted: Sequence[tuple[int, float]]) -> list[Missing]:
    """Return the wanted pairs of heads and dropout that have no complete run."""
    present = {(each.heads, each.dropout) for each in controls if each.is_complete}
    absent = [each for each in wanted if each not in present]
    if not absent:
        return []
    listed = ", ".join(f"{heads} heads with dropout {dropout:g}" for heads, dropout in absent)
    # There is no command, because it needs a checkout of code that is not ours.
    return [Missing(what=f"{SCRIPT}: {listed}", commands=())]
