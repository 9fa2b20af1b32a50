"""The forward pass for one key per position, on PyTorch's fused kernel for softmax attention with a bias per key.

The kernel reads query, key and value in place and returns the row normalisers from which our backward pass recomputes
the tiles. Its own backward pass has no gradient of the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.cpu.block import HIDDEN, LOG2E, Call, Inputs
from mgk.ops.cpu.memory import workspace


def is_served(inputs: Inputs, call: Call) -> bool:
    """Whether PyTorch's kernel supports the call."""
    queries, keys, dim = inputs.query.shape[2], inputs.key.shape[3], inputs.key.shape[-1]
    one_key = inputs.key.shape[2] == 1 and inputs.shift is None
    # The kernel aligns the first query with the first key, where we align the last query with the last key.
    is_aligned = not call.is_causal or queries == keys
    return one_key and is_aligned and inputs.value.shape[-1] == dim


def stock_forward(inputs: Inputs, call: Call, group: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``out [B, H, Nq, Dv]``, ``normaliser [B, Hkv, rows]`` in units of log 2, and ``bias [B, Hkv, 1, Nk]``."""
    query, key, value = inputs.query, inputs.key[:, :, 0], inputs.value
    if call.origin is not None:
        query = _moved("left", query, call.origin.repeat_interleave(group, dim=1))
        key = _moved("right", key, call.origin)
    if call.common_value is not None:
        value = _moved("value", value, call.common_value)
    bias = of_query_heads = _bias(key, call)
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        of_query_heads = None if bias is None else bias.repeat_interleave(group, dim=1)
    # The kernel assumes without a check that the last axis is contiguous.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, call.is_causal, attn_mask=of_query_heads, scale=call.scale
    )
    if call.common_value is not None:
        out += call.common_value.repeat_interleave(group, dim=1)
    return out, (normaliser * LOG2E).unflatten(1, (-1, group)).flatten(2), bias


def _moved(name: str, tensor: Tensor, origin: Tensor) -> Tensor:
    return torch.sub(tensor, origin, out=workspace.array(name, tensor, *tensor.shape))


def _bias(key: Tensor, call: Call) -> Tensor | None:
    """Bias of each key, ``-c |k|^2 / 2``, and very low where the key is hidden, ``[B, Hkv, 1, Nk]``."""
    if not call.is_gaussian and call.key_mask is None:
        return None
    if call.is_gaussian:
        norm = torch.linalg.vector_norm(key, dim=-1)[:, :, None]
        bias = torch.mul(norm, norm, out=norm).mul_(-0.5 * call.scale)
    else:
        bias = key.new_zeros(*key.shape[:2], 1, key.shape[2])
    if call.key_mask is not None:
        bias.masked_fill_(~call.key_mask[:, None, None], HIDDEN)
    return bias.clamp_(min=HIDDEN)
