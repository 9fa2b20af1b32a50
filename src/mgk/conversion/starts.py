"""The start of a converted model: a bias that fades out, and noise that moves equal keys apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from mgk.nn import PRESETS

STARTS = ("auto", "exact", "near", "immediate")


def choose_start(start: str, attention: str) -> str:
    """Return the start for a preset, or raise an error if the preset does not allow it."""
    preset = PRESETS[attention]
    is_dot, is_hard = preset.similarity == "dot", preset.assignment == "hard"
    if start == "auto":
        return "exact" if is_dot else "immediate" if is_hard else "near"
    if start == "exact" and not is_dot:
        raise ValueError(f"start 'exact' needs a dot product, got {attention!r}: a distance starts 'near' at best")
    if start == "near" and is_dot:
        raise ValueError(f"start 'near' needs a distance, got {attention!r}: a dot product starts 'exact'")
    if start == "near" and is_hard:
        raise ValueError(f"start 'near' needs a soft mixture, got {attention!r}: with hard ones keys have no bias")
    return start


class NearStart(nn.Module):
    """A bias that turns distances into dot products and fades out in ``steps`` calls of :func:`advance_start`.

    With ``bias[j,r] = remaining * |k_jr|^2 / (2 variance)`` and ``remaining = 1``, the logits of a Gaussian are ``q_i .
    k_jr / variance`` plus a number that depends only on the query. For one key, or shifts of one key, that is the
    original softmax of dot products. The count is a buffer of integers, which half precision does not round and every
    checkpoint contains.
    """

    steps_left: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("steps_left", torch.tensor(steps))
        self.is_over = steps == 0
        """Whether the host knows that the start is over, so that no bias is computed. Until it knows, the bias is 0."""
        self._left: int | None = None

    def forward(self, key: Tensor, shift: Tensor | None, variance: float | Tensor) -> Tensor | None:
        """Return the bias ``[B, Hkv, M, Nk]`` of keys ``[B, Hkv, M or 1, Nk, D]``; ``None`` when the start is over."""
        if self.is_over:
            return None
        dtype = torch.promote_types(key.dtype, torch.float32)
        key = key.to(dtype)
        squares = key.square().sum(dim=-1)
        if shift is not None:
            shift = shift.to(dtype)
            products = torch.einsum("bhnd,hmd->bhmn", key.squeeze(2), shift)
            squares = squares + 2.0 * products + shift.square().sum(dim=-1)[:, :, None]
        if isinstance(variance, Tensor):
            variance = variance.to(dtype).expand(key.shape[1], -1)[:, :, None]
        return (self.steps_left.to(dtype) / self.steps) * squares / (2.0 * variance)

    def advance(self) -> None:
        """Advance by one step."""
        if self.is_over:
            return
        if self._left is None:
            self._left = int(self.steps_left)
        self._left = max(self._left - 1, 0)
        self.steps_left.fill_(self._left)
        self.is_over = self._left == 0

    def train(self, mode: bool = True) -> NearStart:
        """Switch between training and evaluation."""
        # Loaders of weights call this at the end.
        self._look()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._look()

    def _look(self) -> None:
        if not self.steps_left.is_meta:
            self._left = int(self.steps_left)
            self.is_over = self._left == 0

    def reset_parameters(self) -> None:
        self.steps_left.fill_(self.steps)

    def extra_repr(self) -> str:
        return f"steps={self.steps}"


def advance_start(model: nn.Module) -> None:
    """Advance the start ``"near"`` by one step. Call it once after each optimiser step; other models are left alone.

    Where PEFT trains a copy of the mixture (``modules_to_save``), only the copy advances, so that the model without its
    adapters stays what it was.
    """
    for name, module in model.named_modules():
        if isinstance(module, NearStart) and "original_module" not in name.split("."):
            module.advance()


class AdvanceStart(TrainerCallback):
    """:func:`advance_start` as a callback of Hugging Face's trainer: ``Trainer(..., callbacks=[AdvanceStart()])``."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the start after each optimiser step."""
        advance_start(kwargs["model"])


class Perturbation:
    """Noise that moves equal keys apart. It is drawn anew at each call and sums to zero over the components.

    Thus ``log sum_r exp(q . (k + d_r))`` changes by the square of the noise, while the gradients of the components
    differ by its first power.
    """

    def __init__(self, size: float, seed: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, weights: Tensor) -> Tensor:
        """Return noise for weights ``[Hkv, M, ...]``, relative to their standard deviation."""
        if self.size == 0.0 or weights.is_meta:
            return torch.zeros_like(weights)
        noise = torch.randn(weights.shape, generator=self.generator)
        noise = (noise - noise.mean(dim=1, keepdim=True)).to(weights.device)
        return (self.size * weights.float().std() * noise).to(weights.dtype)
