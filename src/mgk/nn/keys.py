"""The two ways to compute M keys for each position: projections and shifts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHIFT_INITS = ("normal", "first-zero")
"""Initialisation of the shifts: all normal, as in the paper, or the first at 0, as in its released code."""


class ProjectedKeys(nn.Module):
    """``k_jr = W_r x_j``: each component has a projection of its own (MGK). Holds no parameters itself.

    Turns the output of the key projection, ``[B, N, width]``, into ``[B, Hkv, M, N, D]``, and returns no shifts.
    """

    shift = None

    def __init__(self, num_kv_heads: int, head_dim: int, num_components: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_components = num_components
        self.width = num_kv_heads * num_components * head_dim

    def forward(self, projected: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the keys, or ``None`` without input, and ``None`` in place of shifts."""
        if projected is None:
            return None, None
        key = projected.unflatten(-1, (self.num_kv_heads, self.num_components, self.head_dim))
        return key.permute(0, 2, 3, 1, 4), None

    def extra_repr(self) -> str:
        return f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, num_components={self.num_components}"


class ShiftedKeys(nn.Module):
    """``k_jr = W x_j + b_r``: the components are shifts of one key (sMGK). Holds the shifts ``[Hkv, M, D]``.

    Turns the output of the key projection, ``[B, N, width]``, into ``[B, Hkv, N, D]``. The attention adds the shifts,
    which makes them nearly free.

    Code that computes with the shifts must call this module and not read the attribute: when accelerate offloads a
    model, its hooks load the parameters of a module onto the device only while the module is called.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, num_components: int, init_std: float = 1.0, init: str = "normal"
    ) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_components = num_components
        self.init_std = init_std
        self.init = init
        self.width = num_kv_heads * head_dim
        self.shift = nn.Parameter(torch.empty(num_kv_heads, num_components, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Equal components would receive equal gradients forever, so the shifts must start apart.
        nn.init.normal_(self.shift, std=self.init_std)
        if self.init == "first-zero":
            # Zeroed after drawing, so that the other components are the ones that "normal" draws.
            with torch.no_grad():
                self.shift[:, 0].zero_()

    def forward(self, projected: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return the keys, or ``None`` without input (for cached keys), and the shifts that the attention must add."""
        if projected is None:
            return None, self.shift
        return projected.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2), self.shift

    def extra_repr(self) -> str:
        return (
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"num_components={self.num_components}, init_std={self.init_std}, init={self.init}"
        )
