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


class LinearInputs(NamedTuple):
    """The arguments of :func:`fused_linear_attention`, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor | None
    log_prior: Tensor | None
    key_mask: Tensor | None
    length: Tensor | None
    is_causal: bool
    feature_map: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.shift, self.log_prior, self.key_mask, self.length

    @property
    def options(self) -> tuple[bool, str]:
        return self.is_causal, self.feature_map

    def as_read(self) -> LinearInputs:
        """The same with tensors as the kernels read them; a copy only where needed."""
        return self._replace(
            query=aligned(self.query), key=aligned(self.key), value=aligned(self.value),
            shift=None if self.shift is None else self.shift.contiguous(),
            key_mask=None if self.key_mask is None else self.key_mask.contiguous(),
        )  # fmt: skip

    def plan(self, length: int, heads: int, widths: tuple[int, int]) -> _Plan:
        return _plan(
            length, heads, self.query, self.key, widths, self.shift, self.log_prior, self.key_mask, self.is_causal,
            self.length is None, self.feature_map,
        )  # fmt: skip


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


class _Saved(NamedTuple):
    """What backward is given beside the inputs."""

    grad: Tensor
    inverse: Tensor
    sums: Tensor


def _run_backward(
    grad: Tensor, inverse: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor,
    shift: Tensor | None, log_prior: Tensor | None, key_mask: Tensor | None, length: Tensor | None, is_causal: bool,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with on_device(query):
        call = _Backward(
            _Saved(aligned(grad), inverse, sums),
            LinearInputs(query, key, value, shift, log_prior, key_mask, length, is_causal, feature_map),
        )
        grad_query, delta = call.query_gradients()
        later = call.later_states(delta)
        grad_key, grad_value, shift_partials, prior_partials = call.key_value_gradients(delta, later)
        grad_shift, grad_prior = call.collect(shift_partials, prior_partials)
    return grad_query, grad_key, grad_value, grad_shift, grad_prior


class _Backward:
    """A backward pass: how it is cut, and a method for each kernel that it launches."""

    def __init__(self, saved: _Saved, inputs: LinearInputs) -> None:
        self.saved, self.inputs = saved, inputs
        self.ready = ready = inputs.as_read()
        self.batch, self.heads, self.queries, self.width = inputs.query.shape
        self.kv_heads, self.keys, self.value_width = inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[-1]
        self.group_size = self.heads // self.kv_heads
        self.by_key = ready.plan(self.keys, self.batch * self.kv_heads, self.widths)
        self.by_query = self.reverse = self.by_key
        if not inputs.is_causal:
            self.by_query = ready.plan(self.queries, self.batch * self.heads, self.widths)
            self.reverse = ready.plan(self.queries, self.batch * self.kv_heads, self.widths)
        self.query_strides, self.grad_strides = ready.query.stride()[:3], saved.grad.stride()[:3]
        self.key_strides = (*ready.key.stride()[:4], *ready.value.stride()[:3])
        self.prior_strides = _prior_strides(inputs.log_prior)

    @property
    def widths(self) -> tuple[int, int]:
        return self.width, self.value_width

    def query_gradients(self) -> tuple[Tensor, Tensor | None]:
        """``dq``, and ``delta`` where the sum divides."""
        ready, inputs = self.ready, self.inputs
        grad_query = ready.query.new_empty(inputs.query.shape)
        delta = _new(ready.query, self.batch, self.heads, self.queries) if inputs.length is None else None
        blocks, options, tile = self.by_query.kernel("query")
        launch(
            linear_backward.linear_backward_query,
            self.batch * self.heads * self.by_query.segments,
            (
                ready.query, ready.key, ready.value, self.saved.grad, grad_query, delta, ready.shift, ready.log_prior,
                ready.key_mask, self.saved.sums, self.saved.inverse, *self.query_strides, *self.key_strides,
                *self.grad_strides, *self.prior_strides, self.heads, self.group_size, self.queries, self.keys,
                self.by_query.segments, blocks, *self.widths,
            ),
            options,
            tile,
        )  # fmt: skip
        return grad_query, delta

    def later_states(self, delta: Tensor | None) -> Tensor:
        """What queries after each segment leave for its keys, or all queries without causality."""
        plan = self.reverse
        states = _new(self.ready.query, self.batch * self.kv_heads, plan.segments, _state_size(plan.options))
        blocks, options, tile = plan.kernel("reverse states")
        launch(
            linear_backward.linear_reverse_states,
            self.batch * self.kv_heads * plan.segments,
            (
                self.ready.query, self.saved.grad, delta, self.saved.inverse, states, *self.query_strides,
                *self.grad_strides, self.heads, self.group_size, self.queries, plan.segments, blocks, *self.widths,
            ),
            options,
            tile,
        )  # fmt: skip
        return _add_states(states, None, self.inputs.is_causal, reverse=True)

    def key_value_gradients(
        self, delta: Tensor | None, later: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """``dk``, ``dv``, and partial sums of the gradients of shift and prior."""
        ready, inputs, plan = self.ready, self.inputs, self.by_key
        grad_key, grad_value = ready.key.new_empty(inputs.key.shape), ready.value.new_empty(inputs.value.shape)
        blocks, options, tile = plan.kernel("key_value")
        components = options["M"]
        partials = self.batch * plan.segments * (1 if components <= 2 else blocks)
        shift_partials = prior_partials = None
        if inputs.shift is not None:
            shift_partials = _new(ready.query, self.kv_heads, components, partials, options["D"])
        if inputs.log_prior is not None:
            own = (self.batch, self.keys) if options["PRIOR_BY_KEY"] else (partials,)
            prior_partials = _new(ready.query, self.kv_heads, components, *own)
        launch(
            linear_backward.linear_backward_key_value,
            self.batch * self.kv_heads * plan.segments,
            (
                ready.query, ready.key, ready.value, self.saved.grad, grad_key, grad_value, delta, ready.shift,
                ready.log_prior, ready.key_mask, later, self.saved.inverse, shift_partials, prior_partials,
                *self.query_strides, *self.key_strides, *self.grad_strides, *self.prior_strides, self.heads,
                self.group_size, self.queries, self.keys, plan.segments, blocks, self.batch, *self.widths,
            ),
            options,
            tile,
        )  # fmt: skip
        return grad_key, grad_value, shift_partials, prior_partials

    def collect(self, shift_partials: Tensor | None, prior_partials: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients of shift and prior, empty where there is none."""
        query, shift, log_prior, options = self.ready.query, self.ready.shift, self.ready.log_prior, self.by_key.options
        grad_shift = _new(query, 0) if shift is None else _new(query, *shift.shape)
        grad_prior = _new(query, 0) if log_prior is None else _new(query, *log_prior.shape)
        if prior_partials is not None and options["PRIOR_BY_KEY"]:
            grad_prior = prior_partials.sum(dim=2)
        by_head = log_prior is not None and not options["PRIOR_BY_KEY"]
        counted = shift_partials if shift_partials is not None else prior_partials if by_head else None
        if counted is not None:
            launch(
                linear_backward.linear_add_partials,
                self.kv_heads * ((0 if shift is None else options["M"] * options["D"] // 16) + by_head),
                (
                    shift_partials, prior_partials, log_prior, grad_shift, grad_prior, *self.prior_strides[:2],
                    self.kv_heads, counted.shape[2], self.width,
                ),
                {**options, "TOGETHER": 32 if tuning.is_interpreted() else 256},
                SMALL,
            )  # fmt: skip
        return grad_shift, grad_prior


def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_run_forward`, again if it has been run for such inputs before."""
    inputs = LinearInputs(*arguments)
    if not replay.is_possible(inputs.query.device):
        return _run_forward(*inputs)
    return replay.once(  # type: ignore[return-value]
        lambda: _run_forward(*inputs), ("linear", *inputs.options), inputs.tensors,
        is_recordable=lambda: _is_plain(inputs.tensors, inputs.query, inputs.key, inputs.value),
    )  # fmt: skip


def run_backward(grad: Tensor, inverse: Tensor, sums: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """:func:`_run_backward`, likewise."""
    inputs = LinearInputs(*arguments)
    if not replay.is_possible(inputs.query.device):
        return _run_backward(grad, inverse, sums, *inputs)
    tensors = (grad, inverse, sums, *inputs.tensors)

    def is_recordable() -> bool:
        by_head = inputs.log_prior is None or inputs.log_prior.shape[2] == 1
        return by_head and _is_plain(tensors, grad, inputs.query, inputs.key, inputs.value)

    return replay.once(
        lambda: _run_backward(grad, inverse, sums, *inputs), ("linear backward", *inputs.options), tensors,
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
    return LinearInputs(  # type: ignore[return-value]
        query=grad_query, key=grad_key, value=grad_value, shift=None if inputs.shift is None else grad_shift,
        log_prior=None if inputs.log_prior is None else grad_prior, key_mask=None, length=None, is_causal=None,
        feature_map=None,
    )  # type: ignore[arg-type] # fmt: skip


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
