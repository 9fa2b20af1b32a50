"""The operands of a block of heads, whose size is linear in the sequence length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.cpu.grid import Grid
from mgk.ops.cpu.memory import workspace

LOG2E = 1.0 / math.log(2.0)

# Largest logarithm of the ratio of a component to the first one for which shifted components share an exponential.
# The largest exponential of a row is 1, so one vanishes only where a weight is below 1e-11 of the row's sum.
LARGEST_LOG_RATIO = 60.0

# The logit of a masked key. It is finite so that a row with masked keys alone attends to zeros instead of being NaN.
HIDDEN = -1e30


class Inputs(NamedTuple):
    """The tensors that have a gradient, or their gradients."""

    query: Tensor
    """``[B, H, Nq, D]``"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, 1, Nk, D]`` for shifted keys"""
    value: Tensor
    """``[B, Hkv, Nk, Dv]``"""
    shift: Tensor | None
    """``[Hkv, M, D]``"""
    log_prior: Tensor | None
    """``[Hkv, M]``"""


class Call(NamedTuple):
    """The options and constants of a call, which have no gradient."""

    scale: float
    """c = 1 / variance"""
    is_gaussian: bool
    is_causal: bool
    shares_key: bool
    """Whether shifted components share one product and one exponential"""
    origin: Tensor | None
    """``[B, Hkv, 1, D]``: the point from which distances are measured; ``None`` for zero"""
    key_mask: Tensor | None
    """bool ``[B, Nk]``, True = attend"""
    common_value: Tensor | None
    """``[B, Hkv, 1, Dv]``: what is subtracted from the values; ``None`` for nothing"""
    is_blind: Tensor | None
    """bool ``[B, 1, 1, Nq, 1]``, True for a query that sees no key; ``None`` if there is none"""


class Block:
    """The operands of X heads: all heads of some samples, or some heads of one sample."""

    left: Tensor
    """``[X, rows, D + 2]``: c q in units of log 2, a column of ones, and minus the row normaliser once it is known"""
    right: Tensor
    """``[X, R, Nk, D + 2]``: R keys per position, their ``column``, and a column of ones"""
    value: Tensor
    """``[X, Nk, Dv + 1]``: values, and a column of ones"""
    ways: Tensor | None
    """``[heads, M - 1, D]``: the offsets d_r, if the components share one key (R = 1)"""
    ratios: list[tuple[Tensor, Tensor]]
    """For each offset ``exp(of_query) [X, rows, 1]`` and ``exp(of_key) [X, 1, Nk]``"""

    def __init__(
        self,
        inputs: Inputs,
        call: Call,
        grid: Grid,
        samples: slice,
        heads: slice,
        *,
        bias: Tensor | None = None,
        stays: bool = False,
    ) -> None:
        """Prepare the operands.

        Args:
            inputs: the tensors of the whole call.
            call: its options and constants.
            grid: how the call is cut into blocks and tiles.
            samples: the samples of the block.
            heads: the key/value heads of the block.
            bias: ``[B, Hkv, 1, Nk]``, the ``column`` of single keys, not in units of log 2, if it is known.
            stays: whether the block owns its memory. Otherwise it uses the workspace, until the next block is made.
        """
        self.call, self.grid, self.samples, self.heads = call, grid, samples, heads
        self.query_heads = slice(heads.start * grid.group, heads.stop * grid.group)
        self.shape = (samples.stop - samples.start, heads.stop - heads.start)
        self.count = math.prod(self.shape)
        self.dim, self.stays = inputs.key.shape[-1], stays
        self.origin = None if call.origin is None else call.origin[samples, heads, None]

        self.left = self._left(inputs.query)
        self.value = self._value(inputs.value)
        self.ways, self.ratios = None, []
        shift, log_prior = (None if x is None else x[heads] for x in (inputs.shift, inputs.log_prior))
        if call.shares_key:
            assert shift is not None
            right = self._right(inputs.key[samples, heads], shift[:, :1])
            self._share_key(right, shift[:, 1:] - shift[:, :1], log_prior)
            log_prior = None
        else:
            right = self._right(inputs.key[samples, heads], shift)
        if bias is None:
            self._set_columns(right, log_prior)
        else:
            torch.mul(bias[samples, heads], LOG2E, out=right[..., self.dim]).clamp_(min=HIDDEN)
        self.right = right.view(self.count, right.shape[2], grid.keys, -1)

    def set_normaliser(self, normaliser: Tensor) -> None:
        """Enter the row normalisers, so that products of left and right are logarithms of normalised weights."""
        # In a row with hidden keys alone, the normaliser is as low as their logits and is clamped like them.
        column = torch.neg(normaliser[self.samples, self.heads].flatten(0, 1), out=self.left[..., -1])
        column.clamp_(max=-HIDDEN)

    def _array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(shape) if self.stays else workspace.array(name, like, *shape)

    def _left(self, query: Tensor) -> Tensor:
        grid = self.grid
        left = self._array("left", query, *self.shape, grid.group, grid.queries, self.dim + 2)
        by_group = query[self.samples, self.query_heads].unflatten(1, (-1, grid.group))
        features, scale = left[..., : self.dim], self.call.scale * LOG2E
        if self.origin is None:
            torch.mul(by_group, scale, out=features)
        else:
            torch.sub(by_group, self.origin, out=features).mul_(scale)
        left[..., self.dim] = 1.0
        left[..., self.dim + 1] = 0.0
        return left.view(self.count, grid.rows, -1)

    def _right(self, key: Tensor, shift: Tensor | None) -> Tensor:
        """Keys and ones, ``[samples, heads, R, Nk, D + 2]``; ``column`` is not filled yet."""
        count = key.shape[2] if shift is None else shift.shape[1]
        right = self._array("right", key, *self.shape, count, self.grid.keys, self.dim + 2)
        keys = _subtract(key.expand(-1, -1, count, -1, -1), self.origin, right[..., : self.dim])
        if shift is not None:
            keys.add_(shift[:, :, None])
        right[..., self.dim + 1] = 1.0
        return right

    def _value(self, value: Tensor) -> Tensor:
        array = self._array("value", value, *self.shape, self.grid.keys, value.shape[-1] + 1)
        common = None if self.call.common_value is None else self.call.common_value[self.samples, self.heads]
        _subtract(value[self.samples, self.heads], common, array[..., :-1])
        array[..., -1] = 1.0
        return array.flatten(0, 1)

    def _share_key(self, right: Tensor, ways: Tensor, log_prior: Tensor | None) -> None:
        """Set ``ways`` and ``ratios``."""
        c, grid = self.call.scale * LOG2E, self.grid
        by_group = self.left.view(*self.shape, grid.group, grid.queries, -1)
        of_query = ways[:, None] @ by_group[..., : self.dim].mT  # [samples, heads, group, M - 1, Nq]
        of_key = right.new_zeros(*self.shape, ways.shape[1], grid.keys)
        if self.call.is_gaussian:
            torch.matmul(ways * -c, right[:, :, 0, :, : self.dim].mT, out=of_key)
            of_key -= 0.5 * c * ways.square().sum(-1, keepdim=True)
        if log_prior is not None:
            of_key += (log_prior[:, 1:, None] - log_prior[:, :1, None]) * LOG2E
        # A key beyond the limit is hidden by causality from all rows of this form; the clamp keeps it from overflowing.
        limit = LARGEST_LOG_RATIO * LOG2E
        of_query, of_key = (ratio.clamp_(-limit, limit).exp2_() for ratio in (of_query, of_key))
        self.ways = ways
        self.ratios = [
            (a.reshape(self.count, grid.rows, 1), b.reshape(self.count, 1, grid.keys))
            for a, b in zip(of_query.unbind(3), of_key.unbind(2), strict=True)
        ]

    def _set_columns(self, right: Tensor, log_prior: Tensor | None) -> None:
        keys, column = right[..., : self.dim], right[..., self.dim]
        if self.call.is_gaussian:
            square = torch.mul(keys, keys, out=workspace.array("square", keys, *keys.shape))
            torch.sum(square, dim=-1, out=column).mul_(-0.5 * self.call.scale * LOG2E)
        else:
            column.zero_()
        if log_prior is not None:
            column.add_(log_prior[:, :, None], alpha=LOG2E)
        if self.call.key_mask is not None:
            column.masked_fill_(~self.call.key_mask[self.samples, None, None], HIDDEN)
        column.clamp_(min=HIDDEN)


def _subtract(tensor: Tensor, origin: Tensor | None, out: Tensor) -> Tensor:
    return out.copy_(tensor) if origin is None else torch.sub(tensor, origin, out=out)
