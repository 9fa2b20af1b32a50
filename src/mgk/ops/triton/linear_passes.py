"""What a call of linear attention launches, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.triton import tuning
from mgk.ops.triton.call import SMALL, is_prior_by_head, prior_by_name
from mgk.ops.triton.kernels import linear, linear_backward
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, by_name, count_blocks, on_device


class LinearInputs(NamedTuple):
    """One call of linear attention, in the order in which torch's operations take it."""

    query: Tensor
    """``[B, H, Nq, D]``"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or one component beside ``shift``"""
    value: Tensor
    """``[B, Hkv, Nk, Dv]``"""
    shift: Tensor | None
    """fp32 ``[Hkv, M, D]``"""
    log_prior: Tensor | None
    """fp32 ``[Hkv, M, Nk]`` or ``[Hkv, M, 1]``"""
    key_mask: Tensor | None
    """bool ``[B, Nk]``"""
    length: Tensor | None
    """fp32 ``[B, Nq]``: what to divide by instead of the sum"""
    is_causal: bool
    """with as many queries as keys"""
    feature_map: str
    """``"elu"`` or ``"relu"``"""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:7]

    @property
    def options(self) -> tuple[bool, str]:
        return self.is_causal, self.feature_map

    @property
    def components(self) -> int:
        return self.key.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def block_widths(self) -> tuple[int, int]:
        """Columns of blocks of keys and of values."""
        return block_width(self.query.shape[-1]), block_width(self.value.shape[-1])

    @property
    def state_size(self) -> int:
        width, value_width = self.block_widths
        return width * value_width + width


class LinearResults(NamedTuple):
    """What the forward pass returns."""

    out: Tensor
    """``[B, H, Nq, Dv]``"""
    inverse: Tensor
    """fp32 ``[B, H, Nq]``: 1 / the normaliser"""
    sums: Tensor
    """fp32 ``[B * Hkv, segments + 1 or 1, state]``: under causality the states before each segment and, last, after all
    of them; else that alone"""


class LinearGradients(NamedTuple):
    """What the backward pass returns; the last two are fp32, and empty where there is no such input."""

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor
    log_prior: Tensor


class Segments(NamedTuple):
    """How the tokens of a head are cut, so that all of the GPU is busy."""

    num: int
    tokens: int
    """in one segment"""


def cut(inputs: LinearInputs, length: int, heads: int) -> Segments:
    """Cut ``length`` tokens of ``heads`` heads of all samples into no more segments than keep the GPU busy: every
    segment has a state in memory, which grows with the square of the width. (Narrow heads, and keys that are no
    mixture, were measured to leave room for more programs on a multiprocessor.)"""
    width, unit = max(inputs.block_widths), tuning.linear_unit()
    waves = 2 if width > 64 else 4 if width > 32 and inputs.components > 1 else 8
    wanted = 2 if tuning.is_interpreted() else count_blocks(tuning.programs(inputs.query.device, waves), heads)
    blocks = count_blocks(length, unit)
    together = max(1, count_blocks(blocks, max(1, min(wanted, blocks))))
    return Segments(count_blocks(blocks, together), together * unit)


def new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


class _Call:
    """One call, as its kernels read it."""

    def __init__(self, inputs: LinearInputs) -> None:
        self.inputs = inputs
        self.batch, self.heads, self.queries, width = inputs.query.shape
        self.kv_heads, self.keys, value_width = inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[-1]
        # Those of all samples.
        self.query_heads, self.key_heads = self.batch * self.heads, self.batch * self.kv_heads
        self.by_key = self.by_query = cut(inputs, self.keys, self.key_heads)
        if not inputs.is_causal:
            self.by_query = cut(inputs, self.queries, self.query_heads)
        d, dv = inputs.block_widths
        self.values: dict[str, Any] = {
            **by_name("query", aligned(inputs.query)), **by_name("key", aligned(inputs.key)),
            **by_name("value", aligned(inputs.value)), **prior_by_name(inputs.log_prior),
            "p_shift": None if inputs.shift is None else inputs.shift.contiguous(),
            "p_key_mask": None if inputs.key_mask is None else inputs.key_mask.contiguous(),
            "p_length": inputs.length, "num_heads": self.heads, "num_kv_heads": self.kv_heads,
            "group_size": self.heads // self.kv_heads, "num_queries": self.queries, "num_keys": self.keys,
            "num_samples": self.batch, "width": width, "value_width": value_width, "M": inputs.components,
            "MAP": inputs.feature_map, "CAUSAL": inputs.is_causal, "D": d, "DV": dv,
            "EVEN": (d, dv) == (width, value_width), "ONE_GROUP": self.heads == self.kv_heads,
        }  # fmt: skip

    def new(self, *shape: int) -> Tensor:
        return new(self.inputs.query, *shape)

    def blocks_per_segment(self, name: str, segments: Segments) -> int:
        return segments.tokens // self._tile(name).columns

    def _tile(self, name: str) -> tuning.Tile:
        inputs, query = self.inputs, self.inputs.query
        return tuning.choose_linear_tile(
            name, max(inputs.block_widths), query.element_size(), inputs.is_causal, inputs.components > 1, query.device
        )

    def launch(self, kernel: Any, name: str, heads: int, segments: Segments, values: dict[str, Any]) -> None:
        """One program for each segment of each head; ``name`` is that of its tile."""
        tile = self._tile(name)
        values = {
            **self.values, **values, "num_segments": segments.num,
            "blocks_per_segment": self.blocks_per_segment(name, segments), "BLOCK": tile.columns,
        }  # fmt: skip
        launch(kernel, heads * segments.num, values, tile)

    def states(self, kernel: Any, name: str, segments: Segments, values: dict[str, Any]) -> Tensor:
        """The state of each segment, which ``kernel`` makes."""
        states = self.new(self.key_heads, segments.num, self.inputs.state_size)
        self.launch(kernel, name, self.key_heads, segments, {**values, "p_state": states})
        return states

    def add_states(self, states: Tensor, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
        """The states before each segment: see :class:`LinearResults` and ``linear_add_states``."""
        heads, segments, size = states.shape
        sums = self.new(heads, segments + 1 if self.inputs.is_causal else 1, size)
        together = 64 if tuning.is_interpreted() else 512
        values = {
            "p_state": states, "p_initial": initial, "p_sums": sums, "num_segments": segments,
            "CAUSAL": self.inputs.is_causal, "REVERSE": reverse, "STATE": size, "TOGETHER": together,
        }  # fmt: skip
        launch(linear.linear_add_states, heads * count_blocks(size, together), values, SMALL)
        return sums


def forward_pass(inputs: LinearInputs, initial: Tensor | None = None) -> LinearResults:
    """``initial``: ``[B, Hkv, state]``, what earlier keys have left."""
    with on_device(inputs.query):
        call = _Call(inputs)
        sums = call.add_states(call.states(linear.linear_states, "states", call.by_key, {}), initial)
        out = inputs.query.new_empty(call.batch, call.heads, call.queries, inputs.value.shape[-1])
        inverse = call.new(call.batch, call.heads, call.queries)
        values = {"p_out": out, "p_state": sums, "p_inverse": inverse}
        call.launch(linear.linear_forward, "forward", call.query_heads, call.by_query, values)
    return LinearResults(out, inverse, sums)


def backward_pass(grad: Tensor, inverse: Tensor, sums: Tensor, inputs: LinearInputs) -> LinearGradients:
    """The gradients of a call, after ``inverse`` and ``sums`` of its results."""
    with on_device(inputs.query):
        call = _Call(inputs)
        grad_query = inputs.query.new_empty(inputs.query.shape)
        grad_key, grad_value = inputs.key.new_empty(inputs.key.shape), inputs.value.new_empty(inputs.value.shape)
        delta = call.new(call.batch, call.heads, call.queries) if inputs.length is None else None
        call.values |= {**by_name("grad", aligned(grad)), "p_inverse": inverse, "p_delta": delta}
        call.launch(
            linear_backward.linear_backward_query, "query", call.query_heads, call.by_query,
            {"p_grad_query": grad_query, "p_state": sums},
        )  # fmt: skip
        # What queries after each segment leave for its keys, or all queries without causality.
        segments = call.by_key if inputs.is_causal else cut(inputs, call.queries, call.key_heads)
        later = call.states(linear_backward.linear_reverse_states, "reverse states", segments, {})
        # Every program leaves its partial sum of the gradients of shift and prior.
        partials = call.batch * call.by_key.num
        if inputs.components > 2:
            partials *= call.blocks_per_segment("key_value", call.by_key)
        heads, components = call.kv_heads, inputs.components
        shift_partials = prior_partials = None
        if inputs.shift is not None:
            shift_partials = call.new(heads, components, partials, inputs.block_widths[0])
        if inputs.log_prior is not None:
            own = (partials,) if is_prior_by_head(inputs.log_prior) else (call.batch, call.keys)
            prior_partials = call.new(heads, components, *own)
        values = {
            "p_grad_key": grad_key, "p_grad_value": grad_value, "p_state": call.add_states(later, reverse=True),
            "p_shift_partial": shift_partials, "p_prior_partial": prior_partials,
        }  # fmt: skip
        call.launch(linear_backward.linear_backward_key_value, "key_value", call.key_heads, call.by_key, values)
        grad_shift, grad_prior = _add_partials(call, shift_partials, prior_partials, partials)
    return LinearGradients(grad_query, grad_key, grad_value, grad_shift, grad_prior)


def _add_partials(
    call: _Call, shift_partials: Tensor | None, prior_partials: Tensor | None, partials: int
) -> tuple[Tensor, Tensor]:
    """The gradients of shift and prior, empty where there is none."""
    shift, log_prior, width = call.inputs.shift, call.inputs.log_prior, call.inputs.block_widths[0]
    grad_shift = call.new(0) if shift is None else call.new(*shift.shape)
    grad_prior = call.new(0) if log_prior is None else call.new(*log_prior.shape)
    by_head = log_prior is not None and is_prior_by_head(log_prior)
    if prior_partials is not None and not by_head:
        grad_prior, prior_partials = prior_partials.sum(dim=2), None
    values = {
        **call.values, "p_shift_partial": shift_partials, "p_prior_partial": prior_partials, "num_partials": partials,
        "p_grad_shift": grad_shift, "p_grad_prior": grad_prior, "BY_SUM": call.inputs.length is None,
        "TOGETHER": 32 if tuning.is_interpreted() else 256,
    }  # fmt: skip
    programs = call.kv_heads * ((0 if shift is None else call.inputs.components * width // 16) + by_head)
    launch(linear_backward.linear_add_partials, programs, values, SMALL)
    return grad_shift, grad_prior
