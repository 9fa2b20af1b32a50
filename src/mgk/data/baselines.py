"""What can be had without a transformer, to print beside every result."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data import byte_text, listops
from mgk.data.store import Corpus, Sequences

# Entries of a table of counts, and tokens that are counted at once.
LARGEST_TABLE = 2**24


def majority(train: NDArray[Any], test: NDArray[Any]) -> float:
    """Accuracy on ``test`` of always saying the most frequent label of ``train``."""
    values, counts = np.unique(train, return_counts=True)
    return float((test == values[counts.argmax()]).mean())


class TfIdf:
    """Documents as vectors of word weights, tf * log(N / df), of length one."""

    def __init__(self, texts: list[str]) -> None:
        counts = [Counter(re.findall(r"[a-z]{2,}", text.lower())) for text in texts]
        frequency = Counter(word for count in counts for word in count)
        self.vectors = []
        for count in counts:
            weights = {word: (1 + np.log(n)) * np.log(len(texts) / frequency[word]) for word, n in count.items()}
            length = np.sqrt(sum(weight**2 for weight in weights.values())) or 1.0
            self.vectors.append({word: weight / length for word, weight in weights.items()})

    def similarity(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cosine of each pair."""
        return np.array([self._cosine(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)])

    def _cosine(self, first: int, second: int) -> float:
        a, b = self.vectors[first], self.vectors[second]
        a, b = (a, b) if len(a) < len(b) else (b, a)
        return float(sum(weight * b[word] for word, weight in a.items() if word in b))


def best_threshold(scores: NDArray[np.float64], labels: NDArray[Any]) -> float:
    """The score from which on saying 1 is right most often; infinity where it never is."""
    order = np.argsort(scores)
    ordered, ones = scores[order], labels[order] == 1
    # Right, if everything before place i is called 0 and the rest 1.
    right = np.concatenate([[0], np.cumsum(~ones)]) + ones.sum() - np.concatenate([[0], np.cumsum(ones)])
    # Equal scores cannot be told apart.
    right[1:-1][ordered[1:] == ordered[:-1]] = -1
    place = int(right.argmax())
    return float(ordered[place]) if place < len(ordered) else float("inf")


def ngram_cross_entropy(train: Sequences, test: Sequences, vocabulary: int, order: int = 3) -> float:
    """Nats per token of an interpolated n-gram model (Witten-Bell), trained on ``train``.

    ``p_n(w | h) = (count(h w) + types(h) p_{n-1}(w | h')) / (count(h) + types(h))``, down to the uniform distribution.
    """
    if float(vocabulary) ** order >= 2.0**63:
        raise ValueError(f"order must be small enough that {vocabulary} ** order fits 64 bits, got {order}")
    probability = np.full(len(test.tokens), 1.0 / vocabulary)
    for n in range(1, order + 1):
        grams, seen = _count(train.tokens, n, vocabulary)
        if len(grams) == 0:
            break
        histories, first, types = np.unique(grams // vocabulary, return_index=True, return_counts=True)
        totals = np.add.reduceat(seen, first)
        keys = _keys(test.tokens, n, vocabulary)
        lower = probability[n - 1 :]
        count = _lookup(grams, seen, keys)
        total, kinds = (_lookup(histories, values, keys // vocabulary) for values in (totals, types))
        known = total > 0
        probability[n - 1 :][known] = ((count + kinds * lower) / np.maximum(total + kinds, 1))[known]
    return float(-np.log(probability).mean())


def _count(tokens: NDArray[Any], n: int, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All n-grams of a text in ascending order, and how often each occurs."""
    possible = vocabulary**n
    if possible > LARGEST_TABLE:
        return np.unique(_keys(tokens, n, vocabulary), return_counts=True)
    # One table of counts, filled piece by piece: sorting 90 million numbers would take gigabytes.
    table = np.zeros(possible, dtype=np.int64)
    for start in range(0, max(len(tokens) - n + 1, 0), LARGEST_TABLE):
        table += np.bincount(_keys(tokens[start : start + LARGEST_TABLE + n - 1], n, vocabulary), minlength=possible)
    grams = np.flatnonzero(table)
    return grams, table[grams]


def _keys(tokens: NDArray[Any], n: int, vocabulary: int) -> NDArray[np.int64]:
    """Every n-gram as one number, the last token in its lowest digit."""
    keys = np.zeros(max(len(tokens) - n + 1, 0), dtype=np.int64)
    for place in range(n):
        keys = keys * vocabulary + tokens[place : len(tokens) - n + 1 + place]
    return keys


def _lookup(keys: NDArray[np.int64], values: NDArray[Any], wanted: NDArray[np.int64]) -> NDArray[np.float64]:
    """The value of each wanted key, 0 where there is none."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0).astype(np.float64)


def compute(corpus: Corpus, test: str = "test") -> dict[str, float]:
    """Every baseline that fits this corpus, by name: accuracies, or nats per token and perplexities."""
    train, held_out = corpus.splits["train"], corpus.splits[test]
    results: dict[str, float] = {}
    if "labels" in train.numbers:
        labels, expected = (np.asarray(split.numbers["labels"]) for split in (train, held_out))
        results["majority class, accuracy"] = majority(labels, expected)
        if corpus.name == "listops":
            results["root operator, accuracy"] = listops.root_operator_rule(
                train.sequences["text"], labels, held_out.sequences["text"], expected
            )
        if "first" in train.numbers:
            documents = corpus.splits["documents"].sequences["text"]
            texts = [byte_text.decode(corpus, "text", np.asarray(documents[i])) for i in range(len(documents))]
            model = TfIdf(texts)
            score, other = (model.similarity(s.numbers["first"], s.numbers["second"]) for s in (train, held_out))
            results["TF-IDF cosine, accuracy"] = float(((other >= best_threshold(score, labels)) == expected).mean())
    elif "text" in train.sequences:
        vocabulary = corpus.manifest["facts"].get("vocabulary", 256)
        for order in (1, 2, 3):
            nats = ngram_cross_entropy(train.sequences["text"], held_out.sequences["text"], vocabulary, order)
            results[f"{order}-gram, nats per token"] = nats
    return results
