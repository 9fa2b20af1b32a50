"""Correctness checks of contestants against fp64, before they are timed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.benchmark import oracle
from mgk.benchmark.contestants import Contestant
from mgk.benchmark.inputs import Inputs, draw
from mgk.benchmark.shape import Shape

# Relative RMS errors on the same rounded inputs, as in tests/ops/test_accuracy.py. Gradients of shifts and priors are
# differences of large sums; those of hard assignment jump where rounding flips a tie.
OUTPUT_CAP = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
PARAMETER_CAP = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
HARD_CAP = 2e-2
GRADIENT_FACTOR = 2.5
"""Largest error of the gradients of query, key and value, as a multiple of that of the output."""

# Shape at which whole gradients are compared: a length that is no multiple of a block size, and enough heads to give
# the gradient of a prior, which may cancel in one of them, a scale.
SMALL = {"batch": 2, "heads": 8, "tokens": 299}

# A gradient whose RMS is below this counts as zero, because it is a rounding error of fp64.
ZERO = 1e-10


class WrongResultError(Exception):
    """The result of a contestant is wrong, so it is not timed."""

    def __init__(self, reason: str, errors: dict[str, float]) -> None:
        super().__init__(reason)
        self.errors = errors


class Judge:
    """Compares contestants with fp64.

    The output is compared at the timed shape, on some rows. Gradients are compared in full at a smaller shape with the
    same width, dtype and mask, once for each contestant, also for all lengths of a sweep.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._gradient_errors: dict[tuple[object, ...], dict[str, float]] = {}

    def check(self, contestant: Contestant, inputs: Inputs, shape: Shape) -> dict[str, float]:
        """Return the relative RMS errors of the output and of the gradient of each tensor, by name.

        Raises:
            WrongResultError: if one of them is too large or NaN.
        """
        errors = {"output": self.check_output(contestant, inputs)}
        key = (contestant.preset, contestant.backend, contestant.is_baseline, shape.head_dim, shape.is_causal)
        if key not in self._gradient_errors:
            self._gradient_errors[key] = self._gradients(contestant, shape)
        errors |= self._gradient_errors[key]
        self._compare(errors, inputs.assignment)
        return errors

    def check_output(self, contestant: Contestant, inputs: Inputs) -> float:
        """Return the relative RMS error of the output alone; raises like :meth:`check`."""
        error = self._output_error(contestant, inputs)
        self._compare({"output": error}, inputs.assignment)
        return error

    def _output_error(self, contestant: Contestant, inputs: Inputs) -> float:
        with torch.no_grad():
            with contestant.context():
                out = contestant.attention(inputs)
            if out.shape != inputs.query.shape or out.dtype != inputs.query.dtype:
                return math.nan
            got, expected = [], []
            for batch, head, rows in _some_rows(inputs.query):
                got.append(out[batch, head, rows])
                expected.append(oracle.attention_rows(inputs, batch, head, rows))
            return relative_error(torch.stack(got), torch.stack(expected))

    def _gradients(self, contestant: Contestant, shape: Shape) -> dict[str, float]:
        inputs = draw(
            contestant.preset, batch=SMALL["batch"], heads=SMALL["heads"], tokens=SMALL["tokens"],
            head_dim=shape.head_dim, is_causal=shape.is_causal, dtype=self.dtype, device=self.device,
        )  # fmt: skip
        grad = torch.randn_like(inputs.value)
        with contestant.context():
            got = _gradients_of(contestant.attention(inputs), inputs, grad)
        exact = inputs.in_float64()
        expected = _gradients_of(oracle.attention(exact), exact, grad.double())
        return {name: relative_error(got[name], expected[name]) for name in expected}

    def _compare(self, errors: dict[str, float], assignment: str) -> None:
        for name, error in errors.items():
            cap = self._cap(name, assignment)
            # The negated comparison is also true for NaN.
            if not error <= cap:
                what = "output" if name == "output" else f"gradient of {name}"
                raise WrongResultError(f"the error of the {what} must be at most {cap:g}, got {error:.2g}", errors)

    def _cap(self, name: str, assignment: str) -> float:
        if name == "output":
            return OUTPUT_CAP[self.dtype]
        is_parameter = name in ("shift", "log_prior")
        cap = PARAMETER_CAP[self.dtype] if is_parameter else GRADIENT_FACTOR * OUTPUT_CAP[self.dtype]
        return max(cap, HARD_CAP) if assignment == "hard" and name != "value" else cap


def relative_error(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference divided by that of ``expected``, or not divided if ``expected`` is zero."""
    scale = float(expected.double().square().mean().sqrt())
    error = float((got.double() - expected).square().mean().sqrt())
    return error / scale if scale > ZERO else error


def _gradients_of(out: Tensor, inputs: Inputs, grad: Tensor) -> dict[str, Tensor]:
    leaves = inputs.leaves()
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


def _some_rows(query: Tensor) -> list[tuple[int, int, Tensor]]:
    """Select 64 rows of ``query [B, H, N, D]``: eight in each of eight heads, with the first and the last of all."""
    batch, heads, tokens, _ = query.shape
    found = []
    for turn in range(8):
        b, h = int(torch.randint(batch, ())), int(torch.randint(heads, ()))
        if turn < 2:
            b, h = turn * (batch - 1), turn * (heads - 1)
        rows = torch.randint(tokens, (8,))
        rows[0], rows[1] = 0, tokens - 1
        found.append((b, h, rows.to(query.device)))
    return found
