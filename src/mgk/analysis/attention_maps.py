"""The attention weights of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mgk.evaluation.inference import evaluation_mode


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
