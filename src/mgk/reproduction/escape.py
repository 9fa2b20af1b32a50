"""When a run leaves a plateau: the first validation that is better than what the plateau gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def step_of_escape(curve: Sequence[Mapping[str, Any]], threshold: float) -> int | None:
    """The step of the first validation whose accuracy lies above ``threshold``; ``None`` where there is none.

    On ListOps a model first predicts the majority class (17 to 19 %), then all at once what the root operator says
    (about 37 %); a threshold of 0.3 lies between the two. A run that never leaves the plateau is censored at its last
    step, not an escape at that step, so it has no number here.

    Args:
        curve: the lines of ``results/curves/NAME.jsonl``, in any order; those that are no validation are passed over.
        threshold: an accuracy between 0 and 1. A validation that reaches it exactly has not escaped.
    """
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"threshold must be an accuracy in [0, 1), got {threshold}")
    steps = [
        int(line["step"]) for line in curve if line.get("kind") == "valid" and line.get("accuracy", 0.0) > threshold
    ]
    return min(steps, default=None)
