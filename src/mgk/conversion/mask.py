"""Masks between transformers and the attention, without ``[B, 1, Nq, Nk]`` where a smaller tensor suffices.

The mask of :func:`compact_mask` passes through the layers of a model as ``attention_mask``, and :func:`read_mask`
decodes it:

========================  =================================================================================
``None``                  every key; in causal attention those up to the query's own, aligned bottom-right
bool ``[B, n]``           those of the first n keys that are True, with the causality of ``None``
int32 ``[S + 1]``         boundaries of sequences that do not see each other, in the tokens of all rows
bool ``[B, 1, Nq, Nk]``   every pair, True = attend: a mask of the user, or a pattern without a smaller form
========================  =================================================================================

A mask with two axes that passes twice, as in generation with a static cache, is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from mgk.models.visibility import pair_mask
from mgk.ops.validation import is_traced


class Visible(NamedTuple):
    """The keys that each query sees, as arguments of :func:`mgk.mixture_attention`."""

    is_causal: bool = False
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    """Boundaries of sequences in the concatenated tokens of all rows."""
    length: int | None = None
    """Number of keys to use, from the first on; ``None`` for all."""


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask for ``attn_implementation="mgk"``. transformers calls this function and defines its arguments."""
    if local_size is not None:
        raise ValueError(f"attn_implementation 'mgk' has no sliding windows or chunks, got one of {local_size} tokens")
    is_causal = mask_function is causal_mask_function
    if not is_causal and mask_function is not bidirectional_mask_function:
        sequences = None if attention_mask is not None or is_traced() else packed_sequences(mask_function)
        if sequences is not None:
            return boundaries(sequences)
        return _all_pairs(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if not is_traced() and bool(padding.all()):
            padding = None
    if not is_causal or q_length == kv_length:
        return padding

    if q_length == 1:
        if not isinstance(q_offset, Tensor) and q_offset + 1 == kv_length:
            return padding
        # All slots of a static cache exist from the start, so slots that are not written yet are hidden.
        written = (torch.arange(kv_length, device=device) <= q_offset).expand(batch_size, -1)
        return written if padding is None else written & padding
    if isinstance(q_offset, Tensor):
        if is_traced():
            return _all_pairs(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
            )
        q_offset = int(q_offset)
    length = q_offset + q_length
    if padding is None and length != kv_length:
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    return None if padding is None else padding[:, :length]


def _all_pairs(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int,
    mask_function: Callable[..., Any], attention_mask: Tensor | None, use_vmap: bool, device: torch.device | str,
) -> Tensor:  # fmt: skip
    mask: Tensor = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False, use_vmap=use_vmap,
        device=device,
    )  # fmt: skip
    return mask


def packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """Return the sequence number of each token, ``[B, N]``, if the function is causality within packed sequences.

    transformers finds sequences by positions that restart, and passes only a function of pairs. The numbers are taken
    from the closure of that function. If it does not look as expected, the result is ``None``, and the function is
    evaluated for all pairs.
    """
    if getattr(mask_function, "__code__", None) is not _AND.__code__:
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    packed = [part for part in parts if getattr(part, "__code__", None) is _PACKED]
    others = [part for part in parts if part not in packed]
    if len(packed) != 1 or len(others) != 1 or not _is_causality(others[0]):
        return None
    numbers = inspect.getclosurevars(packed[0]).nonlocals["packed_sequence_mask"]
    return numbers if isinstance(numbers, Tensor) else None


def _is_causality(mask_function: Callable[..., Any]) -> bool:
    """Whether a function is causality, of places or of the positions within each sequence, which have one order."""
    if _REMAPPED is not None and getattr(mask_function, "__code__", None) is _REMAPPED:
        mask_function = inspect.getclosurevars(mask_function).nonlocals["mask_function"]
    return mask_function is causal_mask_function


_AND = and_masks(causal_mask_function)
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
# Since transformers 5.23 at the latest; before, causality was one of places.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _remap is None else _remap(causal_mask_function, torch.zeros(1, 1)).__code__


def boundaries(sequences: Tensor) -> Tensor:
    """Return the boundaries of sequences in the concatenated tokens of all rows, int32 ``[S + 1]``."""
    begins = torch.nn.functional.pad(sequences.diff(dim=1) != 0, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=sequences.numel())


def read_mask(mask: Any, is_causal: bool, num_queries: int, num_keys: int) -> Visible:
    """Decode a mask for attention that is causal or not."""
    # A single query is the last one and sees all keys. A traced length may be a symbol, and is then known to be longer.
    is_causal = is_causal and bool(num_queries > 1)
    if mask is None:
        return Visible(is_causal)
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    if mask.ndim == 1:
        return Visible(is_causal, cu_seqlens=mask)
    if mask.ndim == 2:
        return Visible(is_causal, key_mask=mask, length=None if mask.shape[1] == num_keys else mask.shape[1])
    if mask.ndim == 4:
        return Visible(attn_mask=pair_mask(mask, num_queries, num_keys))
    raise ValueError(f"attention_mask must have 2 or 4 axes, got shape {list(mask.shape)}")
