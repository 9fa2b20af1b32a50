"""The kernels of linear attention as torch operations, with autograd, shape inference and a FLOP count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops import feature_maps
from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.triton import replay
from mgk.ops.triton.layout import aligned, block_width
from mgk.ops.triton.linear_passes import LinearInputs, backward_pass, forward_pass, new, state_size
from mgk.ops.triton.operator import is_unwatched

MAPS: dict[feature_maps.Map, str] = {feature_maps.elu: "elu", feature_maps.relu: "relu"}
WIDEST = 128


def unsupported(problem: LinearProblem) -> str | None:
    """What the kernels cannot do of a call, or ``None``."""
    mixture, maps = problem.mixture, problem.feature_map
    if maps.query is not maps.key or maps.key not in MAPS:
        return "feature maps other than 'elu' and 'relu'"
    if mixture.query.dtype == torch.float64:
        return "float64"
    if max(mixture.query.shape[-1], mixture.value.shape[-1]) > WIDEST:
        return f"heads wider than {WIDEST}"
    if mixture.log_prior is not None and mixture.log_prior.ndim == 4:
        return "a log_prior of each sample"
    if mixture.num_components > 8:
        return "more than 8 components"
    if mixture.is_causal and mixture.causal_offset != 0:
        return "causality with another number of keys than queries"
    return None


def attention(problem: LinearProblem) -> Tensor:
    """``[B, H, Nq, Dv]``, where :func:`unsupported` has nothing against it."""
    mixture = problem.mixture
    by_sum = problem.normalization == "sum"
    out = attend(
        mixture.query, mixture.key, mixture.value, None if mixture.shift is None else mixture.shift.float(),
        mixture.log_prior, mixture.key_mask, None if by_sum else problem.counts().sqrt(), mixture.is_causal,
        MAPS[problem.feature_map.key],
    )  # fmt: skip
    return out if mixture.query_mask is None else out.masked_fill(~mixture.query_mask[:, None, :, None], 0.0)


@torch.no_grad()
def attention_and_state(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """The same going on from a state, and the state after the last key, ``[B, Hkv, D, Dv + 1]``. Without gradients."""
    mixture = problem.mixture
    width, value_width = mixture.query.shape[-1], mixture.value.shape[-1]
    d, dv = block_width(width), block_width(value_width)
    initial = None
    if problem.state is not None:
        state = F.pad(problem.state[..., :-1], (0, dv - value_width, 0, d - width)).flatten(2)
        initial = torch.cat([state, F.pad(problem.state[..., -1], (0, d - width))], dim=-1).contiguous()
    out, _, sums = forward_pass(
        mixture.query, mixture.key, mixture.value, None if mixture.shift is None else mixture.shift.float(),
        mixture.log_prior, mixture.key_mask, None, mixture.is_causal, MAPS[problem.feature_map.key], initial,
    )  # fmt: skip
    if mixture.query_mask is not None:
        out = out.masked_fill(~mixture.query_mask[:, None, :, None], 0.0)
    last = sums[:, -1].unflatten(0, (len(mixture.query), mixture.key.shape[1]))
    state = last[..., : d * dv].unflatten(-1, (d, dv))[..., :width, :value_width]
    return out, torch.cat([state, last[..., d * dv : d * dv + width, None]], dim=-1)


def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`forward_pass`, again if it has been run for such inputs before."""
    inputs = LinearInputs(*arguments)
    if not replay.is_possible(inputs.query.device):
        return forward_pass(*inputs)
    return replay.once(  # type: ignore[return-value]
        lambda: forward_pass(*inputs), ("linear", *inputs.options), inputs.tensors,
        is_recordable=lambda: _is_plain(inputs.tensors, inputs.query, inputs.key, inputs.value),
    )  # fmt: skip


def run_backward(grad: Tensor, inverse: Tensor, sums: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """:func:`backward_pass`, likewise."""
    inputs = LinearInputs(*arguments)
    if not replay.is_possible(inputs.query.device):
        return backward_pass(grad, inverse, sums, *inputs)
    tensors = (grad, inverse, sums, *inputs.tensors)

    def is_recordable() -> bool:
        by_head = inputs.log_prior is None or inputs.log_prior.shape[2] == 1
        return by_head and _is_plain(tensors, grad, inputs.query, inputs.key, inputs.value)

    return replay.once(
        lambda: backward_pass(grad, inverse, sums, *inputs), ("linear backward", *inputs.options), tensors,
        is_recordable=is_recordable,
    )  # fmt: skip


def _is_plain(tensors: Sequence[Tensor | None], *tokens: Tensor) -> bool:
    """Whether the kernels read all tensors as they are."""
    parameters = [tensor for tensor in tensors if tensor is not None and all(tensor is not each for each in tokens)]
    return all(aligned(each) is each for each in tokens) and all(each.is_contiguous() for each in parameters)


@torch.library.custom_op("mgk::fused_linear_attention", mutates_args=())
def fused_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Linear attention, the inverse of its normaliser, and the states before each segment and after the last (or that
    alone).

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or one component beside ``shift``.
        value: ``[B, Hkv, Nk, Dv]``.
        shift: fp32 ``[Hkv, M, D]``.
        log_prior: fp32 ``[Hkv, M, Nk]`` or ``[Hkv, M, 1]``.
        key_mask: bool ``[B, Nk]``.
        length: fp32 ``[B, Nq]``, what to divide by instead of the sum.
        is_causal: with as many queries as keys.
        feature_map: ``"elu"`` or ``"relu"``.
    """
    return forward_pass(query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map)


@torch.library.custom_op("mgk::fused_linear_attention_backward", mutates_args=())
def fused_linear_attention_backward(
    grad: Tensor, inverse: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor,
    shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, length: Tensor | None, is_causal: bool,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, shift and log prior; the last two are empty where there is none."""
    return backward_pass(
        grad, inverse, sums, query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map
    )


@fused_linear_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    inputs = LinearInputs(query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map)
    plan = inputs.plan(keys, batch * kv_heads, (width, value_width))
    return (
        query.new_empty(batch, heads, queries, value_width),
        new(query, batch, heads, queries),
        new(query, batch * kv_heads, plan.segments + 1 if is_causal else 1, state_size(plan.options)),
    )


@fused_linear_attention_backward.register_fake
def _(
    grad: Tensor, inverse: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor,
    shift: Tensor | None, log_prior: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        new(query, *((0,) if shift is None else shift.shape)),
        new(query, *((0,) if log_prior is None else log_prior.shape)),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, inverse, sums = output
    named = LinearInputs(*inputs)
    ctx.save_for_backward(inverse, sums, *named.tensors)
    ctx.options = named.options


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    # The saved tensors are asked for once: activation checkpointing frees them as they are read.
    inverse, sums, *tensors = ctx.saved_tensors
    inputs = LinearInputs(*tensors, *ctx.options)
    if grad is None:
        grad = inputs.query.new_zeros(*inputs.query.shape[:3], inputs.value.shape[3])
    # With a graph of gradients the operation is asked, which refuses to be differentiated again.
    run: Any = run_backward if is_unwatched(grad) and not torch.is_grad_enabled() else fused_linear_attention_backward
    grad_query, grad_key, grad_value, grad_shift, grad_prior = run(grad, inverse, sums, *inputs)
    of_shift = None if inputs.shift is None else grad_shift
    of_prior = None if inputs.log_prior is None else grad_prior
    return grad_query, grad_key, grad_value, of_shift, of_prior, None, None, None, None


def _refuse_second_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(NO_SECOND_ORDER)


fused_linear_attention.register_autograd(_backward, setup_context=_save_for_backward)
fused_linear_attention_backward.register_autograd(_refuse_second_order)


class _LinearAttention(torch.autograd.Function):
    """What the operation is, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = run_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        return output

    backward = staticmethod(_backward)


def attend(*arguments: Any) -> Tensor:
    """The output alone, the way that takes the host least time. Arguments as of the operation."""
    inputs = LinearInputs(*arguments)
    tensors = inputs.tensors
    run: Any = fused_linear_attention
    if is_unwatched(*tensors):
        needs_graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        run = _LinearAttention.apply if needs_graph else run_forward
    out: Tensor = run(*inputs)[0]
    return out


@register_flop_formula(torch.ops.mgk.fused_linear_attention)
def _forward_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any) -> int:
    """The state of all keys, and what all queries read of it: what a chunk adds is an implementation's choice."""
    batch, heads, queries, width = query_shape
    return 2 * batch * (heads * queries + key_shape[1] * key_shape[3]) * width * (value_shape[3] + 1)


@register_flop_formula(torch.ops.mgk.fused_linear_attention_backward)
def _backward_flops(
    grad_shape: Any, inverse_shape: Any, state_shape: Any, query_shape: Any, key_shape: Any,
    value_shape: Any, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Each product has two in the backward pass."""
    return 2 * _forward_flops(query_shape, key_shape, value_shape)
