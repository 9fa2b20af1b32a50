"""The step at which a run leaves a plateau: its first validation above the accuracy of the plateau."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgk.reproduction.survival import Run


def step_of_escape(curve: Sequence[Mapping[str, Any]], threshold: float) -> int | None:
    """Return the step of the first validation with an accuracy above ``threshold``; ``None`` if there is none.

    On ListOps a model first predicts the majority class (17 to 19 %), and then suddenly learns the root operator (about
    37 %); a threshold of 0.3 separates the two. A run that never leaves the plateau is censored at its last step. That
    is not an escape at that step, so the result is ``None``.

    Args:
        curve: lines of ``results/curves/NAME.jsonl`` in any order; other lines than validations are ignored.
        threshold: an accuracy between 0 and 1. A validation exactly at the threshold has not escaped.
    """
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"threshold must be an accuracy in [0, 1), got {threshold}")
    steps = [
        int(line["step"]) for line in curve if line.get("kind") == "valid" and line.get("accuracy", 0.0) > threshold
    ]
    return min(steps, default=None)


def run_of(curve: Sequence[Mapping[str, Any]], threshold: float) -> Run | None:
    """Return the step at which a run left, or the last at which it was tried and had not; ``None`` if it never was.

    Args:
        curve: as in :func:`step_of_escape`.
        threshold: likewise.
    """
    tried = [int(line["step"]) for line in curve if line.get("kind") == "valid" and line["step"] > 0]
    if not tried:
        return None
    step = step_of_escape(curve, threshold)
    return (max(tried), False) if step is None else (step, True)
