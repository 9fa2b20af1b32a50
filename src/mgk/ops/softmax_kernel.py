"""Where our own kernel computes plain softmax attention faster than the stock kernels: a table of what was measured.

``mgk bench choose`` writes it, ``softmax_kernel.json``, from the JSON of ``mgk bench attention``; nobody types it. A
call that is not like a measured one keeps the stock kernels.
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
    """Our kernel was faster at this size and at every larger one that was measured."""

    architecture: str
    """of the GPU, ``"sm90"`` for example"""
    dtype: torch.dtype
    head_dim: int
    is_causal: bool
    needs_gradient: bool
    """forward and backward together, or forward without gradients"""
    tokens: int
    """fewest of a sequence"""
    queries: int
    """fewest in all sequences and heads: with less to do the host decides, and the stock kernels have less to queue"""


def read(path: Path = PATH) -> tuple[Faster, ...]:
    """The table of a file."""
    return tuple(
        Faster(
            architecture=each["architecture"], dtype=getattr(torch, each["dtype"]), head_dim=each["head_dim"],
            is_causal=each["causal"], needs_gradient=each["direction"] == "training", tokens=each["tokens"],
            queries=each["queries"],
        )
        for each in json.loads(path.read_text(encoding="utf-8"))["faster"]
    )  # fmt: skip


# Once, when the library is imported: a call only compares numbers.
_table = read()


def is_faster(problem: MixtureProblem) -> bool:
    """Whether a plain softmax on a GPU, which our kernel can serve, is like one that it was faster at."""
    if not _table:
        return False
    batch, heads, tokens, head_dim = problem.query.shape
    is_measured_kind = (
        problem.dropout_p == 0
        and problem.key_mask is None
        and problem.query_mask is None
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
    # Compared one by one: a compiler knows some of these sizes as symbols only.
    for each in _table:
        if (
            each.architecture == name
            and each.dtype == problem.query.dtype
            and each.is_causal == problem.is_causal
            and each.needs_gradient == needs_gradient
            and each.head_dim == head_dim
            and tokens >= each.tokens
            and batch * heads * tokens >= each.queries
        ):
            return True
    return False


@contextmanager
def ignored() -> Iterator[None]:
    """Inside, `auto` gives every plain softmax to the stock kernels: for measurements that name them."""
    global _table
    before, _table = _table, ()
    try:
        yield
    finally:
        _table = before


# Asked at every call of plain softmax. To a compiler it is a constant: ``dispatch.py`` says so where there is a GPU.
@functools.cache
def architecture(index: int) -> str:
    """Of a GPU by its number, such as ``sm90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"
