"""Caches of transformers for attention modules with projected keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer


class CacheCheck:
    """A check, before an attention module runs, that its cache holds keys in the module's layout.

    Each token has ``key_heads`` keys, M times the number of key/value heads for M projected keys. A static cache takes
    its sizes from the keys alone, so if values have fewer heads, it is allocated here.
    """

    def __init__(self, layer_idx: int | None, key_heads: int, value_heads: int, head_dim: int) -> None:
        self.layer_idx = layer_idx
        self.key_heads = key_heads
        self.value_heads = value_heads
        self.head_dim = head_dim

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the check as a forward pre-hook."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None or self.layer_idx is None:
            return
        is_cross = any(kwargs.get(name) is not None for name in ("key_value_states", "encoder_hidden_states"))
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        if self.layer_idx >= len(cache.layers):
            return
        layer = cache.layers[self.layer_idx]
        if not layer.is_initialized:
            if self.key_heads != self.value_heads and isinstance(layer, StaticLayer):
                hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                self._allocate(layer, hidden)
            return
        if layer.keys.numel() == 0:
            return
        held = layer.keys.shape[1], layer.values.shape[1], layer.keys.shape[-1]
        if held != (self.key_heads, self.value_heads, self.head_dim):
            raise ValueError(
                f"past_key_values must hold {self.key_heads} keys and {self.value_heads} values of width "
                f"{self.head_dim} a token, got {held[0]} and {held[1]} of width {held[2]}: a cache of another model"
            )

    def _allocate(self, layer: StaticLayer, hidden: Tensor) -> None:
        key = hidden.new_empty(hidden.shape[0], self.key_heads, 1, self.head_dim)
        layer.lazy_initialization(key, key)
        shape = (hidden.shape[0], self.value_heads, *layer.values.shape[2:])
        layer.values = torch.zeros(shape, dtype=layer.dtype, device=layer.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(layer.values)
