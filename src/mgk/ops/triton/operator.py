"""The fused kernels as torch operations, with autograd, shape inference and a FLOP count.

    logit[i,j,r] = scale[r] q_i . k_jr + row[i,r] + column[j,r]

``torch.ops.mgk.fused_attention`` and its backward are what ``torch.compile``, ``opcheck`` and FLOP counters see.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton import backward, forward, preparation, statistics, tuning

LOG2_E = math.log2(math.e)

# Lengths of padded terms are a multiple of every block size, so that no load needs a mask.
PADDING = 128
# Threads of a small kernel work on this many numbers.
BLOCK = 1024


class Limits(NamedTuple):
    """What a row of the fast path may hold in a number format before it is attended again exactly."""

    ratio: float
    """log2 of how far two components may lie apart"""
    lowest_sum: float
    highest_sum: float
    margin: float
    """log2 of the room above the first block's largest weight"""


# fp16 weights overflow at 2^16 and lose digits below 2^-14; the others have the exponents of fp32.
LIMITS = {
    torch.float32: Limits(40.0, 2.0**-60, 2.0**60, 0.0),
    torch.bfloat16: Limits(40.0, 2.0**-60, 2.0**60, 0.0),
    torch.float16: Limits(14.0, 2.0**-8, 2.0**15, 4.0),
}


class _Call:
    """One call, prepared for the kernels: descriptors are made of tensors that the copy engine can read."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor | None, row: Tensor | None, column: Tensor | None,
        scales: Tensor | None, attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
        seed: Tensor | None, scale: float, num_components: int, is_causal: bool, hard: bool, dropout_p: float,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, self.width = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[3]
        self.query = aligned(query)
        self.key = aligned(key.flatten(1, 2))
        self.value = None if value is None else aligned(value)
        self.dtype, self.device = query.dtype, query.device
        self.padded_queries = math.ceil(self.queries / PADDING) * PADDING
        self.padded_keys = math.ceil(self.keys / PADDING) * PADDING
        self.limits = LIMITS[query.dtype]
        self.scale, self.seed, self.attn_mask = scale, seed, attn_mask

        shared = key.shape[2] == 1
        self.factored = shared and num_components == 2 and not hard and scales is None and row is not None
        if column is None and (self.factored or self.keys % PADDING != 0):
            # Keys beyond the end are switched off by their column.
            column = query.new_zeros(1, 1, 1, 1, dtype=torch.float32)
            column = column.expand(self.batch, self.kv_heads, num_components, self.keys)
        self.row, self.alpha = self._pad(row, self.padded_queries, 0.0)
        self.column, self.rho = self._pad(column, self.padded_keys, -math.inf)
        self.scales = None if scales is None else (scales.float() * LOG2_E).contiguous()
        self.key_range = self.query_range = None
        if key_mask is not None or query_mask is not None:
            self.key_range = valid_range(key_mask, self.batch, self.keys, query)
            self.query_range = valid_range(query_mask, self.batch, self.queries, query)
        self.row_key = self.column_key = None
        if seed is not None:
            self.row_key = self._random_keys(self.batch * self.heads * self.padded_queries, 0)
            self.column_key = self._random_keys(self.padded_keys, 1)
        self.options = {
            "M": num_components,
            "SHARED": shared,
            "FACTORED": self.factored,
            "HARD": hard,
            "HAS_ROW": row is not None,
            "HAS_COLUMN": column is not None,
            "EQUAL": scales is None,
            "CAUSAL": is_causal,
            "HAS_MASK": attn_mask is not None,
            "HAS_RANGE": self.key_range is not None,
            "DROPOUT": seed is not None,
            "PRECISION": "ieee",
        }
        keep = 1.0 - dropout_p
        self.threshold, self.keep_scale = round(dropout_p * 2**32), 1.0 / keep
        self.mask_strides = (0, 0, 0, 0)
        if attn_mask is not None:
            self.mask_strides = tuple(
                0 if size == 1 else stride for size, stride in zip(attn_mask.shape, attn_mask.stride(), strict=True)
            )

    def _pad(self, terms: Tensor | None, padded: int, fill: float) -> tuple[Tensor | None, Tensor | None]:
        """Terms ``[B, H, M, N]`` padded, and the ratio of their two components where the pair is factored."""
        if terms is None:
            return None, None
        batch, heads, components, length = terms.shape
        out = terms.new_empty(batch, heads, components, padded)
        ratio = terms.new_empty(batch, heads, padded) if self.factored else None
        blocks = triton.cdiv(padded, BLOCK)
        preparation.pad_terms[(batch * heads * blocks,)](
            terms, out, ratio, *terms.stride(), heads, length, padded, blocks, fill, self.limits.ratio,
            components, self.factored, BLOCK,
        )  # fmt: skip
        return out, ratio

    def _random_keys(self, count: int, stream: int) -> Tensor:
        keys = torch.empty(count, dtype=torch.int32, device=self.device)
        preparation.random_keys[(triton.cdiv(count, BLOCK),)](self.seed, keys, count, stream, BLOCK)
        return keys

    def wide(self) -> Tensor | None:
        """Query heads ``[B * H]`` in which some ratio cannot be trusted."""
        if self.alpha is None or self.rho is None:
            return None
        rows = self.alpha.isnan().any(-1)
        columns = self.rho.isnan().any(-1).repeat_interleave(self.heads // self.kv_heads, dim=1)
        return (rows | columns).flatten().to(torch.int32)

    def kernel(self, name: str) -> tuning.Kernel:
        """What this call's tile is chosen by."""
        width = block_width(max(self.width, 0 if self.value is None else self.value.shape[-1]))
        products = 1 if self.options["SHARED"] else int(self.options["M"])
        return tuning.Kernel(
            name, width, self.dtype.itemsize, products, bool(self.options["CAUSAL"]), self.attn_mask is not None
        )

    def launch(self, name: str, run: Any) -> None:
        """Run a kernel with the tile of the table, or of a trial if one is asked for."""
        kernel = self.kernel(name)
        tuning.tune(kernel, self.device, run)
        run(tuning.choose_tile(kernel, self.device))


def block_width(width: int) -> int:
    """Columns of a block: a power of two that matrix units take."""
    return max(16, triton.next_power_of_2(width))


def aligned(tensor: Tensor) -> Tensor:
    """``[B, H, N, D]`` as the copy engine reads it: rows that start at multiples of 16 bytes. A copy only where needed."""
    step = 16 // tensor.element_size()
    strides_fit = tensor.stride(-1) == 1 and all(
        size == 1 or (stride > 0 and stride % step == 0)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    if strides_fit and tensor.data_ptr() % 16 == 0:
        return tensor
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor.clone(memory_format=torch.contiguous_format)


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of ``rows`` tokens of one head of ``[B, H, N, D]``."""
    dense = [0, 0, 0, 1]
    for axis in (2, 1, 0):
        dense[axis] = dense[axis + 1] * tensor.shape[axis + 1]
    step = 16 // tensor.element_size()
    # An axis of length one may have any stride, but the copy engine looks at it.
    strides = [
        stride if size > 1 or axis == 3 else max(step, -(-dense[axis] // step) * step)
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, block_width(tensor.shape[-1])])


def valid_range(mask: Tensor | None, batch: int, length: int, like: Tensor) -> Tensor:
    """First valid position and one past the last, ``int32 [B, 2]``; ``(0, 0)`` where nothing is valid."""
    if mask is None:
        ends = torch.full((batch, 2), length, dtype=torch.int32, device=like.device)
        ends[:, 0] = 0
        return ends
    marks = mask.to(torch.int32)
    first, last = marks.argmax(-1), length - marks.flip(-1).argmax(-1)
    return torch.stack([first, last], dim=-1).masked_fill(~mask.any(-1, keepdim=True), 0).to(torch.int32)


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def _by_token(like: Tensor, heads: int, length: int, width: int) -> Tensor:
    """``[B, heads, length, width]`` laid out token by token, so that a layer joins its heads without a copy."""
    return like.new_empty(like.shape[0], length, heads, width).transpose(1, 2)


@torch.library.custom_op("mgk::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, row: Tensor | None, column: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    scale: float, num_components: int, is_causal: bool, hard: bool, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its row normaliser.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or one component for all.
        value: ``[B, Hkv, Nk, Dv]``.
        row: fp32 ``[B, H, M, Nq]``.
        column: fp32 ``[B, Hkv, M, Nk]``, -inf at masked keys.
        scales: fp32 ``[Hkv, M]``; ``None``: ``scale`` for all.
        attn_mask: bool, four axes, broadcastable to ``[B, H, Nq, Nk]``.
        key_mask: bool ``[B, Nk]``: which blocks of keys can be left out (``column`` says which keys).
        query_mask: bool ``[B, Nq]``: which blocks of queries can be left out.
        seed: int64 ``[1]``, for dropout.
        scale: factor of the products.
        num_components: M.
        is_causal: aligned bottom-right.
        hard: the best component answers alone.
        dropout_p: probability of dropping a pair.

    Returns:
        ``[B, H, Nq, Dv]`` and fp32 ``[B, H, Nq]``.
    """
    with _on_device(query):
        call = _Call(
            query, key, value, row, column, scales, attn_mask, key_mask, query_mask, seed, scale, num_components,
            is_causal, hard, dropout_p,
        )  # fmt: skip
        assert call.value is not None
        out = _by_token(query, call.heads, call.queries, call.value.shape[-1])
        normaliser = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)

        def run(tile: tuning.Tile) -> None:
            assert call.value is not None
            blocks = triton.cdiv(call.queries, tile.rows)
            forward.attention_forward[(blocks * call.batch * call.heads,)](
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                descriptor(call.value, tile.columns), descriptor(out, tile.rows), call.row, call.column, call.alpha,
                call.rho, call.scales, normaliser, attn_mask, call.key_range, call.query_range, call.row_key,
                call.column_key, *call.mask_strides, scale * LOG2_E, call.threshold, call.keep_scale, call.heads,
                call.heads // call.kv_heads, call.queries, call.keys, call.padded_queries, call.padded_keys, blocks,
                call.limits.lowest_sum, call.limits.highest_sum, call.limits.margin, **call.options,
                BLOCK_I=tile.rows, BLOCK_J=tile.columns, D=block_width(call.query.shape[-1]),
                DV=block_width(call.value.shape[-1]), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        call.launch("forward", run)
    return out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]].clone(), normaliser


@torch.library.custom_op("mgk::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad_out: Tensor, grad_normaliser: Tensor, out: Tensor, normaliser: Tensor, query: Tensor, key: Tensor,
    value: Tensor, row: Tensor | None, column: Tensor | None, scales: Tensor | None, attn_mask: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, scale: float, num_components: int,
    is_causal: bool, hard: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, row, column and scales (the last three empty where there is no such input)."""
    with _on_device(query):
        call = _Call(
            query, key, value, row, column, scales, attn_mask, key_mask, query_mask, seed, scale, num_components,
            is_causal, hard, dropout_p,
        )  # fmt: skip
        assert call.value is not None
        grad_out, out = aligned(grad_out), aligned(out)
        reference = normaliser.new_empty(call.batch, call.heads, call.padded_queries)
        delta = torch.empty_like(reference)
        blocks = call.padded_queries // 64
        backward.attention_delta[(blocks * call.batch * call.heads,)](
            descriptor(out, 64), descriptor(grad_out, 64), normaliser, grad_normaliser.contiguous(), call.row,
            reference, delta, call.heads, call.queries, call.padded_queries, blocks, num_components, call.factored, 64,
            block_width(out.shape[-1]),
        )  # fmt: skip
        wide = call.wide()
        widths = {"D": block_width(call.query.shape[-1]), "DV": block_width(call.value.shape[-1])}
        sizes = (call.heads, call.heads // call.kv_heads, call.queries, call.keys, call.padded_queries, call.padded_keys)
        scalars = (scale * LOG2_E, scale, call.threshold, call.keep_scale)

        one_gradient = call.factored or key.shape[2] == num_components
        grad_key = (
            torch.empty_like(call.key)
            if one_gradient
            else call.key.new_empty(call.batch, call.kv_heads * num_components, call.keys, call.key.shape[-1])
        )
        grad_value = torch.empty_like(call.value)
        grad_column = normaliser.new_empty(call.batch, call.kv_heads, num_components, call.keys)
        grad_scales = None if scales is None else torch.empty_like(grad_column)

        def run_key_value(tile: tuning.Tile) -> None:
            assert call.value is not None
            blocks = triton.cdiv(call.keys, tile.columns)
            backward.attention_backward_key_value[(blocks * call.batch * call.kv_heads,)](
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                descriptor(call.value, tile.columns), descriptor(grad_out, tile.rows),
                descriptor(grad_key, tile.columns), descriptor(grad_value, tile.columns), call.row, call.column,
                call.alpha, call.rho, call.scales, reference, delta, wide, grad_column, grad_scales, attn_mask,
                call.key_range, call.query_range, call.row_key, call.column_key, *call.mask_strides, *scalars, *sizes,
                blocks, **call.options, BLOCK_I=tile.rows, BLOCK_J=tile.columns, **widths, num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip

        call.launch("key_value", run_key_value)
        grad_query = torch.empty_like(call.query)
        grad_row = None if row is None else normaliser.new_empty(row.shape)

        def run_query(tile: tuning.Tile) -> None:
            assert call.value is not None
            blocks = triton.cdiv(call.queries, tile.rows)
            backward.attention_backward_query[(blocks * call.batch * call.heads,)](
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                descriptor(call.value, tile.columns), descriptor(grad_out, tile.rows),
                descriptor(grad_query, tile.rows), call.row, call.column, call.alpha, call.rho, call.scales, reference,
                delta, wide, grad_row, attn_mask, call.key_range, call.query_range, call.row_key, call.column_key,
                *call.mask_strides, *scalars, *sizes, blocks, **call.options, BLOCK_I=tile.rows, BLOCK_J=tile.columns,
                **widths, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        call.launch("query", run_query)
        if grad_row is not None and call.factored:
            # The logits of a row rise and fall together with its normaliser alone: what one component does not get
            # the other does.
            total = grad_normaliser.masked_fill(normaliser == -math.inf, 0.0)
            grad_row[:, :, 1] = total - grad_row[:, :, 0]

    grad_key = grad_key.unflatten(1, (call.kv_heads, -1))
    if not one_gradient:
        grad_key = grad_key.sum(2, keepdim=True)
    return (
        _trimmed(grad_query, query),
        _trimmed(grad_key, key),
        _trimmed(grad_value, value),
        normaliser.new_empty(0) if grad_row is None else grad_row,
        normaliser.new_empty(0) if column is None else grad_column,
        normaliser.new_empty(0) if grad_scales is None else grad_scales.sum(dim=(0, 3)),
    )


def _trimmed(grad: Tensor, like: Tensor) -> Tensor:
    """Without the columns that alignment added, laid out as shape inference promises."""
    return torch.empty_like(like).copy_(grad[..., : like.shape[-1]]) if grad.stride() != _strides(like) else grad


def _strides(like: Tensor) -> tuple[int, ...]:
    return torch.empty_like(like, device="meta").stride()


@torch.library.custom_op("mgk::fused_responsibilities", mutates_args=())
def fused_responsibilities(
    query: Tensor, key: Tensor, row: Tensor | None, column: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, query_mask: Tensor | None, scale: float, num_components: int, is_causal: bool,
) -> Tensor:  # fmt: skip
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``."""
    with _on_device(query):
        call = _Call(
            query, key, None, row, column, scales, attn_mask, None, None, None, scale, num_components, is_causal, False,
            0.0,
        )  # fmt: skip
        tile = tuning.choose_tile(call.kernel("query"), query.device)
        blocks = triton.cdiv(call.queries, tile.rows)
        sums = normaliser_like(query, blocks * call.batch * call.heads, 8)
        names = ("M", "SHARED", "HAS_ROW", "HAS_COLUMN", "EQUAL", "CAUSAL", "HAS_MASK", "PRECISION")
        statistics.responsibilities[(sums.shape[0],)](
            descriptor(call.query, tile.rows), descriptor(call.key, tile.columns), call.row, call.column, call.scales,
            sums, attn_mask, None if query_mask is None else query_mask.contiguous(), *call.mask_strides,
            scale * LOG2_E, call.heads, call.heads // call.kv_heads, call.queries, call.keys, call.padded_queries,
            call.padded_keys, blocks, **{name: call.options[name] for name in names},
            HAS_QUERY_MASK=query_mask is not None, BLOCK_I=tile.rows, BLOCK_J=tile.columns,
            D=block_width(call.query.shape[-1]), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    by_head = sums.view(call.batch, call.kv_heads, -1, 8)[..., :num_components]
    return by_head.sum(dim=(0, 2), dtype=torch.float64).float()


def normaliser_like(query: Tensor, *shape: int) -> Tensor:
    """An fp32 buffer beside ``query``."""
    return query.new_empty(shape, dtype=torch.float32)


@fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = _by_token(query, query.shape[1], query.shape[2], value.shape[-1])
    if value.shape[-1] * value.element_size() % 16 != 0:
        out = out.contiguous()
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_normaliser: Tensor, out: Tensor, normaliser: Tensor, query: Tensor, key: Tensor,
    value: Tensor, row: Tensor | None, column: Tensor | None, scales: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    extra = [
        normaliser.new_empty(0) if tensor is None else normaliser.new_empty(tensor.shape)
        for tensor in (row, column, scales)
    ]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), *extra


@fused_responsibilities.register_fake
def _(query: Tensor, key: Tensor, *arguments: Any) -> Tensor:
    return query.new_empty(key.shape[1], arguments[-2], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:10])
    ctx.options = inputs[10:]


def _backward(ctx: Any, grad_out: Tensor, grad_normaliser: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing frees them as they are read
    grad_query, grad_key, grad_value, *extra = fused_attention_backward(grad_out, grad_normaliser, *saved, *ctx.options)
    extra = [None if tensor is None else grad for tensor, grad in zip(saved[5:8], extra, strict=True)]
    return grad_query, grad_key, grad_value, *extra, *[None] * 9


fused_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _visible_pairs(query_shape: Any, num_keys: int, is_causal: bool) -> int:
    batch, heads, num_queries, _ = query_shape
    if not is_causal:
        return int(batch * heads * num_queries * num_keys)
    per_head = sum(max(0, i + 1 + num_keys - num_queries) for i in range(num_queries))
    return int(batch * heads * per_head)


@register_flop_formula(torch.ops.mgk.fused_attention)
def _forward_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any) -> int:
    """One product of query and key for each key tensor, one of weights and values. Pairs behind the diagonal are not
    counted; those behind other masks are, since their number depends on data."""
    is_causal = bool(args[9])
    pairs = _visible_pairs(query_shape, key_shape[3], is_causal)
    return 2 * pairs * (key_shape[2] * query_shape[3] + value_shape[3])


@register_flop_formula(torch.ops.mgk.fused_attention_backward)
def _backward_flops(
    grad_shape: Any, grad_normaliser_shape: Any, out_shape: Any, normaliser_shape: Any, query_shape: Any,
    key_shape: Any, value_shape: Any, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """Both kernels compute logits and weight gradients; then come dv and dk, and dq."""
    is_causal = bool(args[9])
    pairs = _visible_pairs(query_shape, key_shape[3], is_causal)
    return 2 * pairs * (4 * key_shape[2] * query_shape[3] + 3 * value_shape[3])
