"""Variances of the Gaussian components."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor, nn


def initial_variances(head_dim: int, num_components: int, scale: float | Sequence[float]) -> list[float]:
    """Return ``scale * sqrt(D)`` for each component; a single scale applies to all."""
    try:
        is_one = isinstance(scale, Real) or (isinstance(scale, Tensor) and scale.ndim == 0)
        scales = [float(scale)] * num_components if is_one else [float(s) for s in scale]  # type: ignore
    except (TypeError, ValueError) as error:
        raise TypeError(f"variance_scale must be one number or one per component, got {scale!r}") from error
    if len(scales) != num_components:
        raise ValueError(f"variance_scale must be one number or {num_components}, one per component, got {len(scales)}")
    if not all(0.0 < s < math.inf for s in scales):
        raise ValueError(f"variance_scale must be positive and finite, got {scale}")
    return [s * math.sqrt(head_dim) for s in scales]


class FixedVariance(nn.Module):
    """Constant variances, as one number if all components agree: the attention then needs no term in ``|q|^2``."""

    per_component: Tensor | None

    def __init__(self, head_dim: int, num_components: int, scale: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.values = initial_variances(head_dim, num_components, scale)
        equal = len(set(self.values)) == 1
        self.register_buffer("per_component", None if equal else torch.tensor(self.values), persistent=False)

    def forward(self) -> float | Tensor:
        return self.values[0] if self.per_component is None else self.per_component

    def reset_parameters(self) -> None:
        if self.per_component is not None:
            self.per_component.copy_(torch.tensor(self.values, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedVariance:
        super()._apply(fn, recurse)
        self._restore_digits()
        return self

    def train(self, mode: bool = True) -> FixedVariance:
        """Switch between training and evaluation."""
        # Loaders that set tensors one by one in a dtype of their choice call this at the end.
        self._restore_digits()
        return super().train(mode)

    def leave_meta(self, device: torch.device) -> None:
        """Move variances that are on the meta device to ``device``; no checkpoint holds them."""
        if self.per_component is not None and self.per_component.device.type == "meta":
            self.per_component = torch.tensor(self.values, dtype=torch.float32, device=device)

    def _restore_digits(self) -> None:
        """Restore fp32 or better after a change of the model's dtype, because half precision rounds the variances."""
        if self.per_component is not None and self.per_component.device.type != "meta":
            dtype = torch.promote_types(self.per_component.dtype, torch.float32)
            self.per_component = torch.tensor(self.values, dtype=dtype, device=self.per_component.device)

    def extra_repr(self) -> str:
        return ", ".join(f"{value:g}" for value in self.values)


class LearnedVariance(nn.Module):
    """A learned variance per key/value head and component, ``[Hkv, M]``, positive because its logarithm is learned."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, num_components: int, scale: float | Sequence[float] = 1.0
    ) -> None:
        super().__init__()
        self.initial = initial_variances(head_dim, num_components, scale)
        self.log_variance = nn.Parameter(torch.empty(num_kv_heads, num_components))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_variance.copy_(torch.tensor(self.initial).log().expand_as(self.log_variance))

    def forward(self) -> Tensor:
        return self.log_variance.to(torch.promote_types(self.log_variance.dtype, torch.float32)).exp()

    def extra_repr(self) -> str:
        return f"initial=({', '.join(f'{value:g}' for value in self.initial)})"
