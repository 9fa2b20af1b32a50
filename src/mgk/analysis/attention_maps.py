"""The attention weights of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mgk.analysis.record import NUM_QUERIES, AttentionRecord
from mgk.evaluation.inference import evaluation_mode

# Most cells per side of a drawn map; a figure of all heads cannot show more.
MAP_SIZE = 256


def attention_maps(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    """Compute the attention weights of every layer, ``[layers][B, H, Nq, Nk]``, in fp32 on the CPU.

    The model is evaluated without dropout and gradients, and keeps its mode. For a model of pairs the maps are those of
    the first sequence. For a translation model pass its encoder, or its decoder with ``encoder_hidden_states``.

    Args:
        model: any model of :mod:`mgk.models` with one stack of layers.
        inputs: arguments of its ``forward``.
    """
    with evaluation_mode(model):
        outputs = model(**{**inputs, "output_attentions": True, "return_dict": True})
    maps = getattr(outputs, "attentions", None)
    if not maps:
        kind = type(model).__name__
        raise ValueError(
            f"model must have one stack of layers that returns its attention, got {kind}: "
            f"of a translation model, ask model.get_encoder() or model.get_decoder()"
        )
    return [weights.to("cpu", torch.float32) for weights in maps]


@dataclass(frozen=True, kw_only=True, eq=False)
class PooledMaps:
    """The attention matrices of one layer for one sample, pooled to a size that can be drawn."""

    layer: str
    """Name of the layer in the record."""
    weights: Tensor
    """``[H, rows, columns]``: mean weight of the queries and keys of each cell, times the number of keys, so that
    uniform attention is 1."""
    num_queries: int
    """Number of queries that the rows cover."""
    num_keys: int
    """Number of keys that the columns cover."""


def pooled_maps(
    record: AttentionRecord, *, sample: int = 0, size: int = MAP_SIZE, num_queries: int | None = NUM_QUERIES
) -> list[PooledMaps]:
    """Compute the attention maps of every head and layer, with long sequences pooled to ``size`` cells per side.

    Only one head's matrix exists at a time. If there are more than ``num_queries`` queries, that many evenly spaced
    rows are computed.

    Args:
        record: record of a model on a batch.
        sample: index of the sample in the batch.
        size: most cells per side; shorter sequences have a cell for each token.
        num_queries: most rows to compute; ``None`` is all.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not 0 <= sample < record.num_samples:
        raise ValueError(f"sample must lie in [0, {record.num_samples}), got {sample}")
    found = []
    for call in record.calls:
        call.check_has_tokens(sample)
        queries, keys = call.queries(sample, num_queries), call.keys(sample)
        rows, columns = min(size, len(queries)), min(size, len(keys))
        maps = []
        for head in range(call.num_heads):
            weight = call.weights(sample, head, queries, torch.float32) * len(keys)
            maps.append(F.adaptive_avg_pool2d(weight[None], (rows, columns))[0].cpu())
        found.append(
            PooledMaps(
                layer=call.name, weights=torch.stack(maps), num_queries=len(call.queries(sample)), num_keys=len(keys)
            )
        )
    return found
