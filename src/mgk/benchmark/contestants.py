"""Who takes part: softmax through every stock kernel and our own, presets through every backend, FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mgk
from mgk.benchmark import eager, flex
from mgk.benchmark.inputs import Inputs

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The kernels of ``F.scaled_dot_product_attention``."""

EAGER = "eager"
"""The backend that is none: the formula of the paper's code."""
FLEX = "flex"
"""FlexAttention, which is none of ours either."""
OWN_KERNELS = {"cuda": "triton", "cpu": "chunked"}
"""By the type of the device, the backend of ours that computes softmax without a stock kernel."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to compute attention."""

    preset: str
    backend: str
    """Of :func:`mgk.mixture_attention`, or ``eager``, or ``flex``; of a stock kernel its name."""
    attention: Callable[[Inputs], Tensor]
    """``[B, H, N, D]``"""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """What has to surround a call."""
    is_baseline: bool = False
    """Whether it has all the heads, and is what the others are compared with."""

    may_lack_training: bool = False
    """Whether it takes part even if it can only go forward, as others' software may."""

    @property
    def is_stock(self) -> bool:
        """Whether it is a kernel of ``F.scaled_dot_product_attention``."""
        return self.is_baseline and self.backend in KERNELS

    @property
    def name(self) -> str:
        if self.is_stock:
            return f"softmax through SDPA {self.backend}"
        heads = " with all heads" if self.is_baseline and self.preset == "softmax" else ""
        return f"{self.preset}{heads} through {self.backend}"

    def expected_bytes(self, inputs: Inputs) -> int:
        """What it needs if that grows with the number of pairs, else 0."""
        return eager.peak_bytes(inputs) if self.backend in (EAGER, "math") else 0


def baselines(device: torch.device, names: Sequence[str] = tuple(KERNELS)) -> list[Contestant]:
    """Softmax attention through each stock kernel that the device may have, of those named."""
    names = [name for name in names if device.type == "cuda" or name in ("flash", "math")]
    return [
        Contestant(
            preset="softmax", backend=name, attention=_stock, is_baseline=True,
            context=lambda kernel=KERNELS[name]: sdpa_kernel(kernel),  # type: ignore[misc]
        )
        for name in names
    ]  # fmt: skip


def own_softmax(device: torch.device) -> Contestant:
    """Softmax attention with all the heads through our own kernel: with the stock ones it makes the fastest of all."""
    backend = OWN_KERNELS[device.type]
    return Contestant(preset="softmax", backend=backend, attention=_through(backend), is_baseline=True)


def mixtures(presets: Sequence[str], backends: Sequence[str]) -> list[Contestant]:
    """Each preset through each backend; through FlexAttention those that it is written for."""
    return [
        _mixture(preset, backend)
        for preset in presets
        for backend in backends
        if backend != FLEX or preset in flex.PRESETS
    ]


def _mixture(preset: str, backend: str) -> Contestant:
    if backend == FLEX:
        return Contestant(preset=preset, backend=FLEX, attention=flex.attention, may_lack_training=True)
    attention = eager.attention if backend == EAGER else _through(backend)
    return Contestant(preset=preset, backend=backend, attention=attention)


def linears(presets: Sequence[str], backend: str) -> list[Contestant]:
    """Linear attention with all the heads, which mixtures of linear keys replace, and the presets."""
    plain = Contestant(preset="linear", backend=backend, attention=_through(backend), is_baseline=True)
    return [plain, *mixtures(presets, [backend])]


def _stock(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal)


def _through(backend: str) -> Callable[[Inputs], Tensor]:
    def attention(inputs: Inputs) -> Tensor:
        if inputs.feature_map is not None:
            return mgk.linear_mixture_attention(
                inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
                feature_map=inputs.feature_map, is_causal=inputs.is_causal, backend=backend,
            )  # fmt: skip
        return mgk.mixture_attention(
            inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
            similarity=inputs.similarity, assignment=inputs.assignment, is_causal=inputs.is_causal, backend=backend,
        )  # fmt: skip

    return attention
