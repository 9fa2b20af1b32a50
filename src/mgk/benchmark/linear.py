"""Benchmark of linear attention: mixtures with half the heads against plain linear attention and softmax."""

from __future__ import annotations

from collections.abc import Sequence

from mgk.benchmark.attention import Comparison, draw_at, enter_each, facts_of
from mgk.benchmark.contestants import Contestant
from mgk.benchmark.correctness import Judge
from mgk.benchmark.entry import Entry, enter
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Clock, Effort, Report, Timing, no_report, take_turns, usual_clock
from mgk.benchmark.yardstick import Record

DIRECTIONS = ("forward", "training")


def compare(
    shape: Shape,
    contestants: Sequence[Contestant],
    judge: Judge,
    effort: Effort,
    *,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every contestant, then time those that are right, in turn.

    Args:
        shape: shape of plain linear attention and softmax; the mixtures get half its heads.
        contestants: plain linear attention first, then mixtures and softmax in any order.
        judge: checks results, on its device and in its dtype.
        effort: time that the measurement may take.
        clock: how times are taken; ``None`` is the usual clock of the device.
        report: called with the progress.
    """
    found = Comparison()
    total = len(contestants) + effort.rounds
    entries = enter_each(
        contestants, shape, judge, found, lambda done, text: report(done, total, text), draw_at,
        lambda contestant, inputs: enter(contestant, inputs, shape, judge, effort.slowest),
    )  # fmt: skip
    clock = clock or usual_clock(judge.device)
    timings = take_turns(
        [candidate for entry in entries for candidate in entry.candidates], clock, effort,
        lambda done, _, text: report(len(contestants) + done, total, text),
    )  # fmt: skip
    report(total, total, "done")
    _add_records(found, entries, timings, shape, judge)
    return found


def _add_records(
    found: Comparison, entries: Sequence[Entry], timings: dict[str, Timing], shape: Shape, judge: Judge
) -> None:
    plain = next((entry for entry in entries if entry.contestant.preset == "linear"), None)
    if plain is None:
        raise RuntimeError(f"linear attention must run at {shape}, got none: {found.failures or found.skipped}")
    softmax = [entry for entry in entries if entry.contestant.preset == "softmax"]
    stock = [entry for entry in softmax if entry.contestant.is_stock]

    def ms(entry: Entry, direction: str) -> float:
        return timings[getattr(entry, direction).name].ms

    for entry in entries:
        both = [timings[getattr(entry, direction).name] for direction in DIRECTIONS]
        record: Record = {
            **facts_of(entry.contestant, shape, judge),
            "peak_bytes": entry.peak_bytes,
            "samples": min(each.samples for each in both),
            "noise": max(each.noise for each in both),
            "error": entry.errors,
        }
        for direction, timing in zip(DIRECTIONS, both, strict=True):
            record |= {
                f"{direction}_ms": timing.ms,
                f"{direction}_device_ms": timing.device_ms,
                f"{direction}_host_ms": timing.host_ms,
            }
            for name, some in (("over_softmax", stock), ("over_softmax_of_all", softmax)):
                rivals = [ms(each, direction) for each in some]
                is_rival = entry in softmax
                record[f"{direction}_{name}"] = min(rivals) / timing.ms if rivals and not is_rival else None
        if entry.contestant.is_baseline:
            found.baselines.append(record)
            continue
        found.rows.append(
            {
                **record,
                "baseline": plain.contestant.preset,
                "baseline_ms": ms(plain, "forward"),
                "baseline_training_ms": ms(plain, "training"),
                "baseline_peak_bytes": plain.peak_bytes,
                "forward_ratio": ms(plain, "forward") / ms(entry, "forward"),
                "training_ratio": ms(plain, "training") / ms(entry, "training"),
            }
        )


def crossovers(records: Sequence[Record]) -> list[Record]:
    """Return the lengths from which linear attention is faster than the fastest softmax with all heads.

    There is a record for each preset, mask and direction; ``None`` means at no measured length. Old records know only
    the fastest stock kernel.
    """
    found: list[Record] = []
    keys = dict.fromkeys((each["preset"], each["causal"]) for each in records if each["preset"] != "softmax")
    for preset, causal in keys:
        own = sorted(
            (each for each in records if (each["preset"], each["causal"]) == (preset, causal)),
            key=lambda each: each["tokens"],
        )
        for direction in DIRECTIONS:
            name = f"{direction}_over_softmax"
            ratios = [(each["tokens"], each.get(f"{name}_of_all", each[name])) for each in own]
            first = None
            for tokens, ratio in reversed(ratios):
                if ratio is None or ratio <= 1.0:
                    break
                first = tokens
            found.append({"preset": preset, "causal": causal, "direction": direction, "tokens": first})
    return found
