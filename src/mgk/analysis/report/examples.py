"""Example sequences of a corpus, and the attention of a model to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mgk.analysis.attention_maps import attention_maps
from mgk.analysis.component_shares import component_shares
from mgk.analysis.report.page import AttentionMaps
from mgk.data import translation
from mgk.data.registry import find_kind
from mgk.data.store import Corpus

SPLIT = "test"
# Fewest tokens of an example; shorter sequences show little.
SHORTEST = 16


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sequence as model inputs and as text."""

    ids: Sequence[int]
    words: Sequence[str]
    title: str


def find_examples(corpus: Corpus, *, count: int, longest: int) -> list[Example]:
    """Return the first test sequences that fit, or else the first ones, cut.

    For pairs they are the first sequences, for translation the sources, and for a language model's stream consecutive
    windows.

    Args:
        corpus: prepared corpus.
        count: most sequences.
        longest: most tokens of a sequence.
    """
    kind = find_kind(corpus.name)
    field = "source" if kind.task == "translation" else "text"
    what = {"pairs": "first document of pair", "language": "window", "translation": "source sentence"}.get(
        kind.task, "sequence"
    )
    examples = []
    for number, tokens in _chosen(corpus, kind.task, field, count, longest):
        shown = tokens[:longest]
        title = f"{corpus.name}, {SPLIT}, {what} {number + 1}"
        if len(tokens) > longest:
            title += f": the first {longest:,} of its {len(tokens):,} tokens, which are all that the model reads here"
        words = [_word(corpus, field, token) for token in shown]
        examples.append(Example(ids=[int(token) for token in shown], words=words, title=title))
    return examples


def look(model: PreTrainedModel, example: Example) -> AttentionMaps:
    """Compute the attention weights of a model on an example, and the share of each component.

    For a translation model they are those of the encoder's self-attention.
    """
    ids = torch.tensor([list(example.ids)])
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    elif model.config.is_decoder:
        # With a cache, linear attention would use a state and form no weights.
        inputs["use_cache"] = False
    elif "Pair" in type(model).__name__:
        inputs["pair_input_ids"] = ids
    weights = torch.stack([layer[0] for layer in attention_maps(model, **inputs)])
    shares = torch.stack([layer[0] for layer in component_shares(model, **inputs)])
    return AttentionMaps(
        tokens=example.words, weights=weights, shares=shares if shares.shape[2] > 1 else None, title=example.title
    )


def _chosen(corpus: Corpus, task: str, field: str, count: int, longest: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the number and the tokens of each chosen sequence."""
    split = corpus.splits[SPLIT]
    if task == "language":
        stream = split.sequences[field].tokens
        windows = max(1, min(count, len(stream) // longest))
        for number in range(windows):
            yield number, stream[number * longest : (number + 1) * longest]
        return
    if task == "pairs":
        sequences, places = corpus.splits["documents"].sequences[field], split.numbers["first"]
    else:
        sequences, places = split.sequences[field], np.arange(len(split.sequences[field]))
    lengths = sequences.lengths[places]
    fitting = np.flatnonzero((lengths >= min(SHORTEST, longest)) & (lengths <= longest))
    others = np.flatnonzero(lengths > longest)
    short = np.flatnonzero((lengths > 0) & (lengths < min(SHORTEST, longest)))
    seen: set[int] = set()
    for number in np.concatenate([fitting, others, short]).tolist():
        # Skip documents that an earlier pair has shown, because many pairs share a document.
        if int(places[number]) in seen:
            continue
        if len(seen) == count:
            return
        seen.add(int(places[number]))
        yield number, sequences[int(places[number])]


def _word(corpus: Corpus, field: str, token: Any) -> str:
    """Return a token as text, or its number if it is no text by itself, such as a byte of a longer character."""
    if field == "source" and int(token) < len(translation.SPECIAL_TOKENS):
        return translation.SPECIAL_TOKENS[int(token)]
    word = find_kind(corpus.name).decode(corpus, field, np.asarray([token]))
    return f"#{int(token)}" if "\N{REPLACEMENT CHARACTER}" in word or not word else word
