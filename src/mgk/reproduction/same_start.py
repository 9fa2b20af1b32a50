"""Comparison of our training with the published code from the same weights in the same batches.

``benchmarks/same_start.py`` makes the runs. Steps at which runs leave the plateau vary with the seed. Here everything
that a seed decides is the same, so a difference is one of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mgk.reproduction.controls import Control, read_controls
from mgk.reproduction.missing import Missing
from mgk.reproduction.page import Grid
from mgk.reproduction.published_code import fidelity
from mgk.reproduction.results import Results

SCRIPT = "benchmarks/same_start.py"
EARLY = 500
"""Steps at the start for which losses are compared: later, rounding has driven any two runs apart."""
ALIKE = 0.002
"""Largest difference of two losses, in nats, that we call rounding: a thousandth of the loss."""
AVERAGED = 50
"""Steps whose mean loss the published code logs."""
NO_LOSSES = "no losses in common"


class Pair(NamedTuple):
    """A run of the published code, and ours from its start."""

    published: Control
    ours: Control


def pairs(controls: Sequence[Control], results: Results) -> list[Pair]:
    """Return our runs with the weights and the batches of one of ``controls``, each with that control."""
    name = fidelity()["control"]["same_start"]["name"]
    published = {_key(each): each for each in controls}
    own = [each for each in read_controls(results.folder) if each.name == name and len(each.takes) == 2]
    return [Pair(published[_key(each)], each) for each in own if _key(each) in published]


def grid(found: Sequence[Pair]) -> Grid:
    """Build the table, with a line for each pair."""
    lines = []
    for published, ours in found:
        apart = _early_differences(published, ours)
        lines.append((
            str(ours.heads), f"{ours.dropout:g}", str(ours.seed), ours.machine,
            f"{max(apart.values()):.4f} in {max(apart):,} steps" if apart else NO_LOSSES,
            _show_escape(published, _level()), _show_escape(ours, _level()),
        ))  # fmt: skip
    header = (
        "heads", "dropout", "seed", "ours ran on", "largest difference of the training loss", "published left at",
        "ours left at",
    )  # fmt: skip
    return Grid(title=fidelity()["control"]["same_start"]["title"], header=header, lines=tuple(lines))


def sentences(found: Sequence[Pair]) -> tuple[str, ...]:
    """Say what was done, and what the table shows."""
    if not found:
        return ()
    said = finding(found)
    return (str(fidelity()["control"]["same_start"]["text"]), *([said] if said else []))


def finding(found: Sequence[Pair]) -> str | None:
    """Say what the runs without dropout show; ``None`` without any, since dropout draws other numbers in ours."""
    exact = [(pair, apart) for pair in found if pair.ours.dropout == 0 if (apart := _early_differences(*pair))]
    if not exact:
        return None
    worst, steps = max(max(apart.values()) for _, apart in exact), min(max(apart) for _, apart in exact)
    said = "does what the published code does" if worst <= ALIKE else "differs from the published code"
    escapes = [tuple(step_of_low_loss(run.curve, _level()) for run in pair) for pair, _ in exact]
    left = [(theirs, ours) for theirs, ours in escapes if theirs is not None and ours is not None]
    ends = ""
    if len(left) == 1:
        ((theirs, ours),) = left
        ends = f" The published code leaves the plateau of ListOps at step {theirs:,}, and ours at step {ours:,}."
    elif left:
        most = max(abs(theirs - ours) for theirs, ours in left)
        ends = f" The steps at which they leave the plateau of ListOps are at most {most:,} apart."
    return (
        f"**From the same weights and in the same batches, our training {said}:** over the first {steps:,} steps the "
        f"training losses, averaged over {AVERAGED} steps each, differ by at most {worst:.4f} "
        f"({len(exact)} run{'s' if len(exact) > 1 else ''} without dropout).{ends}"
    )


def find_missing_pairs(controls: Sequence[Control], found: Sequence[Pair]) -> list[Missing]:
    """Return the runs of the published code from whose start we have no run."""
    present = {_key(pair.ours) for pair in found}
    absent = [each for each in controls if each.is_complete and _key(each) not in present]
    if not absent:
        return []
    listed = ", ".join(f"{each.heads} heads with dropout {each.dropout:g}, seed {each.seed}" for each in absent)
    return [Missing(what=f"{SCRIPT}: {listed}", commands=())]


def step_of_low_loss(curve: Sequence[Mapping[str, Any]], level: float) -> int | None:
    """Return the step at which the mean training loss is first below ``level``; ``None`` if it never is."""
    steps = [int(line["step"]) for line in curve if line["kind"] == "train" and line["loss"] < level]
    return min(steps, default=None)


def _level() -> float:
    return float(fidelity()["control"]["same_start"]["level"])


def _key(run: Control) -> tuple[int, float, int]:
    return run.heads, run.dropout, run.seed


def _losses(run: Control) -> dict[int, float]:
    return {line["step"]: float(line["loss"]) for line in run.curve if line["kind"] == "train"}


def _early_differences(published: Control, ours: Control) -> dict[int, float]:
    """Return how far the training losses are apart, for the early steps that both have."""
    theirs, own = _losses(published), _losses(ours)
    return {step: abs(own[step] - theirs[step]) for step in sorted(own.keys() & theirs.keys()) if step <= EARLY}


def _show_escape(run: Control, level: float) -> str:
    step = step_of_low_loss(run.curve, level)
    if step is not None:
        return f"{step:,}"
    return "never" if run.is_complete else f"not by {max(_losses(run), default=0):,}"
