"""The state of linear attention, one per layer, in the caches of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer


class LinearState(CacheLayerMixin):
    """The state of one layer, ``[B, Hkv, F, Dv + 1]`` in fp32, in place of its keys and values.

    Args:
        slots: number of slots of the static cache layer that it replaces, whose tensors must keep their addresses so
            that a step can be compiled; ``None`` for a dynamic cache.
    """

    is_compileable = True
    is_sliding = False
    is_initialized: bool

    def __init__(self, slots: int | None = None) -> None:
        super().__init__()
        self.slots = slots
        self.cumulative_length: int | Tensor = 0 if slots is None else torch.tensor(0)

    @property
    def state(self) -> Tensor | None:
        return self.keys if self.is_initialized else None

    def take(self, state: Tensor, num_tokens: int) -> None:
        """Store ``state``, which includes ``num_tokens`` more tokens than the last one."""
        if not self.is_initialized:
            self.lazy_initialization(state, state[..., :0])
        if self.slots is None:
            self.keys = state
            self.cumulative_length += num_tokens
        else:
            assert self.keys is not None
            self.keys.copy_(state)
            assert isinstance(self.cumulative_length, Tensor)
            self.cumulative_length.add_(num_tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = torch.zeros_like(key_states), value_states.new_zeros(len(key_states), 0)
        if isinstance(self.cumulative_length, Tensor):
            self.cumulative_length = self.cumulative_length.to(self.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.keys)
                torch._dynamo.mark_static_address(self.cumulative_length)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("a layer of linear attention keeps a state, got keys and values to keep")

    def get_seq_length(self) -> int:
        return self.cumulative_length if self.is_initialized else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.slots is not None:
            return self.slots, 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.slots is None else self.slots

    def reset(self) -> None:
        if self.slots is None:
            self.__init__()  # type: ignore[misc]
        else:
            super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Implement the interface that transformers expects of a cache layer."""
        if self.is_initialized:
            assert self.keys is not None
            self._replace(self.keys.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Implement the interface that transformers expects of a cache layer."""
        if self.is_initialized:
            assert self.keys is not None
            self._replace(self.keys.index_select(0, indices.to(self.keys.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise an error, because tokens cannot be taken out of a sum."""
        if tokens_to_remove != 0:
            raise ValueError(f"a state of linear attention cannot forget tokens, got {self._counted(tokens_to_remove)}")

    def _counted(self, tokens_to_remove: int) -> str:
        """Describe the request in words: a negative number removes tokens, a positive one is the number to keep."""
        if tokens_to_remove > 0:
            return f"{tokens_to_remove} of {int(self.get_seq_length())} to keep"
        return f"{-tokens_to_remove} to remove"

    def _replace(self, state: Tensor) -> None:
        if self.slots is not None and self.keys is not None and state.shape == self.keys.shape:
            self.keys.copy_(state)
        else:
            self.keys, self.values = state, state.new_zeros(len(state), 0)


def linear_state(cache: Cache, layer_idx: int) -> LinearState:
    """Return the state of a layer, after replacing the keys and values that an ordinary cache has for it."""
    while len(cache.layers) <= layer_idx:
        cache.layers.append(LinearState())
    layer = cache.layers[layer_idx]
    if isinstance(layer, LinearState):
        return layer
    if getattr(layer, "is_initialized", False):
        kind = type(layer).__name__
        raise ValueError(f"past_key_values must hold states of linear attention, got a {kind} with keys and values")
    state = LinearState(layer.max_cache_len if isinstance(layer, StaticLayer) else None)
    cache.layers[layer_idx] = state
    return state
