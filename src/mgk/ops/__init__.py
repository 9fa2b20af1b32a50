"""Pure functions on tensors."""

from mgk.ops.attention import mixture_attention, mixture_log_density, mixture_responsibilities, mixture_weights
from mgk.ops.packed import mixture_attention_varlen, mixture_responsibilities_varlen
from mgk.ops.validation import debug_checks

__all__ = [
    "debug_checks",
    "mixture_attention",
    "mixture_attention_varlen",
    "mixture_log_density",
    "mixture_responsibilities",
    "mixture_responsibilities_varlen",
    "mixture_weights",
]
