"""The mixture of one attention module: its parameters, and attention with them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mgk.conversion.families import AS_POSITIONS
from mgk.conversion.mask import Visible
from mgk.conversion.record import Record
from mgk.conversion.starts import NearStart
from mgk.nn import (
    PRESETS,
    EMPrior,
    FixedVariance,
    LearnedPrior,
    LearnedVariance,
    ProjectedKeys,
    ShiftedKeys,
    UniformPrior,
)
from mgk.ops import mixture_attention, mixture_attention_varlen, mixture_weights
from mgk.ops.boundaries import pairs_within_sequences


class Mixture(nn.Module):
    """Shifts, prior and variances of the keys that an attention module projects.

    It is called with queries, keys and values as the module hands them on, after rotation and cache, so whatever wraps
    modules (adapters of PEFT, hooks of accelerate) wraps it like any other.
    """

    def __init__(self, record: Record, num_kv_heads: int, head_dim: int, layout: str | None) -> None:
        super().__init__()
        preset = PRESETS[record.attention]
        self.similarity = preset.similarity
        self.assignment = preset.assignment
        self.backend = record.backend
        self.num_components = components = record.components
        self.layout = layout
        """How M projected keys arrive."""
        self.keys: ProjectedKeys | ShiftedKeys
        if preset.keys == "shifted":
            self.keys = ShiftedKeys(num_kv_heads, head_dim, components, record.shift_init_std)
        else:
            self.keys = ProjectedKeys(num_kv_heads, head_dim, components)
        self.prior: UniformPrior | LearnedPrior | EMPrior
        if preset.prior == "uniform" or components == 1:
            self.prior = UniformPrior()
        elif preset.prior == "learned":
            self.prior = LearnedPrior(num_kv_heads, components)
        else:
            self.prior = EMPrior(num_kv_heads, components)
        # Relative to what the model divides by: of a head of width 1 the square root is 1.
        scale = record.variance_scale
        self.variance: FixedVariance | LearnedVariance
        if record.learn_variance:
            self.variance = LearnedVariance(num_kv_heads, 1, components, scale)
        else:
            self.variance = FixedVariance(1, components, scale)
        self.start = NearStart(record.fade_steps) if record.fade_steps else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        *,
        scaling: float,
        dropout: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: ``[B, H, Nq, D]``.
            key: ``[B, Hkv, Nk, D]``, or as M projected keys pass through the module.
            value: ``[B, Hkv, Nk, D]``.
            visible: which keys a query sees.
            scaling: what the model multiplies products with: ``1 / variance``.
            dropout: of the weights.
            need_weights: whether to return the weights, which materialises them.

        Returns:
            ``[B, H, Nq, D]``, and the weights ``[B, H, Nq, Nk]`` or ``None``.
        """
        _, shift = self.keys(None)
        key = self.components(key, value.shape[2])
        if visible.length is not None:
            key, value = key[..., : visible.length, :], value[:, :, : visible.length]
        variance = self.variance() / scaling
        log_prior = self.prior()
        bias = None if self.start is None else self.start(key, shift, variance)
        if bias is not None:
            log_prior = bias if log_prior is None else bias + log_prior[:, :, None]
        options: dict[str, Any] = {
            "shift": shift, "log_prior": log_prior, "variance": variance, "similarity": self.similarity,
        }  # fmt: skip
        if shift is not None:
            key = key.squeeze(2)
        gather = self.prior.gather if isinstance(self.prior, EMPrior) else None
        return attend(
            query, key, value, visible, options, assignment=self.assignment, backend=self.backend, dropout=dropout,
            need_weights=need_weights, gather=gather,
        )  # fmt: skip

    def components(self, key: Tensor, num_keys: int) -> Tensor:
        """``[B, Hkv, M or 1, Nk, D]``"""
        if self.keys.shift is not None or self.num_components == 1:
            return key[:, :, None]
        if self.layout == AS_POSITIONS:
            return key.unflatten(2, (num_keys, self.num_components)).transpose(2, 3)
        return key.unflatten(1, (-1, self.num_components))


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, options: dict[str, Any], *, assignment: str = "soft",
    backend: str = "auto", dropout: float = 0.0, need_weights: bool = False, gather: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """:func:`mgk.mixture_attention` of packed rows or padded ones, with weights where they are wanted.

    ``gather`` is told of what was computed, ``gather(out, query, key, **options)``, and gives the output back.
    """
    if visible.cu_seqlens is not None and not need_weights:
        return _attend_packed(query, key, value, visible, options, assignment, backend, dropout, gather), None
    masks: dict[str, Any] = {
        "is_causal": visible.is_causal, "key_mask": visible.key_mask, "attn_mask": visible.attn_mask,
    }  # fmt: skip
    if visible.cu_seqlens is not None:
        if len(query) > 1:
            raise ValueError(f"the weights of packed sequences need one row, got {len(query)}")
        masks["attn_mask"] = pairs_within_sequences(visible.cu_seqlens, None, query.shape[2], value.shape[2])
    weights = None
    if need_weights:
        weights = F.dropout(mixture_weights(query, key, assignment=assignment, **options, **masks), dropout)
        repeated = value.to(weights.dtype).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        out = (weights @ repeated).to(query.dtype)
    else:
        out = mixture_attention(
            query, key, value, assignment=assignment, dropout_p=dropout, backend=backend, **options, **masks
        )
    return out if gather is None else gather(out, query, key, **options, **masks), weights


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, options: dict[str, Any], assignment: str,
    backend: str, dropout: float, gather: Any,
) -> Tensor:  # fmt: skip
    """The rows of a batch, each of several sequences, one after the other."""
    batch, _, length, _ = query.shape
    tokens = [tensor.movedim(-2, 1).flatten(0, 1) for tensor in (query, key, value)]
    prior = options["log_prior"]
    if prior is not None and prior.ndim == 4:  # a bias of each key
        options = {**options, "log_prior": prior.permute(1, 2, 0, 3).flatten(2)}
    options = {
        **options, "cu_seqlens_q": visible.cu_seqlens, "cu_seqlens_k": visible.cu_seqlens,
        "is_causal": visible.is_causal,
    }  # fmt: skip
    out = mixture_attention_varlen(*tokens, assignment=assignment, dropout_p=dropout, backend=backend, **options)
    if gather is not None:
        out = gather(out, *tokens[:2], **options)
    return out.unflatten(0, (batch, length)).transpose(1, 2)
