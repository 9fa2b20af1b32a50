"""Attention with a mixture of Gaussian keys."""

from typing import TYPE_CHECKING

from mgk.nn import MixtureAttention, build_attention, replace_attention, update_priors
from mgk.ops import (
    debug_checks,
    mixture_attention,
    mixture_log_density,
    mixture_responsibilities,
    mixture_weights,
)

if TYPE_CHECKING:
    from types import ModuleType

    from mgk import data, models

__version__ = "0.1.0"

__all__ = [
    "MixtureAttention",
    "build_attention",
    "data",
    "debug_checks",
    "mixture_attention",
    "mixture_log_density",
    "mixture_responsibilities",
    "mixture_weights",
    "models",
    "replace_attention",
    "update_priors",
]


def __getattr__(name: str) -> "ModuleType":
    """``mgk.models`` and ``mgk.data`` on first use: they import what the rest does without."""
    if name not in ("data", "models"):
        raise AttributeError(f"module 'mgk' has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"mgk.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("mgk"):
            raise
        raise ImportError(f"mgk.{name} needs {error.name}: pip install 'mgk[models]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), "data", "models"})
