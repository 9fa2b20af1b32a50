"""Text as bytes: id = byte + 1, so that 0 is left for padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.store import Corpus, flatten

PADDING = 0
VOCABULARY = 257


def encode(texts: list[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Texts as one flat array of ids and the length of each."""
    content, lengths = flatten([text.encode() for text in texts])
    return content.astype(np.uint16) + 1, lengths


def decode(corpus: Corpus, field: str, tokens: NDArray[Any]) -> str:
    """Back to text; padding is left out, and half a character at a cut shows as a replacement character."""
    kept = tokens[tokens != PADDING]
    return (kept - 1).astype(np.uint8).tobytes().decode(errors="replace")
