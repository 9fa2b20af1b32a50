"""The backward pass for one key per position and so few keys that every tile holds whole rows.

Short calls spend most of their time on passes over memory, not on products. A complete row needs neither its output
nor sums that continue in another tile, and no operand needs a column for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.ops.cpu import grid as limits
from mgk.ops.cpu.block import LOG2E, Call, Inputs
from mgk.ops.cpu.grid import Grid
from mgk.ops.cpu.memory import workspace

# With more keys, a pass over the pairs costs more than the additional columns by which ``passes.py`` avoids it.
MOST_KEYS = 256


def has_whole_rows(grid: Grid) -> bool:
    """Whether a tile holds all queries and keys of a head, and is not much larger than its operands."""
    return grid.keys <= MOST_KEYS and grid.rows * grid.keys <= limits.TILE_PAIRS


def backward_of_rows(
    inputs: Inputs, call: Call, grid: Grid, bias: Tensor | None, normaliser: Tensor, grad_out: Tensor, gradient: Inputs
) -> None:
    """Fill the gradients. ``bias [B, Hkv, 1, Nk]`` belongs to the keys, ``normaliser [B, Hkv, rows]`` to the rows."""
    tiles = list(grid.tiles_of_heads())
    by_group = (grid.batch, grid.heads, grid.group, grid.queries, -1)
    query, grad_query, grad_out = (x.view(by_group) for x in (inputs.query, gradient.query, grad_out))
    arrays = (
        query, inputs.key[:, :, 0], inputs.value, grad_out, normaliser, bias, call.origin, call.common_value,
        grad_query, gradient.key[:, :, 0], gradient.value,
    )  # fmt: skip
    for samples, heads in tiles:
        of_tile = arrays if len(tiles) == 1 else [None if x is None else x[samples, heads] for x in arrays]
        blind = None if call.is_blind is None else call.is_blind[samples]
        _backward_of_tile(call, grid, blind, *of_tile)


def _backward_of_tile(
    call: Call, grid: Grid, blind: Tensor | None, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor,
    normaliser: Tensor, bias: Tensor | None, origin: Tensor | None, common_value: Tensor | None,
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
) -> None:  # fmt: skip
    """``query``, ``grad_out`` and ``grad_query`` are ``[samples, heads, group, Nq, D]``, the others as in the call."""
    count, rows, keys = query.shape[0] * query.shape[1], grid.rows, grid.keys
    dim, width = key.shape[-1], value.shape[-1]
    left = _copied("left", query, None if origin is None else origin[:, :, None]).view(count, rows, dim)
    right = _copied("right", key, origin).view(count, keys, dim)
    values = _copied("value", value, common_value).view(count, keys, width)
    grad = _copied("grad_left", grad_out, None)
    if blind is not None:
        grad.masked_fill_(blind, 0.0)
    grad = grad.view(count, rows, width)

    weight = workspace.array("logit 0", left, count, rows, keys)
    column = left.new_zeros(1) if bias is None else (bias * LOG2E).view(count, 1, keys)
    torch.baddbmm(column, left, right.mT, alpha=call.scale * LOG2E, out=weight)
    weight.sub_(normaliser.reshape(count, rows, 1))
    if grid.is_causal:
        later = left.new_full((grid.queries, keys), -math.inf).triu_(keys - grid.queries + 1)
        weight.view(count, grid.group, grid.queries, keys).add_(later)
    weight.exp2_()
    # The kernel rounds its normalisers differently, which would show in the gradients for logits far from zero.
    weight.div_(weight.sum(-1, keepdim=True))
    grad_logit = torch.bmm(grad, values.mT, out=workspace.array("grad_weight", left, count, rows, keys))
    torch._softmax_backward_data(grad_logit, weight, -1, weight.dtype, grad_input=grad_logit)

    # The products go into arrays that are no longer needed, because these are still in the cache.
    torch.bmm(weight.mT, grad, out=values)
    grad_value.copy_(values.view(grad_value.shape))
    product = grad if width == dim else workspace.array("of_query", left, count, rows, dim)
    torch.bmm(grad_logit, right, out=product)
    torch.mul(product.view(grad_query.shape), call.scale, out=grad_query)
    product = values if width == dim else workspace.array("of_key", left, count, keys, dim)
    torch.bmm(grad_logit.mT, left, out=product)
    if call.is_gaussian:
        product.addcmul_(right, grad_logit.sum(1)[..., None], value=-1.0)
    torch.mul(product.view(grad_key.shape), call.scale, out=grad_key)


def _copied(name: str, tensor: Tensor, origin: Tensor | None) -> Tensor:
    """Contiguous copy of ``tensor``, minus ``origin`` if there is one."""
    array = workspace.array(name, tensor, *tensor.shape)
    return array.copy_(tensor) if origin is None else torch.sub(tensor, origin, out=array)
