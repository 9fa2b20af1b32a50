"""Checks that a tokenizer is the one that a model was trained with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mgk.models.configuration import MGKConfig


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary with its ids, to be stored in ``config.tokenizer_sha256``."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def check_tokenizer(config: MGKConfig, tokenizer: Any, *, is_source: bool = False) -> None:
    """Raise an error for a tokenizer with tokens that the model lacks, or other than the one it was trained with.

    ``is_source`` means that it is the tokenizer of a source with its own vocabulary.
    """
    name = "source_vocab_size" if is_source else "vocab_size"
    size, expected = getattr(config, name), config.source_tokenizer_sha256 if is_source else config.tokenizer_sha256
    if len(tokenizer) > size:
        raise ValueError(f"the tokenizer must have at most {name}={size} tokens, got {len(tokenizer)}")
    if expected is not None and fingerprint(tokenizer) != expected:
        raise ValueError(
            f"the tokenizer must be the one that the model was trained with, whose fingerprint is {expected[:12]}..., "
            f"got {fingerprint(tokenizer)[:12]}..."
        )
