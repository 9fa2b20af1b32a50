"""Benchmark of a step of generation: one query per sequence, and a long cache to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mgk.benchmark.attention import Comparison, enter_each, facts_of, need_baseline
from mgk.benchmark.contestants import Contestant
from mgk.benchmark.correctness import Judge
from mgk.benchmark.entry import refusals
from mgk.benchmark.inputs import Inputs, draw
from mgk.benchmark.memory import peak_bytes
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Candidate, Clock, Effort, Report, Timing, no_report, take_turns, usual_clock
from mgk.benchmark.yardstick import Record, fastest, is_stock, ratios_of_all

COPY = "copy"
"""Name of the candidate that measures the speed of memory."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A correct contestant."""

    contestant: Contestant
    candidate: Candidate
    error: float
    """Relative error of the output against fp64."""
    cache_bytes: int
    """Bytes of keys and values."""
    peak_bytes: int | None
    """Peak memory in bytes, without the inputs."""


def compare(
    shape: Shape,
    contestants: Sequence[Contestant],
    judge: Judge,
    effort: Effort,
    *,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every contestant, then time the correct ones and a copy of memory in turn.

    Args:
        shape: shape of the baselines, with ``tokens`` in the cache; the others get half its heads.
        contestants: contestants, with baselines among them.
        judge: checks results, on its device and in its dtype.
        effort: time that the measurement may take.
        clock: how times are taken; ``None`` is the usual clock of the device.
        report: called with the progress.
    """
    found = Comparison()
    total = len(contestants) + effort.rounds
    steps = enter_each(
        contestants, shape, judge, found, lambda done, text: report(done, total, text), draw_step,
        lambda contestant, inputs: _enter(contestant, inputs, judge),
    )  # fmt: skip
    need_baseline(found, [step.contestant for step in steps], shape)
    clock = clock or usual_clock(judge.device)
    copy, copied = _copy(judge.device)
    timings = take_turns(
        [*(step.candidate for step in steps), copy], clock, effort,
        lambda done, _, text: report(len(contestants) + done, total, text),
    )  # fmt: skip
    # A copy reads and writes, so it moves twice its size.
    bytes_per_ms = 2 * copied / timings[COPY].device_ms
    _add_records(found, steps, timings, bytes_per_ms, shape, judge)
    report(total, total, "done")
    return found


def draw_step(preset: str, shape: Shape, heads: int, judge: Judge) -> Inputs:
    """Draw one query per head, and keys in the layout of the library's cache, all components of a token together."""
    inputs = draw(
        preset, batch=shape.batch, heads=heads, tokens=shape.tokens, head_dim=shape.head_dim, is_causal=False,
        dtype=judge.dtype, device=judge.device, queries=1, needs_gradients=False,
    )  # fmt: skip
    if inputs.key.ndim == 4:
        return inputs
    return replace(inputs, key=inputs.key.transpose(2, 3).contiguous().transpose(2, 3))


def cache_bytes(inputs: Inputs) -> int:
    """Bytes of keys and values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (inputs.key, inputs.value))


def _enter(contestant: Contestant, inputs: Inputs, judge: Judge) -> Step:
    @contextmanager
    def without_gradients() -> Iterator[None]:
        with torch.no_grad(), contestant.context():
            yield

    candidate = Candidate(
        name=contestant.name, call=lambda: contestant.attention(inputs), context=without_gradients
    )  # fmt: skip
    with refusals(contestant):
        error = judge.check_output(contestant, inputs)
        # The first call compiles, so the second is measured.
        peak_bytes(candidate, judge.device)
        peak = peak_bytes(candidate, judge.device)
    return Step(
        contestant=contestant, candidate=candidate, error=error, cache_bytes=cache_bytes(inputs), peak_bytes=peak
    )


def _copy(device: torch.device) -> tuple[Candidate, int]:
    """Return a candidate that copies much more memory than any cache of the device holds, and its bytes."""
    count = COPIED_BYTES[device.type]
    source = torch.zeros(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)

    def call() -> Tensor:
        return target.copy_(source)

    return Candidate(name=COPY, call=call), count


def _add_records(
    found: Comparison, steps: list[Step], timings: dict[str, Timing], bytes_per_ms: float, shape: Shape, judge: Judge
) -> None:
    """Add records with ratios to the fastest stock kernel, and to the fastest softmax of all."""
    ours: list[Record] = []
    for step in steps:
        timing = timings[step.candidate.name]
        read_ms = step.cache_bytes / bytes_per_ms
        record = {
            **facts_of(step.contestant, shape, judge),
            "queries": 1,
            "forward_ms": timing.ms,
            "forward_device_ms": timing.device_ms,
            "forward_host_ms": timing.host_ms,
            "peak_bytes": step.peak_bytes,
            "cache_bytes": step.cache_bytes,
            "read_ms": read_ms,
            "over_reading": timing.ms / read_ms,
            "samples": timing.samples,
            "noise": timing.noise,
            "error": {"output": step.error},
        }
        (found.baselines if step.contestant.is_baseline else ours).append(record)
    stock = fastest([record for record in found.baselines if is_stock(record)], "forward_ms")
    assert stock is not None, "need_baseline has found one"
    for record in ours:
        found.rows.append(
            {
                **record,
                "baseline": stock["kernel"],
                "baseline_ms": stock["forward_ms"],
                "forward_ratio": stock["forward_ms"] / record["forward_ms"],
                **ratios_of_all(record, found.baselines, {"forward": "forward_ms"}),
                "training_ratio": None,
                "cache_ratio": record["cache_bytes"] / stock["cache_bytes"],
                "noise": max(record["noise"], stock["noise"]),
            }
        )
