"""One attention call as values: the mixture and the visibility that the caller passed, and the validated call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.boundaries import count_visible, nth_valid, sequence_of_tokens

# A value channel counts as nearly constant if its first two entries differ by less than this, relative to their size.
CHANNEL_SPREAD = 2.0**-10


class Mixture(NamedTuple):
    """The arguments of :func:`mgk.mixture_attention` that describe the mixture, as the caller passed them."""

    shift: Tensor | None = None
    log_prior: Tensor | None = None
    variance: float | Tensor | None = None
    similarity: str = "gaussian"
    assignment: str = "soft"


class Visibility(NamedTuple):
    """The arguments that decide which query sees which key, as the caller passed them.

    They are those of :func:`mgk.mixture_attention` and, for packed sequences in a batch of one row, the boundaries of
    :func:`mgk.mixture_attention_varlen`.
    """

    is_causal: bool = False
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


class MixtureProblem(NamedTuple):
    """One call in canonical form with every option checked. Backends receive it from ``mgk.ops.dispatch``.

    The dispatcher has filled padded keys, values and queries with zeros, so that their former content (NaN included)
    reaches neither an output nor a gradient. Quantities of a sequence (:meth:`origin`, :meth:`common_value`) have an
    axis of S sequences: S is 1 for a padded call, whose sequences are the rows of the batch.
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
    cu_seqlens_q: Tensor | None = None
    """int32 ``[S + 1]``: boundaries of the queries of packed sequences; ``None`` if each row is one sequence."""
    cu_seqlens_k: Tensor | None = None
    """The same for the keys; both are ``None`` or neither is."""

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
        """Whether all components provably share one variance, so that the term in ``|q|^2`` cancels."""
        return isinstance(self.variance, float) or self.num_components == 1

    @property
    def has_prior_by_key(self) -> bool:
        """Whether the prior may differ between key positions, and not only between components."""
        return self.log_prior is not None and (self.log_prior.ndim == 4 or self.log_prior.shape[-1] > 1)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of norms, priors and sums, which are never kept in half precision."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def parameters(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The parameters of the mixture, shift, prior and variance; ``None`` for one that is not a tensor."""
        return self.shift, self.log_prior, self.variance if isinstance(self.variance, Tensor) else None

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.query.shape[:3], self.key.shape[3], self.value.shape[-1])

    def inverse_variance(self) -> float | Tensor:
        """``1 / variance``, a float or ``[Hkv, M, 1, 1]``."""
        if isinstance(self.variance, float):
            return 1.0 / self.variance
        return self.variance.to(self.compute_dtype).reciprocal()[:, :, None, None]

    def with_relative_prior(self) -> MixtureProblem:
        """Return the problem with priors of which the largest of each head is 1, unless they differ between keys.

        Only ratios of priors matter to the weights, but a large logarithm leaves no digits for the distance that it is
        added to. The largest is a constant for autograd, since no weight depends on it.
        """
        if self.log_prior is None or self.has_prior_by_key:
            return self
        largest = self.log_prior.detach().amax(dim=1, keepdim=True)
        # A head without any prior above zero, which is refused where values may be read, must not become NaN.
        return self._replace(log_prior=self.log_prior - largest.clamp(min=torch.finfo(largest.dtype).min))

    def component_keys(self, key: Tensor) -> Tensor:
        """Add the shifts, if any, to ``key [B, Hkv, 1 or M, Nk, D]``, giving ``[B, Hkv, M, Nk, D]``."""
        return key if self.shift is None else key + self.shift.to(key.dtype)[:, :, None, :]

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return query and key in the compute dtype; for distances both are moved by :meth:`origin`.

        Moving both leaves the distances alone and avoids the cancellation in ``|q|^2 - 2 q.k + |k|^2`` when the data is
        far from zero (docs/numerics.md). The origin is a constant for autograd, since no result depends on it.
        """
        query, key = self.query.to(self.compute_dtype), self.key.to(self.compute_dtype)
        if self.similarity == "dot":
            return query, key
        origin = self.origin()
        return query - self.at_queries(origin), key - self.at_keys(origin)[:, :, None]

    def origin(self) -> Tensor:
        """Common offset of the first valid key and query of each sequence, ``[B, Hkv, S, D]``, detached.

        Each coordinate is the one nearer to zero of the two, or 0 where their signs differ. This finds an offset of all
        the data, but is not misled by a first key far from the others (an attention sink). It uses the first tokens and
        not means, because a mean would let later tokens change the bits of earlier rows.
        """
        key = _nth_valid(1, self.key.detach()[:, :, 0], self.key_mask, self.cu_seqlens_k)
        query = _nth_valid(1, self.query.detach()[:, :: self.group_size], self.query_mask, self.cu_seqlens_q)
        return _in_common(key.to(self.compute_dtype), query.to(self.compute_dtype))

    def common_value(self) -> tuple[Tensor, Tensor]:
        """Return the first valid value of each sequence and the constant to subtract before its values are summed.

        Both are ``[B, Hkv, S, Dv]``, detached. The constant is the first value in channels whose first two values
        nearly agree, and 0 elsewhere: moving a channel that varies around zero would cost precision, because its
        averages, on which the gradients depend, are small.
        """
        value = self.value.detach()
        first = _nth_valid(1, value, self.key_mask, self.cu_seqlens_k)
        if value.shape[2] == 1:
            return first, torch.zeros_like(first)
        second = _nth_valid(2, value, self.key_mask, self.cu_seqlens_k)
        # For an infinite value the comparison is False, so it is never subtracted.
        agree = (first - second).abs() < CHANNEL_SPREAD * first.abs()
        return first, torch.where(agree, first, 0.0)

    def at_keys(self, of_sequence: Tensor) -> Tensor:
        """Expand ``[B, Hkv, S, X]``, one row per sequence, to one row per key, ``[B, Hkv, Nk or 1, X]``."""
        if self.cu_seqlens_k is None:
            return of_sequence
        return of_sequence.index_select(2, sequence_of_tokens(self.cu_seqlens_k, self.key.shape[3]))

    def at_queries(self, of_sequence: Tensor) -> Tensor:
        """Expand ``[B, Hkv, S, X]``, one row per sequence, to one row per query, ``[B, H, Nq or 1, X]``."""
        if self.cu_seqlens_q is not None:
            of_sequence = of_sequence.index_select(2, sequence_of_tokens(self.cu_seqlens_q, self.query.shape[2]))
        return of_sequence.repeat_interleave(self.group_size, dim=1) if self.group_size > 1 else of_sequence

    def count_visible_keys(self) -> Tensor:
        """Number of keys that each query sees, broadcastable to ``[B, H, Nq]``."""
        num_queries, num_keys = self.query.shape[2], self.key.shape[3]
        device = self.query.device
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            mask = None if self.key_mask is None else self.key_mask[0]
            return count_visible(self.cu_seqlens_q, self.cu_seqlens_k, num_queries, mask, self.is_causal)[None, None]
        if self.attn_mask is not None:
            visible = self.attn_mask
            if self.is_causal:
                pairs = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
                visible = visible & pairs.tril(self.causal_offset)
            if self.key_mask is not None:
                visible = visible & self.key_mask[:, None, None, :]
            return visible.sum(dim=-1)
        if not self.is_causal and self.key_mask is None:
            return torch.full((1, 1, 1), num_keys, device=device)
        if not self.is_causal and self.key_mask is not None:
            return self.key_mask.sum(dim=-1)[:, None, None]
        seen = torch.arange(1 + self.causal_offset, 1 + num_keys, device=device).clamp(min=0)
        if self.key_mask is None:
            return seen[None, None]
        up_to = torch.nn.functional.pad(self.key_mask.cumsum(dim=-1), (1, 0))
        return up_to[:, None, seen]


def _in_common(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise the number nearer to 0, or 0 where the signs differ or the result is not finite."""
    common = torch.minimum(one, other).clamp(min=0.0) + torch.maximum(one, other).clamp(max=0.0)
    return common.nan_to_num(0.0, 0.0, 0.0)


def _nth_valid(number: int, tensor: Tensor, mask: Tensor | None, boundaries: Tensor | None) -> Tensor:
    """Select the first or second row of each sequence that is not padding, ``[B, H, N, D]`` to ``[B, H, S, D]``."""
    if boundaries is not None:
        rows = nth_valid(number, boundaries, tensor.shape[2], None if mask is None else mask[0])
        return tensor.index_select(2, rows)
    if mask is None:
        return tensor[:, :, number - 1 : number]
    if number > 1:
        mask = mask & (mask.cumsum(dim=-1) >= number)
    row = mask.to(torch.int8).argmax(dim=-1)
    return tensor.gather(2, row[:, None, None, None].expand(-1, tensor.shape[1], 1, tensor.shape[-1]))
