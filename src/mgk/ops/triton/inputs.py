"""One call of the fused kernels, by name: its tensors and its options, what it returns, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from mgk.ops.problem import MixtureProblem


class Tensors(NamedTuple):
    """The tensors of a call, in the order in which torch's operations take them."""

    query: Tensor
    """``[B, H, Nq, D]``"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or one component beside ``shift``"""
    value: Tensor
    """``[B, Hkv, Nk, Dv]``; where no values are attended to, of width 0"""
    shift: Tensor | None = None
    """``[Hkv, M, D]``"""
    log_prior: Tensor | None = None
    """fp32 ``[Hkv, M, 1]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``"""
    inverse_variance: Tensor | None = None
    """``[Hkv, M]``; ``None``: ``scale`` for all"""
    attn_mask: Tensor | None = None
    """bool, four axes, broadcastable to ``[B, H, Nq, Nk]``"""
    key_mask: Tensor | None = None
    """bool ``[B, Nk]``"""
    query_mask: Tensor | None = None
    """bool ``[B, Nq]``: which blocks of queries can be left out"""
    seed: Tensor | None = None
    """int64 ``[1]``, for dropout"""
    query_spans: Tensor | None = None
    """int32 ``[Nq / PADDING, 3]``: several sequences lie one after the other (and B is 1), each from a multiple of
    ``PADDING`` on. For every so many queries: the first key of their sequence, one past its last, and what to add to a
    query for the last key that it sees under causality."""
    key_spans: Tensor | None = None
    """the same for keys: first query, one past the last, and the same difference"""


class Options(NamedTuple):
    """What a call is told beside its tensors, in the order in which torch's operations take it."""

    scale: float
    """``1 / variance``"""
    gaussian: bool
    """whether the similarity is a distance"""
    is_causal: bool = False
    """whether a query sees no later key; aligned bottom-right"""
    hard: bool = False
    """whether the best component answers alone"""
    dropout_p: float = 0.0
    """the probability of dropping a pair"""


class Results(NamedTuple):
    """What the forward pass returns."""

    out: Tensor
    """``[B, H, Nq, Dv]``"""
    normaliser: Tensor
    """fp32 ``[B, H, Nq]``: of each row, without the term in ``|q_i|^2`` where all variances agree"""
    terms: Tensor
    """fp32, flat: the terms of rows and columns, which the backward pass reads"""


class Gradients(NamedTuple):
    """What the backward pass returns; the last three are fp32, and empty where there is no such input."""

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor
    log_prior: Tensor
    inverse_variance: Tensor


_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool", str: "str"}


def schema_of(*bundles: type) -> str:
    """The arguments of a torch operation that takes the values of these bundles one after the other."""
    return ", ".join(f"{_TYPES[kind]} {name}" for bundle in bundles for name, kind in get_type_hints(bundle).items())


SCHEMA = schema_of(Tensors, Options)


def named(values: Sequence[Any]) -> tuple[Tensors, Options]:
    """The values of :data:`SCHEMA`, as torch hands them over, by name again."""
    count = len(Tensors._fields)
    return Tensors(*values[:count]), Options(*values[count:])


def inputs_of(problem: MixtureProblem, seed: Tensor | None = None, *spans: Tensor | None) -> tuple[Tensors, Options]:
    """A problem as the kernels take it. ``spans`` are those of queries and of keys."""
    # Products of half-precision numbers are exact in fp32 as they came; those of fp32 lose digits far from zero.
    is_exact = problem.query.dtype != torch.float32
    query, key = (problem.query, problem.key) if is_exact else problem.centred()
    variance = problem.variance
    scale, inverse_variance = (
        (1.0 / variance, None) if isinstance(variance, float) else (1.0, variance.float().reciprocal())
    )
    tensors = Tensors(
        query, key, problem.value, problem.shift, problem.log_prior, inverse_variance, problem.attn_mask,
        problem.key_mask, problem.query_mask, seed, *spans,
    )  # fmt: skip
    # One component leaves nothing to choose.
    is_hard = problem.assignment == "hard" and problem.num_components > 1
    return tensors, Options(scale, problem.similarity == "gaussian", problem.is_causal, is_hard, problem.dropout_p)
