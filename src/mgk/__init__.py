"""Attention with a mixture of Gaussian keys."""

from typing import TYPE_CHECKING, Any

from mgk.nn import MixtureAttention, build_attention, replace_attention, update_priors
from mgk.ops import (
    FeatureMap,
    debug_checks,
    linear_mixture_attention,
    linear_mixture_attention_varlen,
    linear_mixture_step,
    linear_mixture_weights,
    mixture_attention,
    mixture_attention_varlen,
    mixture_log_density,
    mixture_responsibilities,
    mixture_responsibilities_varlen,
    mixture_weights,
)

if TYPE_CHECKING:
    from mgk import analysis, conversion, data, evaluation, models, recipes, training
    from mgk.conversion import convert, load_converted

__version__ = "0.1.0"

# Imported on first use: they need what the rest does without.
_LAZY = ("analysis", "conversion", "data", "evaluation", "models", "recipes", "training")
_LAZY_FUNCTIONS = {"convert": "conversion", "load_converted": "conversion"}

__all__ = [
    "FeatureMap",
    "MixtureAttention",
    "analysis",
    "build_attention",
    "conversion",
    "convert",
    "data",
    "debug_checks",
    "evaluation",
    "linear_mixture_attention",
    "linear_mixture_attention_varlen",
    "linear_mixture_step",
    "linear_mixture_weights",
    "load_converted",
    "mixture_attention",
    "mixture_attention_varlen",
    "mixture_log_density",
    "mixture_responsibilities",
    "mixture_responsibilities_varlen",
    "mixture_weights",
    "models",
    "recipes",
    "replace_attention",
    "training",
    "update_priors",
]


def __getattr__(name: str) -> Any:
    """``mgk.models``, ``mgk.training``, ``mgk.convert`` and their like, on first use."""
    if name in _LAZY_FUNCTIONS:
        return getattr(__getattr__(_LAZY_FUNCTIONS[name]), name)
    if name not in _LAZY:
        raise AttributeError(f"module 'mgk' has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"mgk.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("mgk"):
            raise
        extra = "models" if name in ("analysis", "conversion", "data", "models") else "train"
        raise ImportError(f"mgk.{name} needs {error.name}: pip install 'mgk[{extra}]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_FUNCTIONS})
