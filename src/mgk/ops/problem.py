"""One attention call after validation: every tensor in its canonical shape, every option checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A value channel whose first two entries differ by less than this, relative to their size, lies around a constant.
CHANNEL_SPREAD = 2.0**-10


class MixtureProblem(NamedTuple):
    """What every backend receives.

    Padded keys, values and queries are already filled with zeros, so that whatever stood there (NaN included) can
    reach neither an output nor a gradient.
    """

    query: Tensor
    """``[B, H, Nq, D]``"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, 1, Nk, D]`` when the components are shifts of one key."""
    value: Tensor
    """``[B, Hkv, Nk, Dv]``"""
    shift: Tensor | None
    """``[Hkv, M, D]``: the key of component r at position j is ``key_j + shift_r``."""
    log_prior: Tensor | None
    """``[Hkv, M, 1]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``; ``None`` means uniform."""
    variance: float | Tensor
    """One number shared by all components, or ``[Hkv, M]``."""
    similarity: str
    assignment: str
    is_causal: bool
    key_mask: Tensor | None
    """bool ``[B, Nk]``, True = attend."""
    query_mask: Tensor | None
    """bool ``[B, Nq]``, False = padded query."""
    attn_mask: Tensor | None
    """bool, four axes, broadcastable to ``[B, H, Nq, Nk]``, True = attend."""
    dropout_p: float

    @property
    def num_components(self) -> int:
        return self.key.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def causal_offset(self) -> int:
        """Query i sees keys up to ``i + causal_offset``: the last query always sees the last key."""
        return self.key.shape[3] - self.query.shape[2]

    @property
    def shares_variance(self) -> bool:
        """Whether all components provably have one variance, so that the term in ``|q|^2`` cancels."""
        return isinstance(self.variance, float) or self.num_components == 1

    @property
    def has_prior_by_key(self) -> bool:
        """Whether a prior may differ between key positions, so that it changes more than ratios of components."""
        return self.log_prior is not None and (self.log_prior.ndim == 4 or self.log_prior.shape[-1] > 1)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Norms, priors and sums are never kept in half precision."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.query.shape[:3], self.key.shape[3], self.value.shape[-1])

    def inverse_variance(self) -> float | Tensor:
        """``1 / variance``, a float or ``[Hkv, M, 1, 1]``."""
        if isinstance(self.variance, float):
            return 1.0 / self.variance
        return self.variance.to(self.compute_dtype).reciprocal()[:, :, None, None]

    def component_keys(self, key: Tensor) -> Tensor:
        """Add the shifts, if any, to ``key [B, Hkv, 1 or M, Nk, D]``, giving ``[B, Hkv, M, Nk, D]``."""
        return key if self.shift is None else key + self.shift.to(key.dtype)[:, :, None, :]

    def centred(self) -> tuple[Tensor, Tensor]:
        """Query and key in the compute precision; for distances moved together by :meth:`origin`.

        Distances do not change, but ``|q|^2 - 2 q.k + |k|^2`` stops cancelling when the data is far from zero
        (docs/numerics.md). The origin is a constant for autograd, since nothing depends on it.
        """
        query, key = self.query.to(self.compute_dtype), self.key.to(self.compute_dtype)
        if self.similarity == "dot":
            return query, key
        origin = self.origin()
        return query - origin.repeat_interleave(self.group_size, dim=1), key - origin[:, :, None]

    def origin(self) -> Tensor:
        """``[B, Hkv, 1, D]``, detached: what the first valid key and the first valid query have in common.

        Coordinate by coordinate the smaller of the two, or 0 where their signs differ: an offset of all the data is
        found, while a first key that lies far from the others (an attention sink) pulls nothing along. First tokens
        rather than means, because a mean would carry later tokens into the bits of earlier rows.
        """
        key = _first_valid(self.key.detach()[:, :, 0], self.key_mask)
        query = _first_valid(self.query.detach()[:, :: self.group_size], self.query_mask)
        return _in_common(key.to(self.compute_dtype), query.to(self.compute_dtype))

    def common_value(self) -> tuple[Tensor, Tensor]:
        """The first valid value, and where zero may be moved to before values are summed.

        Both ``[B, Hkv, 1, Dv]``, detached. The second is 0 except in channels in which the first two values nearly
        agree. To move the others would cost: values around zero average to little, and the gradients live on that.
        """
        value = self.value.detach()
        first = _first_valid(value, self.key_mask)
        if value.shape[2] == 1:
            return first, torch.zeros_like(first)
        if self.key_mask is None:
            second = value[:, :, 1:2]
        else:
            later = self.key_mask & (self.key_mask.cumsum(dim=-1) > 1)
            second = _first_valid(value, later)
        common = _in_common(first, second)
        agree = (first - second).abs() <= CHANNEL_SPREAD * common.abs()
        return first, torch.where(agree, common, 0.0)

    def count_visible_keys(self) -> Tensor:
        """How many keys each query sees, broadcastable to ``[B, H, Nq]``."""
        num_queries, num_keys = self.query.shape[2], self.key.shape[3]
        device = self.query.device
        if self.attn_mask is not None:
            visible = self.attn_mask
            if self.is_causal:
                pairs = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
                visible = visible & pairs.tril(self.causal_offset)
            if self.key_mask is not None:
                visible = visible & self.key_mask[:, None, None, :]
            return visible.sum(dim=-1)
        valid = torch.ones(1, num_keys, dtype=torch.bool, device=device) if self.key_mask is None else self.key_mask
        if not self.is_causal:
            return valid.sum(dim=-1)[:, None, None]
        up_to = torch.nn.functional.pad(valid.cumsum(dim=-1), (1, 0))
        seen = (torch.arange(num_queries, device=device) + self.causal_offset + 1).clamp(min=0)
        return up_to[:, None, seen]


def _in_common(one: Tensor, other: Tensor) -> Tensor:
    """Coordinate by coordinate the one nearer to 0, or 0 where their signs differ or the result is not finite."""
    common = torch.minimum(one, other).clamp(min=0.0) + torch.maximum(one, other).clamp(max=0.0)
    return common.nan_to_num(0.0, 0.0, 0.0)


def _first_valid(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """The first row that is not padding, ``[B, H, N, D]`` to ``[B, H, 1, D]``."""
    if mask is None:
        return tensor[:, :, :1]
    first = mask.to(torch.int8).argmax(dim=-1)
    return tensor.gather(2, first[:, None, None, None].expand(-1, tensor.shape[1], 1, tensor.shape[-1]))
