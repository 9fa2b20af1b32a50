"""Feature maps phi of linear attention, in which ``phi(q) . phi(k)`` replaces ``exp(q . k)``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.validation import check_choice, may_inspect_values

Map = Callable[[Tensor], Tensor]


class FeatureMap(NamedTuple):
    """A pair of functions, for queries and for keys, from ``[..., D]`` to ``[..., F]``. Features are never negative."""

    query: Map
    key: Map


def elu(x: Tensor) -> Tensor:
    """``elu(x) + 1`` (Katharopoulos et al. 2020), computed so that adding 1 does not round small features away."""
    return torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``"""
    return F.relu(x)


def dpfp(x: Tensor, nu: int = 3) -> Tensor:
    """Deterministic parameter-free projection (Schlag et al. 2021), ``F = 2 * nu * D``.

    The features are the products of ``relu([x, -x])`` with itself, rolled by 1 to ``nu``.
    """
    halves = F.relu(torch.cat([x, -x], dim=-1))
    return torch.cat([halves * halves.roll(shift, dims=-1) for shift in range(1, nu + 1)], dim=-1)


# FAVOR+ clamps the exponents of keys to this, so that a sum of a million features does not overflow fp32. Only a key
# that is many times longer than usual and points along a direction comes near it.
LARGEST_EXPONENT = 60.0


def favor(head_dim: int, *, num_features: int | None = None, seed: int = 0) -> FeatureMap:
    """Return positive orthogonal random features (Choromanski et al. 2021).

    The expectation of ``phi(q) . phi(k)`` is ``exp(q . k / sqrt(D))``.

    Args:
        head_dim: dimension D of a head.
        num_features: number of features F; ``None`` is ``D log D``.
        seed: seed of the random directions, which are the same on every device.
    """
    count = max(1, round(head_dim * math.log(max(head_dim, 2)))) if num_features is None else num_features
    if count < 1:
        raise ValueError(f"num_features must be at least 1, got {count}")
    directions = _directions(head_dim, count, seed)
    return FeatureMap(_FavorOfQuery(directions), _FavorOfKey(directions))


class _Favor:
    """Random features in the given directions. A class and no closure, because layers that hold it are pickled."""

    def __init__(self, directions: Tensor) -> None:
        self.directions = directions

    def exponents(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        return x @ self.directions.to(x).mT - 0.5 * x.square().sum(-1, keepdim=True)

    def scale(self) -> float:
        return float(len(self.directions) ** -0.5)


class _FavorOfQuery(_Favor):
    def __call__(self, x: Tensor) -> Tensor:
        exponent = self.exponents(x)
        # A factor that all features of a query share cancels, so the maximum may be subtracted.
        return (exponent - exponent.detach().amax(-1, keepdim=True)).exp() * self.scale()


class _FavorOfKey(_Favor):
    def __call__(self, x: Tensor) -> Tensor:
        # A maximum over the keys is not subtracted, because it would let later keys change earlier rows.
        return self.exponents(x).clamp(max=LARGEST_EXPONENT).exp() * self.scale()


@functools.lru_cache(maxsize=64)
def _directions(head_dim: int, count: int, seed: int) -> Tensor:
    """Directions that are orthogonal in blocks of D and distributed in length like normal vectors, ``[F, D]``."""
    # The tensor outlives the call, but modes and transforms of the calling thread would mark it as theirs: a meta
    # device, fake tensors, inference mode, vmap. A new thread has none of them.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_draw_directions, head_dim, count, seed).result()


def _draw_directions(head_dim: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    blocks = []
    for _ in range(-(-count // head_dim)):
        orthogonal, triangular = torch.linalg.qr(torch.randn(head_dim, head_dim, **options))
        # The sign of the diagonal makes the rotations uniformly distributed.
        blocks.append((orthogonal * triangular.diagonal().sign()).mT)
    lengths = torch.randn(count, head_dim, **options).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:count] * lengths


NAMES = ("elu", "relu", "dpfp", "favor")


def resolve(feature_map: str | Map | FeatureMap, head_dim: int, normalization: str) -> FeatureMap:
    """Return the feature map for a name, for one function of queries and keys, or for a pair of functions."""
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if callable(feature_map):
        own = _Checked(feature_map)
        return FeatureMap(own, own)
    if not isinstance(feature_map, str):
        raise TypeError(f"feature_map must be a name or a function, got {type(feature_map).__name__}")
    check_choice("feature_map", feature_map, NAMES)
    if feature_map == "favor":
        if normalization != "sum":
            raise ValueError(
                f"feature_map='favor' needs normalization='sum', since it scales rows, got {normalization!r}"
            )
        return favor(head_dim)
    plain: Map = {"elu": elu, "relu": relu, "dpfp": dpfp}[feature_map]
    return FeatureMap(plain, plain)


class _Checked:
    """A user's function in checks of what it returns. A class, so that layers that hold it can be pickled."""

    def __init__(self, function: Map) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        features = self.function(x)
        if not isinstance(features, Tensor) or features.shape[:-1] != x.shape[:-1]:
            got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(f"feature_map must give [..., F] for {list(x.shape)}, got {got}")
        if features.dtype != x.dtype:
            raise TypeError(f"feature_map must keep the dtype, {x.dtype}, got {features.dtype}")
        if may_inspect_values(features) and features.numel() and bool((features < 0).any()):
            raise ValueError(f"feature_map must give numbers that are not negative, got {float(features.min()):g}")
        return features
