"""Conversion of the masks and caches of transformers to the masks of our operation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mgk.ops.boundaries import sequence_of_tokens
from mgk.ops.transforms import is_transformed
from mgk.ops.validation import check_boundaries, is_traced, may_inspect_values

# A number of a float mask at or below this means "do not attend": callers use the lowest fp16 number, or lower ones.
LARGEST_BIAS = -6e4


class Visibility(NamedTuple):
    """The masks of a forward pass, the same for every layer. ``Nk`` counts keys after the cut to :attr:`length`."""

    key_mask: Tensor | None = None
    """bool ``[B, Nk]``, True = attend"""
    query_mask: Tensor | None = None
    """bool ``[B, Nq]``, False = padding"""
    attn_mask: Tensor | None = None
    """bool ``[B or 1, 1 or H, Nq, Nk]``, True = attend"""
    is_causal: bool = False
    length: int | None = None
    """Number of keys from the cache to use, from the first on; ``None`` for all"""
    cu_seqlens: Tensor | None = None
    """int32 ``[S + 1]``: boundaries of sequences packed into one row"""
    cu_seqlens_k: Tensor | None = None
    """int32 ``[S + 1]``: boundaries of the keys, if they are not those of the queries"""
    token_mask: Tensor | None = None
    """bool ``[B, Nq]``: False for padding among the new tokens, for attention that keeps no old ones"""
    is_pairwise: bool = False
    """Whether :attr:`attn_mask` holds more than causality and padding"""


def past_length(cache: Cache | None) -> int | Tensor:
    """Number of tokens in the cache, as a tensor if the cache keeps it on the device."""
    return 0 if cache is None else cache.get_seq_length()


def padding_mask(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return a 2-D mask as bool, or ``None`` if it is known without stalling a device that it hides nothing."""
    if mask is None:
        return None
    if mask.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(mask.shape)}")
    if not may_inspect_values(mask):
        return mask.bool()
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} must hold 1 for tokens and 0 for padding, got {mask.min():g} to {mask.max():g}")
    return None if bool(mask.bool().all()) else mask.bool()


def pair_mask(mask: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return a 4-D mask as bool, True = attend."""
    if mask.shape[2:] != (num_queries, num_keys):
        expected = f"[B, 1 or H, {num_queries}, {num_keys}]"
        raise ValueError(f"attention_mask must have shape {expected}, got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"an attention_mask of pairs must be bool or float, got {mask.dtype}")
    if may_inspect_values(mask) and bool(((mask != 0) & (mask > LARGEST_BIAS)).any()):
        raise ValueError(
            f"an attention_mask of floats must hold 0 to attend and -inf not to, got {mask.min():g} to {mask.max():g}"
        )
    return mask == 0


def self_visibility(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    batch_size: int,
    num_queries: int,
    is_causal: bool,
) -> Visibility:
    """Return the masks of self-attention: which cached and which new tokens each new token sees.

    Args:
        attention_mask: ``[B, past + Nq]`` with 1 = token; or a mask of pairs ``[B, 1 or H, Nq, Nk]``, bool with True =
            attend or float with 0 = attend, which then decides alone.
        position_ids: ``[B, Nq]`` as passed by the caller. Without a mask and with an empty cache, positions that
            restart mark sequences packed into one row, which do not see each other.
        cache: the cache before the new tokens are added.
        batch_size: B.
        num_queries: number of new tokens, Nq.
        is_causal: whether a token sees only itself and earlier tokens.
    """
    past = past_length(cache)
    if attention_mask is not None and attention_mask.ndim not in (2, 4):
        raise ValueError(f"attention_mask must have 2 or 4 axes, got shape {list(attention_mask.shape)}")
    if isinstance(past, Tensor):
        assert cache is not None
        return _into_static_cache(attention_mask, cache, past, batch_size, num_queries)

    num_keys = past + num_queries
    if attention_mask is not None and attention_mask.ndim == 4:
        pairs = pair_mask(attention_mask, num_queries, num_keys)
        return Visibility(attn_mask=pairs, length=num_keys, is_pairwise=True)
    if attention_mask is None and position_ids is not None and past == 0:
        same_sequence = _packed_pairs(position_ids)
        if same_sequence is not None:
            # A traced graph needs the mask even if the positions of the example do not restart.
            is_seen = _may_look_at(position_ids)
            return Visibility(attn_mask=same_sequence, is_causal=is_causal, length=num_keys, is_pairwise=is_seen)
    key_mask = padding_mask("attention_mask", attention_mask, (batch_size, num_keys))
    query_mask = key_mask if past == 0 else None
    token_mask = None if key_mask is None else key_mask[:, past:]
    return Visibility(key_mask, query_mask, None, is_causal, num_keys, token_mask=token_mask)


def packed_visibility(
    name: str,
    cu_seqlens: Tensor,
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    is_causal: bool,
) -> Visibility:
    """Return the masks for sequences packed into one row of ``tokens [1, T, d]``, which do not see each other.

    ``name`` is the user's name of the boundaries, for error messages.
    """
    if len(tokens) != 1:
        raise ValueError(f"packed sequences must lie in one row, got {len(tokens)} rows beside {name}")
    check_boundaries(name, cu_seqlens, tokens.shape[1], tokens.device)
    if attention_mask is not None:
        raise ValueError(f"packed sequences have no padding, got an attention mask beside {name}")
    if cache is not None:
        raise ValueError(f"packed sequences cannot be cached, got past_key_values or use_cache beside {name}")
    return Visibility(is_causal=is_causal, cu_seqlens=cu_seqlens)


def packed_positions(cu_seqlens: Tensor, num_tokens: int, *, from_end: bool = False) -> Tensor:
    """Positions of packed tokens, ``[1, T]``, counted from the first token of each sequence or back from the last."""
    sequence, token = sequence_of_tokens(cu_seqlens, num_tokens), torch.arange(num_tokens, device=cu_seqlens.device)
    if from_end:
        return (cu_seqlens[1:].long()[sequence] - 1 - token)[None]
    return (token - cu_seqlens[:-1].long()[sequence])[None]


def _packed_pairs(position_ids: Tensor) -> Tensor | None:
    """Mask of pairs within a sequence, bool ``[B, 1, N, N]``; ``None`` if every row is one sequence."""
    starts_anew = position_ids.diff(dim=-1) != 1
    if _may_look_at(position_ids) and not bool(starts_anew.any()):
        return None
    number = torch.nn.functional.pad(starts_anew, (1, 0)).cumsum(dim=-1)
    return (number[:, :, None] == number[:, None, :])[:, None]


def _may_look_at(position_ids: Tensor) -> bool:
    return not (is_traced() or is_transformed() or position_ids.is_meta)


def _into_static_cache(
    attention_mask: Tensor | None, cache: Cache, past: Tensor, batch_size: int, num_queries: int
) -> Visibility:
    """Return the masks for a static cache, all of whose slots exist from the start: unwritten ones are hidden."""
    slots = cache.get_max_length()
    if attention_mask is not None and attention_mask.ndim == 4:
        return Visibility(attn_mask=pair_mask(attention_mask, num_queries, slots), is_pairwise=True)
    slot = torch.arange(slots, device=past.device)
    row = past + torch.arange(num_queries, device=past.device)
    pairs = slot[None, :] <= row[:, None]
    written = new = None
    if attention_mask is not None:
        written = pad_to_slots(attention_mask, slots).bool()
        new = written.index_select(1, row)
    if num_queries == 1:
        seen = pairs.expand(batch_size, -1) if written is None else pairs & written
        return Visibility(key_mask=seen, token_mask=new)
    seen = pairs[None, None] if written is None else pairs & written[:, None, None]
    return Visibility(attn_mask=seen, token_mask=new)


def pad_to_slots(attention_mask: Tensor, slots: int) -> Tensor:
    """Extend a mask ``[B, n]`` to ``[B, slots]`` with ones: later tokens are not padding, only not yet written."""
    if attention_mask.shape[1] > slots:
        raise ValueError(f"attention_mask must cover at most {slots} cached tokens, got {attention_mask.shape[1]}")
    return torch.nn.functional.pad(attention_mask, (0, slots - attention_mask.shape[1]), value=1)


def token_positions(
    attention_mask: Tensor | None, past: int | Tensor, num_queries: int, device: torch.device
) -> Tensor:
    """Positions of the new tokens, ``[B or 1, Nq]``, counted from the first token that is not padding."""
    row = torch.arange(num_queries, device=device) + past
    if attention_mask is None or attention_mask.ndim != 2:
        return row[None]
    counted = attention_mask.bool().cumsum(dim=-1) - 1
    return counted.clamp(min=0).index_select(1, row)
