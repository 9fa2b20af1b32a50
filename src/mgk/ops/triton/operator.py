"""The fused kernels as torch operations, with autograd, shape inference and a FLOP count.

``torch.ops.mgk.fused_attention`` and its backward are what ``torch.compile``, ``opcheck`` and FLOP counters see. Where
nobody looks, :func:`attend` calls the same code directly: to go through the dispatcher takes the host longer than it
takes to start the kernels.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import backward, forward, preparation, replay, statistics, tuning
from mgk.ops.triton.launch import launch

LOG2_E = math.log2(math.e)

# Lengths of padded terms are a multiple of every block size, so that no load needs a mask.
PADDING = 128
# A small kernel works on this many numbers.
BLOCK = 1024
SMALL = tuning.Tile(0, 0, 2, 1)
# As many programs as keep a large GPU busy.
PROGRAMS = 264
# Blocks of terms that one program makes.
MOST_BLOCKS_TOGETHER = 4
# Numbers that a program adds to its sums at a time.
ADDED_TOGETHER = 16384


class Limits(NamedTuple):
    """What a row of the fast path may hold in a number format before it is attended again exactly."""

    ratio: float
    """log2 of how far two components may lie apart"""
    lowest_sum: float
    highest_sum: float
    margin: float
    """log2 of the room above the first block's largest weight"""
    level: float
    """log2 of the largest level that columns may hold without losing digits that count"""


# fp16 weights overflow at 2^16 and lose digits below 2^-14; the others have the exponents of fp32.
LIMITS = {
    torch.float32: Limits(40.0, 2.0**-60, 2.0**60, 0.0, 64.0),
    torch.bfloat16: Limits(40.0, 2.0**-60, 2.0**60, 0.0, 4096.0),
    torch.float16: Limits(14.0, 2.0**-8, 2.0**15, 4.0, 0.0),
}


class TermsLayout:
    """Which row and column terms a call has, and how much room they take: known from shapes alone."""

    def __init__(
        self, query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, scales: Tensor | None,
        key_mask: Tensor | None, gaussian: bool, hard: bool,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, self.width = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[3]
        self.components = key.shape[2] if shift is None else shift.shape[1]
        self.padded_queries = (self.queries + PADDING - 1) // PADDING * PADDING
        self.padded_keys = (self.keys + PADDING - 1) // PADDING * PADDING
        # Two shifted keys of one variance: one product, and softly one exponential.
        self.paired = shift is not None and self.components == 2 and scales is None
        self.factored = self.paired and not hard
        self.has_norm = gaussian and scales is not None and self.components > 1
        self.has_row = shift is not None or self.has_norm
        # Keys beyond the end are switched off by their column.
        self.has_column = (
            gaussian or log_prior is not None or key_mask is not None or self.paired or self.keys % PADDING != 0
        )
        # Only half precision: in fp32 the data has been centred.
        self.has_origin = shift is not None and gaussian and query.dtype != torch.float32
        self.block_d = block_width(self.width)
        # Two projected keys of one variance are copied and multiplied side by side.
        self.joined = shift is None and self.components == 2 and scales is None
        is_plain = self.paired or self.joined or (self.components == 1 and not self.has_row)
        self.has_level = gaussian and scales is None and is_plain and query.dtype != torch.float16

    def sizes(self) -> dict[str, int]:
        """Numbers in each part of the buffer."""
        rows, kv_heads = self.batch * self.heads * self.padded_queries, self.batch * self.kv_heads
        return {
            "row": rows * self.components if self.has_row else 0,
            "alpha": rows if self.paired else 0,
            "column": kv_heads * self.components * self.padded_keys if self.has_column else 0,
            "rho": kv_heads * self.padded_keys if self.paired else 0,
            "origin": kv_heads * self.block_d if self.has_origin else 0,
            "wide": kv_heads if self.factored else 0,
            "level": kv_heads if self.has_level else 0,
        }


class _Call(TermsLayout):
    """One call, prepared for the kernels: aligned tensors, row and column terms, masks, random numbers, options."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor | None, shift: Tensor | None, log_prior: Tensor | None,
        scales: Tensor | None, attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
        seed: Tensor | None, query_spans: Tensor | None, key_spans: Tensor | None, scale: float, gaussian: bool,
        is_causal: bool, hard: bool, dropout_p: float, saved: Tensor | None = None, pairs_are_left: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(query, key, shift, log_prior, scales, key_mask, gaussian, hard)
        self.query, self.key = aligned(query), aligned(key.flatten(1, 2))
        self.value = None if value is None else aligned(value)
        self.dtype, self.device = query.dtype, query.device
        self.limits = LIMITS[query.dtype]
        self.scale = scale * LOG2_E
        self.scales = None if scales is None else (scales.float() * LOG2_E).contiguous()
        self.shift = None if shift is None else shift.float().contiguous()
        self.log_prior, self.attn_mask, self.seed, self.gaussian = log_prior, attn_mask, seed, gaussian

        shared = shift is not None or self.components == 1
        self.key_range = self.query_range = None
        # Packed sequences have spans instead, each its own.
        if query_spans is None and (key_mask is not None or query_mask is not None):
            self.key_range = valid_range(key_mask, self.batch, self.keys, query)
            self.query_range = valid_range(query_mask, self.batch, self.queries, query)
        self.row_key = self.column_key = None
        if seed is not None:
            self.row_key = self._random_keys(self.batch * self.heads * self.padded_queries, 0)
            self.column_key = self._random_keys(self.padded_keys, 1)
        self.options: dict[str, Any] = {
            "M": self.components,
            "SHARED": shared,
            "HARD": hard,
            "HAS_ROW": self.has_row,
            "HAS_COLUMN": self.has_column,
            "EQUAL": scales is None,
            "CAUSAL": is_causal,
            "HAS_MASK": attn_mask is not None,
            "HAS_RANGE": self.key_range is not None,
            "PACKED": query_spans is not None,
            "HAS_LEVEL": self.has_level,
            "DROPOUT": seed is not None,
            "PRECISION": "ieee",
        }
        self.threshold, self.keep_scale = round(dropout_p * 2**32), 1.0 / (1.0 - dropout_p)
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if attn_mask is not None:
            sizes = zip(attn_mask.shape, attn_mask.stride(), strict=True)
            self.mask_strides = tuple(0 if size == 1 else stride for size, stride in sizes)
        self._lay_out_terms(saved)
        if saved is None:
            self._prepare_terms(key_mask, not (pairs_are_left and self.paired))

    def _lay_out_terms(self, saved: Tensor | None) -> None:
        """Name the parts of the one buffer that holds all terms, or ``saved``, which a forward pass has filled."""
        sizes = self.sizes()
        self.terms = self._new(sum(sizes.values())) if saved is None else saved
        parts = dict(zip(sizes, self.terms.split(list(sizes.values())), strict=True))
        self.row, self.alpha, self.column, self.rho, self.origin, self.wide, self.level = (
            part if part.numel() else None for part in parts.values()
        )

    def _prepare_terms(self, key_mask: Tensor | None, makes_rows: bool) -> None:
        if not (self.has_row or self.has_column):
            return
        if self.wide is not None:
            self.wide.zero_()
        rows = _rows_of_small_kernels(self.block_d * (1 if self.options["SHARED"] else self.components))
        row_blocks = self.padded_queries // rows if self.has_row and makes_rows else 0
        column_blocks = self.padded_keys // rows if self.has_column else 0
        total = self.batch * (self.heads * row_blocks + self.kv_heads * column_blocks)
        enough = 2 if tuning.is_interpreted() else 4 * PROGRAMS
        together = max(1, min(total // enough, MOST_BLOCKS_TOGETHER))
        row_programs = self.batch * self.heads * count_blocks(row_blocks, together)
        column_programs = self.batch * self.kv_heads * count_blocks(column_blocks, together)
        prior, prior_strides = self.log_prior, (0, 0, 0)
        if prior is not None:
            prior_strides = (prior.stride(0), prior.stride(1), prior.stride(2) if prior.shape[2] > 1 else 0)
        launch(
            preparation.logit_terms,
            row_programs + column_programs,
            (
                self.query, self.key, self.shift, prior, self.scales, self.origin,
                None if key_mask is None else key_mask.contiguous(), self.query_range, self.key_range, self.row,
                self.alpha, self.column, self.rho, self.wide, self.level, *self.query.stride()[:3],
                *self.key.stride()[:3],
                *prior_strides, self.scale, self.limits.ratio, self.limits.level, self.heads,
                self.heads // self.kv_heads, self.queries,
                self.keys, self.padded_queries, self.padded_keys, row_programs, together, self.width,
            ),
            {
                "M": self.components,
                "SHARED": self.options["SHARED"],
                "PAIRED": self.paired,
                "HARD": self.options["HARD"],
                "GAUSSIAN": self.gaussian,
                "HAS_SHIFT": self.shift is not None,
                "HAS_PRIOR": prior is not None,
                "HAS_NORM": self.has_norm,
                "HAS_ORIGIN": self.origin is not None,
                "HAS_KEY_MASK": key_mask is not None,
                "HAS_RANGE": self.key_range is not None,
                "HAS_LEVEL": self.has_level,
                "HAS_ROW": self.has_row,
                "HAS_COLUMN": self.has_column,
                "EQUAL": self.scales is None,
                "BLOCK": rows,
                "D": self.block_d,
            },
            SMALL,
        )  # fmt: skip

    def _new(self, *shape: int) -> Tensor:
        return self.query.new_empty(shape, dtype=torch.float32)

    def _random_keys(self, count: int, stream: int) -> Tensor:
        keys = torch.empty(count, dtype=torch.int32, device=self.device)
        arguments = (self.seed, keys, count, stream)
        launch(preparation.random_keys, count_blocks(count, BLOCK), arguments, {"BLOCK": BLOCK}, SMALL)
        return keys

    def tile(self, name: str) -> tuning.Tile:
        """Of the kernel called ``name``."""
        return tuning.choose_tile(self.kernel(name), self.device)

    def kernel(self, name: str) -> tuning.Kernel:
        """What this call's tile is chosen by."""
        width = block_width(max(self.width, 0 if self.value is None else self.value.shape[-1]))
        kind = "pair" if self.paired else "one" if self.options["SHARED"] else "several"
        if self.options["HARD"] and kind != "one":
            kind = f"hard {kind}"
        return tuning.Kernel(
            name, width, self.dtype.itemsize, kind, bool(self.options["CAUSAL"]), self.attn_mask is not None,
            self.has_level,
        )  # fmt: skip

    def run(self, name: str, run: Any) -> None:
        """Run a kernel with the tile of the table, or of a trial if one is asked for."""
        tuning.tune(self.kernel(name), self.device, run)
        run(self.tile(name))


def block_width(width: int) -> int:
    """Columns of a block: a power of two that matrix units take."""
    return max(16, 1 << (int(width) - 1).bit_length())


def _rows_of_small_kernels(width: int) -> int:
    """``width``: of all the numbers of a row together."""
    if tuning.is_interpreted():
        return 16
    fitting = max(min(128, 4096 // width), min(32, 8192 // width), 8)
    return 1 << (fitting.bit_length() - 1)


def count_blocks(length: int, size: int) -> int:
    return -(-length // size)


def aligned(tensor: Tensor) -> Tensor:
    """``[..., N, D]`` as the copy engine reads it: rows start at multiples of 16 bytes. A copy only where needed."""
    step = 16 // tensor.element_size()
    if _strides_fit(tuple(tensor.shape), tensor.stride(), step) and tensor.data_ptr() % 16 == 0:
        return tensor
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    return strides[-1] == 1 and all(
        size == 1 or (stride > 0 and stride % step == 0) for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def _aligned_width(tensor: Tensor) -> int:
    """Of rows that start at multiples of 16 bytes and hold those of ``tensor``."""
    step = 16 // tensor.element_size()
    return -(-tensor.shape[-1] // step) * step


def _aligned_like(tensor: Tensor) -> Tensor:
    """Room for a gradient that the copy engine writes."""
    width = _aligned_width(tensor)
    return torch.empty_like(tensor) if width == tensor.shape[-1] else tensor.new_empty(*tensor.shape[:-1], width)


def descriptor(tensor: Tensor, rows: int, heads: int = 1) -> TensorDescriptor:
    """Blocks of ``rows`` tokens of one head, or of neighbouring ones, of ``[B, H, N, D]`` or ``[B, H, M, N, D]``."""
    shape = tuple(tensor.shape)
    strides = _strides_for_copies(shape, tensor.stride(), tensor.element_size())
    # What the constructor would check again and again holds: `aligned` has seen to it.
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.padding = tensor, shape, strides, "zero"
    made.block_shape = (1,) * (len(shape) - 3) + (heads, rows, block_width(shape[-1]))
    return made


@functools.lru_cache(maxsize=1024)
def _strides_for_copies(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> tuple[int, ...]:
    """An axis of length one may have any stride, but the copy engine looks at it."""
    last = len(shape) - 1
    dense = [1] * len(shape)
    for axis in reversed(range(last)):
        dense[axis] = dense[axis + 1] * shape[axis + 1]
    step = 16 // element_size
    return tuple(
        stride if size > 1 or axis == last else max(step, -(-dense[axis] // step) * step)
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )


def scales_of(problem: MixtureProblem) -> tuple[float, Tensor | None]:
    """``1 / variance``: a number for all components, or ``[Hkv, M]``."""
    if isinstance(problem.variance, float):
        return 1.0 / problem.variance, None
    return 1.0, problem.variance.float().reciprocal()


def valid_range(mask: Tensor | None, batch: int, length: int, like: Tensor) -> Tensor:
    """First valid position and one past the last, ``int32 [B, 2]``; ``(0, 0)`` where nothing is valid."""
    if mask is None:
        ends = torch.full((batch, 2), length, dtype=torch.int32, device=like.device)
        ends[:, 0] = 0
        return ends
    marks = mask.to(torch.int32)
    first, last = marks.argmax(-1), length - marks.flip(-1).argmax(-1)
    return torch.stack([first, last], dim=-1).masked_fill(~mask.any(-1, keepdim=True), 0).to(torch.int32)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _by_token(like: Tensor, heads: int, length: int, width: int) -> Tensor:
    """``[B, heads, length, width]`` laid out token by token, so that a layer joins its heads without a copy."""
    return like.new_empty(like.shape[0], length, heads, width).transpose(1, 2)


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
        call = _Call(
            query, key, value, shift, log_prior, scales, attn_mask, key_mask, query_mask, seed, query_spans,
            key_spans, scale, gaussian, is_causal, hard, dropout_p, pairs_are_left=True,
        )  # fmt: skip
        assert call.value is not None
        values = call.value
        out = _by_token(query, call.heads, call.queries, _aligned_width(value))
        normaliser = call._new(*query.shape[:-1])
        widths = {"D": block_width(call.query.shape[-1]), "DV": block_width(values.shape[-1])}
        masks = (attn_mask, call.key_range, call.query_range, query_spans, call.row_key, call.column_key)
        strides = (*call.mask_strides, PADDING)
        sizes = (
            call.heads,
            call.heads // call.kv_heads,
            call.queries,
            call.keys,
            call.padded_queries,
            call.padded_keys,
        )
        scalars = (call.scale, call.threshold, call.keep_scale)

        # Two exponentials a pair leave the matrix units idle: they add up the weights, rounded as they multiply them.
        # (A density asks with the narrowest values, and wants the sum unrounded.)
        is_half = query.dtype != torch.float32
        by_product = call.joined and not hard and seed is None and is_half and widths["DV"] in (32, 64)

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
        call = _Call(
            query, key, value, shift, log_prior, scales, attn_mask, key_mask, query_mask, seed, query_spans,
            key_spans, scale, gaussian, is_causal, hard, dropout_p, terms,
        )  # fmt: skip
        assert call.value is not None
        values, components = call.value, call.components
        grad_out, out = aligned(grad_out), aligned(out)
        if grad_normaliser is not None:
            grad_normaliser = grad_normaliser.contiguous()
        reference = call._new(call.batch, call.heads, call.padded_queries)
        delta = torch.empty_like(reference)
        rows = _rows_of_small_kernels(block_width(out.shape[-1]))
        blocks = call.padded_queries // rows
        launch(
            backward.attention_delta,
            blocks * call.batch * call.heads,
            (
                out, grad_out, normaliser, grad_normaliser, call.row if call.paired else None, call.level, reference,
                delta, *out.stride()[:3], *grad_out.stride()[:3], 1.0 - dropout_p, call.heads,
                call.heads // call.kv_heads, call.queries, call.padded_queries, blocks, value.shape[-1],
            ),
            {"M": components, "PAIRED": call.paired, "HAS_LEVEL": call.has_level,
            "HAS_GRAD_NORMALISER": grad_normaliser is not None, "BLOCK_I": rows, "DV": block_width(out.shape[-1])},
            SMALL,
        )  # fmt: skip
        widths = {"D": block_width(call.query.shape[-1]), "DV": block_width(values.shape[-1])}
        options = {**call.options, **widths, "GAUSSIAN": gaussian, "HAS_SHIFT": shift is not None}
        options |= {"PAIRED": call.paired, "HAS_ORIGIN": call.origin is not None}
        options |= {"HAS_GRAD_NORMALISER": grad_normaliser is not None}
        masks = (call.row_key, call.column_key, *call.mask_strides, PADDING)
        ranges = (attn_mask, call.key_range, call.query_range)
        scalars = (call.scale, scale, call.threshold, call.keep_scale)
        group_size = call.heads // call.kv_heads
        sizes = (call.heads, group_size, call.queries, call.keys, call.padded_queries, call.padded_keys)

        one_gradient = call.paired or key.shape[2] == components
        grad_key = (
            _aligned_like(call.key)
            if one_gradient
            else call.key.new_empty(call.batch, call.kv_heads * components, call.keys, _aligned_width(key))
        )
        grad_value, grad_query = _aligned_like(values), _aligned_like(call.query)
        grad_column = call._new(call.kv_heads, components, call.batch, call.keys) if call.has_column else None
        # Only the scales ask for it: shifts have their shares.
        grad_row = None
        if call.has_row and scales is not None:
            grad_row = call._new(call.batch, call.heads, components, call.queries)
        grad_scales = None if scales is None else call._new(call.kv_heads, components, call.batch, call.keys)
        # Every program leaves its share of the shifts' gradient; added up below in a fixed order.
        key_shares = query_shares = None
        # Heads that cannot be factored are left to the second launch.
        variants = ({"WIDE": False}, {"WIDE": True}) if call.factored else ({"WIDE": False},)

        # Three sums of products a key fill the registers: of wide keys one is done after the other.
        two_keys = components == 2 and shift is None and (widths["D"] <= 64 or query.dtype == torch.float32)
        # Measured: next to the two loops of causality, or with wide keys, the compiler schedules the loop better.
        options["ONE_GROUP"] = group_size == 1 and not is_causal and widths["D"] <= 64

        def run_key_value(tile: tuning.Tile) -> None:
            nonlocal key_shares
            blocks = count_blocks(call.keys, tile.columns)
            if shift is not None and gaussian:
                key_shares = call._new(call.kv_heads, components, call.batch * blocks, widths["D"])
            tensors = (
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns),
                descriptor(values, tile.columns), descriptor(grad_out, tile.rows), descriptor(grad_key, tile.columns),
                descriptor(grad_value, tile.columns), call.row, call.column,
            )  # fmt: skip
            numbers = (*ranges, key_spans, *masks, *scalars, *sizes, blocks)
            own = {**options, "BLOCK_I": tile.rows, "BLOCK_J": tile.columns}
            programs = blocks * call.batch * call.kv_heads
            if two_keys:
                arguments = (*tensors, call.scales, reference, delta, grad_column, grad_scales, *numbers)
                launch(backward.attention_backward_two_keys, programs, arguments, own, tile)
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
                query_shares = call._new(call.kv_heads, components, call.batch * group_size * blocks, widths["D"])
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
        call._new(0) if grad_scales is None else _scale_gradient(call, grad_row, grad_column, grad_scales),
    )


def _parameter_gradients(
    call: _Call, scale: float, query_shares: Tensor | None, key_shares: Tensor | None, grad_column: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the shifts, ``[Hkv, M, D]``, by way of rows and columns,
    and of the prior, in its shape; empty where there is no such parameter."""
    prior, shift = call.log_prior, call.shift
    grad_shift = call._new(0) if shift is None else torch.empty_like(shift)
    grad_prior = call._new(0)
    by_head = prior is not None and prior.shape[2] == 1
    if prior is not None:
        assert grad_column is not None
        grad_prior = call._new(*prior.shape) if by_head else grad_column.sum(2)
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


def _scale_gradient(call: _Call, grad_row: Tensor | None, grad_column: Tensor | None, grad_products: Tensor) -> Tensor:
    """``[Hkv, M]``: products, rows and columns are all proportional to the scale, but for the prior."""
    assert call.scales is not None
    grad = grad_products.sum(dim=(2, 3))
    if call.gaussian and call.column is not None and grad_column is not None:
        column = call.column.view(call.batch, call.kv_heads, call.components, -1)[..., : call.keys] / LOG2_E
        if call.log_prior is not None:
            column = column - call.log_prior
        column = column.masked_fill(~column.isfinite(), 0.0).permute(1, 2, 0, 3)
        grad = grad + (grad_column * column).sum(dim=(2, 3)) * LOG2_E / call.scales
    if call.row is not None and grad_row is not None:
        row = call.row.view(call.batch, call.heads, call.components, -1)[..., : call.queries]
        by_head = (grad_row * row).sum(dim=(0, 3)) / LOG2_E
        grad = grad + by_head.unflatten(0, (call.kv_heads, -1)).sum(1) * LOG2_E / call.scales
    return grad


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
        call = _Call(
            query, key, None, shift, log_prior, scales, attn_mask, key_mask, None, None, query_spans, None, scale,
            gaussian, is_causal, False, 0.0,
        )  # fmt: skip
        tile = call.tile("query")
        blocks = count_blocks(call.queries, tile.rows)
        sums = call._new(blocks * call.batch * call.heads, 8)
        launch(
            statistics.responsibilities,
            sums.shape[0],
            (
                descriptor(call.query, tile.rows), descriptor(call.key, tile.columns), call.row, call.column,
                call.scales, sums, attn_mask, None if query_mask is None else query_mask.contiguous(),
                query_spans, *call.mask_strides, PADDING, call.scale, call.heads, call.heads // call.kv_heads,
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
    out = _by_token(query, query.shape[1], query.shape[2], value.shape[-1])
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
    query, key, value, shift, log_prior = tensors = inputs[:5]
    if any(other is not None for other in inputs[5:12]) or not replay.is_possible(query.device):
        return _run_forward(*inputs)
    options = inputs[12:]

    def zeroed() -> tuple[int, int, int] | None:
        layout = TermsLayout(query, key, shift, log_prior, None, None, options[1], options[3])
        sizes = layout.sizes()
        first = sum(sizes[name] for name in ("row", "alpha", "column", "rho", "origin"))
        return (2, first, first + sizes["wide"]) if layout.factored else None

    return replay.once(  # type: ignore[return-value]
        lambda: _run_forward(*inputs), replay.signature_of(tensors, ("forward", *options)), tensors, query.device,
        is_plain=lambda: _is_plain(query, key, value, shift), zeroed=zeroed,
    )  # fmt: skip


def run_backward(grad_out: Tensor, grad_normaliser: Tensor | None, *saved_and_options: Any) -> tuple[Tensor, ...]:
    """:func:`_run_backward`, likewise."""
    saved, others, options = saved_and_options[:8], saved_and_options[8:15], saved_and_options[15:]
    _, _, _, query, key, value, shift, log_prior = saved
    others_given = any(other is not None for other in (grad_normaliser, *others))
    if others_given or not replay.is_possible(query.device):
        return _run_backward(grad_out, grad_normaliser, *saved_and_options)

    def is_plain() -> bool:
        one_gradient = shift is None or shift.shape[1] <= 2
        by_head = log_prior is None or log_prior.shape[2] == 1
        return one_gradient and by_head and aligned(grad_out) is grad_out and _is_plain(query, key, value, shift)

    tensors = (grad_out, *saved)
    return replay.once(
        lambda: _run_backward(grad_out, None, *saved_and_options),
        replay.signature_of(tensors, ("backward", *options)), tensors, query.device, is_plain=is_plain,
    )  # fmt: skip


def _is_plain(query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None) -> bool:
    """Whether the kernels read these tensors as they are, and write what has their width."""
    keys = key.flatten(1, 2)
    read = [query, keys, value]
    return (
        keys.data_ptr() == key.data_ptr()
        and all(aligned(tensor) is tensor and _aligned_width(tensor) == tensor.shape[-1] for tensor in read)
        and (shift is None or (shift.dtype == torch.float32 and shift.is_contiguous()))
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
