"""What a call of the fused kernels launches: forward, backward, and for the responsibilities."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mgk.ops.triton import tuning
from mgk.ops.triton.call import LOG2_E, SMALL, Call, is_prior_by_head, rows_of_small_kernels
from mgk.ops.triton.inputs import Gradients, Options, Results, Tensors
from mgk.ops.triton.kernels import (
    forward,
    gradient_sums,
    key_value_gradients,
    query_gradients,
    repair,
    responsibilities,
    two_key_gradients,
)
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import (
    aligned,
    aligned_like,
    aligned_width,
    block_width,
    by_name,
    by_token,
    count_blocks,
    descriptor,
    on_device,
    terms_descriptor,
)
from mgk.ops.triton.tile_table import Tile

# Numbers that a program adds to its sums at a time.
ADDED_TOGETHER = 16384
EIGHT_WARPS = Tile(0, 0, 8, 1)


def forward_pass(tensors: Tensors, options: Options) -> Results:
    """Attention, its row normaliser, and the terms of rows and columns."""
    with on_device(tensors.query):
        # The forward kernel makes the rows of two shifted keys itself.
        call = Call(tensors, options, leaves_rows=True)
        out = by_token(call.query, call.heads, call.queries, aligned_width(tensors.value))
        normaliser = call.new(call.batch, call.heads, call.queries)
        run = partial(_launch_forward, call, out, normaliser)
        run(call.tile("forward", run))
        _launch_repair(call, out, normaliser)
        if out.shape[-1] != call.value_width:
            out = out[..., : call.value_width].clone()
    return Results(out, normaliser, call.buffer)


def _launch_forward(call: Call, out: Tensor, normaliser: Tensor, tile: Tile) -> None:
    if tile.specialised:
        _launch_specialised(call, out, normaliser, tile)
        return
    # Rows are made up to the end of the padding, which backward reads.
    blocks = count_blocks(call.padded_queries if call.two_shifts else call.queries, tile.rows)
    values = {
        **call.values,
        "d_query": descriptor(call.query, tile.rows),
        "d_key": descriptor(call.key, tile.columns, 2 if call.two_keys else 1),
        "d_value": descriptor(call.value, tile.columns),
        "d_out": descriptor(out, tile.rows),
        "p_normaliser": normaliser, "num_blocks": blocks, "AWAIT_PRODUCTS": tile.await_products,
        "DIRECT": tile.direct, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns,
    }  # fmt: skip
    launch(forward.attention_forward, blocks * call.batch * call.heads, values, tile)


def _launch_specialised(call: Call, out: Tensor, normaliser: Tensor, tile: Tile) -> None:
    from mgk.ops.triton.kernels.hopper.pipeline import GROUP_ROWS
    from mgk.ops.triton.kernels.hopper.tile_scheduler import TILE_ROWS
    from mgk.ops.triton.kernels.hopper.wide_forward import attention_forward_wide

    assert call.fits_specialised_forward
    assert not call.two_keys
    assert (tile.rows, tile.warps) == (TILE_ROWS.value, 4)
    assert call.padding % tile.columns == 0, "blocks of terms are whole"
    # To add products to the larger bias, a hard choice takes both columns as they are before they are scaled.
    assert call.from_bias == call.hard
    terms = call.terms
    column, other = (terms.unscaled, terms.unscaled) if call.from_bias else (terms.column, terms.column_second)
    blocks = count_blocks(call.queries, tile.rows)
    rows = call.batch * call.heads
    values = {
        **call.values,
        "d_query": descriptor(call.query, GROUP_ROWS.value),
        "d_key": descriptor(call.key, tile.columns),
        "d_value": descriptor(call.value, tile.columns),
        "d_out": descriptor(out, GROUP_ROWS.value),
        "d_column": terms_descriptor(column, call.padded_keys, tile.columns),
        "d_other": terms_descriptor(other, call.padded_keys, tile.columns),
        "p_normaliser": normaliser, "num_tiles": blocks * rows, "num_rows": rows, "num_blocks": blocks,
        "section": tuning.heads_in_section(call.keys, 2 * call.block_d * call.dtype.itemsize),
        "PING_PONG": tile.ping_pong, "STAGES": tile.stages, "BLOCK_J": tile.columns,
    }  # fmt: skip
    programs = min(blocks * rows, tuning.multiprocessors(call.device.index or 0))
    launch(attention_forward_wide, programs, values, tile._replace(dependent_launch=call.has_level))


def _launch_repair(call: Call, out: Tensor, normaliser: Tensor) -> None:
    """Rows whose sums the number format did not hold are attended again, with a running maximum."""
    tile = call.tile("repair")
    blocks = count_blocks(call.queries, tile.rows)
    together = blocks * call.batch * call.heads // tuning.programs(call.device)
    together = max(1, min(together, repair.MOST_ROWS_TOGETHER.value // tile.rows, blocks))
    is_relative = call.two_shifts and call.dtype == torch.float32
    values = {
        **call.values, **by_name("query", call.query), **by_name("key", call.key), **by_name("value", call.value),
        **by_name("out", out), "p_normaliser": normaliser, "num_blocks": blocks, "blocks_together": together,
        "p_row_second": call.terms.row_second if is_relative else None,
        "p_column_second": call.terms.column_second if is_relative else None,
        "BLOCK_I": tile.rows, "BLOCK_J": tile.columns,
    }  # fmt: skip
    launch(repair.attention_repair, count_blocks(blocks, together) * call.batch * call.heads, values, tile)


def backward_pass(
    grad_out: Tensor, grad_normaliser: Tensor | None, results: Results, tensors: Tensors, options: Options
) -> Gradients:
    """The gradients of a call. Without ``grad_normaliser`` only the attention has been used."""
    with on_device(tensors.query):
        call = Call(tensors, options, results.terms)
        backward = _Backward(call, aligned(grad_out), grad_normaliser)
        backward.launch_delta(aligned(results.out), results.normaliser)
        backward.launch_key_value(call.tile("key_value", backward.launch_key_value))
        backward.launch_query(call.tile("query", backward.launch_query))
        return backward.collect(tensors)


class _Backward:
    """One backward pass: the room for gradients, the kernels that fill it, and what is made of it."""

    def __init__(self, call: Call, grad_out: Tensor, grad_normaliser: Tensor | None) -> None:
        self.call, self.grad_out = call, grad_out
        has_variances = call.inverse_variance is not None
        by_row = (call.batch, call.heads, call.padded_queries)
        by_column = (call.kv_heads, call.components, call.batch, call.keys)
        self.grad_query, self.grad_value = aligned_like(call.query), aligned_like(call.value)
        # Three shifts or more leave a gradient of the key each.
        self.has_one_key_gradient = call.shift is None or call.two_shifts or call.components == 1
        key_gradients = (call.batch, call.kv_heads * call.components, call.keys, aligned_width(call.key))
        self.grad_key = aligned_like(call.key) if self.has_one_key_gradient else call.key.new_empty(key_gradients)
        self.grad_column = call.new(*by_column) if call.has_column else None
        self.grad_inverse_variance = call.new(*by_column) if has_variances else None
        # Only the variances ask for it: shifts have partial sums.
        has_row = call.has_row and has_variances
        self.grad_row = call.new(call.batch, call.heads, call.components, call.queries) if has_row else None
        # Every program leaves its partial sum of the shifts' gradient; they are added up in a fixed order.
        self.key_partials: Tensor | None = None
        self.query_partials: Tensor | None = None
        # Measured: next to the two loops of causality, or with wide keys, the compiler schedules the loop better.
        one_group = call.group_size == 1 and not call.is_causal and call.block_d <= 64
        self.values = {
            **call.values, "p_reference": call.new(*by_row), "p_delta": call.new(*by_row), "ONE_GROUP": one_group,
            "p_grad_normaliser": None if grad_normaliser is None else grad_normaliser.contiguous(),
            "p_grad_column": self.grad_column, "p_grad_scale": self.grad_inverse_variance, "p_grad_row": self.grad_row,
        }  # fmt: skip
        # Heads that cannot be factored are left to the second launch.
        self.variants = ({"UNFACTORED": False}, {"UNFACTORED": True}) if call.factored else ()

    def launch_delta(self, out: Tensor, normaliser: Tensor) -> None:
        """What each row subtracts from its logits, and from the gradients of its weights."""
        call = self.call
        rows = rows_of_small_kernels(block_width(call.value_width))
        blocks = call.padded_queries // rows
        values = {
            **self.values, **by_name("out", out), **by_name("grad", self.grad_out), "p_normaliser": normaliser,
            "p_row": call.terms.row if call.two_shifts else None, "num_blocks": blocks, "BLOCK_I": rows,
        }  # fmt: skip
        launch(gradient_sums.attention_delta, blocks * call.batch * call.heads, values, SMALL)

    def launch_key_value(self, tile: Tile) -> None:
        """Gradients of keys and values, and of what belongs to a column."""
        call = self.call
        blocks = count_blocks(call.keys, tile.columns)
        if call.shift is not None and call.gaussian:
            self.key_partials = call.new(call.kv_heads, call.components, call.batch * blocks, call.block_d)
        values = {
            **self._blocks(tile), "d_grad_key": descriptor(self.grad_key, tile.columns),
            "d_grad_value": descriptor(self.grad_value, tile.columns), "p_key_partials": self.key_partials,
            "p_spans": call.key_spans, "num_blocks": blocks,
        }  # fmt: skip
        # Three sums of products a key fill the registers: wide keys are done one after the other.
        is_narrow = call.block_d <= 64 or call.dtype == torch.float32
        if call.components == 2 and call.shift is None and is_narrow:
            kernel = two_key_gradients.attention_backward_two_keys
        else:
            kernel = key_value_gradients.attention_backward_key_value
        launch(kernel, blocks * call.batch * call.kv_heads, values, tile, *self.variants)

    def launch_query(self, tile: Tile) -> None:
        """Gradients of queries, and of what belongs to a row."""
        call = self.call
        blocks = count_blocks(call.queries, tile.rows)
        if call.shift is not None:
            partials = call.batch * call.group_size * blocks
            self.query_partials = call.new(call.kv_heads, call.components, partials, call.block_d)
        values = {
            **self._blocks(tile), "d_grad_query": descriptor(self.grad_query, tile.rows),
            "p_query_partials": self.query_partials, "num_blocks": blocks,
        }  # fmt: skip
        launch(query_gradients.attention_backward_query, blocks * call.batch * call.heads, values, tile, *self.variants)

    def _blocks(self, tile: Tile) -> dict[str, Any]:
        """What both kernels read, in blocks of ``tile``."""
        return {
            **self.values,
            "d_query": descriptor(self.call.query, tile.rows),
            "d_key": descriptor(self.call.key, tile.columns),
            "d_value": descriptor(self.call.value, tile.columns),
            "d_grad_out": descriptor(self.grad_out, tile.rows),
            "BLOCK_I": tile.rows, "BLOCK_J": tile.columns,
        }  # fmt: skip

    def collect(self, tensors: Tensors) -> Gradients:
        """The gradients as torch expects them, laid out like ``tensors``."""
        grad_shift, grad_prior = self._parameter_gradients()
        grad_key = self.grad_key.unflatten(1, (self.call.kv_heads, -1))
        if not self.has_one_key_gradient:
            grad_key = grad_key.sum(2, keepdim=True)
        return Gradients(
            _trimmed(self.grad_query, tensors.query),
            _trimmed(grad_key, tensors.key),
            _trimmed(self.grad_value, tensors.value),
            grad_shift,
            grad_prior,
            self._inverse_variance_gradient(),
        )

    def _parameter_gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of the shifts, ``[Hkv, M, D]``, by way of rows and columns, and of the prior, in its shape. A
        parameter that does not exist has an empty one."""
        call, prior = self.call, self.call.log_prior
        grad_shift = call.new(0) if call.shift is None else torch.empty_like(call.shift)
        grad_prior = call.new(0)
        by_head = prior is not None and is_prior_by_head(prior)
        if prior is not None:
            assert self.grad_column is not None
            if by_head:
                grad_prior = call.new(*prior.shape)
            elif prior.ndim == 4:
                grad_prior = self.grad_column.permute(2, 0, 1, 3).contiguous()
            else:
                grad_prior = self.grad_column.sum(2)
        if call.shift is None and not by_head:
            return grad_shift, grad_prior
        width = 16 if call.shift is None else call.block_d
        values = {
            **self.values, "p_query_partials": self.query_partials, "p_key_partials": self.key_partials,
            "p_grad_column": self.grad_column if by_head else None, "p_grad_shift": grad_shift,
            "p_grad_prior": grad_prior, "num_columns": call.batch * call.keys,
            "num_query_partials": 0 if self.query_partials is None else self.query_partials.shape[2],
            "num_key_partials": 0 if self.key_partials is None else self.key_partials.shape[2],
            "ROWS": max(1, (512 if tuning.is_interpreted() else ADDED_TOGETHER) // width), "D": width,
        }  # fmt: skip
        launch(gradient_sums.parameter_gradients, call.kv_heads * call.components, values, EIGHT_WARPS)
        return grad_shift, grad_prior

    def _inverse_variance_gradient(self) -> Tensor:
        """``[Hkv, M]``: products, rows and columns are all proportional to it, but for the prior."""
        call, terms = self.call, self.call.terms
        if call.inverse_variance is None or self.grad_inverse_variance is None:
            return call.new(0)
        grad = self.grad_inverse_variance.sum(dim=(2, 3))
        if call.gaussian and terms.column is not None and self.grad_column is not None:
            column = _in_order(terms.column.view(call.batch, call.kv_heads, call.components, -1))
            column = column[..., : call.keys] / LOG2_E
            if call.log_prior is not None:
                column = column - call.log_prior
            column = column.masked_fill(~column.isfinite(), 0.0).permute(1, 2, 0, 3)
            grad = grad + (self.grad_column * column).sum(dim=(2, 3)) * LOG2_E / call.inverse_variance
        if terms.row is not None and self.grad_row is not None:
            row = _in_order(terms.row.view(call.batch, call.heads, call.components, -1))[..., : call.queries]
            by_head = (self.grad_row * row).sum(dim=(0, 3)) / LOG2_E
            grad = grad + by_head.unflatten(0, (call.kv_heads, -1)).sum(1) * LOG2_E / call.inverse_variance
        return grad


def _in_order(terms: Tensor) -> Tensor:
    """Terms one after the other along the last axis, on which they lie as ``terms.place`` has put them."""
    return terms.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)


def _trimmed(grad: Tensor, like: Tensor) -> Tensor:
    """Without the columns that alignment added, laid out as shape inference promises."""
    if grad.shape == like.shape and grad.stride() == torch.empty_like(like, device="meta").stride():
        return grad
    return torch.empty_like(like).copy_(grad[..., : like.shape[-1]])


def responsibility_pass(tensors: Tensors, options: Options) -> Tensor:
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``."""
    query_mask = None if tensors.query_mask is None else tensors.query_mask.contiguous()
    with on_device(tensors.query):
        call = Call(tensors._replace(query_mask=None), options)
        tile = call.tile("responsibilities")
        blocks = count_blocks(call.queries, tile.rows)
        sums = call.new(blocks * call.batch * call.heads, 8)
        values = {
            **call.values, "d_query": descriptor(call.query, tile.rows), "d_key": descriptor(call.key, tile.columns),
            "p_sums": sums, "p_query_mask": query_mask, "num_blocks": blocks, "BLOCK_I": tile.rows,
            "BLOCK_J": tile.columns,
        }  # fmt: skip
        launch(responsibilities.responsibilities, len(sums), values, tile)
    by_head = sums.view(call.batch, call.kv_heads, -1, 8)[..., : call.components]
    return by_head.sum(dim=(0, 2), dtype=torch.float64).float()
