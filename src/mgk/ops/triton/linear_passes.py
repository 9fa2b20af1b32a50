"""What a call of linear attention launches, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.triton import tuning
from mgk.ops.triton.call import SMALL
from mgk.ops.triton.kernels import linear, linear_backward
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, count_blocks, on_device
from mgk.ops.triton.tile_table import Tile


class _Plan(NamedTuple):
    """How tokens are cut into segments, and what all kernels of a call are told."""

    segments: int
    tokens_per_segment: int
    options: dict[str, Any]
    element_size: int
    device: torch.device

    def kernel(self, name: str) -> tuple[int, dict[str, Any], Tile]:
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


def new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


def state_size(options: dict[str, Any]) -> int:
    return int(options["D"] * options["DV"] + options["D"])


def _add_states(states: Tensor, initial: Tensor | None, is_causal: bool, reverse: bool) -> Tensor:
    """``[heads, segments + 1, state]`` under causality, else ``[heads, 1, state]``: see ``linear_add_states``."""
    heads, segments, size = states.shape
    sums = new(states, heads, segments + 1 if is_causal else 1, size)
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


def forward_pass(
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
        states = new(query, batch * kv_heads, plan.segments, state_size(plan.options))
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
        inverse = new(query, batch, heads, queries)
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


def backward_pass(
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
        delta = new(ready.query, self.batch, self.heads, self.queries) if inputs.length is None else None
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
        states = new(self.ready.query, self.batch * self.kv_heads, plan.segments, state_size(plan.options))
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
            shift_partials = new(ready.query, self.kv_heads, components, partials, options["D"])
        if inputs.log_prior is not None:
            own = (self.batch, self.keys) if options["PRIOR_BY_KEY"] else (partials,)
            prior_partials = new(ready.query, self.kv_heads, components, *own)
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
        grad_shift = new(query, 0) if shift is None else new(query, *shift.shape)
        grad_prior = new(query, 0) if log_prior is None else new(query, *log_prior.shape)
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
