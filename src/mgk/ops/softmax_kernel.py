"""Table of the measured cases in which our kernel computes plain softmax attention faster than the stock kernels.

``mgk bench choose`` writes it to ``softmax_kernel.json`` from the JSON of ``mgk bench attention`` and of
``benchmarks/padded_softmax.py``; it is never edited by hand. A call that resembles no measured one keeps the stock
kernels.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from mgk.ops.problem import MixtureProblem

PATH = Path(__file__).with_name("softmax_kernel.json")


class Faster(NamedTuple):
    """A case in which our kernel was faster at this size and at every larger one that was measured."""

    architecture: str
    """Architecture of the GPU, for example ``"sm90"``"""
    dtype: torch.dtype
    head_dim: int
    is_causal: bool
    is_padded: bool
    """Whether there is a mask of keys"""
    needs_gradient: bool
    """Whether forward and backward were timed together, or forward without gradients"""
    tokens: int
    """Fewest tokens of a sequence"""
    queries: int
    """Fewest queries in all sequences and heads. With fewer, host time decides, of which the stock kernels need less"""


def read(path: Path = PATH) -> tuple[Faster, ...]:
    """Read the table from a file."""
    return tuple(
        Faster(
            architecture=each["architecture"], dtype=getattr(torch, each["dtype"]), head_dim=each["head_dim"],
            is_causal=each["causal"], is_padded=each.get("padded", False),
            needs_gradient=each["direction"] == "training", tokens=each["tokens"], queries=each["queries"],
        )
        for each in json.loads(path.read_text(encoding="utf-8"))["faster"]
    )  # fmt: skip


# Read once, when the library is imported, so that a call only compares numbers.
_table = read()


def is_faster(problem: MixtureProblem) -> bool:
    """Whether our kernel is faster for a call of plain softmax on a GPU, which it must support."""
    if not _table:
        return False
    batch, heads, tokens, head_dim = problem.query.shape
    is_measured_kind = (
        problem.dropout_p == 0
        and (problem.query_mask is None or problem.key_mask is not None)
        and problem.attn_mask is None
        and isinstance(problem.variance, float)
        and problem.key.shape[1] == heads
        and problem.key.shape[3] == tokens
        and problem.value.shape[-1] == head_dim
    )
    if not is_measured_kind:
        return False
    leaves = (problem.query, problem.key, problem.value)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves)
    name = architecture(problem.query.device.index or 0)
    # The entries are compared one by one, because a compiler knows some of these sizes only as symbols.
    for each in _table:
        if (
            each.architecture == name
            and each.dtype == problem.query.dtype
            and each.is_causal == problem.is_causal
            and each.is_padded == (problem.key_mask is not None)
            and each.needs_gradient == needs_gradient
            and each.head_dim == head_dim
            and tokens >= each.tokens
            and batch * heads * tokens >= each.queries
        ):
            return True
    return False


@contextmanager
def ignored() -> Iterator[None]:
    """Context in which `auto` leaves every plain softmax to the stock kernels, for measurements of those."""
    global _table
    before, _table = _table, ()
    try:
        yield
    finally:
        _table = before


# Called for every plain softmax. ``dispatch.py`` marks it as a constant for the compiler where there is a GPU.
@functools.cache
def architecture(index: int) -> str:
    """Architecture of the GPU with this index, for example ``sm90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"
