"""Converted models on disk."""

from __future__ import annotations

import os
from typing import Any

Model = Any


def load_converted(path: str | os.PathLike[str], model_class: type[Any] | None = None, **options: Any) -> Model:
    """Load a model that was converted with :func:`mgk.convert` and saved with ``save_pretrained``.

    Args:
        path: a folder, or a name on the Hub.
        model_class: a class of transformers such as ``LlamaModel``; ``None`` is the class that was saved.
        options: those of ``from_pretrained``: ``dtype``, ``device_map``, ``revision`` and the like.
    """
    raise NotImplementedError
