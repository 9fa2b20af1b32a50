"""The fused kernels as torch operations, with autograd, shape inference and a FLOP count.

``torch.ops.mgk.fused_attention`` and its backward are what ``torch.compile``, ``opcheck`` and FLOP counters see. Where
nobody looks, :func:`attend` calls the same code directly: to go through the dispatcher takes the host longer than it
takes to start the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.triton import backward, forward, replay, statistics, tuning, two_keys
from mgk.ops.triton.call import LOG2_E, PROGRAMS, SMALL, Call, TermsLayout, rows_of_small_kernels
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import (
    aligned,
    aligned_like,
    aligned_width,
    block_width,
    by_token,
    count_blocks,
    descriptor,
    on_device,
)

# Numbers that a program adds to its sums at a time.
ADDED_TOGETHER = 16384


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    query_spans: Tensor | None, key_spans: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention and its row normaliser, without the term in ``|q_i|^2`` where all variances agree.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or one component beside ``shift``.
        value: ``[B, Hkv, Nk, Dv]``.
        shift: ``[Hkv, M, D]``.
        log_prior: fp32 ``[Hkv, M, Nk]`` or ``[Hkv, M, 1]``.
        scales: ``1 / variance [Hkv, M]``; ``None``: ``scale`` for all.
        attn_mask: bool, four axes, broadcastable to ``[B, H, Nq, Nk]``.
        key_mask: bool ``[B, Nk]``.
        query_mask: bool ``[B, Nq]``: which blocks of queries can be left out.
        seed: int64 ``[1]``, for dropout.
        query_spans: int32 ``[Nq / PADDING, 3]``: several sequences lie one after the other (and B is 1), each from a
            multiple of ``PADDING`` on. For every so many queries: the first key of their sequence, one past its last,
            and what to add to a query for the last key that it sees under causality.
        key_spans: the same for keys: first query, one past the last, and the same difference.
        scale: ``1 / variance``.
        gaussian: whether the similarity is a distance.
        is_causal: aligned bottom-right.
        hard: the best component answers alone.
        dropout_p: probability of dropping a pair.

    Returns:
        ``[B, H, Nq, Dv]``, fp32 ``[B, H, Nq]``, and what backward wants to know of rows and columns.
    """
    with on_device(query):
        # The forward kernel makes the rows of a pair itself.
        call = Call(
            query, key, value, shift, log_prior, scales, attn_mask, key_mask, query_mask, seed, query_spans,
            key_spans, scale, gaussian, is_causal, hard, dropout_p, pairs_are_left=True,
        )  # fmt: skip
        assert call.value is not None
        values = call.value
        out = by_token(query, call.heads, call.queries, aligned_width(value))
        normaliser = call.new(*query.shape[:-1])
        widths = {"D": block_width(call.query.shape[-1]), "DV": block_width(values.shape[-1])}
        masks = (attn_mask, call.key_range, call.query_range, query_spans, call.row_key, call.column_key)
        strides = (*call.mask_strides, call.padding)
        sizes = (
            call.heads,
            call.heads // call.kv_heads,
            call.queries,
            call.keys,
            call.padded_queries,
            call.padded_keys,
        )
        scalars = (call.scale, call.threshold, 1.0 / call.keep_probability)

        by_product = tuning.sums_by_product(call.kernel("forward"), widths["DV"])

        def run(tile: tuning.Tile) -> None:
            # Rows are made up to the end of the padding, which backward reads.
            blocks = count_blocks(call.padded_queries if call.paired else call.queries, tile.rows)
            launch(
                forward.attention_forward,
                blocks * call.batch * call.heads,
                (
                    descriptor(call.query, tile.rows), descriptor(call.key, tile.columns, 2 if call.joined else 1),
                    descriptor(values, tile.columns), descriptor(out, tile.rows), call.row, call.column, call.alpha,
                    call.rho, call.wide, call.level, call.scales, call.shift, call.origin, normaliser, *masks, *strides,
                    *scalars, *sizes,
                    blocks, call.width, *call.limits[:4],
                ),
                {**call.options, **widths, "PAIRED": call.paired, "JOINED": call.joined,
                "HAS_ORIGIN": call.origin is not None,
                "SUM_BY_PRODUCT": by_product, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns},
                tile,
            )  # fmt: skip

        call.run("forward", run)
        tile = call.tile("repair")
        blocks = count_blocks(call.queries, tile.rows)
        enough = 2 if tuning.is_interpreted() else PROGRAMS
        together = blocks * call.batch * call.heads // enough
        together = max(1, min(together, forward.MOST_ROWS_TOGETHER.value // tile.rows, blocks))
        launch(
            forward.attention_repair,
            count_blocks(blocks, together) * call.batch * call.heads,
            (
                call.query, call.key, values, out, call.row, call.column, call.level, call.scales, normaliser,
                *masks,
                *call.query.stride()[:3], *call.key.stride()[:3], *values.stride()[:3], *out.stride()[:3],
                *strides, *scalars, *sizes, blocks, together, call.width, value.shape[-1],
            ),
            {**call.options, **widths, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns},
            tile,
        )  # fmt: skip
    return out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]].clone(), normaliser, call.terms


def _run_backward(
    grad_out: Tensor, grad_normaliser: Tensor | None, out: Tensor, normaliser: Tensor, terms: Tensor, query: Tensor,
    key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    query_spans: Tensor | None, key_spans: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, shift, log_prior and scales (the last three empty where there is no input).

    Without ``grad_normaliser`` only the attention has been used.
    """
    with on_device(query):
        call = Call(
            query, key, value, shift, log_prior, scales, attn_mask, key_mask, query_mask, seed, query_spans,
            key_spans, scale, gaussian, is_causal, hard, dropout_p, terms,
        )  # fmt: skip
        assert call.value is not None
        values, components = call.value, call.components
        grad_out, out = aligned(grad_out), aligned(out)
        if grad_normaliser is not None:
            grad_normaliser = grad_normaliser.contiguous()
        reference = call.new(call.batch, call.heads, call.padded_queries)
        delta = torch.empty_like(reference)
        rows = rows_of_small_kernels(block_width(out.shape[-1]))
        blocks = call.padded_queries // rows
        launch(
            backward.attention_delta,
            blocks * call.batch * call.heads,
            (
                out, grad_out, normaliser, grad_normaliser, call.row if call.paired else None, call.level, reference,
                delta, *out.stride()[:3], *grad_out.stride()[:3], call.keep_probability, call.heads,
                call.heads // call.kv_heads, call.queries, call.padded_queries, blocks, value.shape[-1],
            ),
            {"M": components if call.paired else 1, "PAIRED": call.paired, "HAS_LEVEL": call.has_level,
            "HAS_GRAD_NORMALISER": grad_normaliser is not None, "BLOCK_I": rows, "DV": block_width(out.shape[-1])},
            SMALL,
        )  # fmt: skip
        widths = {"D": block_width(call.query.shape[-1]), "DV": block_width(values.shape[-1])}
        options = {**call.options, **widths, "GAUSSIAN": gaussian, "HAS_SHIFT": shift is not None}
        options |= {"PAIRED": call.paired, "HAS_ORIGIN": call.origin is not None}
        options |= {"HAS_GRAD_NORMALISER": grad_normaliser is not None}
        masks = (call.row_key, call.column_key, *call.mask_strides, call.padding)
        ranges = (attn_mask, call.key_range, call.query_range)
        scalars = (call.scale, scale, call.threshold, 1.0 / call.keep_probability)
        group_size = call.heads // call.kv_heads
        sizes = (call.heads, group_size, call.queries, call.keys, call.padded_queries, call.padded_keys)

        one_gradient = call.paired or key.shape[2] == components
        grad_key = (
            aligned_like(call.key)
            if one_gradient
            else call.key.new_empty(call.batch, call.kv_heads * components, call.keys, aligned_width(key))
        )
        grad_value, grad_query = aligned_like(values), aligned_like(call.query)
        grad_column = call.new(call.kv_heads, components, call.batch, call.keys) if call.has_column else None
        # Only the scales ask for it: shifts have their shares.
        grad_row = None
        if call.has_row and scales is not None:
            grad_row = call.new(call.batch, call.heads, components, call.queries)
        grad_scales = None if scales is None else call.new(call.kv_heads, components, call.batch, call.keys)
        # Every program leaves its share of the shifts' gradient; added up below in a fixed order.
        key_shares = query_shares = None
        # Heads that cannot be factored are left to the second launch.
        variants = ({"WIDE": False}, {"WIDE": True}) if call.factored else ({"WIDE": False},)

        # Three sums of products a key fill the registers: of wide keys one is done after the other.
        at_once = components == 2 and shift is None and (widths["D"] <= 64 or query.dtype == torch.float32)
        # Measured: next to the two loops of causality, or with wide keys, the compiler schedules the loop better.
        options["ONE_GROUP"] = group_size == 1 and not is_causal and widths["D"] <= 64

        def run_key_value(tile: tuning.Tile) -> None:
            nonlocal key_shares
            blocks = count_blocks(call.keys, tile.columns)
            if shift is not None and gaussian:
                key_shares = call.new(call.kv_heads, components, call.batch * blocks, widths["D"])
            tensors = (
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                descriptor(values, tile.columns), descriptor(grad_out, tile.rows), descriptor(grad_key, tile.columns),
                descriptor(grad_value, tile.columns), call.row, call.column,
            )  # fmt: skip
            numbers = (*ranges, key_spans, *masks, *scalars, *sizes, blocks)
            own = {**options, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns}
            programs = blocks * call.batch * call.kv_heads
            if at_once:
                arguments = (*tensors, call.scales, reference, delta, grad_column, grad_scales, *numbers)
                launch(two_keys.attention_backward_two_keys, programs, arguments, own, tile)
            else:
                arguments = (
                    *tensors, call.alpha, call.rho, call.scales, call.shift, reference, delta, call.wide, grad_column,
                    grad_scales, key_shares, call.origin, *numbers, call.width,
                )  # fmt: skip
                launch(backward.attention_backward_key_value, programs, arguments, own, tile, *variants)

        def run_query(tile: tuning.Tile) -> None:
            nonlocal query_shares
            blocks = count_blocks(call.queries, tile.rows)
            if shift is not None:
                query_shares = call.new(call.kv_heads, components, call.batch * group_size * blocks, widths["D"])
            launch(
                backward.attention_backward_query,
                blocks * call.batch * call.heads,
                (
                    descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                    descriptor(values, tile.columns), descriptor(grad_out, tile.rows),
                    descriptor(grad_query, tile.rows), call.row, call.column, call.alpha, call.rho, call.scales,
                    reference, delta, grad_normaliser, call.wide, call.shift, grad_row, query_shares, call.origin,
                    *ranges, query_spans, *masks,
                    *scalars, *sizes, blocks, call.width,
                ),
                {**options, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns},
                tile,
                *variants,
            )  # fmt: skip

        call.run("key_value", run_key_value)
        call.run("query", run_query)
        grad_shift, grad_prior = _parameter_gradients(call, scale, query_shares, key_shares, grad_column)

    grad_key = grad_key.unflatten(1, (call.kv_heads, -1))
    if not one_gradient:
        grad_key = grad_key.sum(2, keepdim=True)
    return (
        _trimmed(grad_query, query),
        _trimmed(grad_key, key),
        _trimmed(grad_value, value),
        grad_shift,
        grad_prior,
        call.new(0) if grad_scales is None else _scale_gradient(call, grad_row, grad_column, grad_scales),
    )


def _parameter_gradients(
    call: Call, scale: float, query_shares: Tensor | None, key_shares: Tensor | None, grad_column: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the shifts, ``[Hkv, M, D]``, by way of rows and columns,
    and of the prior, in its shape; empty where there is no such parameter."""
    prior, shift = call.log_prior, call.shift
    grad_shift = call.new(0) if shift is None else torch.empty_like(shift)
    grad_prior = call.new(0)
    by_head = prior is not None and prior.shape[2] == 1
    if prior is not None:
        assert grad_column is not None
        grad_prior = call.new(*prior.shape) if by_head else grad_column.sum(2)
    if shift is None and not by_head:
        return grad_shift, grad_prior
    width = 16 if query_shares is None else query_shares.shape[-1]
    numbers = 512 if tuning.is_interpreted() else ADDED_TOGETHER
    launch(
        backward.parameter_gradients,
        call.kv_heads * call.components,
        (
            query_shares, key_shares, grad_column if by_head else None, call.scales, grad_shift, grad_prior, scale,
            0 if query_shares is None else query_shares.shape[-2], 0 if key_shares is None else key_shares.shape[-2],
            call.batch * call.keys, call.width,
        ),
        {
            "EQUAL": call.scales is None,
            "HAS_SHIFT": shift is not None,
            "GAUSSIAN": key_shares is not None,
            "HAS_PRIOR": by_head,
            "ROWS": max(1, numbers // width),
            "D": width,
        },
        tuning.Tile(0, 0, 8, 1),
    )  # fmt: skip
    return grad_shift, grad_prior


def _scale_gradient(call: Call, grad_row: Tensor | None, grad_column: Tensor | None, grad_products: Tensor) -> Tensor:
    """``[Hkv, M]``: products, rows and columns are all proportional to the scale, but for the prior."""
    assert call.scales is not None
    grad = grad_products.sum(dim=(2, 3))
    if call.gaussian and call.column is not None and grad_column is not None:
        column = _in_order(call.column.view(call.batch, call.kv_heads, call.components, -1))[..., : call.keys] / LOG2_E
        if call.log_prior is not None:
            column = column - call.log_prior
        column = column.masked_fill(~column.isfinite(), 0.0).permute(1, 2, 0, 3)
        grad = grad + (grad_column * column).sum(dim=(2, 3)) * LOG2_E / call.scales
    if call.row is not None and grad_row is not None:
        row = _in_order(call.row.view(call.batch, call.heads, call.components, -1))[..., : call.queries]
        by_head = (grad_row * row).sum(dim=(0, 3)) / LOG2_E
        grad = grad + by_head.unflatten(0, (call.kv_heads, -1)).sum(1) * LOG2_E / call.scales
    return grad


def _in_order(terms: Tensor) -> Tensor:
    """Terms one after the other along the last axis, on which they lie as ``tiles.place`` has put them."""
    return terms.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)


def _trimmed(grad: Tensor, like: Tensor) -> Tensor:
    """Without the columns that alignment added, laid out as shape inference promises."""
    if grad.shape == like.shape and grad.stride() == torch.empty_like(like, device="meta").stride():
        return grad
    return torch.empty_like(like).copy_(grad[..., : like.shape[-1]])


fused_attention = torch.library.custom_op("mgk::fused_attention", _run_forward, mutates_args=())
fused_attention_backward = torch.library.custom_op("mgk::fused_attention_backward", _run_backward, mutates_args=())


@torch.library.custom_op("mgk::fused_responsibilities", mutates_args=())
def fused_responsibilities(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, query_spans: Tensor | None,
    scale: float, gaussian: bool, is_causal: bool,
) -> Tensor:  # fmt: skip
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``."""
    with on_device(query):
        call = Call(
            query, key, None, shift, log_prior, scales, attn_mask, key_mask, None, None, query_spans, None, scale,
            gaussian, is_causal, False, 0.0,
        )  # fmt: skip
        tile = call.tile("query")
        blocks = count_blocks(call.queries, tile.rows)
        sums = call.new(blocks * call.batch * call.heads, 8)
        launch(
            statistics.responsibilities,
            sums.shape[0],
            (
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns), call.row, call.column,
                call.scales, sums, attn_mask, None if query_mask is None else query_mask.contiguous(),
                query_spans, *call.mask_strides, call.padding, call.scale, call.heads, call.heads // call.kv_heads,
                call.queries, call.keys, call.padded_queries, call.padded_keys, blocks,
            ),
            {
                **call.options,
                "HAS_QUERY_MASK": query_mask is not None,
                "BLOCK_I": tile.rows,
                "BLOCK_J": tile.columns,
                "D": block_width(call.query.shape[-1]),
            },
            tile,
        )  # fmt: skip
    by_head = sums.view(call.batch, call.kv_heads, -1, 8)[..., : call.components]
    return by_head.sum(dim=(0, 2), dtype=torch.float64).float()


@fused_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    query_spans: Tensor | None, key_spans: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = by_token(query, query.shape[1], query.shape[2], value.shape[-1])
    if value.shape[-1] * value.element_size() % 16 != 0:
        out = out.contiguous()
    layout = TermsLayout(query, key, shift, log_prior, scales, key_mask, gaussian, hard)
    terms = query.new_empty(sum(layout.sizes().values()), dtype=torch.float32)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32), terms


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_normaliser: Tensor | None, out: Tensor, normaliser: Tensor, terms: Tensor, query: Tensor,
    key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    extra = [
        normaliser.new_empty(0) if tensor is None else normaliser.new_empty(tensor.shape)
        for tensor in (shift, log_prior, scales)
    ]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), *extra


@fused_responsibilities.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor | None, *_: Any) -> Tensor:
    return query.new_empty(key.shape[1], key.shape[2] if shift is None else shift.shape[1], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.options = inputs[12:]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_normaliser: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing frees them as they are read
    if grad_out is None:
        grad_out = torch.zeros_like(saved[0])
    # With a graph of gradients the operation is asked, which refuses to be differentiated again.
    run = run_backward if is_unwatched(grad_out) and not torch.is_grad_enabled() else fused_attention_backward
    grad_query, grad_key, grad_value, *extra = run(grad_out, grad_normaliser, *saved, *ctx.options)
    extra = [None if tensor is None else grad.to(tensor.dtype) for tensor, grad in zip(saved[6:9], extra, strict=True)]
    return grad_query, grad_key, grad_value, *extra, *[None] * 11


def _refuse_second_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(NO_SECOND_ORDER)


fused_attention.register_autograd(_backward, setup_context=_save_for_backward)
fused_attention_backward.register_autograd(_refuse_second_order)


def run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_run_forward`, again if it has been run for such inputs before."""
    query, key, value, shift, log_prior = mixture = inputs[:5]
    others, options = inputs[5:12], inputs[12:]
    beside = _beside_the_mixture(*others)
    if beside is None or not replay.is_possible(query.device):
        return _run_forward(*inputs)
    added, has_one_mask = beside

    def zeroed() -> tuple[int, int, int] | None:
        layout = TermsLayout(query, key, shift, log_prior, None, others[2], options[1], options[3])
        sizes = layout.sizes()
        first = sum(sizes[name] for name in ("row", "alpha", "column", "rho", "origin"))
        return (2, first, first + sizes["wide"]) if layout.factored else None

    tensors = (*mixture, *added)
    return replay.once(  # type: ignore[return-value]
        lambda: _run_forward(*inputs), replay.signature_of(tensors, ("forward", has_one_mask, *options)), tensors,
        query.device, is_plain=lambda: _is_plain(query, key, value, shift, *added), zeroed=zeroed,
    )  # fmt: skip


def run_backward(grad_out: Tensor, grad_normaliser: Tensor | None, *saved_and_options: Any) -> tuple[Tensor, ...]:
    """:func:`_run_backward`, likewise."""
    saved, others, options = saved_and_options[:8], saved_and_options[8:15], saved_and_options[15:]
    _, _, _, query, key, value, shift, log_prior = saved
    beside = _beside_the_mixture(*others)
    if grad_normaliser is not None or beside is None or not replay.is_possible(query.device):
        return _run_backward(grad_out, grad_normaliser, *saved_and_options)
    added, has_one_mask = beside

    def is_plain() -> bool:
        one_gradient = shift is None or shift.shape[1] <= 2
        by_head = log_prior is None or log_prior.shape[2] == 1
        is_read = aligned(grad_out) is grad_out and _is_plain(query, key, value, shift, *added)
        return one_gradient and by_head and is_read

    tensors = (grad_out, *saved, *added)
    return replay.once(
        lambda: _run_backward(grad_out, None, *saved_and_options),
        replay.signature_of(tensors, ("backward", has_one_mask, *options)), tensors, query.device, is_plain=is_plain,
    )  # fmt: skip


def _beside_the_mixture(
    scales: Tensor | None, attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
    seed: Tensor | None, *spans: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], bool] | None:  # fmt: skip
    """Masks and seed of a call that may be replayed, each tensor once, and whether one mask serves keys and queries;
    ``None`` where more than kernels works on what it has, or it hardly comes again."""
    if any(other is not None for other in (scales, attn_mask, *spans)):
        return None
    has_one_mask = key_mask is not None and query_mask is key_mask
    return (key_mask, None if has_one_mask else query_mask, seed), has_one_mask


def _is_plain(query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the kernels read these tensors as they are, and write what has their width."""
    keys = key.flatten(1, 2)
    read = [query, keys, value]
    return (
        keys.data_ptr() == key.data_ptr()
        and all(aligned(tensor) is tensor and aligned_width(tensor) == tensor.shape[-1] for tensor in read)
        and (shift is None or (shift.dtype == torch.float32 and shift.is_contiguous()))
        and all(other is None or other.is_contiguous() for other in others)
    )


class _Attention(torch.autograd.Function):
    """What the operation is, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = run_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        return output

    backward = staticmethod(_backward)


def attend(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its row normaliser, the way that takes the host least time. Arguments as of the operation."""
    tensors = (query, key, value, shift, log_prior, scales)
    run: Any = fused_attention
    if is_unwatched(*tensors):
        needs_graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        run = _Attention.apply if needs_graph else run_forward
    out, normaliser, _ = run(*tensors, *others)
    return out, normaliser


def is_unwatched(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors with data, and no tracer, mode or transform wants to hear of operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device.type != "meta") for t in tensors)


def visible_pairs(query_shape: Any, num_keys: int, is_causal: bool) -> int:
    batch, heads, num_queries, _ = query_shape
    if not is_causal:
        return int(batch * heads * num_queries * num_keys)
    per_head = sum(max(0, i + 1 + num_keys - num_queries) for i in range(num_queries))
    return int(batch * heads * per_head)


@register_flop_formula(torch.ops.mgk.fused_attention)
def _forward_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any) -> int:
    """One product of query and key for each key tensor, one of weights and values. Pairs behind the diagonal are not
    counted; those behind other masks are, since their number depends on data."""
    is_causal = bool(args[11])
    pairs = visible_pairs(query_shape, key_shape[3], is_causal)
    return 2 * pairs * (key_shape[2] * query_shape[3] + value_shape[3])


@register_flop_formula(torch.ops.mgk.fused_attention_backward)
def _backward_flops(
    grad_shape: Any, grad_normaliser_shape: Any, result_shape: Any, normaliser_shape: Any, terms_shape: Any,
    query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """Both kernels compute logits and weight gradients; then come dv and dk, and dq."""
    is_causal = bool(args[11])
    pairs = visible_pairs(query_shape, key_shape[3], is_causal)
    return 2 * pairs * (4 * key_shape[2] * query_shape[3] + 3 * value_shape[3])
