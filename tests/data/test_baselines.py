"""Baselines against what can be counted by hand."""

import math

import numpy as np
import pytest

from mgk.data import Sequences, prepare
from mgk.data.baselines import TfIdf, best_threshold, compute, majority, ngram_cross_entropy


def stream(tokens):
    return Sequences(np.array(tokens), np.array([0, len(tokens)]))


def test_majority():
    assert majority(np.array([0, 1, 1, 2]), np.array([1, 1, 0, 2])) == 0.5


def test_tf_idf_knows_what_belongs_together():
    model = TfIdf(["beans grow in soil", "soil feeds the beans", "queries meet keys", "keys answer queries"])
    near, far = model.similarity(np.array([0, 0]), np.array([1, 2]))
    assert near > far == 0
    assert model.similarity(np.array([2]), np.array([2])) == pytest.approx(1)


@pytest.mark.parametrize(("scores", "labels", "right"), [
    ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], 4),
    ([0.1, 0.2, 0.3], [1, 1, 1], 3),
    ([0.1, 0.2, 0.3], [0, 0, 0], 3),
    ([0.5, 0.5, 0.5], [0, 0, 1], 2),
    ([0, 0, 0, 0, 1], [0, 0, 0, 1, 1], 4),
    ([0.5, 0.1, 0.9, 0.4], [1, 0, 0, 1], 3),
])  # fmt: skip
def test_best_threshold(scores, labels, right):
    scores, labels = np.array(scores), np.array(labels)
    assert ((scores >= best_threshold(scores, labels)) == labels).sum() == right


def test_ngrams_by_hand():
    """Witten-Bell: unigram of `a a b` over 3 words: a has (2 + 2/3) / 5, b (1 + 2/3) / 5, c (0 + 2/3) / 5."""
    train = stream([0, 0, 1])
    one = [(2 + 2 / 3) / 5, (1 + 2 / 3) / 5, (2 / 3) / 5]
    assert sum(one) == pytest.approx(1)
    got = ngram_cross_entropy(train, stream([0, 1, 2]), 3, order=1)
    assert got == pytest.approx(-np.mean(np.log(one)))
    # After a: twice seen, once followed by each of a and b. b c: b was never followed by anything.
    bigram = [one[0], (1 + 2 * one[1]) / 4, one[2]]
    got = ngram_cross_entropy(train, stream([0, 1, 2]), 3, order=2)
    assert got == pytest.approx(-np.mean(np.log(bigram)))


def test_a_table_counts_like_a_sort(monkeypatch):
    random = np.random.default_rng(0)
    train, test = stream(random.integers(0, 5, 3000)), stream(random.integers(0, 5, 500))
    by_table = ngram_cross_entropy(train, test, 5, 3)
    monkeypatch.setattr("mgk.data.baselines.LARGEST_TABLE", 10)
    assert ngram_cross_entropy(train, test, 5, 3) == pytest.approx(by_table, abs=1e-12)
    monkeypatch.setattr("mgk.data.baselines.LARGEST_TABLE", 130)
    assert ngram_cross_entropy(train, test, 5, 3) == pytest.approx(by_table, abs=1e-12)


def test_longer_ngrams_know_a_periodic_text():
    text = stream([0, 1, 2, 3] * 200)
    nats = [ngram_cross_entropy(text, text, 4, order) for order in (1, 2, 3)]
    assert nats[0] == pytest.approx(math.log(4), abs=0.01)
    assert nats[1] < 0.02
    with pytest.raises(ValueError, match="fits 64 bits, got 9"):
        ngram_cross_entropy(text, text, 300, 9)


def test_every_kind_of_corpus(fixtures, peerread_source, tmp_path):
    assert compute(prepare("imdb", fixtures / "imdb", tmp_path / "imdb")) == {"majority class, accuracy": 0.5}
    assert set(compute(prepare("peerread", peerread_source, tmp_path / "p"))) == {
        "majority class, accuracy", "TF-IDF cosine, accuracy",
    }  # fmt: skip
    words = compute(prepare("wikitext2", fixtures, tmp_path / "w"))
    assert set(words) == {f"{n}-gram, nats per token" for n in (1, 2, 3)}
    trees = prepare("listops", None, tmp_path / "l", train=300, valid=20, test=50, minimum=5, maximum=60, processes=1)
    rules = compute(trees)
    assert rules["root operator, accuracy"] >= rules["majority class, accuracy"]


@pytest.mark.slow
def test_real_baselines(real, tmp_path):
    peerread = compute(prepare("peerread", real, tmp_path / "p"))
    assert 0.80 < peerread["TF-IDF cosine, accuracy"] < 0.83
