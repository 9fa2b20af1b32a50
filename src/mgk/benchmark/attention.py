"""Benchmark of one attention shape: softmax with all heads, on stock kernels and ours, and presets with half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from mgk.benchmark.contestants import Contestant
from mgk.benchmark.correctness import Judge, WrongResultError
from mgk.benchmark.entry import Entry, LeftOut, enter
from mgk.benchmark.inputs import Inputs, draw
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Clock, Effort, Report, Timing, no_report, take_turns, usual_clock
from mgk.benchmark.yardstick import Record, fastest, is_stock, ratios_of_all
from mgk.training.result import device_name

TIMES = {"forward": "forward_ms", "training": "training_ms"}
Entered = TypeVar("Entered")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results for one shape, as records of the JSON."""

    baselines: list[Record] = field(default_factory=list)
    """Records of softmax with all heads, for each stock kernel and our own."""
    rows: list[Record] = field(default_factory=list)
    """Records of each preset on each backend, with ratios to the fastest baselines."""
    failures: list[Record] = field(default_factory=list)
    """Records of contestants with a wrong result, without times."""
    skipped: list[Record] = field(default_factory=list)
    """Records of contestants that could not run, with reasons."""


def compare(
    shape: Shape,
    contestants: Sequence[Contestant],
    judge: Judge,
    effort: Effort,
    *,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every contestant, then time the correct ones in turn.

    Args:
        shape: shape of the baselines; the others get half its heads.
        contestants: contestants, with baselines among them.
        judge: checks results, on its device and in its dtype.
        effort: time that the measurement may take.
        clock: how times are taken; ``None`` is the usual clock of the device.
        report: called with the progress.
    """
    found = Comparison()
    steps = len(contestants) + effort.rounds
    entries = enter_each(
        contestants, shape, judge, found, lambda done, text: report(done, steps, text), draw_at,
        lambda contestant, inputs: enter(contestant, inputs, shape, judge, effort.slowest),
    )  # fmt: skip
    need_baseline(found, [entry.contestant for entry in entries], shape)
    clock = clock or usual_clock(judge.device)
    timings: dict[str, Timing] = {}
    light = [entry for entry in entries if not entry.is_heavy]
    for group in (light, *([entry] for entry in entries if entry.is_heavy)):
        if judge.device.type == "cuda":
            # Memory that the allocator keeps from another group must not be in the way.
            torch.cuda.empty_cache()
        timings |= take_turns(
            [candidate for entry in group for candidate in entry.candidates], clock, effort,
            lambda done, total, text: report(len(contestants) + done, steps, text),
        )  # fmt: skip
    _add_records(found, entries, timings, shape, judge)
    report(steps, steps, "done")
    return found


def enter_each(
    contestants: Sequence[Contestant],
    shape: Shape,
    judge: Judge,
    found: Comparison,
    report: Callable[[int, str], None],
    draw_inputs: Callable[[str, Shape, int, Judge], Inputs],
    enter_one: Callable[[Contestant, Inputs], Entered],
) -> list[Entered]:
    """Return the results of ``enter_one`` for all contestants, and note wrong and left-out ones in ``found``."""
    drawn: dict[tuple[str, int], Inputs] = {}
    entered = []
    for number, contestant in enumerate(contestants):
        report(number, f"checking {contestant.name}")
        heads = shape.heads if contestant.is_baseline else shape.mixture_heads
        try:
            # All backends of a preset get the same inputs.
            if (contestant.preset, heads) not in drawn:
                drawn[contestant.preset, heads] = draw_inputs(contestant.preset, shape, heads, judge)
            entered.append(enter_one(contestant, drawn[contestant.preset, heads]))
        except LeftOut as error:
            found.skipped.append({**facts_of(contestant, shape, judge), "reason": str(error)})
        except WrongResultError as error:
            reason = {"reason": str(error), "error": error.errors}
            found.failures.append({**facts_of(contestant, shape, judge), **reason})
    return entered


def draw_at(preset: str, shape: Shape, heads: int, judge: Judge) -> Inputs:
    """Draw inputs of a shape with this number of heads."""
    return draw(
        preset, batch=shape.batch, heads=heads, tokens=shape.tokens, head_dim=shape.head_dim,
        is_causal=shape.is_causal, dtype=judge.dtype, device=judge.device,
    )  # fmt: skip


def need_baseline(found: Comparison, entered: Sequence[Contestant], shape: Shape) -> None:
    """Raise an error if no stock kernel can run, because then there is nothing to compare with."""
    if not any(contestant.is_stock for contestant in entered):
        reasons = "; ".join(each["reason"] for each in [*found.failures, *found.skipped])
        raise RuntimeError(f"a stock kernel must run at {shape}, got none: {reasons}")


def _add_records(
    found: Comparison, entries: list[Entry], timings: dict[str, Timing], shape: Shape, judge: Judge
) -> None:
    """Add records with ratios to the fastest stock kernel of each direction, and to the fastest softmax of all."""
    records = [{**facts_of(entry.contestant, shape, judge), **_costs(entry, timings)} for entry in entries]
    both = list(zip(entries, records, strict=True))
    found.baselines.extend(record for entry, record in both if entry.contestant.is_baseline)
    stock = [record for record in found.baselines if is_stock(record)]
    forward, training = fastest(stock, "forward_ms"), fastest(stock, "training_ms")
    assert forward is not None, "need_baseline has found one"
    assert training is not None, "a stock kernel has both times"
    ours = [record for entry, record in both if not entry.contestant.is_baseline]
    plain_heads = {record["backend"]: record for record in ours if record["preset"] == "softmax"}
    for record in ours:
        plain = plain_heads.get(record["backend"], {})
        found.rows.append(
            {
                **record,
                "baseline": forward["kernel"],
                "baseline_ms": forward["forward_ms"],
                "baseline_training": training["kernel"],
                "baseline_training_ms": training["training_ms"],
                "baseline_peak_bytes": training["peak_bytes"],
                "forward_ratio": _over(forward["forward_ms"], record["forward_ms"]),
                "training_ratio": _over(training["training_ms"], record["training_ms"]),
                **ratios_of_all(record, found.baselines, TIMES),
                "forward_over_softmax_head": _over(record["forward_ms"], plain.get("forward_ms")),
                "training_over_softmax_head": _over(record["training_ms"], plain.get("training_ms")),
                "noise": max(each["noise"] for each in (record, forward, training)),
            }
        )


def _over(time: float | None, other: float | None) -> float | None:
    return None if time is None or other is None else time / other


def facts_of(contestant: Contestant, shape: Shape, judge: Judge) -> Record:
    """Return the facts of a record: contestant, device and shape."""
    who: Record = {"backend": contestant.backend, "heads": shape.heads}
    if not contestant.is_baseline:
        who |= {"heads": shape.mixture_heads, "baseline_heads": shape.heads}
    elif contestant.is_stock or contestant.preset == "linear":
        who = {"kernel": contestant.backend, "heads": shape.heads}
    return {
        "device": device_name(judge.device),
        "dtype": str(judge.dtype).removeprefix("torch."),
        **shape.facts(),
        "preset": contestant.preset,
        **who,
    }


def _costs(entry: Entry, timings: dict[str, Timing]) -> Record:
    forward = timings[entry.forward.name]
    training = None if entry.training is None else timings[entry.training.name]
    both = [forward] if training is None else [forward, training]
    costs: Record = {
        "forward_ms": forward.ms,
        "training_ms": None if training is None else training.ms,
        "forward_device_ms": forward.device_ms,
        "training_device_ms": None if training is None else training.device_ms,
        "forward_host_ms": forward.host_ms,
        "training_host_ms": None if training is None else training.host_ms,
        "peak_bytes": entry.peak_bytes,
        "samples": min(each.samples for each in both),
        "noise": max(each.noise for each in both),
        "error": entry.errors,
    }
    return costs if entry.no_training is None else {**costs, "no_training": entry.no_training}
