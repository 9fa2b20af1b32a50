"""Sweeps: time and memory against the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mgk.benchmark.attention import Comparison, compare
from mgk.benchmark.contestants import Contestant
from mgk.benchmark.correctness import Judge
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Effort, Report, no_report


def lengths(shortest: Shape, longest: int) -> list[Shape]:
    """Return the shape at doubling lengths up to ``longest``."""
    found = [shortest]
    while 2 * found[-1].tokens <= longest:
        found.append(replace(found[-1], tokens=2 * found[-1].tokens))
    return found


def sweep(
    shapes: Sequence[Shape],
    contestants: Sequence[Contestant],
    judge: Judge,
    effort: Effort,
    *,
    report: Callable[[Shape], Report] = lambda shape: no_report,
    known: Mapping[Shape, Comparison] | None = None,
) -> Iterator[Comparison]:
    """Yield the comparison at each length, from short to long, with ``"sweep": true`` in its records.

    A contestant that is left out at one length, or would take longer than ``effort.slowest`` at the next, is not tried
    again. ``report`` is called for a progress callback at each length. Lengths in ``known``, which an earlier call has
    measured, are not yielded.
    """
    present = list(contestants)
    for shape in shapes:
        if known is not None and shape in known:
            present = _without_the_slow(present, known[shape], effort.slowest)
            continue
        found = compare(shape, present, judge, effort, report=report(shape))
        present = _without_the_slow(present, found, effort.slowest)
        for records in (found.baselines, found.rows, found.failures, found.skipped):
            for record in records:
                record["sweep"] = True
        yield found


def _without_the_slow(present: Sequence[Contestant], found: Comparison, slowest: float) -> list[Contestant]:
    """Return the contestants that are expected to manage twice the length, and note the reason for the others."""
    staying = []
    for contestant in present:
        records = found.baselines if contestant.is_baseline else found.rows
        name = "kernel" if contestant.is_stock else "backend"
        own = [each for each in records if (each["preset"], each.get(name)) == (contestant.preset, contestant.backend)]
        if not own:
            continue
        # Twice the length has four times the pairs.
        expected = 4e-3 * own[0]["training_ms"]
        if expected <= slowest:
            staying.append(contestant)
        else:
            facts = ("device", "dtype", "batch", "head_dim", "causal", "preset", name, "heads")
            record = {fact: own[0][fact] for fact in facts}
            reason = f"forward and backward would take about {expected:.1f} s, and may take {slowest:g} s"
            found.skipped.append({**record, "tokens": 2 * own[0]["tokens"], "reason": reason})
    return staying
