"""One call, prepared for the kernels: row and column terms, masks, random numbers, options."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import tuning
from mgk.ops.triton.kernels import preparation
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, count_blocks

LOG2_E = math.log2(math.e)
# Lengths of padded terms are a multiple of every block size, so that no load needs a mask, and of 32, the tokens among
# which random numbers change places.
PADDING = 128
# A small kernel works on this many numbers.
BLOCK = 1024
SMALL = tuning.Tile(0, 0, 2, 1)
ONE_WARP = tuning.Tile(0, 0, 1, 1)
# As many programs as keep a large GPU busy.
PROGRAMS = 264
# Blocks of terms that one program makes.
MOST_BLOCKS_TOGETHER = 4


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
        self, query: Tensor, key: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
        key_mask: Tensor | None, gaussian: bool, hard: bool,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, self.width = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[3]
        self.components = key.shape[2] if shift is None else shift.shape[1]
        self.padding = PADDING
        self.padded_queries = (self.queries + PADDING - 1) // PADDING * PADDING
        self.padded_keys = (self.keys + PADDING - 1) // PADDING * PADDING
        # Two shifted keys of one variance: one product, and softly one exponential.
        self.two_shifts = shift is not None and self.components == 2 and inverse_variance is None
        self.factored = self.two_shifts and not hard
        self.hard = hard
        self.has_norm = gaussian and inverse_variance is not None and self.components > 1
        self.has_row = shift is not None or self.has_norm
        # Keys beyond the end are switched off by their column.
        self.has_column = (
            gaussian or log_prior is not None or key_mask is not None or self.two_shifts or self.keys % PADDING != 0
        )
        # Only half precision: in fp32 the data has been centred.
        self.has_origin = shift is not None and gaussian and query.dtype != torch.float32
        self.block_d = block_width(self.width)
        # Two projected keys of one variance are copied and multiplied side by side.
        self.two_keys = shift is None and self.components == 2 and inverse_variance is None
        is_plain = self.two_shifts or self.two_keys or (self.components == 1 and not self.has_row)
        self.has_level = gaussian and inverse_variance is None and is_plain and query.dtype != torch.float16
        is_hard_pair = self.two_shifts and hard and self.has_level
        self.from_bias = is_hard_pair and tuning.starts_from_bias(self.block_d, query.dtype.itemsize)

    def sizes(self) -> dict[str, int]:
        """Numbers in each part of the buffer."""
        rows, kv_heads = self.batch * self.heads * self.padded_queries, self.batch * self.kv_heads
        return {
            "row": rows * self.components if self.has_row else 0,
            "row_second": rows if self.two_shifts else 0,
            "column": kv_heads * self.components * self.padded_keys if self.has_column else 0,
            "column_second": kv_heads * self.padded_keys if self.two_shifts else 0,
            "origin": kv_heads * self.block_d if self.has_origin else 0,
            "unscaled": kv_heads * 2 * self.padded_keys if self.from_bias else 0,
            # A number for each head, so last: the copy engine wants the others to begin at multiples of 16 bytes.
            "unfactored": kv_heads if self.factored else 0,
            "level": kv_heads if self.has_level else 0,
        }


class Call(TermsLayout):
    """One call, prepared for the kernels: aligned tensors, row and column terms, masks, random numbers, options."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor | None, shift: Tensor | None, log_prior: Tensor | None,
        inverse_variance: Tensor | None, attn_mask: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
        seed: Tensor | None, query_spans: Tensor | None, scale: float, gaussian: bool,
        is_causal: bool, hard: bool, dropout_p: float, saved: Tensor | None = None, pairs_are_left: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(query, key, shift, log_prior, inverse_variance, key_mask, gaussian, hard)
        self.query, self.key = aligned(query), aligned(key.flatten(1, 2))
        self.value = None if value is None else aligned(value)
        self.dtype, self.device = query.dtype, query.device
        self.limits = LIMITS[query.dtype]
        self.scale = scale * LOG2_E
        self.inverse_variance = None if inverse_variance is None else (inverse_variance.float() * LOG2_E).contiguous()
        self.shift = None if shift is None else shift.float().contiguous()
        self.log_prior, self.attn_mask, self.gaussian = log_prior, attn_mask, gaussian

        shared = shift is not None or self.components == 1
        self.key_range = self.query_range = None
        # Packed sequences have spans instead, each its own.
        if query_spans is None and (key_mask is not None or query_mask is not None):
            self.key_range, self.query_range = self._valid_ranges(key_mask, query_mask)
        self.row_random = self.column_random = None
        if seed is not None:
            self.row_random, self.column_random = self._random_numbers(seed)
        self.options: dict[str, Any] = {
            "M": self.components,
            "SHARED_KEY": shared,
            "HARD": hard,
            "HAS_ROW": self.has_row,
            "HAS_COLUMN": self.has_column,
            "ONE_VARIANCE": inverse_variance is None,
            "CAUSAL": is_causal,
            "HAS_MASK": attn_mask is not None,
            "HAS_RANGE": self.key_range is not None,
            "PACKED": query_spans is not None,
            "HAS_LEVEL": self.has_level,
            "FROM_BIAS": self.from_bias,
            "DROPOUT": seed is not None,
            "INPUT_PRECISION": "ieee",
        }
        # Of a random number fifteen bits are compared, and the sixteen below them left; the last of the fifteen is
        # always set in even columns.
        dropped = round(dropout_p * 2**14)
        self.threshold, self.keep_probability = dropped << 17, 1.0 - dropped / 2**14
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if attn_mask is not None:
            sizes = zip(attn_mask.shape, attn_mask.stride(), strict=True)
            self.mask_strides = tuple(0 if size == 1 else stride for size, stride in sizes)
        self._lay_out_terms(saved)
        if saved is None:
            self._prepare_terms(key_mask, not (pairs_are_left and self.two_shifts))

    def _lay_out_terms(self, saved: Tensor | None) -> None:
        """Name the parts of the one buffer that holds all terms, or ``saved``, which a forward pass has filled."""
        sizes = self.sizes()
        self.terms = self.new(sum(sizes.values())) if saved is None else saved
        parts = dict(zip(sizes, self.terms.split(list(sizes.values())), strict=True))
        self.row, self.row_second, self.column, self.column_second, self.origin, self.unscaled, self.unfactored, self.level = (
            part if part.numel() else None for part in parts.values()
        )

    def _prepare_terms(self, key_mask: Tensor | None, makes_rows: bool) -> None:
        if not (self.has_row or self.has_column):
            return
        if self.unfactored is not None:
            self.unfactored.zero_()
        rows = rows_of_terms(self.block_d * (1 if self.options["SHARED_KEY"] else self.components))
        row_blocks = self.padded_queries // rows if self.has_row and makes_rows else 0
        column_blocks = self.padded_keys // rows if self.has_column else 0
        total = self.batch * (self.heads * row_blocks + self.kv_heads * column_blocks)
        enough = 2 if tuning.is_interpreted() else 4 * PROGRAMS
        # What a program finds before it begins takes the longer the more there is to find.
        together = max(1, min(total // enough, MOST_BLOCKS_TOGETHER if self.shift is not None else 1))
        row_programs = self.batch * self.heads * count_blocks(row_blocks, together)
        column_programs = self.batch * self.kv_heads * count_blocks(column_blocks, together)
        prior, prior_strides = prior_and_strides(self.log_prior)
        launch(
            preparation.logit_terms,
            row_programs + column_programs,
            (
                self.query, self.key, self.shift, prior, self.inverse_variance, self.origin,
                None if key_mask is None else key_mask.contiguous(), self.query_range, self.key_range, self.row,
                self.row_second, self.column, self.column_second, self.unscaled, self.unfactored, self.level, *self.query.stride()[:3],
                *self.key.stride()[:3],
                *prior_strides, self.scale, self.limits.ratio, self.limits.level, self.heads,
                self.heads // self.kv_heads, self.queries,
                self.keys, self.padded_queries, self.padded_keys, row_programs, together, self.width,
            ),
            {
                "M": self.components,
                "SHARED_KEY": self.options["SHARED_KEY"],
                "TWO_SHIFTS": self.two_shifts,
                "HARD": self.options["HARD"],
                "GAUSSIAN": self.gaussian,
                "HAS_SHIFT": self.shift is not None,
                "HAS_PRIOR": prior is not None,
                "PRIOR_BY_SAMPLE": self.log_prior is not None and self.log_prior.ndim == 4,
                "HAS_NORM": self.has_norm,
                "HAS_ORIGIN": self.origin is not None,
                "HAS_KEY_MASK": key_mask is not None,
                "HAS_RANGE": self.key_range is not None,
                "HAS_LEVEL": self.has_level,
                "HAS_ROW": self.has_row and makes_rows,
                "HAS_COLUMN": self.has_column,
                "FROM_BIAS": self.from_bias,
                "DEPENDENT_LAUNCH": self.has_level and self.tile("forward").specialised,
                "ONE_VARIANCE": self.inverse_variance is None,
                "BLOCK": rows,
                "D": self.block_d,
            },
            ONE_WARP,
        )  # fmt: skip

    def new(self, *shape: int) -> Tensor:
        return self.query.new_empty(shape, dtype=torch.float32)

    def _random_numbers(self, seed: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.empty(self.batch * self.heads * self.padded_queries, dtype=torch.int32, device=self.device)
        columns = torch.empty(self.batch * self.kv_heads * self.padded_keys // 2, dtype=torch.int32, device=self.device)
        row_programs, column_programs = count_blocks(rows.numel(), BLOCK), count_blocks(columns.numel(), BLOCK)
        arguments = (
            seed, rows, columns, row_programs, rows.numel(), columns.numel(), self.padded_queries, self.padded_keys,
        )  # fmt: skip
        launch(preparation.random_numbers, row_programs + column_programs, arguments, {"BLOCK": BLOCK}, SMALL)
        return rows, columns

    def _valid_ranges(self, key_mask: Tensor | None, query_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        ranges = torch.empty(2, self.batch, 2, dtype=torch.int32, device=self.device)
        block = 64 if tuning.is_interpreted() else 4 * BLOCK
        launch(
            preparation.valid_ranges,
            2 * self.batch,
            (
                None if key_mask is None else key_mask.contiguous(),
                None if query_mask is None else query_mask.contiguous(), ranges, self.keys, self.queries, self.batch,
            ),
            {"HAS_KEY_MASK": key_mask is not None, "HAS_QUERY_MASK": query_mask is not None, "BLOCK": block},
            tuning.Tile(0, 0, 4, 1),
        )  # fmt: skip
        return ranges[0], ranges[1]

    def tile(self, name: str) -> tuning.Tile:
        """Of the kernel called ``name``."""
        return tuning.choose_tile(self.kernel(name), self.device)

    def kernel(self, name: str) -> tuning.Kernel:
        """What this call's tile is chosen by."""
        width = block_width(max(self.width, 0 if self.value is None else self.value.shape[-1]))
        kind = "two shifts" if self.two_shifts else "one" if self.components == 1 else "two keys" if self.two_keys else "many"
        if self.hard and kind in ("two shifts", "two keys"):
            kind = f"hard {kind}"
        return tuning.Kernel(
            name, width, self.dtype.itemsize, kind, bool(self.options["CAUSAL"]), self.attn_mask is not None,
            self.has_level, self.is_plain,
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether warps with roles can do the forward pass: they know no masks, no dropout, no queries before the first
        key, one width for keys and values, and no bias but the level's columns."""
        asked = ("HAS_MASK", "HAS_RANGE", "PACKED", "DROPOUT")
        has_no_bias = not self.has_row and not self.has_column
        return (
            self.value is not None
            and self.keys > 0
            and block_width(self.width) == block_width(self.value.shape[-1])
            and not any(self.options[name] for name in asked)
            and not (self.options["CAUSAL"] and self.keys < self.queries)
            and (self.has_level or (self.components == 1 and self.inverse_variance is None and has_no_bias))
        )

    def run(self, name: str, run: Any) -> None:
        """Run a kernel with the tile of the table, or of a trial if one is asked for."""
        tuning.tune(self.kernel(name), self.device, run)
        run(self.tile(name))


def rows_of_small_kernels(width: int) -> int:
    """``width``: of all the numbers of a row together."""
    if tuning.is_interpreted():
        return 16
    return power_of_two(max(min(128, 4096 // width), min(32, 8192 // width), 8))


def rows_of_terms(width: int) -> int:
    """The same for one warp that makes terms of rows and columns."""
    if tuning.is_interpreted():
        return 16
    return power_of_two(max(8, min(64, (2048 if width <= 64 else 4096) // width)))


def power_of_two(number: int) -> int:
    """The largest that is not larger: what blocks are made of."""
    return 1 << (number.bit_length() - 1)


def prior_and_strides(log_prior: Tensor | None) -> tuple[Tensor | None, tuple[int, int, int]]:
    """The prior as kernels read it, ``[Hkv, M, Nk or 1]`` or ``[B * Hkv, M, Nk]``, and how far heads, components and
    keys lie apart. A prior of each sample is copied if its heads do not follow each other at one distance."""
    if log_prior is None:
        return None, (0, 0, 0)
    by_key = log_prior.ndim == 4 or log_prior.shape[2] > 1
    prior = log_prior.flatten(0, 1) if log_prior.ndim == 4 else log_prior
    return prior, (prior.stride(0), prior.stride(1), prior.stride(2) if by_key else 0)


def inverse_variance_of(problem: MixtureProblem) -> tuple[float, Tensor | None]:
    """``1 / variance``: a number for all components, or ``[Hkv, M]``."""
    if isinstance(problem.variance, float):
        return 1.0 / problem.variance, None
    return 1.0, problem.variance.float().reciprocal()
