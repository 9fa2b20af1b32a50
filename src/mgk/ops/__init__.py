"""Mixture attention and its linear form as pure functions on tensors."""

from mgk.ops.attention import mixture_attention, mixture_log_density, mixture_responsibilities, mixture_weights
from mgk.ops.feature_maps import FeatureMap
from mgk.ops.linear import (
    linear_mixture_attention,
    linear_mixture_attention_varlen,
    linear_mixture_step,
    linear_mixture_weights,
)
from mgk.ops.packed import mixture_attention_varlen, mixture_responsibilities_varlen
from mgk.ops.validation import debug_checks

__all__ = [
    "FeatureMap",
    "debug_checks",
    "linear_mixture_attention",
    "linear_mixture_attention_varlen",
    "linear_mixture_step",
    "linear_mixture_weights",
    "mixture_attention",
    "mixture_attention_varlen",
    "mixture_log_density",
    "mixture_responsibilities",
    "mixture_responsibilities_varlen",
    "mixture_weights",
]
