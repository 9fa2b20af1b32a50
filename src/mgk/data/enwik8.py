"""enwik8: the first 100 million bytes of Wikipedia, 90M / 5M / 5M."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import find, read_bytes
from mgk.data.store import Corpus, Writer, checksum

SIZE = 100_000_000
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"
OPTIONS = {"size": SIZE}


def prepare(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Write the bytes as they are: id = byte. ``size`` takes a piece from the front, for quick runs and tests."""
    chosen = check_options("enwik8", options, OPTIONS)
    size = chosen["size"]
    path, raw = read(source, size)
    content = np.frombuffer(raw, dtype=np.uint8)
    ends = {"train": size * 90 // 100, "valid": size * 95 // 100, "test": size}
    with Writer(folder, "enwik8", {path.name: checksum(path)}, chosen) as writer:
        start = 0
        for split, end in progress(list(ends.items()), "bytes"):
            writer.sequences(split, "text", content[start:end], [end - start])
            start = end


def read(source: Path, size: int) -> tuple[Path, bytes]:
    """The file, and so many of its bytes from the front; all of them must be those of enwik8."""
    if not isinstance(size, int) or not 100 <= size <= SIZE:
        raise ValueError(f"size must be an integer in [100, {SIZE:,}], got {size!r}")
    path = find(source, "enwik8.xz", "enwik8", "enwik8.gz")
    content = read_bytes(path)
    if size == SIZE and hashlib.md5(content).hexdigest() != MD5:
        raise DataError(f"{path} must be enwik8, {SIZE:,} bytes with md5 {MD5}, got {len(content):,} other bytes")
    if len(content) < size:
        raise DataError(f"{path} must hold {size:,} bytes, got {len(content):,}")
    return path, content if len(content) == size else content[:size]


def decode(corpus: Corpus, field: str, tokens: NDArray[Any]) -> str:
    """Back to text; a cut inside a character shows as a replacement character."""
    return tokens.astype(np.uint8).tobytes().decode(errors="replace")


CORPUS = CorpusKind(
    name="enwik8",
    title="The first 100 million bytes of Wikipedia",
    task="language",
    prepare=prepare,
    decode=decode,
    options=OPTIONS,
    origin="enwik8 (plain, .xz or .gz), Matt Mahoney's large text compression benchmark",
)
