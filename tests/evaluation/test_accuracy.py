"""Accuracy: every sample once, whatever the batches, and for the same."""

import numpy as np
import pytest
import torch
from cases import DEVICE
from model_cases import make_model

from mgk.data import Samples, Sequences
from mgk.data.kind import no_progress
from mgk.evaluation import accuracy, in_order_of_length
from mgk.evaluation.accuracy import _tally

COUNT = 23


def make_data(count=COUNT, seed=0):
    """Sequences of 1 to 12 tokens, labels, and for each sample a first and a second sequence."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 13, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(1, 60, offsets[-1]).astype(np.uint16)
    pairs = random.integers(0, count, (2, count))
    return Sequences(tokens, offsets), random.integers(0, 2, count).astype(np.uint8), pairs[0], pairs[1]


def naive(model, sequences, labels, first, second=None):
    """One sample at a time, without padding."""
    losses, right = [], []
    for place, label in enumerate(labels):
        inputs = {"input_ids": torch.tensor(sequences[first[place]].astype(np.int64), device=DEVICE)[None]}
        if second is not None:
            tokens = sequences[second[place]].astype(np.int64)
            inputs["pair_input_ids"] = torch.tensor(tokens, device=DEVICE)[None]
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        losses.append(-float(logits.log_softmax(-1)[int(label)]))
        right.append(int(logits.argmax()) == int(label))
    return right, float(np.mean(losses))


@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
@pytest.mark.parametrize("kind", ["classifier", "matcher"])
def test_every_sample_counts_once_and_for_the_same(kind, batch_size):
    model = make_model(kind)
    sequences, labels, first, second = make_data()
    second = second if kind == "matcher" else None
    right, loss = naive(model, sequences, labels, first, second)
    # Else an order that is wrong could look right.
    assert 0 < sum(right) < COUNT
    sorted_batches = in_order_of_length(sequences, labels, batch_size, first, second)
    plain = Samples(
        sequences=sequences, labels=labels, batch_size=batch_size, first=first, second=second, shuffle=False,
        drop_last=False,
    )  # fmt: skip
    packed = in_order_of_length(sequences, labels, batch_size, first, second, multiple_of=8, longest=16, pack=True)
    assert any(len(packed.batch(0, step)["labels"]) > len(packed.rows(0, step)) for step in range(len(packed)))
    for batches in (sorted_batches, plain, packed):
        score = accuracy(model, batches, device=DEVICE)
        assert (score.correct, score.count) == (sum(right), COUNT)
        assert score.accuracy == sum(right) / COUNT
        assert score.right.tolist() == right, "in the order of the corpus, whatever the batches"
        assert score.loss == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_the_samples(ranks):
    """Eight ranks are more than there are batches."""
    model = make_model("classifier")
    sequences, labels, *_ = make_data()
    batches = in_order_of_length(sequences, labels, 5)
    arguments = (model, batches, DEVICE, None)
    shares = [_tally(*arguments, rank, ranks, no_progress) for rank in range(ranks)]
    sums, whole = sum(own for own, _ in shares), _tally(*arguments, 0, 1, no_progress)
    torch.testing.assert_close(sums, whole[0], rtol=1e-12, atol=0)
    assert int(sums[2]) == COUNT
    right, _ = naive(model, sequences, labels, np.arange(COUNT))
    assert sum(own for _, own in shares).tolist() == whole[1].tolist() == right


def test_some_batches_have_no_items():
    """Validation may read only a few batches: which items those are is not worth keeping."""
    sequences, labels, *_ = make_data()
    batches = in_order_of_length(sequences, labels, 5)

    class Few:
        def __len__(self):
            return 2

        def batch(self, epoch, step):
            return batches.batch(epoch, step)

        def rows(self, epoch, step):
            return batches.rows(epoch, step)

    score = accuracy(make_model("classifier"), Few(), device=DEVICE)
    assert (score.count, score.right) == (10, None)


def test_batches_in_order_of_length():
    sequences, _, first, second = make_data(200)
    batches = in_order_of_length(sequences, np.arange(200), 7, longest=9)
    found = [batches.batch(0, step) for step in range(len(batches))]
    assert sorted(torch.cat([batch["labels"] for batch in found]).tolist()) == list(range(200))
    widths = [batch["input_ids"].shape[1] for batch in found]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 9
    for batch in found:
        lengths = batch["attention_mask"].sum(1).tolist()
        assert lengths == [min(9, len(sequences[label])) for label in batch["labels"].tolist()]
    pairs = in_order_of_length(sequences, np.arange(200), 7, first, second)
    for step in range(len(pairs)):
        batch = pairs.batch(0, step)
        for row, label in enumerate(batch["labels"].tolist()):
            length = int(batch["pair_attention_mask"][row].sum())
            assert batch["pair_input_ids"][row, :length].tolist() == sequences[second[label]].tolist()


def test_the_model_comes_back_as_it_was():
    """Dropout is off during evaluation, and modules go back to the mode that each had."""
    model = make_model("classifier", dropout=0.5).train()
    model.classifier.eval()
    sequences, labels, *_ = make_data()
    batches = in_order_of_length(sequences, labels, 5)
    first = accuracy(model, batches, device=DEVICE)
    assert model.training
    assert model.model.training
    assert not model.classifier.training
    assert first == accuracy(model, batches, device=str(DEVICE))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there a wrong label is a device assertion, which ends the process")
def test_the_mode_comes_back_after_an_error():
    model = make_model("classifier").train()
    sequences, labels, *_ = make_data()
    with pytest.raises(ValueError, match="labels must lie in"):
        accuracy(model, in_order_of_length(sequences, labels + 100, 5), device=DEVICE)
    assert model.training
    assert torch.is_grad_enabled()


def test_precision():
    model = make_model("classifier", dtype=torch.float32)
    sequences, labels, *_ = make_data()
    batches = in_order_of_length(sequences, labels, 5)
    seen = []
    handle = model.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    full = accuracy(model, batches, device=DEVICE)
    low = accuracy(model, batches, device=DEVICE, precision=torch.bfloat16)
    handle.remove()
    assert seen == [torch.float32] * len(batches) + [torch.bfloat16] * len(batches)
    assert low.loss == pytest.approx(full.loss, rel=0.05)


def test_progress_is_shown():
    model = make_model("classifier")
    sequences, labels, *_ = make_data()
    calls = []

    def progress(steps, description, total=None):
        calls.append((description, total))
        return steps

    accuracy(model, in_order_of_length(sequences, labels, 5), device=DEVICE, progress=progress)
    assert calls == [("accuracy", 5)]


class Nothing:
    def __len__(self):
        return 0

    def batch(self, epoch, step):
        raise AssertionError

    def rows(self, epoch, step):
        raise AssertionError


def test_bad_inputs():
    model = make_model("classifier")
    sequences, labels, first, _ = make_data()
    batches = in_order_of_length(sequences, labels, 5)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        accuracy(model, batches, device=DEVICE, rank=2, ranks=2)
    with pytest.raises(ValueError, match=r"ranks must be the 1 of torch\.distributed, or 1, got 2"):
        accuracy(model, batches, device=DEVICE, rank=0, ranks=2)
    with pytest.raises(ValueError, match=r"every sample once, .* got drop_last=True and ranks=1"):
        accuracy(model, Samples(sequences=sequences, labels=labels, batch_size=5), device=DEVICE)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        accuracy(model, Nothing(), device=DEVICE)
    with pytest.raises(ValueError, match="must be as many, got 23 labels, 22 first and no second"):
        in_order_of_length(sequences, labels, 5, first[:-1])
    with pytest.raises(ValueError, match="labels must hold at least one sample, got none"):
        in_order_of_length(sequences, labels[:0], 5)
