"""The kernels of linear attention as torch operations, with autograd, shape inference and a FLOP count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops import feature_maps
from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.triton import replay, tuning
from mgk.ops.triton.call import SMALL
from mgk.ops.triton.kernels import linear, linear_backward
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, count_blocks, on_device
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
    out, _, sums = _run_forward(
        mixture.query, mixture.key, mixture.value, None if mixture.shift is None else mixture.shift.float(),
        mixture.log_prior, mixture.key_mask, None, mixture.is_causal, MAPS[problem.feature_map.key], initial,
    )  # fmt: skip
    if mixture.query_mask is not None:
        out = out.masked_fill(~mixture.query_mask[:, None, :, None], 0.0)
    last = sums[:, -1].unflatten(0, (len(mixture.query), mixture.key.shape[1]))
    state = last[..., : d * dv].unflatten(-1, (d, dv))[..., :width, :value_width]
    return out, torch.cat([state, last[..., d * dv : d * dv + width, None]], dim=-1)


class _Plan(NamedTuple):
    """How tokens are cut into segments, and what all kernels of a call are told."""

    segments: int
    tokens_per_segment: int
    options: dict[str, Any]
    element_size: int
    device: torch.device

    def kernel(self, name: str) -> tuple[int, dict[str, Any], tuning.Tile]:
        """Blocks in a segment, constants and tile of one of the kernels."""
        width = max(self.options["D"], self.options["DV"])
        is_causal, is_mixture = self.options["CAUSAL"], self.options["M"] > 1
        tile = tuning.choose_linear_tile(name, width, self.element_size, is_causal, is_mixture, self.device)
        return self.tokens_per_segment // tile.columns, {**self.options, "BLOCK": tile.columns}, tile


def _segments_wanted(heads: int, width: int, is_mixture: bool, device: torch.device) -> int:
    """So many segments that all of the GPU is busy, and no more: every segment has a state in memory, which grows with
    the square of the width. (Narrow heads, and keys that are no mixture, were measured to leave room for more programs
    on a multiprocessor.)"""
    if tuning.is_interpreted():
        return 2
    waves = 2 if width > 64 else 4 if width > 32 and is_mixture else 8
    return count_blocks(tuning.programs(device, waves), heads)


def _plan(
    length: int, heads: int, query: Tensor, key: Tensor, widths: tuple[int, int], shift: Tensor | None,
    log_prior: Tensor | None, key_mask: Tensor | None, is_causal: bool, by_sum: bool, feature_map: str,
) -> _Plan:  # fmt: skip
    """How ``length`` tokens of ``heads`` heads of all samples are cut; ``widths`` are those of keys and values."""
    width, value_width = map(block_width, widths)
    unit = tuning.linear_unit()
    blocks = count_blocks(length, unit)
    components = key.shape[2] if shift is None else shift.shape[1]
    wanted = _segments_wanted(heads, max(width, value_width), components > 1, query.device)
    per_segment = max(1, count_blocks(blocks, max(1, min(wanted, blocks))))
    options = {
        "M": components,
        "HAS_SHIFT": shift is not None,
        "HAS_PRIOR": log_prior is not None,
        "PRIOR_BY_KEY": log_prior is not None and log_prior.shape[2] > 1,
        "HAS_KEY_MASK": key_mask is not None,
        "MAP": feature_map,
        "CAUSAL": is_causal,
        "BY_SUM": by_sum,
        "INPUT_PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "D": width,
        "DV": value_width,
        "EVEN": (width, value_width) == widths,
        "ONE_GROUP": query.shape[1] == key.shape[1],
    }
    return _Plan(count_blocks(blocks, per_segment), per_segment * unit, options, query.element_size(), query.device)


def _prior_strides(log_prior: Tensor | None) -> tuple[int, int, int]:
    if log_prior is None:
        return 0, 0, 0
    return log_prior.stride(0), log_prior.stride(1), log_prior.stride(2) if log_prior.shape[2] > 1 else 0


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


def _state_size(options: dict[str, Any]) -> int:
    return int(options["D"] * options["DV"] + options["D"])


def _add_states(states: Tensor, initial: Tensor | None, is_causal: bool, reverse: bool) -> Tensor:
    """``[heads, segments + 1, state]`` under causality, else ``[heads, 1, state]``: see ``linear_add_states``."""
    heads, segments, size = states.shape
    sums = _new(states, heads, segments + 1 if is_causal else 1, size)
    together = 64 if tuning.is_interpreted() else 512
    launch(
        linear.linear_add_states,
        heads * count_blocks(size, together),
        (states, initial, sums, segments),
        {
            "CAUSAL": is_causal, "REVERSE": reverse, "HAS_INITIAL": initial is not None, "STATE": size,
            "TOGETHER": together,
        },
        SMALL,
    )  # fmt: skip
    return sums


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str, initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``initial``: ``[B, Hkv, state]``, what earlier keys have left."""
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    widths = (width, value_width)
    with on_device(query):
        query, key, value = aligned(query), aligned(key), aligned(value)
        shift = None if shift is None else shift.contiguous()
        key_mask = None if key_mask is None else key_mask.contiguous()
        common = (query, key, widths, shift, log_prior, key_mask, is_causal, length is None, feature_map)
        plan = _plan(keys, batch * kv_heads, *common)
        states = _new(query, batch * kv_heads, plan.segments, _state_size(plan.options))
        key_strides = (*key.stride()[:4], *value.stride()[:3], *_prior_strides(log_prior))
        blocks, options, tile = plan.kernel("states")
        launch(
            linear.linear_states,
            batch * kv_heads * plan.segments,
            (
                key, value, shift, log_prior, key_mask, states, *key_strides, kv_heads, keys, plan.segments, blocks,
                width, value_width,
            ),
            options,
            tile,
        )  # fmt: skip
        sums = _add_states(states, initial, is_causal, reverse=False)
        out = query.new_empty(batch, heads, queries, value_width)
        inverse = _new(query, batch, heads, queries)
        # Under causality the segments of queries are those of keys.
        rows = plan if is_causal else _plan(queries, batch * heads, *common)
        blocks, options, tile = rows.kernel("forward")
        launch(
            linear.linear_forward,
            batch * heads * rows.segments,
            (
                query, key, value, out, shift, log_prior, key_mask, sums, length, inverse, *query.stride()[:3],
                *key_strides, heads, heads // kv_heads, queries, keys, rows.segments, blocks, width, value_width,
            ),
            options,
            tile,
        )  # fmt: skip
    return out, inverse, sums


def _run_backward(
    grad: Tensor, inverse: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor,
    shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, length: Tensor | None, is_causal: bool,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    widths = (width, value_width)
    group_size = heads // kv_heads
    shapes = query.shape, key.shape, value.shape
    with on_device(query):
        query, key, value, grad = (aligned(tensor) for tensor in (query, key, value, grad))
        shift = None if shift is None else shift.contiguous()
        key_mask = None if key_mask is None else key_mask.contiguous()
        common = (query, key, widths, shift, log_prior, key_mask, is_causal, length is None, feature_map)
        by_key = _plan(keys, batch * kv_heads, *common)
        by_query = by_key if is_causal else _plan(queries, batch * heads, *common)
        reverse = by_key if is_causal else _plan(queries, batch * kv_heads, *common)
        d, components = by_key.options["D"], by_key.options["M"]
        query_strides, grad_strides = query.stride()[:3], grad.stride()[:3]
        key_strides = (*key.stride()[:4], *value.stride()[:3])
        prior_strides = _prior_strides(log_prior)

        grad_query = query.new_empty(shapes[0])
        delta = _new(query, batch, heads, queries) if length is None else None
        blocks, options, tile = by_query.kernel("query")
        launch(
            linear_backward.linear_backward_query,
            batch * heads * by_query.segments,
            (
                query, key, value, grad, grad_query, delta, shift, log_prior, key_mask, sums, inverse,
                *query_strides, *key_strides, *grad_strides, *prior_strides, heads, group_size,
                queries, keys, by_query.segments, blocks, width, value_width,
            ),
            options,
            tile,
        )  # fmt: skip

        states = _new(query, batch * kv_heads, reverse.segments, _state_size(reverse.options))
        blocks, options, tile = reverse.kernel("reverse states")
        launch(
            linear_backward.linear_reverse_states,
            batch * kv_heads * reverse.segments,
            (
                query, grad, delta, inverse, states, *query_strides, *grad_strides, heads, group_size, queries,
                reverse.segments, blocks, width, value_width,
            ),
            options,
            tile,
        )  # fmt: skip
        later = _add_states(states, None, is_causal, reverse=True)

        grad_key, grad_value = key.new_empty(shapes[1]), value.new_empty(shapes[2])
        blocks, options, tile = by_key.kernel("key_value")
        partials = batch * by_key.segments * (1 if components <= 2 else blocks)
        shift_partials = None if shift is None else _new(query, kv_heads, components, partials, d)
        prior_partials = None
        by_position = log_prior is not None and log_prior.shape[2] > 1
        if log_prior is not None:
            prior_partials = _new(query, kv_heads, components, *((batch, keys) if by_position else (partials,)))
        launch(
            linear_backward.linear_backward_key_value,
            batch * kv_heads * by_key.segments,
            (
                query, key, value, grad, grad_key, grad_value, delta, shift, log_prior, key_mask, later, inverse,
                shift_partials, prior_partials, *query_strides, *key_strides, *grad_strides, *prior_strides, heads,
                group_size, queries, keys, by_key.segments, blocks, batch, width, value_width,
            ),
            options,
            tile,
        )  # fmt: skip
        grad_shift = _new(query, 0) if shift is None else _new(query, *shift.shape)
        grad_prior = _new(query, 0) if log_prior is None else _new(query, *log_prior.shape)
        if by_position and prior_partials is not None:
            grad_prior = prior_partials.sum(dim=2)
        by_head = log_prior is not None and not by_position
        if shift is not None or by_head:
            programs = kv_heads * ((0 if shift is None else components * d // 16) + by_head)
            launch(
                linear_backward.linear_add_partials,
                programs,
                (
                    shift_partials, prior_partials, log_prior, grad_shift, grad_prior, *prior_strides[:2], kv_heads,
                    partials, width,
                ),
                {**by_key.options, "TOGETHER": 32 if tuning.is_interpreted() else 256},
                SMALL,
            )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_shift, grad_prior


def run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_run_forward`, again if it has been run for such inputs before."""
    tensors, options = inputs[:7], inputs[7:]
    query, key, value = tensors[:3]
    if not replay.is_possible(query.device):
        return _run_forward(*inputs)
    return replay.once(  # type: ignore[return-value]
        lambda: _run_forward(*inputs), ("linear", *options), tensors,
        is_recordable=lambda: _is_plain(tensors, query, key, value),
    )  # fmt: skip


def run_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`_run_backward`, likewise."""
    tensors, options = inputs[:10], inputs[10:]
    grad, _, _, query, key, value, _, log_prior = tensors[:8]
    if not replay.is_possible(query.device):
        return _run_backward(*inputs)

    def is_plain() -> bool:
        by_head = log_prior is None or log_prior.shape[2] == 1
        return by_head and _is_plain(tensors, grad, query, key, value)

    return replay.once(  # type: ignore[return-value]
        lambda: _run_backward(*inputs), ("linear backward", *options), tensors, is_recordable=is_plain,
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
    return _run_forward(query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map)


@torch.library.custom_op("mgk::fused_linear_attention_backward", mutates_args=())
def fused_linear_attention_backward(
    grad: Tensor, inverse: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor,
    shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, length: Tensor | None, is_causal: bool,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, shift and log prior; the last two are empty where there is none."""
    return _run_backward(
        grad, inverse, sums, query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map
    )


@fused_linear_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    widths = (width, value_width)
    common = (query, key, widths, shift, log_prior, key_mask, is_causal, length is None, feature_map)
    plan = _plan(keys, batch * kv_heads, *common)
    return (
        query.new_empty(batch, heads, queries, value_width),
        _new(query, batch, heads, queries),
        _new(query, batch * kv_heads, plan.segments + 1 if is_causal else 1, _state_size(plan.options)),
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
        _new(query, *((0,) if shift is None else shift.shape)),
        _new(query, *((0,) if log_prior is None else log_prior.shape)),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing frees them as they are read
    query, value, shift, log_prior = saved[2], saved[4], saved[5], saved[6]
    grad = query.new_zeros(*query.shape[:3], value.shape[3]) if grad is None else grad
    # With a graph of gradients the operation is asked, which refuses to be differentiated again.
    run = run_backward if is_unwatched(grad) and not torch.is_grad_enabled() else fused_linear_attention_backward
    gradients = run(grad, *saved, *ctx.options)
    return (
        *gradients[:3],
        None if shift is None else gradients[3],
        None if log_prior is None else gradients[4],
        *(None,) * 4,
    )


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


def attend(*inputs: Any) -> Tensor:
    """The output alone, the way that takes the host least time. Arguments as of the operation."""
    tensors = inputs[:7]
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
