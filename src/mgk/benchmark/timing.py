"""Timing of several candidates in turn, so that a slow moment of the machine affects all of them."""

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
"""A callback with the number of steps done, the total, and the name of the next."""


def no_report(done: int, total: int, text: str) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to time."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of the call, which is entered before timing starts."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The time that a measurement may take."""

    rounds: int
    """Number of rounds, in each of which every candidate takes a turn."""
    seconds: float
    """Most seconds for a candidate in all rounds together; a slower one skips rounds."""
    fewest: int = 5
    """Fewest samples of such a candidate."""
    slowest: float = 10.0
    """Most seconds for one call; a slower candidate is not measured."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The timing of one candidate, in milliseconds."""

    device_ms: float
    """Median over samples of the time between start and end on the device."""
    host_ms: float | None
    """Time that the host needs to queue the call; ``None`` on a CPU."""
    noise: float
    """Relative difference between the medians of the even and of the odd rounds."""
    samples: int

    @property
    def ms(self) -> float:
        """Time of a call: host and device work concurrently, so it is that of the slower one."""
        return self.device_ms if self.host_ms is None else max(self.device_ms, self.host_ms)


class Clock(Protocol):
    """Measures the time of one call, in milliseconds."""

    def host(self, candidate: Candidate) -> float | None:
        """Return the host time per call in a series of calls; ``None`` if calls return only when they are done."""

    def sample(self, candidate: Candidate, host_ms: float | None) -> float:
        """Return the time until the work is done. ``host_ms`` is the result of :meth:`host`."""


class HostClock:
    """A clock for calls that return when they are done."""

    def host(self, candidate: Candidate) -> None:
        return None

    def sample(self, candidate: Candidate, host_ms: float | None) -> float:
        with candidate.context():
            start = time.perf_counter()
            candidate.call()
            return 1e3 * (time.perf_counter() - start)


class StreamClock:
    """A clock with CUDA events on the current stream.

    Args:
        device: a GPU.
        isolated: whether to time only the kernels of one call: the cache is filled with other data before, and the GPU
            waits until the host has queued all kernels. Otherwise calls follow each other as in a training loop.
        calls: number of calls that are averaged in one sample.
    """

    CYCLES_PER_MS = 2_000_000
    """Cycles per millisecond at the highest clock. At a lower clock the GPU waits longer, which costs no accuracy."""
    CACHE_BYTES = 2**28
    """Size of the filler, which is several times the L2 cache of any GPU."""
    LONGEST_HOLD_MS = 50.0
    HOST_CALLS = 8
    HOST_SECONDS = 0.02
    """The host time is averaged over ``HOST_CALLS`` calls in a row, or over those that begin within this many
    seconds."""

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
                # The filler is read and not written, because the write-back of dirty lines would slow down the first
                # kernel.
                self._filler.amax()
                hold = min(0.2 + 2.0 * (host_ms or 0.0), self.LONGEST_HOLD_MS)
                torch.cuda._sleep(int(hold * self.CYCLES_PER_MS))
            else:
                # A first call lets the host run ahead as in a loop.
                candidate.call()
            start.record()
            for _ in range(self.calls):
                candidate.call()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / self.calls


def usual_clock(device: torch.device) -> Clock:
    """Return the clock for single calls on ``device``."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def take_turns(
    candidates: Sequence[Candidate], clock: Clock, effort: Effort, report: Report = no_report
) -> dict[str, Timing]:
    """Time all candidates, and return timings by name. Each must have been called before, so that it is compiled."""
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
        # The order changes in each round, because after a power-hungry kernel the GPU may lower its clock.
        shuffle(present)
        for candidate in present:
            times[candidate.name].append(clock.sample(candidate, host[candidate.name]))
    return {name: _summary(samples, host[name]) for name, samples in times.items()}


def _summary(samples: list[float], host_ms: float | None) -> Timing:
    median = statistics.median(samples)
    even, odd = samples[::2], samples[1::2] or samples
    noise = abs(statistics.median(even) - statistics.median(odd)) / median
    return Timing(device_ms=median, host_ms=host_ms, noise=noise, samples=len(samples))
