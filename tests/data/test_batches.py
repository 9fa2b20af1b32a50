"""Batches: right, in an order that is a pure function, and fast."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from mgk.data import DataError, Samples, Sequences, Translations, Windows, iterate


def make_sequences(count=50, longest=30, seed=0, smallest=1):
    random = np.random.default_rng(seed)
    lengths = random.integers(smallest, longest + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(random.integers(1, 200, offsets[-1]).astype(np.uint16), offsets)


def rows_of(batch, sequences):
    """Which sequences a batch holds."""
    found = []
    for tokens, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        kept = tokens[mask.bool()].numpy()
        found += [i for i in range(len(sequences)) if np.array_equal(sequences[i][: len(kept)], kept)][:1]
    return found


def test_samples_hold_the_sequences():
    sequences = make_sequences()
    samples = Samples(sequences=sequences, labels=np.arange(50), batch_size=8, longest=20, drop_last=False)
    seen = []
    for batch in iterate(samples, epoch=0):
        for tokens, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            expected = sequences[int(label)][:20]
            assert tokens[mask.bool()].tolist() == expected.tolist()
            assert (tokens[~mask.bool()] == 0).all()
            assert (mask.diff() <= 0).all()
        seen += batch["labels"].tolist()
    assert sorted(seen) == list(range(50))


def test_any_step_can_be_asked_for_without_the_ones_before():
    make = lambda: Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=4, seed=3)  # noqa: E731
    whole = [batch["labels"].tolist() for batch in iterate(make(), epoch=2)]
    assert make().batch(2, 7)["labels"].tolist() == whole[7]
    assert [batch["labels"].tolist() for batch in iterate(make(), epoch=2, start=5)] == whole[5:]
    assert whole != [batch["labels"].tolist() for batch in iterate(make(), epoch=3)]
    other = Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=4, seed=4)
    assert whole != [batch["labels"].tolist() for batch in iterate(other, epoch=2)]


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_batches_made_ahead_are_the_same(workers):
    samples = Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=4)
    got = [batch["labels"].tolist() for batch in iterate(samples, 1, start=2, workers=workers)]
    assert got == [samples.batch(1, step)["labels"].tolist() for step in range(2, len(samples))]


class Made:
    """Batches that take their time, each another; ``bad`` is the step that goes wrong, in the way ``fail`` says."""

    def __init__(self, count=8, bad=-1, fail=None):
        self.count, self.bad, self.fail = count, bad, fail
        self.made = []

    def __len__(self):
        return self.count

    def batch(self, epoch, step):
        # The later ones are ready first.
        time.sleep(0.002 * (self.count - step))
        if step == self.bad:
            self.fail()
        self.made.append(step)
        return {"step": torch.tensor(step), "epoch": torch.tensor(epoch)}


def makers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mgk-batches")]


def check_that_none_is_left(seconds=10.0):
    """A thread ends with the batch that it is making."""
    until = time.monotonic() + seconds
    while makers() and time.monotonic() < until:
        time.sleep(0.005)
    assert makers() == []


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_the_order_is_kept_and_no_thread_is_left(workers, count):
    check_that_none_is_left()
    found = list(iterate(Made(count), 3, workers=workers))
    assert [int(batch["step"]) for batch in found] == list(range(count))
    assert all(int(batch["epoch"]) == 3 for batch in found)
    check_that_none_is_left()


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_who_stops_early_leaves_no_thread_and_no_work_behind(workers):
    check_that_none_is_left()
    batches = Made(100)
    some = iterate(batches, 0, workers=workers)
    assert int(next(some)["step"]) == 0
    assert len(makers()) == workers
    some.close()
    made = len(batches.made)
    check_that_none_is_left()
    # What each thread is at, and not what else it was asked for.
    assert len(batches.made) <= made + workers
    # One that was forgotten is closed by itself.
    some = iterate(batches, 0, workers=workers)
    next(some)
    del some
    check_that_none_is_left()


def raise_os_error():
    raise OSError("the disk is gone")


def raise_index_error():
    raise IndexError("7 is out of bounds")


@pytest.mark.parametrize(("workers", "maker"), [(0, "MainThread"), (1, "mgk-batches-0"), (3, r"mgk-batches-[012]")])
@pytest.mark.parametrize(
    ("fail", "said"),
    [(raise_os_error, "OSError in {}: the disk is gone"), (raise_index_error, "IndexError in {}: 7 is out of bounds")],
)
def test_an_error_reaches_the_loop_with_its_place(workers, maker, fail, said):
    """In its turn: the batches before it come first."""
    check_that_none_is_left()
    batches = iterate(Made(8, 3, fail), 5, workers=workers, name="listops, train")
    assert [int(next(batches)["step"]) for _ in range(3)] == [0, 1, 2]
    expected = f"listops, train must give batch 3 of epoch 5, got {said.format(maker)}"
    with pytest.raises(DataError, match=expected) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, (OSError, IndexError))
    check_that_none_is_left()


def test_a_batch_that_never_comes():
    event = threading.Event()
    batches = iterate(Made(8, 2, event.wait), 1, workers=2, timeout=0.3, name="text, train")
    assert [int(next(batches)["step"]) for _ in range(2)] == [0, 1]
    started = time.monotonic()
    with pytest.raises(DataError, match=r"text, train must give batch 2 of epoch 1 within 0\.3 seconds, got none"):
        next(batches)
    assert time.monotonic() - started < 5
    # Here it comes in the end, or its thread would stay.
    event.set()
    check_that_none_is_left()


def test_a_slow_batch_is_no_dead_one():
    found = list(iterate(Made(4, 2, lambda: time.sleep(0.3)), 0, workers=1, timeout=5.0))
    assert len(found) == 4


HANGS = """
import threading
from mgk.data import DataError, iterate

class Hanging:
    def __len__(self):
        return 3
    def batch(self, epoch, step):
        threading.Event().wait()

try:
    next(iterate(Hanging(), 0, workers=2, timeout=0.2))
except DataError as error:
    print(error)
"""


def test_a_process_ends_though_its_batches_hang():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("batches must give batch 0 of epoch 0 within 0.2 seconds, got none")
    assert done.stderr == ""


def test_a_negative_number_of_workers():
    with pytest.raises(ValueError, match="workers must be at least 0, got -1"):
        next(iterate(Made(), 0, workers=-1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_an_epoch(ranks):
    """What the ranks see at a step is what one rank would see in a batch of their size together."""
    common = {"sequences": make_sequences(60), "labels": np.arange(60), "seed": 1}
    alone = Samples(**common, batch_size=4 * ranks)
    shares = [Samples(**common, batch_size=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(alone)}
    for step in range(len(alone)):
        together = torch.cat([share.batch(0, step)["labels"] for share in shares]).tolist()
        assert together == alone.batch(0, step)["labels"].tolist()


def test_no_sample_is_left_out_in_every_epoch():
    """What fills no batch is another part each time, and not the longest."""
    offsets = np.concatenate([[0], np.cumsum(np.arange(1, 101))])
    sequences = Sequences(np.ones(offsets[-1], dtype=np.uint8), offsets)
    samples = Samples(sequences=sequences, labels=np.arange(100), batch_size=32)
    seen = {label for epoch in range(40) for batch in iterate(samples, epoch) for label in batch["labels"].tolist()}
    assert seen == set(range(100))


def test_the_last_samples_are_shared_out():
    common = {"sequences": make_sequences(38), "labels": np.arange(38), "batch_size": 8, "drop_last": False}
    shares = [Samples(**common, rank=rank, ranks=4) for rank in range(4)]
    assert [len(share.batch(0, 1)["labels"]) for share in shares] == [2, 2, 1, 1]
    seen = sorted(n for share in shares for batch in iterate(share, 0) for n in batch["labels"].tolist())
    assert seen == list(range(38))
    with pytest.raises(ValueError, match="every batch must hold a sample for each of 4 ranks, got 33 samples"):
        Samples(**{**common, "labels": np.arange(33)}, ranks=4)
    with pytest.raises(ValueError, match="got 7 samples in batches of 8 with drop_last=True"):
        Samples(**{**common, "labels": np.arange(7), "drop_last": True})


def test_lengths_are_alike_inside_a_batch():
    sequences = make_sequences(4000, 1000)
    padding = {}
    for by_length in (False, True):
        samples = Samples(sequences=sequences, labels=np.zeros(4000), batch_size=16, by_length=by_length)
        masks = [batch["attention_mask"] for batch in iterate(samples, 0)]
        padding[by_length] = 1 - sum(m.sum().item() for m in masks) / sum(m.numel() for m in masks)
    assert padding[False] > 0.3
    assert padding[True] < 0.05


def test_pairs():
    sequences = make_sequences(10)
    first, second = np.arange(10), np.arange(10)[::-1].copy()
    pairs = Samples(sequences=sequences, labels=np.arange(10), first=first, second=second, batch_size=5)
    batch = pairs.batch(0, 1)
    for tokens, mask, label in zip(batch["pair_input_ids"], batch["pair_attention_mask"], batch["labels"], strict=True):
        assert tokens[mask.bool()].tolist() == sequences[9 - int(label)].tolist()
    pairs = Samples(sequences=sequences, labels=np.arange(10), first=first, second=second, batch_size=5, pack=True)
    batch = pairs.batch(0, 1)
    parts = batch["pair_input_ids"][0].tensor_split(batch["pair_cu_seq_lens_q"][1:-1].long())
    for tokens, label in zip(parts, batch["labels"], strict=True):
        assert tokens.tolist() == sequences[9 - int(label)].tolist()


def test_packed_rows_have_no_padding():
    sequences = make_sequences(20)
    samples = Samples(sequences=sequences, labels=np.arange(20), batch_size=5, longest=12, pack=True)
    batch = samples.batch(0, 0)
    ends = batch["cu_seq_lens_q"]
    assert ends.dtype == torch.int32
    assert batch["input_ids"].shape == (1, int(ends[-1]))
    for place, label in enumerate(batch["labels"].tolist()):
        part = slice(int(ends[place]), int(ends[place + 1]))
        assert batch["input_ids"][0, part].tolist() == sequences[label][:12].tolist()


def test_what_rounds_a_packed_row_up_is_a_sequence_that_does_not_count():
    sequences = make_sequences(20)
    plain, rounded = (
        Samples(sequences=sequences, labels=np.arange(20), batch_size=5, pack=True, multiple_of=multiple).batch(0, 0)
        for multiple in (1, 64)
    )
    total = plain["input_ids"].shape[1]
    assert rounded["input_ids"].shape == (1, -(-total // 64) * 64)
    assert rounded["input_ids"][:, :total].equal(plain["input_ids"])
    assert (rounded["input_ids"][:, total:] == 0).all()
    assert rounded["cu_seq_lens_q"].tolist() == [*plain["cu_seq_lens_q"].tolist(), rounded["input_ids"].shape[1]]
    assert rounded["labels"].tolist() == [*plain["labels"].tolist(), -100]
    with pytest.raises(
        ValueError, match=r"multiple_of must be at most longest=12 where sequences are packed, .*got 64"
    ):
        Samples(sequences=sequences, labels=np.arange(20), batch_size=5, longest=12, pack=True, multiple_of=64)


def test_windows_read_the_stream_in_order():
    windows = Windows(tokens=np.arange(1001, dtype=np.uint16), batch_size=4, length=10)
    assert len(windows) == 25
    first, second = windows.batch(0, 0), windows.batch(0, 1)
    assert first["input_ids"][:, 0].tolist() == [0, 250, 500, 750]
    assert (first["shift_labels"] == first["input_ids"] + 1).all()
    assert (second["input_ids"][:, 0] == first["input_ids"][:, -1] + 1).all()
    half = Windows(tokens=np.arange(1001), batch_size=4, length=10, rank=1, ranks=2)
    assert half.batch(0, 3)["input_ids"].equal(windows.batch(0, 3)["input_ids"][2:])
    with pytest.raises(ValueError, match="tokens must be at least 41 for one batch, got 40"):
        Windows(tokens=np.arange(40), batch_size=4, length=10)
    assert len(Windows(tokens=np.arange(41), batch_size=4, length=10)) == 1
    with pytest.raises(ValueError, match="must be at least 1, got 4 and 0"):
        Windows(tokens=np.arange(40), batch_size=4, length=0)


def test_translations_fill_their_budget():
    source, target = make_sequences(3000, 40, 1), make_sequences(3000, 40, 2)
    batches = Translations(source=source, target=target, max_tokens=400)
    seen = 0
    for batch in iterate(batches, 0):
        count, width = batch["input_ids"].shape
        assert count * max(width, batch["labels"].shape[1]) <= 400
        assert (batch["labels"] != 0).all()
        seen += count
    assert seen == 3000
    filled = sum(batch["attention_mask"].numel() for batch in iterate(batches, 0)) / len(batches)
    assert filled > 300
    first = [batch["input_ids"].shape for batch in iterate(batches, 0)]
    assert first != [batch["input_ids"].shape for batch in iterate(batches, 1)]
    with pytest.raises(ValueError, match="shuffle=False must have one rank"):
        Translations(source=source, target=target, max_tokens=400, shuffle=False, ranks=2)
    with pytest.raises(ValueError, match="max_tokens must hold the longest sentence of 40 tokens, got 30"):
        Translations(source=source, target=target, max_tokens=30)


def test_rounded_translations_fill_their_budget_too():
    source, target = make_sequences(3000, 40, 1), make_sequences(3000, 40, 2)
    batches = Translations(source=source, target=target, max_tokens=400, multiple_of=8)
    seen = 0
    for batch in iterate(batches, 0):
        count, width = batch["input_ids"].shape
        assert width % 8 == batch["labels"].shape[1] % 8 == 0
        assert count * max(width, batch["labels"].shape[1]) <= 400
        seen += count
    assert seen == 3000


def test_rounded_samples_are_the_same_samples():
    plain, rounded = (
        Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=4, multiple_of=multiple)
        for multiple in (1, 16)
    )
    for one, other in zip(iterate(plain, 0), iterate(rounded, 0), strict=True):
        width = one["input_ids"].shape[1]
        assert other["input_ids"].shape[1] == -(-width // 16) * 16
        assert torch.equal(other["input_ids"][:, :width], one["input_ids"])
        assert not other["attention_mask"][:, width:].any()
    with pytest.raises(ValueError, match="batch_size and multiple_of must be at least 1, got 4 and 0"):
        Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=4, multiple_of=0)


@pytest.mark.parametrize("pack", [False, True])
def test_fewer_batches_of_sentences_than_ranks_are_refused(pack):
    """An epoch would be empty, and no run could begin."""
    source, target = make_sequences(count=5), make_sequences(count=5)
    with pytest.raises(ValueError, match="every one of 2 ranks must have a batch, got 1 of at most 1000 tokens"):
        Translations(source=source, target=target, max_tokens=1_000, ranks=2, pack=pack)
    with pytest.raises(ValueError, match="every one of 1 ranks must have a batch, got 0 of at most 9 tokens"):
        Translations(source=make_sequences(count=0), target=make_sequences(count=0), max_tokens=9, pack=pack)
    with pytest.raises(ValueError, match="multiple_of must be at least 1, got 0"):
        Translations(source=source, target=target, max_tokens=1_000, multiple_of=0, pack=pack)


def test_bad_shares_and_steps_are_refused():
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        Windows(tokens=np.arange(100), batch_size=2, length=3, rank=2, ranks=2)
    samples = Samples(sequences=make_sequences(), labels=np.arange(50), batch_size=8)
    with pytest.raises(IndexError, match=r"step must lie in \[0, 6\), got 6"):
        samples.batch(0, 6)


def test_a_batch_takes_less_than_a_millisecond(tmp_path):
    """32 x 4096 bytes from a mapped file: half a millisecond on a quiet machine. CI is busy, hence the wider bound."""
    random = np.random.default_rng(0)
    np.save(tmp_path / "tokens.npy", random.integers(1, 257, 20_000_000).astype(np.uint16))
    offsets = np.arange(0, 20_000_001, 5_000)
    sequences = Sequences(np.load(tmp_path / "tokens.npy", mmap_mode="r"), offsets)
    samples = Samples(sequences=sequences, labels=np.zeros(4000), batch_size=32)
    torch.set_num_threads(1)
    times = []
    for step in range(60):
        start = time.perf_counter()
        batch = samples.batch(0, step)
        times.append(time.perf_counter() - start)
    assert batch["input_ids"].shape == (32, 4096)
    assert np.median(times[5:]) < 4e-3
