"""A step of generation: attention of a few queries to a long cache, without a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import tuning
from mgk.ops.triton.call import LOG2_E, SMALL, parameters_of, prior_by_name
from mgk.ops.triton.inputs import SCHEMA, Options, Tensors, inputs_of, named
from mgk.ops.triton.kernels import decode
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, by_name, count_blocks, descriptor, on_device
from mgk.ops.triton.operator import flops_of, is_unwatched
from mgk.ops.triton.tile_table import Tile

FEW_QUERIES = 16
# Queries times the heads that share a key: rows of a block.
MOST_ROWS = 64
# Programs between which the keys of a head are split at most.
MOST_SPLITS = 128
WAVES = 4
# Blocks of keys that a program has at least, unless there are fewer.
LEAST_BLOCKS = 2


def is_step(problem: MixtureProblem) -> bool:
    """Whether a call has few queries, needs no gradient, and asks for nothing that depends on single pairs."""
    tensors = (problem.query, problem.key, problem.value, problem.shift, problem.log_prior, problem.variance)
    needs_graph = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return (
        problem.query.shape[2] < FEW_QUERIES
        and problem.query.shape[2] * problem.group_size <= MOST_ROWS
        and problem.query.dtype in (torch.bfloat16, torch.float16)
        and problem.attn_mask is None
        and problem.dropout_p == 0
        and not needs_graph
    )


def attend_in_step(problem: MixtureProblem) -> Tensor:
    """``[B, H, Nq, Dv]``, where :func:`is_step` allows it. What stands at masked keys is never read."""
    tensors, options = inputs_of(problem._replace(log_prior=None) if problem.assignment == "hard" else problem)
    if problem.query_mask is not None:
        query = tensors.query.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
        tensors = tensors._replace(query=query, query_mask=None)
    out: Tensor = run(tensors, options) if is_unwatched(*tensors) else fused_decode(*tensors, *options)
    return out if problem.query_mask is None else out.masked_fill(~problem.query_mask[:, None, :, None], 0.0)


@torch.library.custom_op("mgk::fused_decode", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def fused_decode(*values: Any) -> Tensor:
    """:func:`run` of ``*tensors, *options``."""
    return run(*named(values))


@fused_decode.register_fake
def _(*values: Any) -> Tensor:
    tensors, _ = named(values)
    return tensors.query.new_empty(*tensors.query.shape[:3], tensors.value.shape[-1])


class Split(NamedTuple):
    """How the keys of a head are split between programs (split-KV)."""

    programs: int
    """programs of a head"""
    keys: int
    """keys of a program: whole blocks"""
    tile: Tile
    """the tile of the kernel"""


def _split(tensors: Tensors) -> Split:
    """As many programs as keep the GPU busy, but each with some blocks of its own."""
    query, key, device = tensors.query, tensors.key, tensors.query.device
    batch, kv_heads, key_tensors, keys, _ = key.shape
    tile = tuning.choose_decode_tile(max(query.shape[-1], tensors.value.shape[-1]), key_tensors, device)
    wanted = count_blocks(tuning.programs(device, WAVES), batch * kv_heads) * key_tensors
    if tuning.is_interpreted():
        wanted = 3
    splits = max(1, min(wanted, count_blocks(keys, LEAST_BLOCKS * tile.columns), MOST_SPLITS))
    keys_per_split = count_blocks(count_blocks(keys, splits), tile.columns) * tile.columns
    return Split(count_blocks(keys, keys_per_split), keys_per_split, tile)


def run(tensors: Tensors, options: Options) -> Tensor:
    """Attention of a few queries, ``[B, H, Nq, Dv]``, without a gradient."""
    split, key_mask = _split(tensors), tensors.key_mask
    batch, heads, queries, width = tensors.query.shape
    kv_heads, keys, value_width = tensors.key.shape[1], tensors.key.shape[3], tensors.value.shape[-1]
    group_size, block_v = heads // kv_heads, block_width(value_width)
    rows = group_size * queries
    with on_device(tensors.query):
        # As a rule a cache is aligned: what is not must be copied.
        query, key, value = aligned(tensors.query), aligned(tensors.key), aligned(tensors.value)
        shift, inverse_variance = parameters_of(tensors)
        components = key.shape[2] if shift is None else shift.shape[1]
        partial_sums = query.new_empty(batch * kv_heads, split.programs, rows, block_v, dtype=torch.float32)
        maximum = query.new_empty(batch * kv_heads, split.programs, rows, dtype=torch.float32)
        sums = torch.empty_like(maximum)
        out = query.new_empty(batch, heads, queries, value_width)
        # With the halves of the shifts, which are rows as well.
        block_rows = block_width(rows + (2 * components if shift is not None and options.gaussian else 0))
        mask_strides = (0, 0) if key_mask is None else key_mask.stride()
        partial = {
            "p_partial": partial_sums, "p_maximum": maximum, "p_sum": sums, "num_splits": split.programs,
            "value_width": value_width, "DV": block_v,
        }  # fmt: skip
        values = {
            **partial, **by_name("query", query), **by_name("key", key), **by_name("value", value),
            **prior_by_name(tensors.log_prior), "d_key": descriptor(key, split.tile.columns),
            "d_value": descriptor(value, split.tile.columns), "p_shift": shift, "p_inverse_variance": inverse_variance,
            "p_key_mask": key_mask, "stride_mask_batch": mask_strides[0], "stride_mask_key": mask_strides[1],
            "scale": options.scale * LOG2_E, "num_heads": heads, "group_size": group_size, "num_queries": queries,
            "num_keys": keys, "keys_per_split": split.keys, "width": width, "M": components,
            "SHARED_KEY": shift is not None or components == 1, "HARD": options.hard, "GAUSSIAN": options.gaussian,
            "CAUSAL": options.is_causal and queries > 1, "ROWS": block_rows, "BLOCK_J": split.tile.columns,
            "D": block_width(width),
        }  # fmt: skip
        launch(decode.decode_split, batch * kv_heads * split.programs, values, split.tile)
        merged = {**partial, "p_out": out, "num_rows": rows, "SPLITS": max(2, 1 << (split.programs - 1).bit_length())}
        launch(decode.decode_merge, batch * kv_heads * rows, merged, SMALL)
    return out


@register_flop_formula(torch.ops.mgk.fused_decode)
def _decode_flops(*values: Any, **_: Any) -> int:
    """As forward. Shapes stand for tensors here."""
    return flops_of(values, of_keys=1, of_values=1)
