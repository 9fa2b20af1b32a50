"""Training by recipes, with one readable loop, :mod:`mgk.training.loop`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgk.training.configuration import RunConfig, from_mapping, to_mapping
    from mgk.training.corpora import open_or_prepare
    from mgk.training.distributed import build_fabric
    from mgk.training.errors import CheckpointError, CheckpointWriteError, NonFiniteError, RunLockedError
    from mgk.training.evaluate import evaluate_run
    from mgk.training.loop import Trainer
    from mgk.training.run import fit
    from mgk.training.tracking import Display

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointWriteError": "errors",
    "Display": "tracking",
    "NonFiniteError": "errors",
    "RunConfig": "configuration",
    "RunLockedError": "errors",
    "Trainer": "loop",
    "build_fabric": "distributed",
    "evaluate_run": "evaluate",
    "fit": "run",
    "from_mapping": "configuration",
    "open_or_prepare": "corpora",
    "to_mapping": "configuration",
}

__all__ = [
    "CheckpointError",
    "CheckpointWriteError",
    "Display",
    "NonFiniteError",
    "RunConfig",
    "RunLockedError",
    "Trainer",
    "build_fabric",
    "evaluate_run",
    "fit",
    "from_mapping",
    "open_or_prepare",
    "to_mapping",
]


def __getattr__(name: str) -> Any:
    """Import a member on first use: Lightning takes seconds to import, for which ``mgk --help`` must not wait."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mgk.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mgk.training.{_HOMES[name]}"), name)
