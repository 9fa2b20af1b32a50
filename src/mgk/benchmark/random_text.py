"""A corpus of drawn tokens, for measurements that need no text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mgk.data.store import FORMAT, Corpus, Sequences, Split
from mgk.training.configuration import RunConfig

UPDATES = 32
"""So many batches are drawn; then they come again."""
BYTES = 256


def random_text(run: RunConfig, vocabulary: int = BYTES) -> Corpus:
    """The corpus of a language model's run, with tokens from a seed; nothing is written.

    Tokens are drawn as words occur (Zipf): token ``r`` about as often as ``1 / (r + 1)`` says. What an adaptive softmax
    costs depends on that.

    Args:
        run: what is to be trained; its batch and its window say how many tokens are needed.
        vocabulary: how many tokens there are.
    """
    if run.task != "language":
        raise ValueError(f"tokens can be drawn for a language model only, got {run.task}: give --data")
    if vocabulary < 2:
        raise ValueError(f"--vocabulary must be at least 2, got {vocabulary}")
    assert run.training.batch_size is not None
    count = run.training.batch_size * run.data.longest * UPDATES + 1
    draws = np.random.default_rng(0).random(count)
    tokens = np.minimum(vocabulary**draws - 1, vocabulary - 1).astype(np.int32)
    text = Sequences(tokens, np.array([0, count], dtype=np.int64))
    manifest = {
        "name": run.data.corpus, "format": FORMAT, "options": {"drawn": count},
        "arrays": {"text": hashlib.sha256(tokens.tobytes()).hexdigest()},
        "splits": {}, "facts": {"vocabulary": vocabulary},
    }  # fmt: skip
    split = Split({"text": text}, {})
    return Corpus(Path(), manifest, {"train": split, "valid": split, "test": split})
