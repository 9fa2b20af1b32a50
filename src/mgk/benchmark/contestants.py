"""The contestants: softmax on every stock kernel and our own, presets on every backend, FlexAttention."""

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
"""Kernels of ``F.scaled_dot_product_attention``."""

EAGER = "eager"
"""Name of the formula of the paper's code, which is no backend of the library."""
FLEX = "flex"
"""Name of FlexAttention, which is no backend of the library either."""
OWN_KERNELS = {"cuda": "triton", "cpu": "chunked"}
"""Our backend that computes softmax without a stock kernel, by the type of the device."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to compute attention."""

    preset: str
    backend: str
    """Backend of :func:`mgk.mixture_attention`, ``eager``, ``flex``, or the name of a stock kernel."""
    attention: Callable[[Inputs], Tensor]
    """Function from the inputs to the output ``[B, H, N, D]``."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of every call."""
    is_baseline: bool = False
    """Whether it has all heads and the others are compared with it."""

    may_lack_training: bool = False
    """Whether it takes part even without a backward pass, as other libraries may."""

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
        """Memory in bytes that it needs if that grows with the number of pairs, else 0."""
        return eager.peak_bytes(inputs) if self.backend in (EAGER, "math") else 0


def baselines(device: torch.device, names: Sequence[str] = tuple(KERNELS)) -> list[Contestant]:
    """Softmax attention on each of the named stock kernels that the device may have."""
    names = [name for name in names if device.type == "cuda" or name in ("flash", "math")]
    return [
        Contestant(
            preset="softmax", backend=name, attention=_stock, is_baseline=True,
            context=lambda kernel=KERNELS[name]: sdpa_kernel(kernel),  # type: ignore[misc]
        )
        for name in names
    ]  # fmt: skip


def own_softmax(device: torch.device) -> Contestant:
    """Softmax attention with all heads on our own kernel, which competes with the stock ones for the fastest of all."""
    backend = OWN_KERNELS[device.type]
    return Contestant(preset="softmax", backend=backend, attention=_through(backend), is_baseline=True)


def mixtures(presets: Sequence[str], backends: Sequence[str]) -> list[Contestant]:
    """Each preset on each backend, and on FlexAttention those that are written for it."""
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
    """Linear attention with all heads, and the presets that replace it."""
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
