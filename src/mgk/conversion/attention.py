"""The attention function of ``attn_implementation="mgk"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import output_capturing

from mgk.conversion.mask import compact_mask, read_mask
from mgk.conversion.mixture import attend
from mgk.ops.problem import Mixture

NAME = "mgk"
MIXTURE = "mixture"
"""Name of the submodule that :func:`mgk.convert` adds to an attention module."""

_REFUSED = {
    "sliding_window": "sliding windows",
    "softcap": "caps on logits (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "position biases",
    "head_mask": "head masks",
    "layer_head_mask": "head masks",
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the mixture of ``module``, or fused softmax attention if it has none.

    transformers calls this function with these arguments, and with others that are ignored, or refused by name if they
    would change the result.

    Args:
        module: the attention module.
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, Nk, D]``, or M projected keys in the layout in which they pass through the module.
        value: ``[B, Hkv, Nk, D]``.
        attention_mask: see :mod:`mgk.conversion.mask`.
        scaling: factor of the products; ``None`` is ``1 / sqrt(D)``.
        dropout: dropout probability of the weights.
        is_causal: overrides ``module.is_causal``.
        cu_seq_lens_q: boundaries of packed sequences, if a collator passes them and the positions do not show them.
        output_attentions: whether to return the weights, which is also done where transformers collects them.
        kwargs: further arguments of transformers.

    Returns:
        The output ``[B, Nq, H, D]``, and the weights ``[B, H, Nq, Nk]`` or ``None``.
    """
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation 'mgk' has no {meaning}, got one from {type(module).__name__}")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and cu_seq_lens_q is not None and query.shape[2] == value.shape[2]:
        attention_mask = cu_seq_lens_q
    visible = read_mask(attention_mask, is_causal, query.shape[2], value.shape[2])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixture = getattr(module, MIXTURE, None)
    options: dict[str, Any] = {"dropout": dropout, "need_weights": bool(output_attentions) or _collects_weights()}
    if mixture is not None:
        out, weights = mixture(query, key, value, visible, scaling=scaling, **options)
    else:
        if visible.length is not None:
            key, value = key[:, :, : visible.length], value[:, :, : visible.length]
        softmax = Mixture(variance=1.0 / scaling, similarity="dot")
        out, weights = attend(query, key, value, visible, softmax, **options)
    return out.transpose(1, 2).contiguous(), weights


def _collects_weights() -> bool:
    """Whether a model is called with ``output_attentions``, which some, such as GPT-2, do not pass on."""
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None:
        return False
    # Of the two places in which transformers notes what it collects, the compiler can read only this one.
    collected = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return any("attentions" in name for name in collected or ())


def register() -> None:
    """Register the attention function with transformers, and its mask function, without which it would get no masks."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, compact_mask)
