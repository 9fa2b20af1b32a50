"""Perplexity: every token once, from the context that the definition gives it."""

import math

import numpy as np
import pytest
import torch
from cases import DEVICE
from model_cases import make_model

from mgk.data import Sequences, Translations, Windows
from mgk.data.kind import no_progress
from mgk.evaluation import Perplexity
from mgk.evaluation.perplexity import _sums, _Windows, disjoint, of_batches, sliding
from mgk.models.loss import IGNORED

HEADS = ["wikitext", "modern"]
"""An adaptive and a plain softmax."""


def stream(count, seed=0):
    return np.random.default_rng(seed).integers(0, 61, count).astype(np.uint16)


def naive(model, tokens, length, stride):
    """One window at a time, and of each the log-probabilities of all words."""
    tokens = torch.tensor(tokens.astype(np.int64), device=DEVICE)
    nats, start, done = [], 0, 0
    while done < len(tokens) - 1:
        window = tokens[start : start + length + 1]
        with torch.no_grad():
            log_probabilities = model(window[None, :-1]).logits[0].log_softmax(-1)
        for place in range(done - start, len(window) - 1):
            nats.append(-float(log_probabilities[place, window[place + 1]]))
        done = start + len(window) - 1
        start += stride
    assert len(nats) == len(tokens) - 1
    return math.fsum(nats) / len(nats)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("count", "length", "stride", "batch_size"),
    [(2, 8, 1, 4), (6, 8, 3, 4), (9, 8, 1, 4), (10, 8, 8, 4), (31, 8, 1, 5), (31, 8, 3, 4), (31, 8, 5, 1),
     (40, 7, 6, 3), (30, 1, 1, 4), (34, 8, 7, 100)],
)  # fmt: skip
def test_sliding_equals_one_window_at_a_time(kind, count, length, stride, batch_size):
    model, tokens = make_model(kind), stream(count)
    found = sliding(model, tokens, length=length, stride=stride, batch_size=batch_size, device=DEVICE)
    assert found.tokens == count - 1
    assert found.nats_per_token == pytest.approx(naive(model, tokens, length, stride), rel=1e-11)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("count", [2, 5, 8, 9, 10, 17, 18, 41])
def test_disjoint_equals_one_window_at_a_time(kind, count):
    model, tokens = make_model(kind), stream(count)
    found = disjoint(model, tokens, length=8, batch_size=2, device=DEVICE)
    assert found.tokens == count - 1
    assert found.nats_per_token == pytest.approx(naive(model, tokens, 8, 8), rel=1e-11)


@pytest.mark.parametrize("batch_size", [1, 2, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 39, 45])
def test_every_token_is_predicted_once_from_its_own_context(length, batch_size):
    for stride in {1, 2, length // 2, length - 1, length} & set(range(1, length + 1)):
        for count in range(2, 41):
            check_windows(count, length, stride, batch_size)


def check_windows(count, length, stride, batch_size):
    """On tokens that are their own place in the stream."""
    windows = _Windows(tokens=np.arange(count), length=length, stride=stride, batch_size=batch_size)
    predicted = {}
    for step in range(len(windows)):
        batch, kept = windows.batch(0, step), windows.kept(step)
        inputs, targets = batch["input_ids"].numpy(), batch["shift_labels"].numpy()
        assert inputs.shape == targets.shape == (len(windows.windows(step)), windows.width(step))
        assert 1 <= inputs.shape[0] <= batch_size
        assert 1 <= kept <= inputs.shape[1] <= length
        for row in range(len(inputs)):
            for place in range(inputs.shape[1] - kept, inputs.shape[1]):
                if (target := targets[row, place]) == IGNORED:
                    continue
                assert target not in predicted
                # What it sees is what stands before it.
                assert (inputs[row, : place + 1] == np.arange(target - place - 1, target)).all()
                predicted[target] = place + 1
    assert sorted(predicted) == list(range(1, count))
    for target, context in predicted.items():
        assert context == target if target <= length else length - stride < context <= length
    if stride == 1:
        assert all(context == min(target, length) for target, context in predicted.items())


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_ranks_share_the_windows(ranks, stride):
    model = make_model("modern")
    windows = _Windows(tokens=stream(33), length=8, stride=stride, batch_size=3)
    shares = [_sums(model, windows, DEVICE, None, rank, ranks, no_progress) for rank in range(ranks)]
    whole = _sums(model, windows, DEVICE, None, 0, 1, no_progress)
    torch.testing.assert_close(sum(shares), whole, rtol=1e-12, atol=0)
    assert int(whole[1]) == 32


@pytest.mark.parametrize("kind", HEADS)
def test_only_what_counts_gets_logits(kind):
    """One position of each window after the first, and no word outside the clusters of the targets."""
    model, rows = make_model(kind), []
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].flatten(0, -2)))
    sliding(model, stream(20), length=8, stride=1, batch_size=4, device=DEVICE)
    handle.remove()
    assert [len(row) for row in rows] == [8, 4, 4, 3]
    if kind == "wikitext":
        model.lm_head.forward = model.lm_head.loss
        sliding(model, stream(20), length=8, stride=1, batch_size=4, device=DEVICE)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_any_integers(tmp_path, dtype):
    """Mapped from disk too."""
    model, tokens = make_model("modern"), stream(20)
    np.save(tmp_path / "tokens.npy", tokens.astype(dtype))
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    options = {"length": 8, "batch_size": 2, "device": DEVICE}
    assert disjoint(model, mapped, **options) == disjoint(model, tokens, **options)


def test_the_model_comes_back_as_it_was():
    model = make_model("modern", dropout=0.5).train()
    found = [sliding(model, stream(20), length=8, batch_size=4, device=str(DEVICE)) for _ in range(2)]
    assert found[0] == found[1]
    assert model.training
    assert torch.is_grad_enabled()


def test_precision():
    model = make_model("wikitext", dtype=torch.float32)
    options = {"length": 8, "batch_size": 4, "device": DEVICE}
    full = sliding(model, stream(40), **options)
    low = sliding(model, stream(40), precision=torch.bfloat16, **options)
    assert full.nats_per_token != low.nats_per_token == pytest.approx(full.nats_per_token, rel=0.05)


def sentences(seed, count=11):
    lengths = np.random.default_rng(seed).integers(1, 9, count)
    return Sequences(stream(lengths.sum(), seed) % 50 + 3, np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize("max_tokens", [9, 24, 500])
def test_of_translations(max_tokens):
    """Every token of every target counts for the same, unlike in a mean of the batches' means."""
    model, source, target = make_model("translation", vocab_size=53), sentences(1), sentences(2)
    nats = []
    for index in range(len(source)):
        words, labels = (torch.tensor(side[index].astype(np.int64), device=DEVICE)[None] for side in (source, target))
        with torch.no_grad():
            log_probabilities = model(words, labels=labels).logits[0].log_softmax(-1)
        nats += (-log_probabilities.gather(1, labels.T)[:, 0]).tolist()
    batches = Translations(source=source, target=target, max_tokens=max_tokens, shuffle=False)
    found = of_batches(model, batches, device=DEVICE)
    assert found.tokens == len(target.tokens) == len(nats)
    assert found.nats_per_token == pytest.approx(math.fsum(nats) / len(nats), rel=1e-11)
    shares = [_sums(model, batches, DEVICE, None, rank, 3, no_progress) for rank in range(3)]
    whole = _sums(model, batches, DEVICE, None, 0, 1, no_progress)
    torch.testing.assert_close(sum(shares), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_of_windows(kind):
    """A stream that fills its windows, and one row: what the windows of training hold is all there is."""
    model, tokens = make_model(kind), stream(41)
    options = {"device": DEVICE}
    found = of_batches(model, Windows(tokens=tokens, batch_size=1, length=8), **options)
    expected = disjoint(model, tokens, length=8, batch_size=3, **options)
    assert found.tokens == expected.tokens == 40
    assert found.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-12)


class Ignored:
    """Batches without a label that counts, or without a batch."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def batch(self, epoch, step):
        return {"input_ids": torch.ones(1, 4, dtype=torch.long), "shift_labels": torch.full((1, 4), IGNORED)}

    def rows(self, epoch, step):
        return np.zeros(1, dtype=np.int64)


@pytest.mark.filterwarnings("ignore:all labels are ignored")
def test_batches_without_labels():
    model = make_model("modern")
    with pytest.raises(ValueError, match="at least one label that counts, got none"):
        of_batches(model, Ignored(2), device=DEVICE)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        of_batches(model, Ignored(0), device=DEVICE)


def test_units():
    found = Perplexity(nats_per_token=math.log(8), tokens=3)
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_token == pytest.approx(3)
    assert Perplexity(nats_per_token=1e4, tokens=3).perplexity == math.inf
    assert math.isnan(Perplexity(nats_per_token=math.nan, tokens=3).perplexity)


@pytest.mark.parametrize(
    ("tokens", "changes", "match"),
    [
        (stream(1), {}, r"tokens must be integers of shape \[T\] with at least 2 of them, got uint16 of shape \[1\]"),
        (stream(0), {}, r"with at least 2 of them, got uint16 of shape \[0\]"),
        (np.ones(9), {}, r"tokens must be integers .* got float64 of shape \[9\]"),
        (stream(9)[None], {}, r"tokens must be integers of shape \[T\] .* got uint16 of shape \[1, 9\]"),
        (stream(9), {"length": 0}, "length must be at least 1, got 0"),
        (stream(9), {"stride": 9}, r"stride must lie in \[1, 8\], the length of a window, got 9"),
        (stream(9), {"stride": 0}, r"stride must lie in \[1, 8\], the length of a window, got 0"),
        (stream(9), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (stream(9), {"rank": 1}, r"rank must lie in \[0, 1\), got 1"),
        (stream(9), {"ranks": 2}, r"ranks must be the 1 of torch\.distributed, or 1, got 2"),
    ],
)
def test_bad_inputs(tokens, changes, match):
    model = make_model("modern")
    options = {"length": 8, "batch_size": 2, "device": DEVICE}
    with pytest.raises(ValueError, match=match):
        sliding(model, tokens, **{**options, **changes})


def test_windows_longer_than_the_table_of_positions():
    model = make_model("modern", positions="learned", max_position_embeddings=8)
    with pytest.raises(ValueError, match="length must be at most max_position_embeddings=8, got 9"):
        disjoint(model, stream(20), length=9, batch_size=2, device=DEVICE)
    # A stream that is short enough has no such window.
    assert disjoint(model, stream(9), length=9, batch_size=2, device=DEVICE).tokens == 8
