"""Sequences of a corpus to look at, and how a model attends to them."""

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
# Below this there is little to look at.
SHORTEST = 16


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sequence, as a model reads it and as people do."""

    ids: Sequence[int]
    words: Sequence[str]
    title: str


def find_examples(corpus: Corpus, *, count: int, longest: int) -> list[Example]:
    """The first sequences of the test part that fit, else the first ones, cut.

    Of a pair this is the first sequence, of a translation the source, of a language model's stream windows that follow
    one another.

    Args:
        corpus: prepared.
        count: how many, at most.
        longest: tokens that a sequence may have.
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
    """Weights, and what part of them each component gives.

    Of a translation model this is the self-attention of the encoder.
    """
    ids = torch.tensor([list(example.ids)])
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    elif model.config.is_decoder:
        # With a cache linear attention would go on from a state, and form no weights.
        inputs["use_cache"] = False
    elif "Pair" in type(model).__name__:
        inputs["pair_input_ids"] = ids
    weights = torch.stack([layer[0] for layer in attention_maps(model, **inputs)])
    shares = torch.stack([layer[0] for layer in component_shares(model, **inputs)])
    return AttentionMaps(
        tokens=example.words, weights=weights, shares=shares if shares.shape[2] > 1 else None, title=example.title
    )


def _chosen(corpus: Corpus, task: str, field: str, count: int, longest: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Number and tokens of each."""
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
        # Many pairs share a document.
        if int(places[number]) in seen:
            continue
        if len(seen) == count:
            return
        seen.add(int(places[number]))
        yield number, sequences[int(places[number])]


def _word(corpus: Corpus, field: str, token: Any) -> str:
    """One token as text; what is no text by itself, such as a byte of a longer character, by its number."""
    if field == "source" and int(token) < len(translation.SPECIAL_TOKENS):
        return translation.SPECIAL_TOKENS[int(token)]
    word = find_kind(corpus.name).decode(corpus, field, np.asarray([token]))
    return f"#{int(token)}" if "\N{REPLACEMENT CHARACTER}" in word or not word else word
