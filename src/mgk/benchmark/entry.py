"""A contestant on its inputs: checked, called once, ready to be timed; or the reason why it is left out."""

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
"""So many bytes for all pairs make a contestant heavy."""


class LeftOut(Exception):
    """A contestant does not take part, for a reason that is no fault of its result."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant that is right."""

    contestant: Contestant
    heads: int
    forward: Candidate
    """Without gradients, as in evaluation."""
    training: Candidate | None
    """Forward and backward; ``None`` where it can only go forward."""
    no_training: str | None = None
    """Why it cannot do more."""
    errors: dict[str, float]
    """See :meth:`mgk.benchmark.correctness.Judge.check`."""
    peak_bytes: int | None
    """Of forward and backward, beyond the inputs."""
    is_heavy: bool
    """Whether it takes so much memory that others would wait for theirs if it were timed among them."""

    @property
    def candidates(self) -> list[Candidate]:
        """What there is to time."""
        return [self.forward] if self.training is None else [self.forward, self.training]


def enter(contestant: Contestant, inputs: Inputs, shape: Shape, judge: Judge, slowest: float) -> Entry:
    """Check a contestant, and call it each way, which compiles what there is to compile.

    Args:
        contestant: who.
        inputs: what will be timed.
        shape: of the inputs.
        judge: says whether it is right.
        slowest: seconds that forward and backward may take.

    Raises:
        LeftOut: if it cannot do it, or not within memory and time.
        WrongResultError: if it does it wrong.
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
    """One that cannot be trained, for a reason that is known, but may be right without gradients."""
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
    """Turn what a contestant says when it cannot serve a call into a reason to leave it out.

    A stock kernel refuses with a RuntimeError and explains itself in warnings. A backend of ours refuses with a
    ValueError; any other error, of the compiler for example, is its fault, and the others go on. What stops
    FlexAttention is nobody's fault here, whatever it is.
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
    """What a stock kernel says, in its error and in the warnings before it, as one line."""
    explained = dict.fromkeys(str(each.message).partition(" (Triggered")[0].strip() for each in heard)
    return " ".join([*explained, str(error).splitlines()[0]])
