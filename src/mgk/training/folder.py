"""Folders for what a run writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_folder(what: str, folder: Path | None) -> None:
    """Make a folder that can be written to, before the time of the training is spent.

    Args:
        what: name of the folder in an error.
        folder: path of the folder; ``None`` if the user named none.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(f"{what} must be a folder that can be written to, got {folder}: {error.strerror}") from error
