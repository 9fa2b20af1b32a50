"""Attention with a mixture of Gaussian keys."""

from mgk.nn import MixtureAttention, build_attention, replace_attention, update_priors
from mgk.ops import (
    debug_checks,
    mixture_attention,
    mixture_log_density,
    mixture_responsibilities,
    mixture_weights,
)

__version__ = "0.1.0"

__all__ = [
    "MixtureAttention",
    "build_attention",
    "debug_checks",
    "mixture_attention",
    "mixture_log_density",
    "mixture_responsibilities",
    "mixture_weights",
    "replace_attention",
    "update_priors",
]
