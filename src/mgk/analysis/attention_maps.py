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

# Cells to a side of a map that is drawn: more than that a picture of all heads does not show.
MAP_SIZE = 256


def attention_maps(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    """Weights of every layer on these inputs, ``[layers][B, H, Nq, Nk]``, materialised, in fp32 on the CPU.

    Evaluated without dropout and without gradients; the model keeps its mode. Of a model for pairs these are the maps
    of the first sequence. Of a translation model ask the encoder, or the decoder with ``encoder_hidden_states``.

    Args:
        model: any model of :mod:`mgk.models` with one stack of layers.
        inputs: what its ``forward`` takes.
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
    """The attention matrices of one layer for one sample, small enough to look at."""

    layer: str
    """Its name in the record."""
    weights: Tensor
    """``[H, rows, columns]``: a cell is the mean weight of its queries and keys, times the number of keys: 1 is what it
    would be if every key got the same."""
    num_queries: int
    """How many the rows stand for."""
    num_keys: int
    """How many the columns stand for."""


def pooled_maps(
    record: AttentionRecord, *, sample: int = 0, size: int = MAP_SIZE, num_queries: int | None = NUM_QUERIES
) -> list[PooledMaps]:
    """The attention maps of every head and layer, long sequences pooled to ``size`` cells a side.

    One head exists at a time, and of more than ``num_queries`` queries so many rows of it, evenly spaced.

    Args:
        record: of a model and a batch.
        sample: which of the batch.
        size: cells to a side at most; shorter sequences have a cell for each token.
        num_queries: rows to compute at most; ``None``: all.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not 0 <= sample < record.num_samples:
        raise ValueError(f"sample must lie in [0, {record.num_samples}), got {sample}")
    found = []
    for call in record.calls:
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
