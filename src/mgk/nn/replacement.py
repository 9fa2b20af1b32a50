"""Mixture attention as a replacement of ``nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mgk.nn.attention import MixtureAttention
from mgk.nn.presets import build_attention
from mgk.ops.validation import may_inspect_values

# A float mask at or below this hides a key: callers write -inf or a large negative number.
HIDDEN = -1e4


class MultiheadMixtureAttention(nn.Module):
    """A :class:`MixtureAttention` with the interface of ``nn.MultiheadAttention``.

    It takes the same masks (bool with True = *ignore*, or float with 0 and -inf) and layouts (batch first, sequence
    first, no batch), and returns the same pair of output and weights. A float mask with other numbers is refused on the
    CPU; on a GPU, where masks are not read, such numbers count as 0 unless ``mgk.debug_checks(True)``.
    """

    # In evaluation torch's transformer layers have a fast path that reads the projections of their attention and never
    # calls it. These attributes disable it, because they say that there is no single packed projection.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, attention: MixtureAttention, *, batch_first: bool = False) -> None:
        super().__init__()
        self.attention = attention
        self.batch_first = batch_first

    @property
    def embed_dim(self) -> int:
        return self.attention.embed_dim

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("query, key and value must be plain tensors with a key_padding_mask, got a nested tensor")
        unbatched = query.ndim == 2
        is_self_attention = query is key and key is value
        if unbatched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        key_mask = _keep("key_padding_mask", key_padding_mask)
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be given when is_causal is True, as in nn.MultiheadAttention, got None")
        # is_causal promises that the mask is the causal one, which for a square mask equals our causality.
        is_causal = is_causal and query.shape[1] == key.shape[1]
        pair_mask = None if is_causal else _keep("attn_mask", attn_mask)
        if pair_mask is not None and pair_mask.ndim == 3:
            if pair_mask.shape[0] != query.shape[0] * self.num_heads:
                raise ValueError(
                    f"attn_mask must have shape [Nq, Nk] or [B * H, Nq, Nk] with {self.num_heads} heads, "
                    f"got {list(pair_mask.shape)}"
                )
            pair_mask = pair_mask.unflatten(0, (query.shape[0], self.num_heads))

        masks: dict[str, Any] = {"key_mask": key_mask, "attn_mask": pair_mask, "is_causal": is_causal or None}
        inputs = (query,) if is_self_attention else (query, key, value)
        out = self.attention(*inputs, **masks)
        weight = None
        if need_weights:
            weight = self.attention.attention_weights(query, key, **masks)
            weight = weight.mean(dim=1) if average_attn_weights else weight
        if unbatched:
            return out.squeeze(0), None if weight is None else weight.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weight

    def extra_repr(self) -> str:
        return f"batch_first={self.batch_first}"


def replace_attention(
    model: nn.Module, name: str, *, num_heads: int | None = None, head_dim: int | None = None, **options: Any
) -> nn.Module:
    """Swap every ``nn.MultiheadAttention`` in ``model`` for mixture attention, in place, and return the model.

    Args:
        model: any module, such as ``nn.TransformerEncoder``, ``nn.TransformerDecoder`` or ``nn.Transformer``.
        name: a preset of :func:`build_attention`.
        num_heads: heads of the new attention; ``None`` keeps the number.
        head_dim: width of one head; ``None`` keeps the old head dimension, so that fewer heads make a narrower layer.
        options: any further argument of :class:`MixtureAttention`. Dropout and biases are kept unless given.

    A projection whose shape does not change keeps its weights, frozen or not; the others start fresh. Preset
    ``"softmax"`` at the same width therefore computes what was there before.
    """
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            "model must hold nn.MultiheadAttention as a child, got one itself, which has no place to swap in"
        )
    places = [
        (parent, child_name, child)
        for parent in model.modules()
        for child_name, child in parent._modules.items()
        if isinstance(child, nn.MultiheadAttention)
    ]
    if not places:
        raise ValueError(f"model must hold at least one nn.MultiheadAttention, got {type(model).__name__} without any")
    # All replacements are built before any is swapped in, so that an error leaves the model unchanged. A module that is
    # used in several places has one replacement.
    replacements = {child: _replacement(child, name, num_heads, head_dim, options) for _, _, child in places}
    for parent, child_name, child in places:
        setattr(parent, child_name, replacements[child])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # The encoder set this when it was built, according to the attention that it had then.
            module.enable_nested_tensor = False
            module.use_nested_tensor = False
    return model


def _replacement(
    old: nn.MultiheadAttention, name: str, num_heads: int | None, head_dim: int | None, options: dict[str, Any]
) -> MultiheadMixtureAttention:
    if not old._qkv_same_embed_dim:
        raise ValueError(
            "nn.MultiheadAttention with kdim or vdim cannot be replaced, got one whose inputs differ in width"
        )
    if old.bias_k is not None or old.add_zero_attn:
        raise ValueError("nn.MultiheadAttention must not use add_bias_kv or add_zero_attn, got one that does")
    settings = {"bias": old.in_proj_bias is not None, "dropout": old.dropout, **options}
    num_heads = old.num_heads if num_heads is None else num_heads
    head_dim = old.head_dim if head_dim is None else head_dim
    new = build_attention(name, old.embed_dim, num_heads, head_dim=head_dim, **settings)
    new.to(device=old.out_proj.weight.device, dtype=old.out_proj.weight.dtype)

    old_state = {"out_proj.weight": old.out_proj.weight, "out_proj.bias": old.out_proj.bias}
    for packed_name, packed in (("weight", old.in_proj_weight), ("bias", old.in_proj_bias)):
        parts = (None,) * 3 if packed is None else packed.chunk(3)
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            old_state[f"{projection}.{packed_name}"] = part
    with torch.no_grad():
        for parameter_name, parameter in new.named_parameters():
            before = old_state.get(parameter_name)
            if before is not None and before.shape == parameter.shape:
                parameter.copy_(before).requires_grad_(before.requires_grad)
    return MultiheadMixtureAttention(new, batch_first=old.batch_first).train(old.training)


def _keep(name: str, mask: Tensor | None) -> Tensor | None:
    """Convert a mask of torch (bool: True = ignore; float: added to the logits) to our convention, True = attend."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or float, got {mask.dtype}")
    hidden = mask <= HIDDEN
    if may_inspect_values(mask) and not bool((hidden | (mask == 0)).all()):
        raise ValueError(f"{name} must hold only 0 and -inf, got other numbers: mixture attention has no additive bias")
    return ~hidden
