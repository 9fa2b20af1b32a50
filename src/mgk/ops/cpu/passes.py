"""The forward and the backward pass over the tiles of one block of heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.ops.cpu.block import LOG2E, Block, Inputs
from mgk.ops.cpu.grid import spans
from mgk.ops.cpu.memory import workspace


class _Tile:
    """The operands for some heads, rows and keys of a block. Its arrays are ``[heads, rows, keys]``."""

    def __init__(self, block: Block, heads: slice, rows: slice, keys: slice) -> None:
        self.left, self.right = block.left[heads, rows], block.right[heads, :, keys]
        self.value = block.value[heads, keys]
        self.ratios = [(of_query[heads, rows], of_key[heads, :, keys]) for of_query, of_key in block.ratios]
        self.first_visible, self.last_visible = block.grid.last_visible(rows, keys)
        self.shape = (self.left.shape[0], self.left.shape[1], self.right.shape[2])

    def array(self, name: str) -> Tensor:
        return workspace.array(name, self.left, *self.shape)

    def logits(self) -> list[Tensor]:
        """Compute the logits of each of the R keys per position, in units of log 2."""
        logits = [
            torch.bmm(self.left, self.right[:, r].mT, out=self.array(f"logit {r}")) for r in range(self.right.shape[1])
        ]
        if self.first_visible < self.shape[2] - 1:
            later = self.left.new_full(self.shape[1:], -math.inf).triu_(self.first_visible + 1)
            for logit in logits:
                logit.add_(later)
        return logits

    def ratio(self, r: int) -> Tensor:
        """Compute the ratio of the weight of component ``r + 1`` to that of the first."""
        return torch.mul(*self.ratios[r], out=self.array("ratio"))


def forward_pass(block: Block, out: Tensor, normaliser: Tensor) -> None:
    """Fill the block's part of ``out [B, H, Nq, Dv]`` and ``normaliser [B, Hkv, rows]``, which is in units of log 2."""
    grid, width = block.grid, out.shape[-1]
    of_block = workspace.array("out", out, block.count, grid.rows, width)
    normaliser_of_block = workspace.array("normaliser", out, block.count, grid.rows)
    if grid.is_causal and grid.queries > grid.keys:
        of_block.zero_()
        normaliser_of_block.zero_()
    for heads in spans(0, block.count, grid.tile_heads):
        for rows in grid.blocks_of_rows():
            weighted = workspace.array("weighted", out, heads.stop - heads.start, rows.stop - rows.start, width)
            maximum = total = None
            for keys in grid.blocks_of_keys():
                tile = _Tile(block, heads, rows, keys)
                if tile.last_visible < 0:
                    break
                logits = tile.logits()
                highest = _maximum([logit.amax(-1, keepdim=True) for logit in logits])
                if maximum is not None:
                    highest = torch.maximum(highest, maximum)
                weight = _sum_in_place([logit.sub_(highest).exp2_() for logit in logits])
                if tile.ratios:
                    ratio = tile.ratio(0)
                    for of_query, of_key in tile.ratios[1:]:
                        ratio.addcmul_(of_query, of_key)
                    weight.addcmul_(weight, ratio)
                if maximum is None or total is None:
                    total = weight.sum(-1, keepdim=True)
                    torch.bmm(weight, tile.value[..., :-1], out=weighted)
                else:
                    # Online softmax: rescale the earlier sums, which were relative to a smaller maximum.
                    decay = maximum.sub_(highest).exp2_()
                    total = total.mul_(decay).add_(weight.sum(-1, keepdim=True))
                    weighted.mul_(decay).baddbmm_(weight, tile.value[..., :-1])
                maximum = highest
            assert maximum is not None
            assert total is not None
            torch.div(weighted, total, out=of_block[heads, rows])
            torch.add(total.log2_()[..., 0], maximum[..., 0], out=normaliser_of_block[heads, rows])
    by_group = out[block.samples, block.query_heads].unflatten(1, (-1, grid.group))
    of_block = of_block.view(by_group.shape)
    if block.call.common_value is None:
        by_group.copy_(of_block)
    else:
        torch.add(of_block, block.call.common_value[block.samples, block.heads, None], out=by_group)
    normaliser[block.samples, block.heads] = normaliser_of_block.view(*block.shape, grid.rows)


def backward_pass(block: Block, grad_out: Tensor, out: Tensor, gradient: Inputs) -> None:
    """Fill the block's part of the gradients, and add to the gradients of shifts and priors.

    With w the normalised weight of one component, dlogit = w (dO . v - dO . o). The second term enters the product as
    one more feature.
    """
    grid, width, dim = block.grid, out.shape[-1], block.dim
    components = block.right.shape[1]
    grad_left = _grad_left(block, grad_out, out)
    sums = _Sums(block, width)
    rows_of_call = list(grid.blocks_of_rows())
    for heads in spans(0, block.count, grid.tile_heads):
        of_rows = [_Sum(f"of_rows {n}", sums.query[heads, rows]) for n, rows in enumerate(rows_of_call)]
        for keys in grid.blocks_of_keys():
            of_value = _Sum("of_value", sums.value[heads, :, keys])
            of_keys = [_Sum(f"of_keys {r}", sums.key[r, heads, :, keys]) for r in range(components)]
            for rows, of_query in zip(rows_of_call, of_rows, strict=True):
                tile = _Tile(block, heads, rows, keys)
                if tile.last_visible < 0:
                    continue
                weights = [logit.exp2_() for logit in tile.logits()]
                grad_weight = torch.bmm(grad_left[heads, rows], tile.value.mT, out=tile.array("grad_weight"))
                if tile.ratios:
                    weight, grad_logit = _through_ratios(tile, weights[0], grad_weight, sums, heads, rows, keys)
                    grad_logits = [grad_logit]
                elif components == 1:
                    weight, grad_logits = weights[0], [grad_weight.mul_(weights[0])]
                else:
                    weight = torch.add(weights[0], weights[1], out=tile.array("weight"))
                    for other in weights[2:]:
                        weight.add_(other)
                    grad_logits = [each.mul_(grad_weight) for each in weights]
                of_value.add(grad_left[heads, rows, :width].mT, weight)
                for r, grad_logit in enumerate(grad_logits):
                    # The column of ones beside the queries yields the sum of dlogit for each key.
                    of_keys[r].add(tile.left[..., : dim + 1].mT, grad_logit)
                    of_query.add(grad_logit, tile.right[:, r, :, :dim])
            for complete in (of_value, *of_keys):
                complete.store()
        for complete in of_rows:
            complete.store()
    _finish(block, sums, gradient)


class _Sum:
    """A sum of matrix products, accumulated in a contiguous array for speed and then copied to its target."""

    def __init__(self, name: str, target: Tensor) -> None:
        self._target, self._is_empty = target, True
        self._array = target if target.is_contiguous() else workspace.array(name, target, *target.shape)

    def add(self, one: Tensor, other: Tensor) -> None:
        if self._is_empty:
            torch.bmm(one, other, out=self._array)
            self._is_empty = False
        else:
            self._array.baddbmm_(one, other)

    def store(self) -> None:
        if self._is_empty:
            self._target.zero_()
        elif self._array is not self._target:
            self._target.copy_(self._array)


class _Sums:
    """Sums over the tiles of a block."""

    def __init__(self, block: Block, width: int) -> None:
        grid, like, count, dim = block.grid, block.left, block.count, block.dim
        self.query = workspace.array("sum of query", like, count, grid.rows, dim)
        """``sum_jr dlogit k``, to be multiplied by c"""
        if grid.is_causal and grid.queries > grid.keys:
            self.query.zero_()
        self.key = workspace.array("sum of key", like, block.right.shape[1], count, dim + 1, grid.keys)
        """Transposed: ``c sum_i dlogit q_i`` in units of log 2, and after the last feature ``sum_i dlogit``"""
        self.value = workspace.array("sum of value", like, count, width, grid.keys)
        """Transposed"""
        self.of_query = [like.new_zeros(count, grid.rows) for _ in block.ratios]
        self.of_key = [like.new_zeros(count, grid.keys) for _ in block.ratios]


def _grad_left(block: Block, grad_out: Tensor, out: Tensor) -> Tensor:
    """``[X, rows, Dv + 1]``: dO, and -dO . o."""
    grid, width = block.grid, out.shape[-1]
    grad, of_block = (x[block.samples, block.query_heads].unflatten(1, (-1, grid.group)) for x in (grad_out, out))
    array = workspace.array("grad_left", out, *grad.shape[:-1], width + 1)
    product = workspace.array("square", out, *grad.shape)
    if block.call.common_value is None:
        torch.mul(grad, of_block, out=product)
    else:
        torch.sub(of_block, block.call.common_value[block.samples, block.heads, None], out=product).mul_(grad)
    torch.sum(product, dim=-1, out=array[..., width]).neg_()
    array[..., :width] = grad
    if block.call.is_blind is not None:
        array.masked_fill_(block.call.is_blind[block.samples], 0.0)
    return array.view(block.count, grid.rows, width + 1)


def _through_ratios(
    tile: _Tile, first: Tensor, grad_weight: Tensor, sums: _Sums, heads: slice, rows: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """Return the weight of all components together and the gradient of the logit that they share."""
    of_first = grad_weight.mul_(first)
    weight, grad_logit = tile.array("weight"), of_first
    for r in range(len(tile.ratios)):
        ratio = tile.ratio(r)
        if r == 0:
            torch.addcmul(first, first, ratio, out=weight)
        else:
            weight.addcmul_(first, ratio)
        of_component = ratio.mul_(of_first)
        sums.of_query[r][heads, rows] += of_component.sum(-1)
        sums.of_key[r][heads, keys] += of_component.sum(-2)
        if r == 0 and len(tile.ratios) > 1:
            grad_logit = torch.add(of_first, of_component, out=tile.array("grad_logit"))
        else:
            grad_logit.add_(of_component)
    return weight, grad_logit


def _finish(block: Block, sums: _Sums, gradient: Inputs) -> None:
    """Turn the sums into gradients of the inputs of the block."""
    grid, dim, scale, shape = block.grid, block.dim, block.call.scale, block.shape
    samples, heads = block.samples, block.heads
    components = len(sums.key)
    column_sum = sums.key[:, :, dim]  # [R, X, Nk]
    keys = block.right[..., :dim]
    has_own_keys = gradient.key.shape[2] == components
    if has_own_keys:
        by_component = gradient.key[samples, heads].permute(2, 0, 1, 3, 4)  # [R, samples, heads, Nk, D]
    else:
        by_component = workspace.array("square", block.left, components, *shape, grid.keys, dim)
    torch.mul(sums.key[:, :, :dim].mT.unflatten(1, shape), 1.0 / LOG2E, out=by_component)
    if block.call.is_gaussian:
        of_column = column_sum.unflatten(1, shape)[..., None]
        by_component.addcmul_(keys.transpose(0, 1).unflatten(1, shape), of_column, value=-scale)
    if block.ways is not None:
        for r, (of_query, of_key) in enumerate(zip(sums.of_query, sums.of_key, strict=True)):
            way = block.ways[:, r].expand(*shape, dim).reshape(block.count, 1, dim)
            sums.query.addcmul_(of_query[..., None], way)
            grad_way = of_query[:, None] @ block.left[..., :dim] / LOG2E
            if block.call.is_gaussian:
                of_first = by_component[0]
                of_first.addcmul_(of_key.view(*shape, -1, 1), way.view(*shape, 1, dim), value=-scale)
                grad_way -= scale * (of_key[:, None] @ keys[:, 0] + of_key.sum(-1)[:, None, None] * way)
            grad_way = grad_way.view(*shape, dim).sum(0)
            assert gradient.shift is not None
            gradient.shift[heads, r + 1] += grad_way
            gradient.shift[heads, 0] -= grad_way
            if gradient.log_prior is not None:
                of_prior = of_key.view(*shape, grid.keys).sum((0, 2))
                gradient.log_prior[heads, r + 1] += of_prior
                gradient.log_prior[heads, 0] -= of_prior
    elif gradient.log_prior is not None:
        gradient.log_prior[heads] += column_sum.unflatten(1, shape).sum((1, 3)).mT
    if gradient.shift is not None:
        gradient.shift[heads, :components] += by_component.sum((1, 3)).transpose(0, 1)

    by_group = gradient.query[samples, block.query_heads].unflatten(1, (-1, grid.group))
    torch.mul(sums.query.view(*shape, grid.group, grid.queries, dim), scale, out=by_group)
    gradient.value[samples, heads] = sums.value.mT.unflatten(0, shape)
    if not has_own_keys:
        torch.sum(by_component, dim=0, out=gradient.key[samples, heads, 0])


def _maximum(tensors: list[Tensor]) -> Tensor:
    highest = tensors[0]
    for tensor in tensors[1:]:
        highest = torch.maximum(highest, tensor)
    return highest


def _sum_in_place(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
