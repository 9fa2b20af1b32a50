"""One validated call of linear attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk.ops.feature_maps import FeatureMap
from mgk.ops.problem import MixtureProblem


class LinearProblem(NamedTuple):
    """The input of every backend of linear attention."""

    mixture: MixtureProblem
    """Tensors, masks and priors; similarity and variance are not used."""
    feature_map: FeatureMap
    normalization: str
    state: Tensor | None = None
    """``[B, Hkv, F, Dv + 1]``: the sum ``sum_j phi(k_j) (v_j, 1)`` over earlier keys."""

    def query_features(self) -> Tensor:
        """``phi(q_i)``, ``[B, H, Nq, F]``; 0 at padded queries."""
        query = self.mixture.query.to(self.mixture.compute_dtype)
        features = self.feature_map.query(query)
        mask = self.mixture.query_mask
        return features if mask is None else features.masked_fill(~mask[:, None, :, None], 0.0)

    def key_features(self) -> Tensor:
        """``sum_r prior_r phi(k_jr)``, ``[B, Hkv, Nk, F]``; 0 at padded keys. Adds up one component at a time."""
        mixture = self.mixture
        key = mixture.key.to(mixture.compute_dtype)
        components = mixture.num_components
        total: Tensor | float = 0.0
        for r in range(components):
            own = key[:, :, 0 if mixture.shift is not None else r]
            if mixture.shift is not None:
                own = own + mixture.shift[:, r, None].to(own.dtype)
            features = self.feature_map.key(own)
            if mixture.log_prior is not None:
                features = features * mixture.log_prior[..., r, :, None].exp()
            elif components > 1:
                features = features / components
            total = total + features
        assert isinstance(total, Tensor)
        mask = mixture.key_mask
        return total if mask is None else total.masked_fill(~mask[:, None, :, None], 0.0)

    def extended_values(self, features: Tensor) -> Tensor:
        """Values with a last column of ones, whose weighted sum is the normaliser, ``[B, Hkv, Nk, Dv + 1]``."""
        value = self.mixture.value.to(features.dtype)
        return torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)

    def counts(self) -> Tensor:
        """Number of keys of this call that each query sees, ``[B, Nq]``; keys in ``state`` are not counted."""
        mixture = self.mixture
        (batch, _, num_queries, _), num_keys = mixture.query.shape, mixture.key.shape[3]
        valid = torch.ones(batch, num_keys, device=mixture.query.device, dtype=mixture.compute_dtype)
        if mixture.key_mask is not None:
            valid = mixture.key_mask.to(valid.dtype)
        if not mixture.is_causal:
            return valid.sum(dim=1, keepdim=True).expand(batch, num_queries)
        seen = torch.cat([valid.new_zeros(batch, 1), valid.cumsum(dim=1)], dim=1)
        last = torch.arange(num_queries, device=valid.device) + mixture.causal_offset + 1
        return seen[:, last.clamp(min=0)]
