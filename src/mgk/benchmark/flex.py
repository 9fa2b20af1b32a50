"""Mixtures in FlexAttention: a ``score_mod`` says what a dot product does not, and PyTorch compiles a kernel for it.

With one variance, query i and key j or its component r::

    gaussian:  q_i . k_j / variance  +  column_j                            column_j = -|k_j|^2 / (2 variance)
    mgk:       the same over the M * N keys of all components, each value M times; the log prior is in the column
    smgk:      q_i . k_j / variance  +  log sum_r exp(row_ir + column_jr)   row_ir = q_i . b_r / variance
                                     column_jr = log_prior_r - |k_j + b_r|^2 / (2 variance)

Rows and columns are tensors that the ``score_mod`` captures. Since torch 2.6 they get gradients on a GPU, by an atomic
addition for every pair; on a CPU FlexAttention has no backward at all, and says so.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mgk.benchmark.inputs import Inputs

PRESETS = ("gaussian", "smgk", "mgk")
"""What is written here."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Operands(NamedTuple):
    """What FlexAttention is given beside the query."""

    key: Tensor
    """``[B, H, K, D]``, where K is N, or M * N for components of their own"""
    value: Tensor
    """``[B, H, K, D]``"""
    rows: tuple[Tensor, ...]
    """``[B, H, N]`` for each shift; none without"""
    columns: tuple[Tensor, ...]
    """``[B, H, K]`` for each shift; one without"""


def attention(inputs: Inputs) -> Tensor:
    """``[B, H, N, D]``, compiled: what has to be prepared, and the attention."""
    query, key, value = inputs.query, inputs.key, inputs.value
    if query.device.type == "cpu" and not torch.is_grad_enabled():
        # There it refuses what wants a gradient even where none is taken.
        query, key, value = query.detach(), key.detach(), value.detach()
    kind = (query.shape, key.shape, inputs.shift is None, query.dtype, inputs.is_causal, torch.is_grad_enabled())
    operands = _compiled(prepare, kind)(query, key, value, inputs.shift, inputs.log_prior)
    return _compiled(attend, kind)(query, operands, block_mask_of(inputs))


def prepare(query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None) -> Operands:
    """Gaussian similarity and soft assignment in terms of FlexAttention. Rows and columns are in fp32 at least.

    Not compiled together with the attention: what its kernel captures should lie in memory, and not be computed again
    for every pair.
    """
    scale = _scale(query)
    if shift is not None:
        assert log_prior is not None, "every shifted preset here has a prior"
        shifts = _exact(shift)[:, :, None].unbind(1)  # M times [H, 1, D]
        priors = log_prior[:, :, None].unbind(1)  # M times [H, 1]
        # A tensor of its own for each component: one that wants a gradient may be indexed once only.
        rows = tuple(scale * (_exact(query) * each).sum(-1) for each in shifts)
        columns = tuple(
            prior - 0.5 * scale * (_exact(key) + each).square().sum(-1)
            for prior, each in zip(priors, shifts, strict=True)
        )
        return Operands(key, value, rows, columns)
    column = -0.5 * scale * _exact(key).square().sum(-1)  # [B, H, N] or [B, H, M, N]
    if key.ndim == 5:
        assert log_prior is not None, "every mixture here has a prior"
        column = (column + log_prior[..., None]).flatten(2)
        value = torch.cat([value] * key.shape[2], dim=2)
        key = key.flatten(2, 3)
    return Operands(key, value, (), (column,))


def attend(query: Tensor, operands: Operands, block_mask: BlockMask | None) -> Tensor:
    """The attention itself; called as it is, not compiled, FlexAttention keeps a number for every pair."""
    out = flex_attention(
        query, operands.key, operands.value, score_mod=score_mod_of(operands), block_mask=block_mask,
        scale=_scale(query),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def score_mod_of(operands: Operands) -> ScoreMod:
    """What is added to the score of a pair."""
    rows, columns = operands.rows, operands.columns

    def add_column(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        return score + columns[0][batch, head, place]

    def add_sum(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        terms = [mine[batch, head, row] + its[batch, head, place] for mine, its in zip(rows, columns, strict=True)]
        highest = functools.reduce(torch.maximum, terms)
        return score + highest + functools.reduce(torch.add, [(term - highest).exp() for term in terms]).log()

    return add_sum if rows else add_column


def block_mask_of(inputs: Inputs) -> BlockMask | None:
    """Which blocks of pairs are visited; made once for all calls of a shape, as in a model."""
    if not inputs.is_causal:
        return None
    components = inputs.key.shape[2] if inputs.key.ndim == 5 else 1
    return _causal_blocks(inputs.query.shape[2], components, inputs.query.device)


@functools.lru_cache(maxsize=16)
def _causal_blocks(tokens: int, components: int, device: torch.device) -> BlockMask:
    def is_visible(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        # The keys of the components stand one after the other.
        return row >= place % tokens

    return create_block_mask(is_visible, None, None, tokens, components * tokens, device=str(device))


@functools.cache
def _compiled(function: Callable[..., Any], kind: tuple[object, ...]) -> Callable[..., Any]:
    """``function`` for calls of one ``kind``: for fixed lengths, which FlexAttention is fastest at, and whole, or
    an error, since less would be no FlexAttention.

    At each call the compiler looks through all that it has made of a piece of code, at the host's expense. A copy of
    the code for each kind leaves one to look at, as in a model, which has one shape.
    """
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copied, dynamic=False, fullgraph=True)


def _scale(query: Tensor) -> float:
    """Over the default variance."""
    return 1.0 / math.sqrt(query.shape[-1])


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
