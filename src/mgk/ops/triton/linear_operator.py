"""The kernels of linear attention as torch operations, with autograd, shape inference and a FLOP count."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops import feature_maps
from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.triton import linear, tuning
from mgk.ops.triton.call import PROGRAMS
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, count_blocks, on_device

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
    out = fused_linear_attention(
        mixture.query, mixture.key, mixture.value, None if mixture.shift is None else mixture.shift.float(),
        mixture.log_prior, mixture.key_mask, None if by_sum else problem.counts().sqrt(), mixture.is_causal,
        MAPS[problem.feature_map.key],
    )[0]  # fmt: skip
    return out if mixture.query_mask is None else out.masked_fill(~mixture.query_mask[:, None, :, None], 0.0)


@torch.no_grad()
def attention_and_state(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """The same going on from a state, and the state after the last key, ``[B, Hkv, D, Dv + 1]``. Without gradients."""
    mixture = problem.mixture
    found = _forward(
        mixture.query, mixture.key, mixture.value, None if mixture.shift is None else mixture.shift.float(),
        mixture.log_prior, mixture.key_mask, None, mixture.is_causal, MAPS[problem.feature_map.key], problem.state,
    )  # fmt: skip
    out = found.out
    if mixture.query_mask is not None:
        out = out.masked_fill(~mixture.query_mask[:, None, :, None], 0.0)
    shape = (len(mixture.query), mixture.key.shape[1])
    width, value_width = mixture.query.shape[-1], mixture.value.shape[-1]
    state = found.last_state.unflatten(0, shape)[..., :width, :value_width]
    return out, torch.cat([state, found.last_total.unflatten(0, shape)[..., :width, None]], dim=-1)


class _Plan(NamedTuple):
    """How a call is cut, and what all of its kernels are told."""

    block: int
    segments: int
    blocks_per_segment: int
    options: dict[str, Any]
    tile: tuning.Tile


def _plan(
    length: int, heads: int, query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, is_causal: bool, by_sum: bool, feature_map: str,
) -> _Plan:  # fmt: skip
    """``length`` tokens of ``heads`` heads of all samples are shared out."""
    width, value_width = block_width(query.shape[-1]), block_width(value.shape[-1])
    tile = tuning.choose_linear_tile(max(width, value_width), query.element_size())
    blocks = count_blocks(length, tile.columns)
    wanted = 2 if tuning.is_interpreted() else count_blocks(2 * PROGRAMS, heads)
    per_segment = count_blocks(blocks, max(1, min(wanted, blocks)))
    options = {
        "M": key.shape[2] if shift is None else shift.shape[1],
        "HAS_SHIFT": shift is not None,
        "HAS_PRIOR": log_prior is not None,
        "PRIOR_BY_KEY": log_prior is not None and log_prior.shape[2] > 1,
        "HAS_KEY_MASK": key_mask is not None,
        "MAP": feature_map,
        "CAUSAL": is_causal,
        "BY_SUM": by_sum,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "BLOCK": tile.columns,
        "D": width,
        "DV": value_width,
    }
    return _Plan(tile.columns, count_blocks(blocks, max(per_segment, 1)), max(per_segment, 1), options, tile)


def _prior_strides(log_prior: Tensor | None) -> tuple[int, int, int]:
    if log_prior is None:
        return 0, 0, 0
    return log_prior.stride(0), log_prior.stride(1), log_prior.stride(2) if log_prior.shape[2] > 1 else 0


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


@torch.library.custom_op("mgk::fused_linear_attention", mutates_args=())
def fused_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Linear attention, its normaliser, and the states before each segment (or the one of all keys).

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
    found = _forward(query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map, None)
    return found.out, found.normaliser, found.state, found.total


class _Results(NamedTuple):
    """Of forward, and the state after the last key."""

    out: Tensor
    normaliser: Tensor
    state: Tensor
    total: Tensor
    last_state: Tensor
    last_total: Tensor


def _forward(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str, initial: Tensor | None,
) -> _Results:  # fmt: skip
    """``initial``: ``[B, Hkv, D, Dv + 1]``, what earlier keys have left."""
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    with on_device(query):
        query, key, value = aligned(query), aligned(key), aligned(value)
        shift = None if shift is None else shift.contiguous()
        key_mask = None if key_mask is None else key_mask.contiguous()
        common = (query, key, value, shift, log_prior, key_mask, is_causal, length is None, feature_map)
        plan = _plan(keys, batch * kv_heads, *common)
        d, dv = plan.options["D"], plan.options["DV"]
        state = _new(query, batch * kv_heads, plan.segments, d, dv)
        total = _new(query, batch * kv_heads, plan.segments, d)
        key_strides = (*key.stride()[:4], *value.stride()[:3], *_prior_strides(log_prior))
        launch(
            linear.linear_states,
            batch * kv_heads * plan.segments,
            (
                key, value, shift, log_prior, key_mask, state, total, *key_strides, kv_heads, keys, plan.segments,
                plan.blocks_per_segment, width, value_width,
            ),
            plan.options,
            plan.tile,
        )  # fmt: skip
        last_state, last_total = state.sum(dim=1), total.sum(dim=1)
        if is_causal:
            state, total = _before(state), _before(total)
        else:
            state, total = last_state, last_total
        if initial is not None:
            initial = initial.flatten(0, 1)
            first_state = F.pad(initial[..., :-1], (0, dv - value_width, 0, d - width))
            first_total = F.pad(initial[..., -1], (0, d - width))
            last_state, last_total = last_state + first_state, last_total + first_total
            state = state + first_state[:, None] if is_causal else last_state
            total = total + first_total[:, None] if is_causal else last_total
        out = query.new_empty(batch, heads, queries, value_width)
        normaliser = _new(query, batch, heads, queries)
        # Under causality the segments of queries are those of keys.
        rows = plan if is_causal else _plan(queries, batch * heads, *common)
        launch(
            linear.linear_forward,
            batch * heads * rows.segments,
            (
                query, key, value, out, shift, log_prior, key_mask, state, total, length, normaliser,
                *query.stride()[:3], *key.stride()[:4], *value.stride()[:3], *out.stride()[:3],
                *_prior_strides(log_prior), heads, heads // kv_heads, queries, keys, rows.segments,
                rows.blocks_per_segment, width, value_width,
            ),
            rows.options,
            rows.tile,
        )  # fmt: skip
    return _Results(out, normaliser, state, total, last_state, last_total)


def _before(states: Tensor) -> Tensor:
    """``[heads, segments, ...]``: what all segments before each have left together."""
    sums = states.cumsum(dim=1)
    return torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)


def _after(states: Tensor) -> Tensor:
    """The same of all segments after each."""
    return _before(states.flip(1)).flip(1)


@torch.library.custom_op("mgk::fused_linear_attention_backward", mutates_args=())
def fused_linear_attention_backward(
    grad: Tensor, out: Tensor, normaliser: Tensor, state: Tensor, total: Tensor, query: Tensor, key: Tensor,
    value: Tensor, shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, length: Tensor | None,
    is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, shift and log prior; the last two are empty where there is none."""
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[3], value.shape[-1]
    group_size = heads // kv_heads
    shapes = query.shape, key.shape, value.shape
    with on_device(query):
        query, key, value, grad, out = (aligned(tensor) for tensor in (query, key, value, grad, out))
        shift = None if shift is None else shift.contiguous()
        key_mask = None if key_mask is None else key_mask.contiguous()
        common = (query, key, value, shift, log_prior, key_mask, is_causal, length is None, feature_map)
        by_key = _plan(keys, batch * kv_heads, *common)
        by_query = by_key if is_causal else _plan(queries, batch * heads, *common)
        reverse = by_key if is_causal else _plan(queries, batch * kv_heads, *common)
        d, dv, components = by_key.options["D"], by_key.options["DV"], by_key.options["M"]
        rows = (*out.stride()[:3], *grad.stride()[:3])
        key_strides = (*key.stride()[:4], *value.stride()[:3])
        prior_strides = _prior_strides(log_prior)

        grad_query = query.new_empty(shapes[0])
        launch(
            linear.linear_backward_query,
            batch * heads * by_query.segments,
            (
                query, key, value, out, grad, grad_query, shift, log_prior, key_mask, state, total, normaliser,
                *query.stride()[:3], *key_strides, *rows, *prior_strides, heads, group_size, queries, keys,
                by_query.segments, by_query.blocks_per_segment, width, value_width,
            ),
            by_query.options,
            by_query.tile,
        )  # fmt: skip

        later = _new(query, batch * kv_heads, reverse.segments, d, dv)
        later_total = _new(query, batch * kv_heads, reverse.segments, d)
        launch(
            linear.linear_reverse_states,
            batch * kv_heads * reverse.segments,
            (
                query, out, grad, normaliser, later, later_total, *query.stride()[:3], *rows, heads, group_size,
                queries, reverse.segments, reverse.blocks_per_segment, width, value_width,
            ),
            reverse.options,
            reverse.tile,
        )  # fmt: skip
        later, later_total = (_after(each) if is_causal else each.sum(dim=1) for each in (later, later_total))

        grad_key, grad_value = key.new_empty(shapes[1]), value.new_empty(shapes[2])
        shares = batch * by_key.segments
        shift_share = None if shift is None else _new(query, kv_heads, components, shares, d)
        prior_share = None
        if log_prior is not None:
            prior_share = _new(query, kv_heads, components, *((batch, keys) if log_prior.shape[2] > 1 else (shares,)))
        launch(
            linear.linear_backward_key_value,
            batch * kv_heads * by_key.segments,
            (
                query, key, value, out, grad, grad_key, grad_value, shift, log_prior, key_mask, later, later_total,
                normaliser, shift_share, prior_share, *query.stride()[:3], *key_strides, *rows, *prior_strides, heads,
                group_size, queries, keys, by_key.segments, by_key.blocks_per_segment, batch, width, value_width,
            ),
            by_key.options,
            by_key.tile,
        )  # fmt: skip
        grad_shift = _new(query, 0) if shift_share is None else shift_share.sum(dim=2)[..., :width]
        grad_prior = _new(query, 0)
        if prior_share is not None and log_prior is not None:
            grad_prior = prior_share.sum(dim=2).reshape(log_prior.shape)
    return grad_query, grad_key, grad_value, grad_shift, grad_prior


@fused_linear_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None,
    key_mask: Tensor | None, length: Tensor | None, is_causal: bool, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[3]
    common = (query, key, value, shift, log_prior, key_mask, is_causal, length is None, feature_map)
    plan = _plan(keys, batch * kv_heads, *common)
    d, dv = plan.options["D"], plan.options["DV"]
    segments = (plan.segments,) if is_causal else ()
    return (
        query.new_empty(batch, heads, queries, value.shape[-1]),
        _new(query, batch, heads, queries),
        _new(query, batch * kv_heads, *segments, d, dv),
        _new(query, batch * kv_heads, *segments, d),
    )


@fused_linear_attention_backward.register_fake
def _(
    grad: Tensor, out: Tensor, normaliser: Tensor, state: Tensor, total: Tensor, query: Tensor, key: Tensor,
    value: Tensor, shift: Tensor | None, log_prior: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    empty = _new(query, 0)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        empty if shift is None else _new(query, *shift.shape),
        empty.clone() if log_prior is None else _new(query, *log_prior.shape),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map = inputs
    ctx.save_for_backward(*output, query, key, value, shift, log_prior, key_mask, length)
    ctx.options = (is_causal, feature_map)


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad = torch.zeros_like(saved[0]) if grad is None else grad
    gradients = fused_linear_attention_backward(grad, *saved, *ctx.options)
    shift, log_prior = saved[7], saved[8]
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


@register_flop_formula(torch.ops.mgk.fused_linear_attention)
def _forward_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any) -> int:
    """The state of all keys, and what all queries read of it: what a chunk adds is an implementation's choice."""
    batch, heads, queries, width = query_shape
    return 2 * batch * (heads * queries + key_shape[1] * key_shape[3]) * width * (value_shape[3] + 1)


@register_flop_formula(torch.ops.mgk.fused_linear_attention_backward)
def _backward_flops(
    grad_shape: Any, attention_shape: Any, normaliser_shape: Any, state_shape: Any, total_shape: Any, query_shape: Any,
    key_shape: Any, value_shape: Any, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Each product has two in the backward pass."""
    return 2 * _forward_flops(query_shape, key_shape, value_shape)
