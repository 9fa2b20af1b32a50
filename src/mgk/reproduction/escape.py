"""The step at which a run leaves a plateau: its first validation above the accuracy of the plateau."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
