"""Times of several candidates, taken in turn, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

Report = Callable[[int, int, str], None]
"""Told how many steps are done, out of how many, and what comes next."""


def no_report(done: int, total: int, text: str) -> None:
    """For whoever does not want to be told."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to time."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the call, outside of what is timed."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much time a measurement may take."""

    rounds: int
    """In how many rounds every candidate takes its turn."""
    seconds: float
    """A candidate that would take longer than this in all rounds together sits some of them out."""
    fewest: int = 5
    """But not so many that it has fewer samples than this."""
    slowest: float = 10.0
    """What takes longer than this for one call, in seconds, is not measured at all."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What came of one candidate, in milliseconds."""

    device_ms: float
    """Median over the samples: the time between start and end on the device."""
    host_ms: float | None
    """What the host needs to queue the call; ``None`` where host and device are one."""
    noise: float
    """Measured twice, by the even rounds and by the odd ones: how far the two medians lie apart, as a fraction."""
    samples: int

    @property
    def ms(self) -> float:
        """What a call costs: host and device work at the same time, and the slower one decides."""
        return self.device_ms if self.host_ms is None else max(self.device_ms, self.host_ms)


class Clock(Protocol):
    """Takes the time of one call, in milliseconds."""

    def host(self, candidate: Candidate) -> float | None:
        """Until a call has returned, of some that follow each other; ``None`` where that is all there is."""

    def sample(self, candidate: Candidate, host_ms: float | None) -> float:
        """Until the work is done. ``host_ms`` is what :meth:`host` has found."""


class HostClock:
    """For calls that return when they are done."""

    def host(self, candidate: Candidate) -> None:
        return None

    def sample(self, candidate: Candidate, host_ms: float | None) -> float:
        with candidate.context():
            start = time.perf_counter()
            candidate.call()
            return 1e3 * (time.perf_counter() - start)


class StreamClock:
    """CUDA events on the current stream.

    Args:
        device: a GPU.
        isolated: time the kernels of one call and nothing else: the cache is filled with something else before, and the
            GPU is held up until the host has queued them all. Otherwise calls follow each other as they do in a
            training loop.
        calls: how many one sample is the mean of.
    """

    CYCLES_PER_MS = 2_000_000
    """Of the highest clock; at a lower one the GPU is held up longer, which costs time but no accuracy."""
    CACHE_BYTES = 2**28
    """Several times the L2 of any GPU that there is."""
    LONGEST_HOLD_MS = 50.0
    HOST_CALLS = 8
    HOST_SECONDS = 0.02
    """What the host takes is the mean of this many calls in a row, or of as many as begin within this time."""

    def __init__(self, device: torch.device, *, isolated: bool = True, calls: int = 1) -> None:
        self.device, self.isolated, self.calls = device, isolated, calls
        self._filler = torch.zeros(self.CACHE_BYTES // 4 if isolated else 0, dtype=torch.int32, device=device)

    def host(self, candidate: Candidate) -> float:
        with candidate.context():
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            calls = 0
            while calls < self.HOST_CALLS and time.perf_counter() - start < self.HOST_SECONDS:
                candidate.call()
                calls += 1
            elapsed = 1e3 * (time.perf_counter() - start)
            torch.cuda.synchronize(self.device)
        return elapsed / calls

    def sample(self, candidate: Candidate, host_ms: float | None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with candidate.context():
            if self.isolated:
                # Read, not written: what was written would leave the cache at the expense of the first kernel.
                self._filler.amax()
                hold = min(0.2 + 2.0 * (host_ms or 0.0), self.LONGEST_HOLD_MS)
                torch.cuda._sleep(int(hold * self.CYCLES_PER_MS))
            else:
                # So that the host is as far ahead as it is in a loop.
                candidate.call()
            start.record()
            for _ in range(self.calls):
                candidate.call()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / self.calls


def usual_clock(device: torch.device) -> Clock:
    """For single calls on ``device``."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def take_turns(
    candidates: Sequence[Candidate], clock: Clock, effort: Effort, report: Report = no_report
) -> dict[str, Timing]:
    """The timing of every candidate by its name. All must have been called before, so that nothing is compiled here."""
    host: dict[str, float | None] = {}
    turns: dict[str, int] = {}
    for candidate in candidates:
        taken = [each for each in (clock.host(candidate) for _ in range(3)) if each is not None]
        host[candidate.name] = statistics.median(taken) if taken else None
        estimate = clock.sample(candidate, host[candidate.name])
        affordable = max(effort.fewest, int(1e3 * effort.seconds / max(estimate, 1e-6)))
        turns[candidate.name] = max(1, effort.rounds // min(affordable, effort.rounds))
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    shuffle = random.Random(0).shuffle
    for number in range(effort.rounds):
        report(number, effort.rounds, f"round {number + 1} of {effort.rounds}")
        present = [candidate for candidate in candidates if number % turns[candidate.name] == 0]
        # Always another order: what follows a hungry kernel may find the clock lowered.
        shuffle(present)
        for candidate in present:
            times[candidate.name].append(clock.sample(candidate, host[candidate.name]))
    return {name: _summary(samples, host[name]) for name, samples in times.items()}


def _summary(samples: list[float], host_ms: float | None) -> Timing:
    median = statistics.median(samples)
    even, odd = samples[::2], samples[1::2] or samples
    noise = abs(statistics.median(even) - statistics.median(odd)) / median
    return Timing(device_ms=median, host_ms=host_ms, noise=noise, samples=len(samples))
