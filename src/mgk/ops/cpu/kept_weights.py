"""Attention with one key per position and very short rows, whose weights are kept for the backward pass.

Short calls spend most of their time on starting operations and on passes over memory. Where a row has hardly more
weights than a query has features, keeping the weights costs less of both than recomputing them: forward and backward
are six matrix products, one softmax and its derivative.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.cpu import grid as limits
from mgk.ops.cpu.block import HIDDEN, Call, Inputs
from mgk.ops.cpu.grid import Grid
from mgk.ops.cpu.memory import workspace

# Most keys for which the weights are kept. With more, the stock kernel is as fast and saves less.
MOST_KEYS = 64


class Kept(NamedTuple):
    """The contiguous operands and the weights that the backward pass reads."""

    left: Tensor
    """``[X, rows, D]``: c q"""
    right: Tensor
    """``[X, Nk, D]``"""
    value: Tensor
    """``[X, Nk, Dv]``"""
    weight: Tensor
    """``[X, rows, Nk]``"""


def keeps_weights(inputs: Inputs, grid: Grid) -> bool:
    """Whether a call has one key per position, few keys, no row without a key, and all its pairs in one tile."""
    one_key = inputs.key.shape[2] == 1 and inputs.shift is None
    sees_some = not grid.is_causal or grid.queries <= grid.keys
    is_small = grid.batch * grid.heads * grid.rows * grid.keys <= limits.TILE_PAIRS
    return one_key and sees_some and grid.keys <= MOST_KEYS and is_small


class Forward:
    """The forward pass in two steps: the constructor copies the operands, the call computes the output."""

    def __init__(self, inputs: Inputs, call: Call, grid: Grid) -> None:
        """Copy the operands, moved by the origin and the common value of ``call``."""
        query, key, value = inputs.query, inputs.key[:, :, 0], inputs.value
        if call.origin is not None:
            query = query - call.origin.repeat_interleave(grid.group, dim=1)
            key = key - call.origin
        if call.common_value is not None:
            value = value - call.common_value
        count, rows, keys = grid.batch * grid.heads, grid.rows, grid.keys
        # One allocation for all: the allocator returns small ones to the system at every step and has to ask for them
        # again at the next.
        sizes = (query.numel(), key.numel(), value.numel(), count * rows * keys)
        left, right, values, weight = query.new_empty(sum(sizes)).split(sizes)
        torch.mul(query, call.scale, out=left.view(query.shape))
        right.view(key.shape).copy_(key)
        values.view(value.shape).copy_(value)
        self._call, self._grid = call, grid
        self._left, self._right = left.view(count, rows, -1), right.view(count, keys, -1)
        self._value, self._weight = values.view(count, keys, -1), weight.view(count, rows, keys)
        self._column = _column(self._right, call, grid)

    def is_around_zero(self, near: float, spread: float) -> bool:
        """Whether the first keys have ``|k|^2 / variance <= near`` and no channel of the values is constant.

        The copies that it reads are still in the cache, while the inputs are not. It is called only where every row
        sees all keys and there are at least three.
        """
        if self._call.is_gaussian and not float(self._column[:, 0, 0].amin()) >= -0.5 * near:
            return False
        # Two values agree by chance in some channels, but three do not.
        first = self._value[:, :1]
        ratio = (self._value[:, 1 :: self._grid.keys - 2] / first).sub_(1.0).abs_()
        return float(ratio.amax(dim=1).amin()) > spread

    def __call__(self) -> tuple[Tensor, Kept]:
        """Return ``out [B, H, Nq, Dv]`` and what is kept for the backward pass."""
        call, grid, left, right, value = self._call, self._grid, self._left, self._right, self._value
        count, rows, keys, width = left.shape[0], grid.rows, grid.keys, value.shape[-1]
        logit = workspace.array("logit 0", left, count, rows, keys)
        torch.baddbmm(self._column, left, right.mT, out=logit)
        if grid.is_causal:
            later = logit.new_full((grid.queries, keys), -math.inf).triu_(keys - grid.queries + 1)
            logit.view(-1, grid.queries, keys).add_(later)
        weight = torch.softmax(logit, dim=-1, out=self._weight)
        product = torch.bmm(weight, value, out=workspace.array("out", left, count, rows, width))
        # In memory the heads of a token are adjacent, as the output projection needs them.
        heads = grid.heads * grid.group
        out = value.new_empty(grid.batch, grid.queries, heads, width).transpose(1, 2)
        product = product.view(out.shape)
        if call.common_value is None:
            out.copy_(product)
        else:
            torch.add(product, call.common_value.repeat_interleave(grid.group, dim=1), out=out)
        return out, Kept(left, right, value, weight)


def _column(right: Tensor, call: Call, grid: Grid) -> Tensor:
    """Bias of each key, ``-c |k|^2 / 2`` or 0, and very low where the key is hidden, ``[X, 1, Nk]``."""
    if call.is_gaussian:
        square = torch.mul(right, right, out=workspace.array("square", right, *right.shape))
        column = square.sum(-1).mul_(-0.5 * call.scale)
    else:
        column = right.new_zeros(right.shape[:2])
    if call.key_mask is not None:
        column.view(grid.batch, grid.heads, grid.keys).masked_fill_(~call.key_mask[:, None], HIDDEN)
    return column.clamp_(min=HIDDEN)[:, None]


def backward_with_weights(kept: Kept, call: Call, grid: Grid, grad_out: Tensor, gradient: Inputs) -> None:
    """Fill the gradients of query, key and value."""
    left, right, values, weight = kept
    grad = workspace.array("grad_left", left, *grad_out.shape).copy_(grad_out)
    if call.is_blind is not None:
        grad.view(grid.batch, grid.heads, grid.group, grid.queries, -1).masked_fill_(call.is_blind, 0.0)
    grad = grad.view(*left.shape[:2], -1)

    grad_logit = torch.bmm(grad, values.mT, out=workspace.array("grad_weight", left, *weight.shape))
    torch._softmax_backward_data(grad_logit, weight, -1, weight.dtype, grad_input=grad_logit)
    product = torch.bmm(weight.mT, grad, out=workspace.array("of_value", left, *values.shape))
    gradient.value.copy_(product.view(gradient.value.shape))
    product = torch.bmm(grad_logit, right, out=workspace.array("of_query", left, *left.shape))
    torch.mul(product.view(gradient.query.shape), call.scale, out=gradient.query)
    product = torch.bmm(grad_logit.mT, left, out=workspace.array("of_key", left, *right.shape))
    grad_key = gradient.key[:, :, 0]
    if call.is_gaussian:
        column = grad_logit.sum(1).view(*grad_key.shape[:-1], 1)
        torch.addcmul(product.view(grad_key.shape), right.view(grad_key.shape), column, value=-call.scale, out=grad_key)
    else:
        grad_key.copy_(product.view(grad_key.shape))
