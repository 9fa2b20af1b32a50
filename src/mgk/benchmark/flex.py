"""Mixtures in FlexAttention: a ``score_mod`` adds the terms beside the dot product, and PyTorch compiles a kernel.

With one variance, query i and key j or its component r::

    gaussian:  q_i . k_j / variance  +  column_j                            column_j = -|k_j|^2 / (2 variance)
    mgk:       the same over the M * N keys of all components, each value M times; the log prior is in the column
    smgk:      q_i . k_j / variance  +  log sum_r exp(row_ir + column_jr)   row_ir = q_i . b_r / variance
                                     column_jr = log_prior_r - |k_j + b_r|^2 / (2 variance)

Rows and columns are tensors that the ``score_mod`` captures. Since torch 2.6 they get gradients on a GPU, by an atomic
addition for every pair. On a CPU FlexAttention has no backward pass and raises an error.
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
"""Presets that are implemented here."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Operands(NamedTuple):
    """The arguments of FlexAttention besides the query."""

    key: Tensor
    """``[B, H, K, D]``, where K is N, or M * N for projected components"""
    value: Tensor
    """``[B, H, K, D]``"""
    rows: tuple[Tensor, ...]
    """``[B, H, N]`` for each shift; empty without shifts"""
    columns: tuple[Tensor, ...]
    """``[B, H, K]`` for each shift; a single one without shifts"""


def attention(inputs: Inputs) -> Tensor:
    """Attention output, ``[B, H, N, D]``. Both the preparation and the attention are compiled."""
    query, key, value = inputs.query, inputs.key, inputs.value
    if query.device.type == "cpu" and not torch.is_grad_enabled():
        # On a CPU it refuses tensors that require a gradient, even if none is computed.
        query, key, value = query.detach(), key.detach(), value.detach()
    kind = (query.shape, key.shape, inputs.shift is None, query.dtype, inputs.is_causal, torch.is_grad_enabled())
    operands = _compiled(prepare, kind)(query, key, value, inputs.shift, inputs.log_prior)
    return _compiled(attend, kind)(query, operands, block_mask_of(inputs))


def prepare(query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None) -> Operands:
    """Express Gaussian similarity and soft assignment in operands of FlexAttention; rows and columns are fp32 or fp64.

    The preparation is not compiled together with the attention, so that captured tensors are in memory and are not
    recomputed for every pair.
    """
    scale = _scale(query)
    if shift is not None:
        assert log_prior is not None, "every shifted preset here has a prior"
        shifts = _exact(shift)[:, :, None].unbind(1)  # M times [H, 1, D]
        priors = log_prior[:, :, None].unbind(1)  # M times [H, 1]
        # Each component has a tensor of its own, because a captured tensor that requires a gradient may be indexed only
        # once.
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
    """Run FlexAttention, which must be compiled, since otherwise it materialises every pair."""
    out = flex_attention(
        query, operands.key, operands.value, score_mod=score_mod_of(operands), block_mask=block_mask,
        scale=_scale(query),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def score_mod_of(operands: Operands) -> ScoreMod:
    """Return the function that modifies the score of a pair."""
    rows, columns = operands.rows, operands.columns

    def add_column(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        return score + columns[0][batch, head, place]

    def add_sum(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        terms = [mine[batch, head, row] + its[batch, head, place] for mine, its in zip(rows, columns, strict=True)]
        highest = functools.reduce(torch.maximum, terms)
        return score + highest + functools.reduce(torch.add, [(term - highest).exp() for term in terms]).log()

    return add_sum if rows else add_column


def block_mask_of(inputs: Inputs) -> BlockMask | None:
    """Return the mask of visited blocks, which is made once for all calls of a shape, as in a model."""
    if not inputs.is_causal:
        return None
    components = inputs.key.shape[2] if inputs.key.ndim == 5 else 1
    return _causal_blocks(inputs.query.shape[2], components, inputs.query.device)


@functools.lru_cache(maxsize=16)
def _causal_blocks(tokens: int, components: int, device: torch.device) -> BlockMask:
    def is_visible(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        # The components follow each other along the key axis.
        return row >= place % tokens

    return create_block_mask(is_visible, None, None, tokens, components * tokens, device=str(device))


@functools.cache
def _compiled(function: Callable[..., Any], kind: tuple[object, ...]) -> Callable[..., Any]:
    """Return ``function`` compiled for calls of one ``kind``, for fixed lengths, which are fastest, and in one graph.

    At each call the compiler searches all compiled versions of a code object, which costs host time. Each kind has a
    copy of the code, so that there is a single version, as in a model with one shape.
    """
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copied, dynamic=False, fullgraph=True)


def _scale(query: Tensor) -> float:
    """Return 1 divided by the default variance."""
    return 1.0 / math.sqrt(query.shape[-1])


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
