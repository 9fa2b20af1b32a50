"""The mixture of an attention module: its parameters, and the attention with them."""

from __future__ import annotations

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
from mgk.ops import dispatch
from mgk.ops.dispatch import weights as materialised_weights
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import make_problem


class KeyMixture(nn.Module):
    """Shifts, prior and variances for the keys of an attention module.

    Its ``forward`` takes queries, keys and values from the module after rotation and cache. It is a module of its own,
    so that adapters of PEFT and hooks of accelerate can wrap it.
    """

    def __init__(self, record: Record, num_kv_heads: int, head_dim: int, layout: str | None) -> None:
        super().__init__()
        preset = PRESETS[record.attention]
        self.similarity = preset.similarity
        self.assignment = preset.assignment
        self.backend = record.backend
        self.num_components = components = record.components
        self.layout = layout
        """Layout of M projected keys, or ``None``."""
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
        # The scale is relative to the variance of the model, so the head dimension is passed as 1, whose square root is
        # 1.
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
        """Compute the attention.

        Args:
            query: ``[B, H, Nq, D]``.
            key: ``[B, Hkv, Nk, D]``, or M projected keys in their layout.
            value: ``[B, Hkv, Nk, D]``.
            visible: the keys that each query sees.
            scaling: the model's factor of the products, ``1 / variance``.
            dropout: dropout probability of the weights.
            need_weights: whether to return the weights, which materialises them.

        Returns:
                The output ``[B, H, Nq, D]``, and the weights ``[B, H, Nq, Nk]`` or ``None``.
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
        if shift is not None:
            key = key.squeeze(2)
        return attend(
            query, key, value, visible, Mixture(shift, log_prior, variance, self.similarity, self.assignment),
            backend=self.backend, dropout=dropout, need_weights=need_weights,
            prior=self.prior if isinstance(self.prior, EMPrior) else None,
        )  # fmt: skip

    def components(self, key: Tensor, num_keys: int) -> Tensor:
        """Return the keys with a component axis, ``[B, Hkv, M or 1, Nk, D]``."""
        if self.keys.shift is not None or self.num_components == 1:
            return key[:, :, None]
        if self.layout == AS_POSITIONS:
            return key.unflatten(2, (num_keys, self.num_components)).transpose(2, 3)
        return key.unflatten(1, (-1, self.num_components))


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, mixture: Mixture, *, backend: str = "auto",
    dropout: float = 0.0, need_weights: bool = False, prior: EMPrior | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute :func:`mgk.mixture_attention` of packed or padded rows, with weights if they are wanted.

    An EM ``prior`` gathers the responsibilities of the call.
    """
    batch, _, length, _ = query.shape
    visibility = Visibility(visible.is_causal, visible.key_mask, attn_mask=visible.attn_mask)
    if visible.cu_seqlens is not None:
        if need_weights and batch > 1:
            raise ValueError(f"the weights of packed sequences need one row, got {batch}")
        # Concatenate the rows of the batch, each of which holds several sequences.
        query, key, value = (tensor.movedim(0, -3).flatten(-3, -2)[None] for tensor in (query, key, value))
        if mixture.log_prior is not None and mixture.log_prior.ndim == 4:  # a bias of each key
            mixture = mixture._replace(log_prior=mixture.log_prior.permute(1, 2, 0, 3).flatten(2))
        visibility = Visibility(visible.is_causal, cu_seqlens_q=visible.cu_seqlens, cu_seqlens_k=visible.cu_seqlens)
    problem = make_problem(query, key, value, mixture, visibility, dropout)
    weights = None
    if need_weights:
        weights = F.dropout(materialised_weights(problem), dropout)
        repeated = value.to(weights.dtype).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        out = (weights @ repeated).to(query.dtype)
    else:
        out = dispatch.attend(problem, backend)
    if prior is not None:
        out = prior.gather(out, query, key, mixture, visibility)
    if visible.cu_seqlens is not None:
        out = out[0].unflatten(1, (batch, length)).movedim(1, 0)
    return out, weights
