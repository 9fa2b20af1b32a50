"""A step of generation: attention of a few queries to a long cache, without a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.problem import MixtureProblem
from mgk.ops.triton import tuning
from mgk.ops.triton.call import LOG2_E, PROGRAMS, SMALL, inverse_variance_of, prior_and_strides
from mgk.ops.triton.kernels import decode
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import aligned, block_width, count_blocks, descriptor, on_device
from mgk.ops.triton.operator import is_unwatched, visible_pairs

FEW_QUERIES = 16
# Queries times the heads that share a key: rows of a block.
MOST_ROWS = 64
# Shares into which the keys of a head are split at most.
MOST_SPLITS = 128
WAVES = 4
# Blocks of keys that a share has at least, unless there are fewer.
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
    hard = problem.assignment == "hard"
    scale, inverse_variance = inverse_variance_of(problem)
    query, log_prior = problem.query, None if hard else problem.log_prior
    if problem.query_mask is not None:
        query = query.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    arguments = (query, problem.key, problem.value, problem.shift, log_prior, inverse_variance, problem.key_mask)
    call: Any = run if is_unwatched(*arguments) else fused_decode
    out = call(*arguments, scale, problem.similarity == "gaussian", problem.is_causal, hard)
    return out if problem.query_mask is None else out.masked_fill(~problem.query_mask[:, None, :, None], 0.0)


@torch.library.custom_op("mgk::fused_decode", mutates_args=())
def fused_decode(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
    key_mask: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
) -> Tensor:  # fmt: skip
    """Attention of a few queries, ``[B, H, Nq, Dv]``, without a gradient. Arguments as of ``fused_attention``."""
    return run(query, key, value, shift, log_prior, inverse_variance, key_mask, scale, gaussian, is_causal, hard)


@fused_decode.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def run(
    query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, log_prior: Tensor | None, inverse_variance: Tensor | None,
    key_mask: Tensor | None, scale: float, gaussian: bool, is_causal: bool, hard: bool,
) -> Tensor:  # fmt: skip
    batch, heads, queries, width = query.shape
    kv_heads, components, keys = key.shape[1], key.shape[2] if shift is None else shift.shape[1], key.shape[3]
    group_size = heads // kv_heads
    rows, value_width = group_size * queries, value.shape[-1]
    tile = tuning.choose_decode_tile(max(width, value_width), 1 if shift is not None else components)
    # As many programs as keep the GPU busy, but each with some blocks of its own.
    wanted = (
        3
        if tuning.is_interpreted()
        else count_blocks(WAVES * PROGRAMS, batch * kv_heads) * (1 if shift is not None else components)
    )
    splits = max(1, min(wanted, count_blocks(keys, LEAST_BLOCKS * tile.columns), MOST_SPLITS))
    keys_per_split = count_blocks(count_blocks(keys, splits), tile.columns) * tile.columns
    splits = count_blocks(keys, keys_per_split)
    block_v = block_width(value_width)
    with on_device(query):
        # As a rule a cache is aligned: what is not must be copied.
        query, key, value = aligned(query), aligned(key), aligned(value)
        partial = query.new_empty(batch * kv_heads, splits, rows, block_v, dtype=torch.float32)
        maximum = query.new_empty(batch * kv_heads, splits, rows, dtype=torch.float32)
        sums = torch.empty_like(maximum)
        out = query.new_empty(batch, heads, queries, value_width)
        prior, prior_strides = prior_and_strides(log_prior)
        own_inverse_variance = None if inverse_variance is None else (inverse_variance.float() * LOG2_E).contiguous()
        launch(
            decode.decode_split,
            batch * kv_heads * splits,
            (
                descriptor(key, tile.columns), descriptor(value, tile.columns), query, key, value,
                None if shift is None else shift.float().contiguous(), prior, own_inverse_variance,
                key_mask, partial, maximum, sums, *query.stride()[:3], *key.stride()[:4], *value.stride()[:3],
                *prior_strides, *((0, 0) if key_mask is None else key_mask.stride()), scale * LOG2_E, heads,
                group_size, queries, keys, keys_per_split, splits, width, value_width,
            ),
            {
                "M": components,
                "SHARED_KEY": shift is not None or components == 1,
                "HARD": hard,
                "GAUSSIAN": gaussian,
                "ONE_VARIANCE": inverse_variance is None,
                "HAS_SHIFT": shift is not None,
                "HAS_PRIOR": log_prior is not None,
                "PRIOR_BY_KEY": log_prior is not None and (log_prior.ndim == 4 or log_prior.shape[2] > 1),
                "PRIOR_BY_SAMPLE": log_prior is not None and log_prior.ndim == 4,
                "HAS_KEY_MASK": key_mask is not None,
                "CAUSAL": is_causal and queries > 1,
                "INPUT_PRECISION": "ieee",
                # With the halves of the shifts, which are rows as well.
                "ROWS": block_width(rows + (2 * components if shift is not None and gaussian else 0)),
                "BLOCK_J": tile.columns,
                "D": block_width(width),
                "DV": block_v,
            },
            tile,
        )  # fmt: skip
        launch(
            decode.decode_merge,
            batch * kv_heads * rows,
            (partial, maximum, sums, out, splits, rows, value_width),
            {"SPLITS": max(2, 1 << (splits - 1).bit_length()), "DV": block_v},
            SMALL,
        )
    return out


@register_flop_formula(torch.ops.mgk.fused_decode)
def _decode_flops(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **_: Any) -> int:
    """As forward."""
    pairs = visible_pairs(query_shape, key_shape[3], bool(args[6]) and query_shape[2] > 1)
    return 2 * pairs * (key_shape[2] * query_shape[3] + value_shape[3])
