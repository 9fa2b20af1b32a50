"""Pairs of documents as bytes: what AAN and PeerRead have in common.

Every document is kept once, in the split ``documents``; the other splits name two of them and a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mgk.data import byte_text
from mgk.data.errors import DataError
from mgk.data.store import Writer, checksum


class Pair(NamedTuple):
    """Two documents by their identifiers, and whether they belong together."""

    label: int
    first: str
    second: str


def write(
    folder: Path,
    name: str,
    files: Sequence[Path],
    options: Mapping[str, Any],
    documents: Mapping[str, str],
    splits: Mapping[str, Sequence[Pair]],
) -> None:
    """Write the documents and the pairs of every split."""
    number = {identifier: place for place, identifier in enumerate(documents)}
    with Writer(folder, name, {path.name: checksum(path) for path in files}, options) as writer:
        writer.sequences("documents", "text", *byte_text.encode(list(documents.values())))
        for split, pairs in splits.items():
            writer.numbers(split, "first", np.array([number[pair.first] for pair in pairs], dtype=np.int64))
            writer.numbers(split, "second", np.array([number[pair.second] for pair in pairs], dtype=np.int64))
            writer.numbers(split, "labels", np.array([pair.label for pair in pairs], dtype=np.int64))


def parse_label(text: str, where: str) -> int:
    """``0``, ``1``, or the same as a float."""
    if text not in ("0", "1", "0.0", "1.0"):
        raise DataError(f"{where} must have label 0 or 1, got {text!r}")
    return int(float(text))


def check_text(text: str, where: str) -> str:
    if not text.strip():
        raise DataError(f"{where} must hold text, got an empty document")
    return text
