"""One call, prepared for the kernels: row and column terms, masks, random numbers, constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mgk.ops.triton import tuning
from mgk.ops.triton.inputs import Options, Tensors
from mgk.ops.triton.kernels import preparation
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, by_name, count_blocks
from mgk.ops.triton.tile_table import Kernel, Tile

T = TypeVar("T")
LOG2_E = math.log2(math.e)
# Lengths of padded terms are a multiple of every block size, so that no load needs a mask, and of 32, the tokens among
# which random numbers change places.
PADDING = 128
# A small kernel works on this many numbers.
BLOCK = 1024
ONE_WARP, SMALL, FOUR_WARPS = Tile(0, 0, 1, 1), Tile(0, 0, 2, 1), Tile(0, 0, 4, 1)
# Blocks of terms that one program makes.
MOST_BLOCKS_TOGETHER = 4


# What a row of the fast path may hold in a number format before it is attended again exactly: log2 of how far two
# components may lie apart, the least sum of weights whose digits are all there, the largest that cannot have
# overflowed, and log2 of the room above the first block's largest weight. fp16 weights overflow at 2^16 and lose digits
# below 2^-14; the others have the exponents of fp32.
_WIDE_RANGE = {"largest_ratio": 40.0, "lowest_sum": 2.0**-60, "highest_sum": 2.0**60, "margin": 0.0}
LIMITS = {
    torch.float32: _WIDE_RANGE,
    torch.bfloat16: _WIDE_RANGE,
    torch.float16: {"largest_ratio": 14.0, "lowest_sum": 2.0**-8, "highest_sum": 2.0**15, "margin": 4.0},
}
# log2 of the largest level that columns may hold without losing digits that count.
LARGEST_LEVELS = {torch.float32: 64.0, torch.bfloat16: 4096.0, torch.float16: 0.0}


class Terms(NamedTuple, Generic[T]):
    """One thing of each kind of terms of rows and columns: the part of the buffer that holds it, or its length.

    Those of a head come last: the copy engine wants the others to begin at multiples of 16 bytes.
    """

    row: T
    """``[B, H, M, padded Nq]``: what is added to all logits of a query and a component"""
    row_second: T
    """``[B, H, padded Nq]``: the second shifted key's term relative to the first's"""
    column: T
    """``[B, Hkv, M, padded Nk]``: what is added to all logits of a key and a component"""
    column_second: T
    """``[B, Hkv, padded Nk]``: the second shifted key's term relative to the first's"""
    origin: T
    """``[B, Hkv, D]``: the first key, from which shifts are seen"""
    unscaled: T
    """``[B, Hkv, 2, padded Nk]``: columns before they are scaled, which products start from"""
    unfactored: T
    """``[B, Hkv]``: whether ratios of the head leave the range in which weights may be factored"""
    level: T
    """``[B, Hkv]``: the logit that takes the place of the row maximum"""


NAMES_OF_TERMS = [f"p_{name}" for name in Terms._fields]


class TermsLayout:
    """Which row and column terms a call has, and how much room they take: known from shapes alone."""

    def __init__(self, tensors: Tensors, options: Options) -> None:
        query, key, shift, inverse_variance = tensors.query, tensors.key, tensors.shift, tensors.inverse_variance
        self.batch, self.heads, self.queries, self.width = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[3]
        self.components = key.shape[2] if shift is None else shift.shape[1]
        self.padding, self.hard, self.gaussian = PADDING, options.hard, options.gaussian
        self.padded_queries = (self.queries + PADDING - 1) // PADDING * PADDING
        self.padded_keys = (self.keys + PADDING - 1) // PADDING * PADDING
        # Two shifted keys of one variance: one product, and where the choice is soft one exponential.
        self.two_shifts = shift is not None and self.components == 2 and inverse_variance is None
        self.factored = self.two_shifts and not self.hard
        self.has_norm = self.gaussian and inverse_variance is not None and self.components > 1
        self.has_row = shift is not None or self.has_norm
        # Keys beyond the end are switched off by their column.
        has_columns_of_its_own = self.gaussian or tensors.log_prior is not None or tensors.key_mask is not None
        self.has_column = has_columns_of_its_own or self.two_shifts or self.keys % PADDING != 0
        # Only half precision: in fp32 the data has been centred.
        self.has_origin = shift is not None and self.gaussian and query.dtype != torch.float32
        self.block_d = block_width(self.width)
        # Two projected keys of one variance are copied and multiplied side by side.
        self.two_keys = shift is None and self.components == 2 and inverse_variance is None
        is_one_key = self.components == 1 and not self.has_row
        may_have_level = self.gaussian and inverse_variance is None and query.dtype != torch.float16
        self.has_level = may_have_level and (self.two_shifts or self.two_keys or is_one_key)
        is_hard_choice = self.two_shifts and self.hard and self.has_level
        self.from_bias = is_hard_choice and tuning.starts_from_bias(self.block_d, query.dtype.itemsize)

    def lengths(self) -> Terms[int]:
        """How many numbers each part of the buffer has."""
        rows, kv_heads = self.batch * self.heads * self.padded_queries, self.batch * self.kv_heads
        return Terms(
            row=rows * self.components if self.has_row else 0,
            row_second=rows if self.two_shifts else 0,
            column=kv_heads * self.components * self.padded_keys if self.has_column else 0,
            column_second=kv_heads * self.padded_keys if self.two_shifts else 0,
            origin=kv_heads * self.block_d if self.has_origin else 0,
            unscaled=kv_heads * 2 * self.padded_keys if self.from_bias else 0,
            unfactored=kv_heads if self.factored else 0,
            level=kv_heads if self.has_level else 0,
        )


class Call(TermsLayout):
    """One call, prepared for the kernels.

    Args:
        tensors: as they came; here they are aligned.
        options: as they came.
        buffer: the terms that a forward pass has made.
        leaves_rows: whether the kernel that follows makes the rows of two shifted keys itself.

    ``values`` are arguments and constants of kernels by name. A pass adds its own, and a kernel takes those it names.
    """

    def __init__(
        self, tensors: Tensors, options: Options, buffer: Tensor | None = None, leaves_rows: bool = False
    ) -> None:
        super().__init__(tensors, options)
        self.query, self.key = aligned(tensors.query), aligned(tensors.key.flatten(1, 2))
        self.value, self.value_width = aligned(tensors.value), tensors.value.shape[-1]
        self.dtype, self.device = self.query.dtype, self.query.device
        self.shift, self.inverse_variance = parameters_of(tensors)
        self.log_prior, self.key_spans = tensors.log_prior, tensors.key_spans
        self.group_size, self.is_causal = self.heads // self.kv_heads, options.is_causal
        self.key_mask, self.query_mask = (
            None if mask is None else mask.contiguous() for mask in (tensors.key_mask, tensors.query_mask)
        )
        lengths = self.lengths()
        self.buffer = self.new(sum(lengths)) if buffer is None else buffer
        self.terms: Terms[Tensor | None] = Terms(
            *[part if part.numel() else None for part in self.buffer.split(lengths)]
        )
        # Fifteen bits of a random number are compared, and the sixteen below them left; the last of the fifteen is
        # always set in even columns.
        dropped = round(options.dropout_p * 2**14)
        keep_probability = 1.0 - dropped / 2**14
        self.values: dict[str, Any] = {
            **dict(zip(NAMES_OF_TERMS, self.terms, strict=True)),
            **self._masks(tensors),
            **LIMITS[self.dtype],
            "p_shift": self.shift, "p_inverse_variance": self.inverse_variance, "scale": options.scale * LOG2_E,
            "natural_scale": options.scale, "threshold": dropped << 17, "keep_probability": keep_probability,
            "keep_scale": 1.0 / keep_probability,
            "num_heads": self.heads, "group_size": self.group_size, "num_queries": self.queries,
            "num_keys": self.keys, "padded_queries": self.padded_queries, "padded_keys": self.padded_keys,
            "width": self.width, "value_width": self.value_width,
            "M": self.components, "SHARED_KEY": self.shift is not None or self.components == 1, "HARD": self.hard,
            "GAUSSIAN": self.gaussian, "TWO_SHIFTS": self.two_shifts, "TWO_KEYS": self.two_keys, "UNFACTORED": False,
            "CAUSAL": options.is_causal, "D": self.block_d, "DV": block_width(self.value_width),
        }  # fmt: skip
        if buffer is None and (self.has_row or self.has_column):
            self._prepare_terms(makes_rows=self.has_row and not (leaves_rows and self.two_shifts))

    def new(self, *shape: int) -> Tensor:
        return self.query.new_empty(shape, dtype=torch.float32)

    def _masks(self, tensors: Tensors) -> dict[str, Any]:
        """Which pairs count. An axis of the attention mask that has length one stands for all: its stride is 0."""
        key_range = query_range = row_random = column_random = None
        # Packed sequences have spans instead, each its own.
        if tensors.query_spans is None and (self.key_mask is not None or self.query_mask is not None):
            key_range, query_range = self._valid_ranges()
        if tensors.seed is not None:
            row_random, column_random = self._random_numbers(tensors.seed)
        mask, strides = tensors.attn_mask, [0, 0, 0, 0]
        if mask is not None:
            strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        return {
            "p_mask": mask, "p_key_range": key_range, "p_query_range": query_range, "p_spans": tensors.query_spans,
            "p_row_random": row_random, "p_column_random": column_random, "stride_mask_batch": strides[0],
            "stride_mask_head": strides[1], "stride_mask_row": strides[2], "stride_mask_column": strides[3],
            "rows_per_span": self.padding,
        }  # fmt: skip

    def _prepare_terms(self, makes_rows: bool) -> None:
        if self.terms.unfactored is not None:
            self.terms.unfactored.zero_()
        rows = rows_of_terms(self.block_d * (self.key.shape[1] // self.kv_heads))
        row_blocks = self.padded_queries // rows if makes_rows else 0
        column_blocks = self.padded_keys // rows if self.has_column else 0
        total = self.batch * (self.heads * row_blocks + self.kv_heads * column_blocks)
        enough = tuning.programs(self.device, waves=4)
        # What a program finds before it begins takes the longer the more there is to find.
        together = max(1, min(total // enough, MOST_BLOCKS_TOGETHER if self.shift is not None else 1))
        row_programs = self.batch * self.heads * count_blocks(row_blocks, together)
        column_programs = self.batch * self.kv_heads * count_blocks(column_blocks, together)
        values = {
            **self.values, **by_name("query", self.query), **by_name("key", self.key), **prior_by_name(self.log_prior),
            "p_key_mask": self.key_mask, "largest_level": LARGEST_LEVELS[self.dtype],
            "num_row_programs": row_programs, "blocks_together": together, "HAS_ROW": makes_rows,
            "DEPENDENT_LAUNCH": self.has_level and self.tile("forward").specialised, "BLOCK": rows,
        }  # fmt: skip
        launch(preparation.logit_terms, row_programs + column_programs, values, ONE_WARP)

    def _random_numbers(self, seed: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.empty(self.batch * self.heads * self.padded_queries, dtype=torch.int32, device=self.device)
        columns = torch.empty(self.batch * self.kv_heads * self.padded_keys // 2, dtype=torch.int32, device=self.device)
        row_programs, column_programs = count_blocks(rows.numel(), BLOCK), count_blocks(columns.numel(), BLOCK)
        values = {
            "p_seed": seed, "p_row_random": rows, "p_column_random": columns, "num_row_programs": row_programs,
            "num_rows": rows.numel(), "num_columns": columns.numel(), "padded_queries": self.padded_queries,
            "padded_keys": self.padded_keys, "BLOCK": BLOCK,
        }  # fmt: skip
        launch(preparation.random_numbers, row_programs + column_programs, values, SMALL)
        return rows, columns

    def _valid_ranges(self) -> tuple[Tensor, Tensor]:
        ranges = torch.empty(2, self.batch, 2, dtype=torch.int32, device=self.device)
        values = {
            "p_key_mask": self.key_mask, "p_query_mask": self.query_mask, "p_ranges": ranges, "num_keys": self.keys,
            "num_queries": self.queries, "num_samples": self.batch,
            "BLOCK": 64 if tuning.is_interpreted() else 4 * BLOCK,
        }  # fmt: skip
        launch(preparation.valid_ranges, 2 * self.batch, values, FOUR_WARPS)
        return ranges[0], ranges[1]

    def tile(self, name: str, run: Callable[[Tile], object] | None = None) -> Tile:
        """The tile of the kernel called ``name``: of the table or, if a trial is asked for, the fastest for ``run``."""
        kernel = self.kernel(name)
        if run is not None:
            tuning.tune(kernel, self.device, run)
        return tuning.choose_tile(kernel, self.device)

    def kernel(self, name: str) -> Kernel:
        """What this call's tile is chosen by."""
        width = block_width(max(self.width, self.value_width))
        if self.two_shifts or self.two_keys:
            kind = ("hard " if self.hard else "") + ("two shifts" if self.two_shifts else "two keys")
        else:
            kind = "one" if self.components == 1 else "many"
        return Kernel(
            name, width, self.dtype.itemsize, kind, self.is_causal, self.values["p_mask"] is not None,
            self.has_level, self.fits_specialised_forward,
        )  # fmt: skip

    @property
    def fits_specialised_forward(self) -> bool:
        """Whether the kernel with warp specialisation can do the forward pass: it knows no masks, no dropout, no
        queries before the first key, one width for keys and values, and no bias but the level's columns."""
        has_bias = self.has_row or self.has_column
        masks = ("p_mask", "p_key_range", "p_spans", "p_row_random")
        return (
            self.keys > 0
            and self.block_d == block_width(self.value_width)
            and all(self.values[name] is None for name in masks)
            and not (self.is_causal and self.keys < self.queries)
            and (self.has_level or (self.components == 1 and self.inverse_variance is None and not has_bias))
        )


def rows_of_small_kernels(width: int) -> int:
    """How many rows a program takes at a time, where ``width`` numbers make a row."""
    if tuning.is_interpreted():
        return 16
    return power_of_two(max(min(128, 4096 // width), min(32, 8192 // width), 8))


def rows_of_terms(width: int) -> int:
    """The same for one warp that makes terms of rows and columns."""
    if tuning.is_interpreted():
        return 16
    return power_of_two(max(8, min(64, (2048 if width <= 64 else 4096) // width)))


def power_of_two(number: int) -> int:
    """The largest power of two that is not larger: what blocks are made of."""
    return 1 << (number.bit_length() - 1)


def parameters_of(tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Shifts, and inverse variances in units of log 2, as kernels read them."""
    shift, variance = tensors.shift, tensors.inverse_variance
    return (
        None if shift is None else shift.float().contiguous(),
        None if variance is None else (variance.float() * LOG2_E).contiguous(),
    )


def prior_by_name(log_prior: Tensor | None) -> dict[str, Any]:
    """The prior as kernels read it, ``[Hkv, M, Nk or 1]`` or ``[B * Hkv, M, Nk]``, and how far heads, components and
    keys lie apart. A prior of each sample is copied if its heads do not follow each other at one distance."""
    prior, strides, by_key = log_prior, [0, 0, 0], False
    if log_prior is not None:
        prior = log_prior.flatten(0, 1) if log_prior.ndim == 4 else log_prior
        strides, by_key = list(prior.stride()), not is_prior_by_head(log_prior)
    return {
        "p_prior": prior, "stride_prior_head": strides[0], "stride_prior_component": strides[1],
        "stride_prior_token": strides[2] if by_key else 0, "PRIOR_BY_KEY": by_key,
        "PRIOR_BY_SAMPLE": log_prior is not None and log_prior.ndim == 4,
    }  # fmt: skip


def is_prior_by_head(log_prior: Tensor) -> bool:
    """Whether all keys of all samples have one prior."""
    return log_prior.ndim == 3 and log_prior.shape[2] == 1
