"""The attention layer of a model: :class:`mgk.MixtureAttention` with rotary positions and caches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from mgk.models.configuration import MGKConfig
from mgk.models.linear_state import linear_state
from mgk.models.positions import Rotation
from mgk.models.visibility import Visibility
from mgk.nn import PRESETS, MixtureAttention
from mgk.ops.linear import attend_in_linear_step, linear_weights, make_linear_problem
from mgk.ops.problem import Mixture
from mgk.ops.problem import Visibility as VisibilityOfCall

# Backends for transformers' names of attention implementations. `auto` takes the stock kernels of `sdpa` where they
# support the call, and otherwise blocks of plain torch.
BACKENDS = {"eager": "reference", "sdpa": "auto", "triton": "triton"}


class MGKAttention(MixtureAttention):
    """Self- or cross-attention with the mixture that the configuration names.

    A cache holds values ``[B, Hkv, N, D]`` and keys ``[B, Hkv, N, W]``. For shifted keys W is the width D of a head: a
    token has one key, and the shifts are added when it is read. For projected keys W is ``M * D``. Keys are rotated
    before they are cached and shifted afterwards. With ``qk_norm`` the norm needs the shifted keys, so all M of them
    are normalised, rotated and cached.
    """

    def __init__(self, config: MGKConfig, layer_idx: int, *, is_causal: bool = False, is_cross: bool = False) -> None:
        options: dict[str, Any] = asdict(PRESETS[config.attention])
        if config.num_components is not None:
            options["num_components"] = config.num_components
        is_linear = options["feature_map"] is not None
        if config.feature_map is not None:
            options["feature_map"] = config.feature_map
        if config.prior is not None:
            options["prior"] = config.prior
        super().__init__(
            config.hidden_size, config.num_attention_heads, head_dim=config.head_dim,
            num_kv_heads=config.num_key_value_heads, qk_norm=config.qk_norm, bias=config.attention_bias,
            dropout=0.0 if is_linear else config.attention_dropout, normalization=config.normalization,
            learn_variance=config.learn_variance,
            variance_scale=config.variance_scale, shift_init_std=config.shift_init_std, is_causal=is_causal,
            prior_momentum=config.prior_momentum, shift_init=config.shift_init, **options,
        )  # fmt: skip
        # Read where the weights of a model are initialised, which sees one projection at a time.
        self.q_proj.bias_init_std = config.query_bias_init_std  # type: ignore[assignment]
        self.config = config
        self.layer_idx = layer_idx
        self.is_cross = is_cross

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        visibility: Visibility,
        *,
        context: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Project, attend and project back.

        Args:
            hidden_states: ``[B, Nq, hidden_size]``.
            visibility: which keys each token may see.
            context: ``[B, Nk, hidden_size]``, the encoder's states for cross-attention.
            rotation: rotation of queries and keys; ``None`` without rotary positions.
            cache: cache to which the new keys and values are added, and which returns all of them.
            output_attentions: whether to return the weights, which materialises them.

        Returns:
            ``[B, Nq, hidden_size]`` and the weights ``[B, H, Nq, Nk]``, or ``None``.
        """
        # Read at every call, because `model.set_attn_implementation` may change it.
        self.backend = BACKENDS[self.config._attn_implementation or "sdpa"]
        query = self.project_query(hidden_states)
        if rotation is not None:
            query = rotation(query)
        slots: int | None = None
        if self.is_cross:
            keys, value = self._context_keys(context, cache)
        else:
            keys, value = self._new_keys(hidden_states, rotation)
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            if self.feature_map is not None and visibility.is_pairwise:
                raise ValueError(
                    "linear attention cannot hide single pairs, got an attention_mask with 4 axes or positions that "
                    "start anew: give cu_seq_lens_q for packed sequences"
                )
            if self.feature_map is not None and cache is not None:
                return self.attend_to_state(query, keys, value, visibility, cache, output_attentions)
            if cache is not None:
                self._widen_prefix(cache, keys.shape[-1])
                keys, value = cache.update(keys, value, self.layer_idx)
                slots = keys.shape[2]
                # A static cache returns all its slots.
                keys, value = keys[:, :, : visibility.length], value[:, :, : visibility.length]
        out, weights = self.attend(
            query, self._unpack(keys), value, shift=self._late_shift(),
            key_mask=visibility.key_mask, query_mask=visibility.query_mask,
            attn_mask=visibility.attn_mask if self.feature_map is None or visibility.is_pairwise else None,
            is_causal=visibility.is_causal, is_self_attention=not self.is_cross, need_weights=output_attentions,
            cu_seqlens=visibility.cu_seqlens, cu_seqlens_k=visibility.cu_seqlens_k,
        )  # fmt: skip
        if weights is not None and slots is not None and slots > weights.shape[-1]:
            # At every step of generation, the prompt included, the weights have the width of the cache. (Padding by
            # zero columns would copy them, and they would no longer be the tensor that the output was computed from.)
            weights = F.pad(weights, (0, slots - weights.shape[-1]))
        return out, weights

    def attend_to_state(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        visibility: Visibility,
        cache: Cache,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Linear attention to the new tokens and to the state of all earlier ones, which the cache holds."""
        if self.normalization != "sum":
            raise ValueError(f"normalization must be 'sum' where a cache is filled, got {self.normalization!r}")
        held = linear_state(cache, self.layer_idx)
        if output_attentions and held.state is not None:
            raise ValueError("linear attention keeps no keys to show weights of, got output_attentions and a past")
        keys = self._unpack(keys)
        assert self.feature_map is not None
        mixture = Mixture(self._late_shift(), self.prior())
        seen = VisibilityOfCall(is_causal=True, key_mask=visibility.token_mask)
        problem = make_linear_problem(query, keys, value, mixture, seen, self.feature_map, self.normalization)
        out, state = attend_in_linear_step(problem, held.state, self.backend)
        held.take(state, query.shape[2])
        weights = None
        if output_attentions:
            weights = linear_weights(problem)
            out = weights @ value.to(weights.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            out = out.to(query.dtype)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _new_keys(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return keys and values in the layout of the cache."""
        key, _ = self.project_key(hidden_states)
        if rotation is not None:
            key = rotation(key)
        packed = key if key.ndim == 4 else key.transpose(2, 3).flatten(3)
        return packed, self.project_value(hidden_states)

    def _widen_prefix(self, cache: Cache, width: int) -> None:
        """Repeat the keys of a cache filled by prefix tuning, one per token, for all components."""
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        if layer is None or not getattr(layer, "is_initialized", False) or layer.keys is None:
            return
        held = layer.keys.shape[-1]
        if layer.keys.numel() == 0 or held == width:
            return
        if held != self.head_dim:
            raise ValueError(
                f"past_key_values must hold keys of width {width}, or {self.head_dim} for all components alike, "
                f"got {held}"
            )
        layer.keys = layer.keys.repeat(1, 1, 1, self.num_components)

    def _context_keys(self, context: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Return the encoder's keys and values, which are projected once and then cached."""
        # A static cache may have more slots than the source has tokens.
        length = None if context is None else context.shape[1]
        if isinstance(cache, EncoderDecoderCache):
            memory = cache.cross_attention_cache
            if cache.is_updated.get(self.layer_idx):
                layer = memory.layers[self.layer_idx]
                return layer.keys[:, :, :length], layer.values[:, :, :length]
        if context is None:
            raise ValueError("cross-attention needs encoder_hidden_states, got None and no cache that holds them")
        keys, value = self._new_keys(context, None)
        if isinstance(cache, EncoderDecoderCache):
            keys, value = memory.update(keys, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return keys[:, :, :length], value[:, :, :length]

    def _unpack(self, packed: Tensor) -> Tensor:
        """Reshape ``[B, Hkv, N, M * D]`` to ``[B, Hkv, M, N, D]``; a single key per token is returned unchanged."""
        if self._adds_shifts_late:
            return packed
        return packed.unflatten(-1, (self.num_components, self.head_dim)).transpose(2, 3)

    def _late_shift(self) -> Tensor | None:
        """Return the shifts that the attention adds to the single key of each token, new or cached, if it does so."""
        return self.keys(None)[1] if self._adds_shifts_late else None

    def bytes_per_cached_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token in a cache, for attention that is not linear."""
        keys = 1 if self._adds_shifts_late else self.num_components
        return self.num_kv_heads * (keys + 1) * self.head_dim * dtype.itemsize

    @property
    def _adds_shifts_late(self) -> bool:
        """Whether each token has a single key, to which the attention adds the shifts."""
        return self.keys.shift is not None and self.k_norm is None
