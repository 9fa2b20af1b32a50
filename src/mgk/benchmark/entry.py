"""The entry of a contestant: it is checked, called once and ready to be timed, or left out with a reason."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mgk.benchmark.contestants import Contestant
from mgk.benchmark.correctness import Judge, WrongResultError
from mgk.benchmark.inputs import Inputs
from mgk.benchmark.memory import available_bytes, peak_bytes
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Candidate

HEAVY = 2**30
"""Bytes for all pairs from which a contestant counts as heavy."""


class LeftOut(Exception):
    """A contestant does not take part, although its result is not wrong."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A correct contestant."""

    contestant: Contestant
    heads: int
    forward: Candidate
    """Forward pass without gradients, as in evaluation."""
    training: Candidate | None
    """Forward and backward pass; ``None`` if it has no backward pass."""
    no_training: str | None = None
    """Reason why it has no backward pass."""
    errors: dict[str, float]
    """See :meth:`mgk.benchmark.correctness.Judge.check`."""
    peak_bytes: int | None
    """Peak memory of forward and backward in bytes, without the inputs."""
    is_heavy: bool
    """Whether it uses so much memory that timing it among the others would disturb their allocations."""

    @property
    def candidates(self) -> list[Candidate]:
        """Return what to time."""
        return [self.forward] if self.training is None else [self.forward, self.training]


def enter(contestant: Contestant, inputs: Inputs, shape: Shape, judge: Judge, slowest: float) -> Entry:
    """Check a contestant and call it in each direction, so that everything is compiled.

    Args:
        contestant: the contestant.
        inputs: inputs for timing.
        shape: shape of the inputs.
        judge: checks the result.
        slowest: most seconds that forward and backward may take.

    Raises:
        LeftOut: if it does not support the call, or exceeds memory or time.
        WrongResultError: if its result is wrong.
    """
    needed, available = contestant.expected_bytes(inputs), available_bytes(judge.device)
    if needed > available:
        raise LeftOut(f"it needs about {needed / 1e9:.1f} GB for its pairs, and there are {available / 1e9:.1f} GB")
    grad, leaves = torch.randn_like(inputs.value), list(inputs.leaves().values())

    @contextmanager
    def without_gradients() -> Iterator[None]:
        with torch.no_grad(), contestant.context():
            yield

    forward = Candidate(
        name=f"{contestant.name}, forward", call=lambda: contestant.attention(inputs), context=without_gradients
    )
    training = Candidate(
        name=f"{contestant.name}, training",
        call=lambda: torch.autograd.grad(contestant.attention(inputs), leaves, grad),
        context=contestant.context,
    )
    try:
        with refusals(contestant):
            errors = judge.check(contestant, inputs, shape)
            for candidate in (forward, training):
                peak_bytes(candidate, judge.device)
            start = time.perf_counter()
            peak = peak_bytes(training, judge.device)
            seconds = time.perf_counter() - start
        if seconds > slowest:
            raise LeftOut(f"forward and backward take {seconds:.1f} s, and may take {slowest:g} s")
    except LeftOut as reason:
        if not contestant.may_lack_training:
            raise
        return _enter_forward(contestant, inputs, judge, forward, slowest, str(reason))
    return Entry(
        contestant=contestant, heads=inputs.query.shape[1], forward=forward, training=training, errors=errors,
        peak_bytes=peak, is_heavy=needed > HEAVY,
    )  # fmt: skip


def _enter_forward(
    contestant: Contestant, inputs: Inputs, judge: Judge, forward: Candidate, slowest: float, no_training: str
) -> Entry:
    """Enter a contestant that cannot be trained, for a known reason, but may be correct without gradients."""
    with refusals(contestant):
        error = judge.check_output(contestant, inputs)
        peak_bytes(forward, judge.device)
        start = time.perf_counter()
        peak_bytes(forward, judge.device)
        seconds = time.perf_counter() - start
    if seconds > slowest:
        raise LeftOut(f"forward takes {seconds:.1f} s, and may take {slowest:g} s")
    return Entry(
        contestant=contestant, heads=inputs.query.shape[1], forward=forward, training=None, no_training=no_training,
        errors={"output": error}, peak_bytes=None, is_heavy=False,
    )  # fmt: skip


@contextmanager
def refusals(contestant: Contestant) -> Iterator[None]:
    """Context that converts the error of a contestant that does not support a call to :class:`LeftOut`.

    A stock kernel refuses a call with a RuntimeError and explains it in warnings. Our backends refuse with a
    ValueError; any other error, such as one of the compiler, counts as a wrong result, and the benchmark continues.
    Every error of FlexAttention counts as a refusal.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except WrongResultError:
            raise
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise LeftOut("it ran out of memory") from error
        except (ValueError, ImportError) as error:
            raise LeftOut(str(error)) from error
        except Exception as error:
            if contestant.may_lack_training:
                raise LeftOut(f"it stopped with {type(error).__name__}: {str(error).splitlines()[0]}") from error
            if not contestant.is_baseline:
                raise WrongResultError(f"it stopped with {type(error).__name__}: {error}", {}) from error
            if not isinstance(error, RuntimeError):
                raise
            raise LeftOut(why_refused(error, heard)) from error


def why_refused(error: RuntimeError, heard: Sequence[warnings.WarningMessage]) -> str:
    """Return the reason of a stock kernel, from its error and the warnings before it, as one line."""
    explained = dict.fromkeys(str(each.message).partition(" (Triggered")[0].strip() for each in heard)
    return " ".join([*explained, str(error).splitlines()[0]])
