"""One layer of an encoder or a decoder."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from mgk.models.attention import MGKAttention
from mgk.models.configuration import MGKConfig
from mgk.models.positions import Rotation
from mgk.models.visibility import Visibility


def build_norm(config: MGKConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class FeedForward(nn.Module):
    """``down(act(up x))``, or gated: ``down(act(gate x) * up x)``."""

    def __init__(self, config: MGKConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = config.activation_dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up_proj(x)
        inner = self.activation(inner) if self.gate_proj is None else self.activation(self.gate_proj(x)) * inner
        return self.down_proj(F.dropout(inner, self.dropout, self.training))


class MGKLayer(GradientCheckpointingLayer):
    """Self-attention, cross-attention in a decoder that has an encoder, and a feed-forward network.

    Each is a sublayer ``f`` with a residual: ``x + f(norm(x))``, or ``norm(x + f(x))`` with norms placed after.
    """

    def __init__(self, config: MGKConfig, layer_idx: int, *, is_causal: bool, has_cross_attention: bool) -> None:
        super().__init__()
        self.norm_first = config.norm_placement == "pre"
        self.dropout = config.dropout
        self.self_attn = MGKAttention(config, layer_idx, is_causal=is_causal)
        self.self_attn_norm = build_norm(config)
        self.cross_attn = MGKAttention(config, layer_idx, is_cross=True) if has_cross_attention else None
        self.cross_attn_norm = build_norm(config) if has_cross_attention else None
        self.mlp = FeedForward(config)
        self.mlp_norm = build_norm(config)

    def forward(
        self,
        hidden_states: Tensor,
        visibility: Visibility,
        context: Tensor | None = None,
        context_visibility: Visibility | None = None,
        rotation: Rotation | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> Tensor:
        """Run the layer on ``[B, N, hidden_size]``; the arguments are those of :meth:`MGKAttention.forward`.

        Gradient checkpointing needs the tensors with gradients first, and recognises the cache by its name.
        """
        x = self._before(self.self_attn_norm, hidden_states)
        x, _ = self.self_attn(
            x, visibility, rotation=rotation, cache=past_key_values, output_attentions=output_attentions
        )
        hidden_states = self._after(self.self_attn_norm, hidden_states, x)
        if self.cross_attn is not None and self.cross_attn_norm is not None:
            assert context_visibility is not None
            x = self._before(self.cross_attn_norm, hidden_states)
            x, _ = self.cross_attn(
                x, context_visibility, context=context, cache=past_key_values, output_attentions=output_attentions
            )
            hidden_states = self._after(self.cross_attn_norm, hidden_states, x)
        x = self.mlp(self._before(self.mlp_norm, hidden_states))
        return self._after(self.mlp_norm, hidden_states, x)

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first else x

    def _after(self, norm: nn.Module, residual: Tensor, x: Tensor) -> Tensor:
        x = residual + F.dropout(x, self.dropout, self.training)
        return x if self.norm_first else norm(x)
