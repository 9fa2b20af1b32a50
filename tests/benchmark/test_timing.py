"""Turns, medians and noise, with a clock that says what it is told."""

import itertools
import time

import pytest
import torch

from mgk.benchmark.timing import Candidate, Effort, HostClock, StreamClock, Timing, take_turns


class Script:
    """A clock that gives each candidate its times in order, over and over, and remembers who was asked when."""

    def __init__(self, host=None, **times):
        self.times = {name: itertools.cycle(values) for name, values in times.items()}
        self.host_ms, self.asked = host, []

    def host(self, candidate):
        return self.host_ms

    def sample(self, candidate, host_ms):
        assert host_ms == self.host_ms
        self.asked.append(candidate.name)
        return next(self.times[candidate.name])


def candidates(*names):
    return [Candidate(name=name, call=lambda: None) for name in names]


def test_candidates_take_turns():
    clock = Script(a=[1.0], b=[2.0], c=[3.0])
    reports = []
    found = take_turns(
        candidates("a", "b", "c"), clock, Effort(rounds=8, seconds=1), lambda *said: reports.append(said)
    )
    assert {name: timing.device_ms for name, timing in found.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    # One look at each, to plan; then everybody once in every round, not always in the same order.
    rounds = [tuple(clock.asked[start : start + 3]) for start in range(3, len(clock.asked), 3)]
    assert len(rounds) == 8
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert reports[0] == (0, 8, "round 1 of 8")


def test_a_slow_candidate_sits_rounds_out():
    clock = Script(fast=[1.0], slow=[1000.0])
    found = take_turns(candidates("fast", "slow"), clock, Effort(rounds=20, seconds=2, fewest=4))
    assert (found["fast"].samples, found["slow"].samples) == (20, 4)


def test_noise_is_how_far_two_measurements_lie_apart():
    # The first sample is the plan's.
    clock = Script(steady=[5.0], restless=[10.0, 8.0, 12.0, 8.0, 12.0])
    found = take_turns(candidates("steady", "restless"), clock, Effort(rounds=4, seconds=1))
    assert found["steady"].noise == 0
    assert found["restless"].noise == 0.4


def test_the_slower_of_host_and_device_decides():
    assert Timing(device_ms=2.0, host_ms=None, noise=0, samples=1).ms == 2.0
    assert Timing(device_ms=2.0, host_ms=3.0, noise=0, samples=1).ms == 3.0
    found = take_turns(candidates("a"), Script(host=0.5, a=[0.2]), Effort(rounds=3, seconds=1))["a"]
    assert (found.device_ms, found.host_ms, found.ms) == (0.2, 0.5, 0.5)


def test_the_clock_of_the_host():
    entered = []

    class Context:
        def __enter__(self):
            # Not part of the time.
            time.sleep(0.05)
            entered.append(True)

        def __exit__(self, *_):
            pass

    candidate = Candidate(name="sleep", call=lambda: time.sleep(0.02), context=Context)
    assert 20 <= HostClock().sample(candidate, None) < 45
    assert entered == [True]


@pytest.mark.parametrize("isolated", [True, False])
def test_a_gpu_is_held_up_until_the_call_is_queued(isolated, monkeypatch):
    """On a GPU that only writes down what it is told."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")

        def synchronize(self):
            told.append("wait")

        def elapsed_time(self, end):
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append(f"hold {cycles / 2_000_000:g} ms"))
    monkeypatch.setattr(StreamClock, "CACHE_BYTES", 16)
    candidate = Candidate(name="call", call=lambda: told.append("call"))
    clock = StreamClock(torch.device("cpu"), isolated=isolated, calls=1 if isolated else 3)
    assert 0 < clock.host(candidate) < 100
    assert told == ["wait", *["call"] * clock.HOST_CALLS, "wait"]
    told.clear()
    if isolated:
        assert clock.sample(candidate, 0.4) == 12.0
        assert told == ["hold 1 ms", "event", "call", "event", "wait"]
    else:
        assert clock.sample(candidate, 0.4) == 4.0
        assert told == ["call", "event", "call", "call", "call", "event", "wait"]


@pytest.mark.gpu
@pytest.mark.parametrize("isolated", [True, False])
def test_the_clock_of_a_stream(isolated):
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    clock = StreamClock(device, isolated=isolated, calls=1 if isolated else 3)
    once, twice = (Candidate(name=f"{n}", call=lambda n=n: [x @ x for _ in range(n)]) for n in (1, 2))
    found = take_turns([once, twice], clock, Effort(rounds=6, seconds=1))
    assert found["2"].device_ms / found["1"].device_ms == pytest.approx(2.0, rel=0.2)
    assert 0 < found["1"].host_ms < found["1"].device_ms
