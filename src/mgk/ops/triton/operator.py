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
from mgk.ops.triton import replay
from mgk.ops.triton.call import Call, TermsLayout, prior_and_strides
from mgk.ops.triton.kernels import responsibilities
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, aligned_width, block_width, by_token, count_blocks, descriptor, on_device
from mgk.ops.triton.passes import backward_pass, forward_pass

fused_attention = torch.library.custom_op("mgk::fused_attention", forward_pass, mutates_args=())
fused_attention_backward = torch.library.custom_op("mgk::fused_attention_backward", backward_pass, mutates_args=())


@torch.library.custom_op("mgk::fused_responsibilities", mutates_args=())
def fused_responsibilities(
    query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, query_spans: Tensor | None,
    scale: float, gaussian: bool, is_causal: bool,
) -> Tensor:  # fmt: skip
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``."""
    with on_device(query):
        call = Call(
            query, key, None, shift, log_prior, inverse_variance, attn_mask, key_mask, None, None, query_spans, scale,
            gaussian, is_causal, False, 0.0,
        )  # fmt: skip
        tile = call.tile("query")
        blocks = count_blocks(call.queries, tile.rows)
        sums = call.new(blocks * call.batch * call.heads, 8)
        launch(
            responsibilities.responsibilities,
            sums.shape[0],
            (
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns), call.row, call.column,
                call.inverse_variance, sums, attn_mask, None if query_mask is None else query_mask.contiguous(),
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
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
    attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    query_spans: Tensor | None, key_spans: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = by_token(query, query.shape[1], query.shape[2], value.shape[-1])
    if value.shape[-1] * value.element_size() % 16 != 0:
        out = out.contiguous()
    layout = TermsLayout(query, key, shift, log_prior, inverse_variance, key_mask, gaussian, hard)
    terms = query.new_empty(sum(layout.sizes().values()), dtype=torch.float32)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32), terms


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_normaliser: Tensor | None, out: Tensor, normaliser: Tensor, terms: Tensor, query: Tensor,
    key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    extra = [
        normaliser.new_empty(0) if tensor is None else normaliser.new_empty(tensor.shape)
        for tensor in (shift, log_prior, inverse_variance)
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
    """:func:`forward_pass`, again if it has been run for such inputs before."""
    query, key, value, shift, log_prior = mixture = inputs[:5]
    others, options = inputs[5:12], inputs[12:]
    beside = _beside_the_mixture(*others)
    if beside is None or not replay.is_possible(query.device):
        return forward_pass(*inputs)
    added, has_one_mask = beside

    def zeroed() -> tuple[int, int, int] | None:
        layout = TermsLayout(query, key, shift, log_prior, None, others[2], options[1], options[3])
        sizes = layout.sizes()
        first = sum(list(sizes.values())[: list(sizes).index("unfactored")])
        return (2, first, first + sizes["unfactored"]) if layout.factored else None

    tensors = (*mixture, *added)
    return replay.once(  # type: ignore[return-value]
        lambda: forward_pass(*inputs), replay.signature_of(tensors, ("forward", has_one_mask, *options)), tensors,
        query.device, is_plain=lambda: _is_plain(query, key, value, shift, log_prior, *added), zeroed=zeroed,
    )  # fmt: skip


def run_backward(grad_out: Tensor, grad_normaliser: Tensor | None, *saved_and_options: Any) -> tuple[Tensor, ...]:
    """:func:`backward_pass`, likewise."""
    saved, others, options = saved_and_options[:8], saved_and_options[8:15], saved_and_options[15:]
    _, _, _, query, key, value, shift, log_prior = saved
    beside = _beside_the_mixture(*others)
    if grad_normaliser is not None or beside is None or not replay.is_possible(query.device):
        return backward_pass(grad_out, grad_normaliser, *saved_and_options)
    added, has_one_mask = beside

    def is_plain() -> bool:
        one_gradient = shift is None or shift.shape[1] <= 2
        by_head = log_prior is None or (log_prior.ndim == 3 and log_prior.shape[2] == 1)
        is_read = aligned(grad_out) is grad_out and _is_plain(query, key, value, shift, log_prior, *added)
        return one_gradient and by_head and is_read

    tensors = (grad_out, *saved, *added)
    return replay.once(
        lambda: backward_pass(grad_out, None, *saved_and_options),
        replay.signature_of(tensors, ("backward", has_one_mask, *options)), tensors, query.device, is_plain=is_plain,
    )  # fmt: skip


def _beside_the_mixture(
    inverse_variance: Tensor | None, attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
    seed: Tensor | None, *spans: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], bool] | None:  # fmt: skip
    """Masks and seed of a call that may be replayed, each tensor once, and whether one mask serves keys and queries;
    ``None`` where more than kernels works on what it has, or it hardly comes again."""
    if any(other is not None for other in (inverse_variance, attn_mask, *spans)):
        return None
    has_one_mask = key_mask is not None and query_mask is key_mask
    return (key_mask, None if has_one_mask else query_mask, seed), has_one_mask


def _is_plain(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, *others: Tensor | None
) -> bool:
    """Whether the kernels read these tensors as they are, and write what has their width."""
    keys, prior = key.flatten(1, 2), prior_and_strides(log_prior)[0]
    read = [query, keys, value]
    return (
        keys.data_ptr() == key.data_ptr()
        and (prior is None or log_prior is None or prior.data_ptr() == log_prior.data_ptr())
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
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its row normaliser, the way that takes the host least time. Arguments as of the operation."""
    tensors = (query, key, value, shift, log_prior, inverse_variance)
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
