"""The kernels of linear attention as torch operations, with autograd, shape inference and a FLOP count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops import feature_maps
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.triton import replay
from mgk.ops.triton.inputs import schema_of
from mgk.ops.triton.layout import aligned
from mgk.ops.triton.linear_passes import (
    LinearGradients,
    LinearInputs,
    LinearResults,
    backward_pass,
    cut,
    forward_pass,
    new,
)
from mgk.ops.triton.operator import is_unwatched, refuse_second_order, shortest_way

MAPS: dict[feature_maps.Map, str] = {feature_maps.elu: "elu", feature_maps.relu: "relu"}
WIDEST = 128
SCHEMA = schema_of(LinearInputs)


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


def inputs_of(problem: LinearProblem, length: Tensor | None) -> LinearInputs:
    """A problem as the kernels take it."""
    mixture = problem.mixture
    shift = None if mixture.shift is None else mixture.shift.float()
    return LinearInputs(
        mixture.query, mixture.key, mixture.value, shift, mixture.log_prior, mixture.key_mask, length,
        mixture.is_causal, MAPS[problem.feature_map.key],
    )  # fmt: skip


def attention(problem: LinearProblem) -> Tensor:
    """``[B, H, Nq, Dv]``, where :func:`unsupported` has nothing against it."""
    inputs = inputs_of(problem, None if problem.normalization == "sum" else problem.counts().sqrt())
    out: Tensor = shortest_way(fused_linear_attention, _LinearAttention, run_forward, inputs)[0]
    return _of_valid_queries(out, problem)


@torch.no_grad()
def attention_and_state(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """The same going on from a state, and the state after the last key, ``[B, Hkv, D, Dv + 1]``. Without gradients."""
    inputs = inputs_of(problem, None)
    width, value_width = inputs.query.shape[-1], inputs.value.shape[-1]
    d, dv = inputs.block_widths
    initial = None
    if problem.state is not None:
        state = F.pad(problem.state[..., :-1], (0, dv - value_width, 0, d - width)).flatten(2)
        initial = torch.cat([state, F.pad(problem.state[..., -1], (0, d - width))], dim=-1).contiguous()
    results = forward_pass(inputs, initial)
    last = results.sums[:, -1].unflatten(0, (len(inputs.query), inputs.key.shape[1]))
    state = last[..., : d * dv].unflatten(-1, (d, dv))[..., :width, :value_width]
    return _of_valid_queries(results.out, problem), torch.cat([state, last[..., d * dv : d * dv + width, None]], dim=-1)


def _of_valid_queries(out: Tensor, problem: LinearProblem) -> Tensor:
    query_mask = problem.mixture.query_mask
    return out if query_mask is None else out.masked_fill(~query_mask[:, None, :, None], 0.0)


def run_forward(*values: Any) -> LinearResults:
    """:func:`forward_pass`, again if it has been run for such inputs before."""
    inputs = LinearInputs(*values)
    if not replay.is_possible(inputs.query.device):
        return forward_pass(inputs)
    return LinearResults(*replay.once(
        lambda: forward_pass(inputs), ("linear", *inputs.options), inputs.tensors,
        is_recordable=lambda: _is_plain(inputs.tensors, inputs.query, inputs.key, inputs.value),
    ))  # fmt: skip


def run_backward(grad: Tensor, inverse: Tensor, sums: Tensor, *values: Any) -> LinearGradients:
    """:func:`backward_pass`, likewise."""
    inputs = LinearInputs(*values)
    if not replay.is_possible(inputs.query.device):
        return backward_pass(grad, inverse, sums, inputs)
    tensors = (grad, inverse, sums, *inputs.tensors)

    def is_recordable() -> bool:
        by_head = inputs.log_prior is None or inputs.log_prior.shape[2] == 1
        return by_head and _is_plain(tensors, grad, inputs.query, inputs.key, inputs.value)

    return LinearGradients(*replay.once(
        lambda: backward_pass(grad, inverse, sums, inputs), ("linear backward", *inputs.options), tensors,
        is_recordable=is_recordable,
    ))  # fmt: skip


def _is_plain(tensors: Sequence[Tensor | None], *tokens: Tensor) -> bool:
    """Whether the kernels read all tensors as they are."""
    parameters = [tensor for tensor in tensors if tensor is not None and all(tensor is not each for each in tokens)]
    return all(aligned(each) is each for each in tokens) and all(each.is_contiguous() for each in parameters)


@torch.library.custom_op(
    "mgk::fused_linear_attention", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
def fused_linear_attention(*values: Any) -> LinearResults:
    """:func:`forward_pass` of :class:`LinearInputs`."""
    return forward_pass(LinearInputs(*values))


@torch.library.custom_op(
    "mgk::fused_linear_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor inverse, Tensor sums, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def fused_linear_attention_backward(grad: Tensor, inverse: Tensor, sums: Tensor, *values: Any) -> LinearGradients:
    """:func:`backward_pass` of :class:`LinearInputs`."""
    return backward_pass(grad, inverse, sums, LinearInputs(*values))


@fused_linear_attention.register_fake
def _(*values: Any) -> LinearResults:
    inputs = LinearInputs(*values)
    query, heads = inputs.query, inputs.query.shape[0] * inputs.key.shape[1]
    states = cut(inputs, inputs.key.shape[3], heads).num + 1 if inputs.is_causal else 1
    out = query.new_empty(*query.shape[:3], inputs.value.shape[-1])
    return LinearResults(out, new(query, *query.shape[:3]), new(query, heads, states, inputs.state_size))


@fused_linear_attention_backward.register_fake
def _(grad: Tensor, inverse: Tensor, sums: Tensor, *values: Any) -> LinearGradients:
    inputs = LinearInputs(*values)
    return LinearGradients(
        *[tensor.new_empty(tensor.shape) for tensor in (inputs.query, inputs.key, inputs.value)],
        *[new(grad, *((0,) if tensor is None else tensor.shape)) for tensor in (inputs.shift, inputs.log_prior)],
    )


def _save_for_backward(ctx: Any, values: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, inverse, sums = output
    inputs = LinearInputs(*values)
    ctx.save_for_backward(inverse, sums, *inputs.tensors)
    ctx.options = inputs.options


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    # The saved tensors are asked for once: activation checkpointing frees them as they are read.
    inverse, sums, *tensors = ctx.saved_tensors
    inputs = LinearInputs(*tensors, *ctx.options)
    if grad is None:
        grad = inputs.query.new_zeros(*inputs.query.shape[:3], inputs.value.shape[3])
    # With a graph of gradients the operation is asked, which refuses to be differentiated again.
    run: Any = run_backward if is_unwatched(grad) and not torch.is_grad_enabled() else fused_linear_attention_backward
    gradients = LinearGradients(*run(grad, inverse, sums, *inputs))
    of_shift = None if inputs.shift is None else gradients.shift
    of_prior = None if inputs.log_prior is None else gradients.log_prior
    return *gradients[:3], of_shift, of_prior, None, None, None, None


fused_linear_attention.register_autograd(_backward, setup_context=_save_for_backward)
fused_linear_attention_backward.register_autograd(refuse_second_order)


class _LinearAttention(torch.autograd.Function):
    """What the operation is, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> LinearResults:
        output = run_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        return output

    backward = staticmethod(_backward)


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
