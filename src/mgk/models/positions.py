"""Position encodings: learned, sinusoidal and rotary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mgk.models.configuration import MGKConfig
from mgk.ops.validation import may_inspect_values


class LearnedPositions(nn.Embedding):
    """A table with one row for each position."""

    def forward(self, position_ids: Tensor) -> Tensor:
        if may_inspect_values(position_ids) and position_ids.numel() > 0:
            longest = int(position_ids.max()) + 1
            if longest > self.num_embeddings:
                raise ValueError(
                    f"a sequence may have at most max_position_embeddings={self.num_embeddings} tokens, got {longest}"
                )
        return super().forward(position_ids)


class SinusoidalPositions(nn.Module):
    """``[sin(p w_0), sin(p w_1), ..., cos(p w_0), ...]`` with ``w_i = 10000^(-2i/d)``, for any length."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, position_ids: Tensor) -> Tensor:
        """Encode positions ``[B, N]`` as ``[B, N, hidden_size]``, in fp32."""
        exponent = torch.arange(0, self.hidden_size, 2, device=position_ids.device, dtype=torch.float32)
        angle = position_ids[..., None].float() * 10000.0 ** (-exponent / self.hidden_size)
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}"


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Angles of rotary positions, with every scaling that transformers knows."""


class Rotation(NamedTuple):
    """The rotation of queries and keys by the angles of their positions.

    It is a tuple so that accelerate can move its tensors to the device of a layer.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[B, H, ..., N, D]``."""
        shape = (self.cos.shape[0], *[1] * (x.ndim - 3), *self.cos.shape[1:])
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * self.cos.view(shape) + turned * self.sin.view(shape)).to(x.dtype)


def build_positions(config: MGKConfig) -> nn.Module | None:
    """Return the module that adds positions to embeddings, or ``None`` if the attention adds them, or nothing does."""
    if config.positions == "learned":
        return LearnedPositions(config.max_position_embeddings, config.hidden_size)
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.hidden_size)
    return None
