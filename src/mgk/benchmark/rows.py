"""Training throughput of each row of a recipe: updates of the training loop itself, in turns, in one process.

A ratio is that of one group: rows that were in memory together and took turns, the first row of the table always among
them. As many rows make a group as time and memory allow.
"""

from __future__ import annotations

import gc
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from mgk.benchmark import result
from mgk.benchmark.attention import Comparison
from mgk.benchmark.correctness import WrongResultError
from mgk.benchmark.row_step import RowStep, check_gradient
from mgk.benchmark.timing import (
    Candidate,
    Clock,
    Effort,
    HostClock,
    Report,
    StreamClock,
    Timing,
    no_report,
    take_turns,
)
from mgk.benchmark.training_step import many_versions
from mgk.benchmark.yardstick import Record
from mgk.data.store import Corpus
from mgk.training.configuration import RunConfig
from mgk.training.result import device_name

CALLS = 10
"""Number of consecutive updates that one sample averages."""
FEWEST = 3
"""Minimum number of rounds."""
PREPARING = 0.6
"""Share of the time after which no further row is prepared, so that those which are can be timed."""
OTHERS_BYTES = 2**31
"""Memory that other processes may use on the GPU: a display, the context of a server."""


@dataclass(frozen=True, kw_only=True)
class Group(Comparison):
    """Results of rows that took turns: the first row of the table as baseline, and the rows timed with it."""

    left: list[RunConfig] = field(default_factory=list)
    """Rows that were not reached in time, or had no room in memory."""


def check_alone(device: torch.device) -> None:
    """Refuse a GPU that another process uses, since the times would be wrong."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > OTHERS_BYTES:
        raise ValueError(f"mgk bench rows must have the GPU to itself, got one where others use {others / 1e9:.1f} GB")


def compare(
    runs: Sequence[RunConfig],
    corpus: Corpus,
    *,
    fabric: Fabric,
    effort: Effort,
    seconds: float | None = None,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Group:
    """Check every row, then time the updates of those that are right, in turns.

    Args:
        runs: of the rows. The first is what the others are compared with.
        corpus: what they read.
        fabric: launched.
        effort: how many rounds.
        seconds: how long it may take; ``None``: as long as it does.
        clock: how times are taken; ``None``: as the device needs it.
        report: told how far it is.
    """
    begun, device, found = time.monotonic(), fabric.device, Group()
    total = len(runs) + effort.rounds
    ready: list[RowStep] = []
    with tempfile.TemporaryDirectory() as folder, many_versions(device):
        steps: dict[str, RowStep] = {}
        try:
            # All of them first: a new one makes the compiler forget the others, and then none comes between.
            for number, run in enumerate(runs):
                place = Path(folder) / str(number)
                place.mkdir()
                steps[run.row] = RowStep(run, corpus, fabric, place)
            for number, run in enumerate(runs):
                used = time.monotonic() - begun
                # The slowest so far says what the next one may take.
                if seconds is not None and len(ready) > 1 and used * (number + 1) / number > PREPARING * seconds:
                    found.left.append(run)
                    continue
                report(number, total, f"checking {run.row}")
                _prepare(run, steps[run.row], corpus, found, ready)
            rounds = effort.rounds
            if seconds is not None and ready:
                a_round = sum(step.seconds for step in ready) * ((CALLS + 1) if device.type == "cuda" else 1)
                remaining = seconds - (time.monotonic() - begun)
                # Two rounds' worth go into finding out how long a sample takes.
                rounds = min(rounds, max(FEWEST, int(0.9 * remaining / max(a_round, 1e-9)) - 2))
            if clock is None:
                is_cuda = device.type == "cuda"
                clock = StreamClock(device, isolated=False, calls=CALLS) if is_cuda else HostClock()
            timings = take_turns(
                [Candidate(name=step.row, call=step.train) for step in ready], clock,
                # Nobody sits out: in every round all rows see the same batches.
                Effort(rounds=rounds, seconds=1e9, fewest=rounds, slowest=effort.slowest),
                lambda done, _, text: report(len(runs) + done, total, text),
            )  # fmt: skip
            report(total, total, "done")
            records = [_record(step, timings[step.row], device) for step in ready]
        finally:
            for step in steps.values():
                step.close()
    _add_ratios(records, runs[0].row, found)
    del steps, ready
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def join(earlier: Mapping[str, Any] | None, new: Mapping[str, Any], found: Group) -> dict[str, Any]:
    """Add a group to a result.

    Args:
        earlier: the result so far; ``None``: there is none.
        new: as :func:`mgk.benchmark.result.begin` makes it.
        found: the group.
    """
    joined = dict(new if earlier is None else earlier)
    number = len(joined.get("groups", []))
    names = [record["row"] for record in (*found.baselines, *found.rows)]
    joined["groups"] = [*joined.get("groups", []), {"written": new["written"], "rows": names}]
    for name in ("baselines", "rows", "failures", "skipped"):
        joined[name] = [*joined[name], *({**record, "group": number} for record in getattr(found, name))]
    return joined


def read_earlier(path: Path, new: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the result to continue, or ``None`` if there is none. A result of another configuration is refused."""
    if not path.exists():
        return None
    found = result.read(path)
    for name in ("benchmark", "device", "versions", "config"):
        if found[name] != new[name]:
            raise ValueError(
                f"--resume must go on with a result of the same {name}, got {path} with {found[name]} in place of "
                f"{new[name]}: use another --output"
            )
    return found


def measured(found: Mapping[str, Any] | None) -> set[str]:
    """Return the rows that need not be timed again: rows with a time, and rows that failed."""
    if found is None:
        return set()
    return {record["row"] for name in ("baselines", "rows", "failures", "skipped") for record in found[name]}


def _prepare(run: RunConfig, step: RowStep, corpus: Corpus, found: Group, ready: list[RowStep]) -> None:
    """Check a row and warm it up, or record why it is left out."""
    facts = {
        "row": run.row,
        "preset": run.model.changes["attention"],
        "heads": run.model.changes["num_attention_heads"],
    }
    try:
        with warnings.catch_warnings():
            # Of what cannot be recorded, the JSON says so.
            warnings.filterwarnings("ignore", message="CUDA graphs could not be recorded")
            step.warm_up(check_gradient(run, corpus, step.device))
        ready.append(step)
    except WrongResultError as error:
        found.failures.append({**facts, "backend": "auto", "reason": str(error), "error": error.errors})
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        if len(ready) > 1:
            found.left.append(run)
        else:
            found.skipped.append({**facts, "backend": "auto", "reason": "it ran out of memory"})


def _record(step: RowStep, timing: Timing, device: torch.device) -> Record:
    tokens = step.tokens_per_update
    return {
        **step.facts(),
        "device": device_name(device),
        "tokens": tokens,
        "training_ms": timing.ms,
        "tokens_per_second": 1e3 * tokens / timing.ms,
        "samples": timing.samples,
        "noise": timing.noise,
    }


def _add_ratios(records: Sequence[Record], first: str, found: Group) -> None:
    """Tokens a second over those of the first row; without it there is nothing to compare with."""
    yardstick = next((record for record in records if record["row"] == first), None)
    for record in records:
        ratio = None if yardstick is None else record["tokens_per_second"] / yardstick["tokens_per_second"]
        kept = found.baselines if record is yardstick else found.rows
        kept.append({**record, "training_ratio": ratio, "baseline": None if yardstick is None else first})
