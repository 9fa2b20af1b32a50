"""Whether a tokenizer is the one that a model was trained with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mgk.models.configuration import MGKConfig


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary with its ids. ``config.tokenizer_sha256`` is the place to keep it."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def check_tokenizer(config: MGKConfig, tokenizer: Any) -> None:
    """Refuse a tokenizer whose tokens the model does not have, or that is another one than it was trained with."""
    largest = max(config.vocab_size, config.source_vocab_size or 0)
    if len(tokenizer) > largest:
        raise ValueError(f"the tokenizer must have at most vocab_size={largest} tokens, got {len(tokenizer)}")
    if config.tokenizer_sha256 is not None and fingerprint(tokenizer) != config.tokenizer_sha256:
        raise ValueError(
            f"the tokenizer must be the one that the model was trained with, whose fingerprint is "
            f"{config.tokenizer_sha256[:12]}..., got {fingerprint(tokenizer)[:12]}..."
        )
