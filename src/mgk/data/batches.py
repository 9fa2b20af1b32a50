"""From mapped arrays to batches: no Python for each sample, and an order that needs no state.

Which samples make batch ``step`` of ``epoch`` on ``rank`` is a pure function of those numbers and the seed: to resume
at step k, ask for step k. Every class here has ``__len__`` (batches of an epoch on a rank) and ``batch(epoch, step)``.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from mgk.data.errors import DataError
from mgk.data.store import Sequences

# Batches that are sorted by length together: enough that neighbours are alike, few enough that epochs differ.
POOL = 64
# The label that no loss counts, as everywhere in PyTorch.
IGNORED = -100


class Batches(Protocol):
    """What a training loop needs of its data."""

    def __len__(self) -> int: ...

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]: ...

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Which samples make this batch; of a stream, at which token each row starts."""


def iterate(
    batches: Batches,
    epoch: int,
    start: int = 0,
    *,
    pin_memory: bool = False,
    workers: int = 1,
    timeout: float | None = None,
    name: str = "batches",
) -> Iterator[dict[str, Tensor]]:
    """The batches of an epoch from ``start`` on.

    Args:
        batches: where they come from.
        epoch: which pass over the data.
        start: the first step, to resume.
        pin_memory: put them where a GPU can fetch them by itself.
        workers: threads that make batches while the loop is busy, two ahead each; 0 makes them when asked for. The
            batches are the same.
        timeout: seconds after which a batch that does not come is an error.
        name: of the data, for errors.
    """
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")

    def make(step: int) -> dict[str, Tensor]:
        try:
            batch = batches.batch(epoch, step)
            return {name: tensor.pin_memory() for name, tensor in batch.items()} if pin_memory else batch
        except Exception as error:
            maker = threading.current_thread().name
            raise DataError(
                f"{name} must give batch {step} of epoch {epoch}, got {type(error).__name__} in {maker}: {error}"
            ) from error

    if workers == 0:
        yield from map(make, range(start, len(batches)))
        return
    asked: queue.SimpleQueue[tuple[int, Future[dict[str, Tensor]]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (order := asked.get()) is not None:
            step, future = order
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(make(step))
                except DataError as error:
                    future.set_exception(error)

    # Daemons: one that hangs must not keep the process from ending, as those of concurrent.futures would.
    threads = [threading.Thread(target=work, name=f"mgk-batches-{n}", daemon=True) for n in range(workers)]
    for thread in threads:
        thread.start()
    waiting: deque[Future[dict[str, Tensor]]] = deque()
    steps = iter(range(start, len(batches)))

    def ask(count: int) -> None:
        for step in itertools.islice(steps, count):
            waiting.append(Future())
            asked.put((step, waiting[-1]))

    try:
        ask(2 * workers)
        for step in range(start, len(batches)):
            try:
                batch = waiting.popleft().result(timeout)
            except TimeoutError as error:
                raise DataError(
                    f"{name} must give batch {step} of epoch {epoch} within {timeout:g} seconds, got none: "
                    f"is the disk still there?"
                ) from error
            ask(1)
            yield batch
    finally:
        for future in waiting:
            future.cancel()
        for _ in threads:
            asked.put(None)
        # A thread that is inside of torch when the interpreter ends would abort the process.
        for thread in threads:
            thread.join(timeout=1.0)


def padded(
    sequences: Sequences, rows: NDArray[np.int64], longest: int, width: int | None = None, multiple_of: int = 1
) -> tuple[Tensor, Tensor]:
    """Sequences as ``input_ids`` and ``attention_mask`` (int8), ``[rows, width]``, padded on the right with 0.

    Each is cut to ``longest`` tokens; ``width=None`` is the longest of these rows, rounded up to ``multiple_of``.
    """
    starts = sequences.offsets[rows]
    lengths = np.minimum(sequences.offsets[rows + 1] - starts, longest)
    width = -(-int(lengths.max(initial=1)) // multiple_of) * multiple_of if width is None else width
    mask = np.arange(width) < lengths[:, None]
    # In the type of the disk: every large array that is made anew for each batch costs more than it looks.
    tokens = _windows(sequences.tokens, starts, width) * mask
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(mask.view(np.int8))


def _windows(tokens: NDArray[Any], starts: NDArray[np.int64], width: int) -> NDArray[Any]:
    """``tokens[start : start + width]`` for every start, ``[starts, width]``, the last token again beyond the end."""
    last = len(tokens) - width
    if last < 0:
        return np.take(tokens, starts[:, None] + np.arange(width), mode="clip")
    windows = sliding_window_view(tokens, width)[np.minimum(starts, last)]
    late = starts > last
    if late.any():
        windows[late] = np.take(tokens, starts[late, None] + np.arange(width), mode="clip")
    return windows


def packed(sequences: Sequences, rows: NDArray[np.int64], longest: int, multiple_of: int = 1) -> dict[str, Tensor]:
    """Sequences one after the other in a single row, ``input_ids [1, T]``, without any padding.

    ``cu_seq_lens_q``, int32 ``[rows + 1]``, says where each begins, as the models want to be told. With ``multiple_of``
    above 1 there is one more sequence of zeros, short or empty, that rounds T up.
    """
    starts = sequences.offsets[rows]
    lengths = np.minimum(sequences.offsets[rows + 1] - starts, longest)
    ends = np.cumsum(lengths)
    position = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    tokens = sequences.tokens[np.repeat(starts, lengths) + position]
    boundaries = np.concatenate([[0], ends])
    if multiple_of > 1:
        total = -(-len(tokens) // multiple_of) * multiple_of
        tokens = np.concatenate([tokens, np.zeros(total - len(tokens), dtype=tokens.dtype)])
        boundaries = np.append(boundaries, total)
    return {
        "input_ids": torch.from_numpy(tokens.astype(np.int64))[None],
        "cu_seq_lens_q": torch.from_numpy(boundaries.astype(np.int32)),
    }


def _shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _check_share(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Labelled sequences, or pairs of them, in batches of a fixed number.

    ``batch`` gives ``input_ids``, ``attention_mask`` and ``labels``; with pairs also ``pair_input_ids`` and
    ``pair_attention_mask``.
    """

    sequences: Sequences
    labels: NDArray[Any]
    batch_size: int
    """Samples of one batch on one rank."""
    first: NDArray[np.int64] | None = None
    """Which sequence a sample has; ``None``: sample i has sequence i."""
    second: NDArray[np.int64] | None = None
    """The other sequence of a pair."""
    places: NDArray[np.int64] | None = None
    """Where each sample stands in the corpus, if these are in another order; ``None``: sample i is item i."""
    longest: int = 4096
    """Sequences are cut to so many tokens."""
    width: int | None = None
    """Pad to this; ``None``: to the longest sequence of the batch."""
    multiple_of: int = 1
    """Round that longest up: kernels like round numbers, and a compiler dislikes many shapes."""
    seed: int = 0
    shuffle: bool = True
    by_length: bool = True
    """Put sequences of similar length into one batch."""
    drop_last: bool = True
    """Leave out what does not fill a batch on every rank."""
    pack: bool = False
    """One row without padding instead, with ``cu_seq_lens_q`` (and ``pair_cu_seq_lens_q``) in place of the mask. What
    rounds its length up to ``multiple_of`` is a sequence of its own, with a label that no loss counts."""
    rank: int = 0
    ranks: int = 1
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_share(self.rank, self.ranks)
        if self.batch_size < 1 or self.multiple_of < 1:
            raise ValueError(
                f"batch_size and multiple_of must be at least 1, got {self.batch_size} and {self.multiple_of}"
            )
        if self.pack and self.multiple_of > self.longest:
            raise ValueError(
                f"multiple_of must be at most longest={self.longest} where sequences are packed, since what fills a "
                f"batch up is one of them, got {self.multiple_of}"
            )
        rest = len(self.labels) % (self.batch_size * self.ranks)
        if len(self) == 0 or (not self.drop_last and 0 < rest < self.ranks):
            raise ValueError(
                f"every batch must hold a sample for each of {self.ranks} ranks, got {len(self.labels)} samples "
                f"in batches of {self.batch_size} with drop_last={self.drop_last}"
            )

    def __len__(self) -> int:
        whole, rest = divmod(len(self.labels), self.batch_size * self.ranks)
        return whole if self.drop_last or rest == 0 else whole + 1

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in [0, {len(self)}), got {step}")
        # All ranks together take the next samples; the last few are shared out evenly.
        together = self.batch_size * self.ranks
        return np.array_split(self._order(epoch)[step * together : (step + 1) * together], self.ranks)[self.rank]

    def items(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Which items of the corpus make this batch."""
        rows = self.rows(epoch, step)
        return rows if self.places is None else self.places[rows]

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        rows = self.rows(epoch, step)
        first = rows if self.first is None else self.first[rows]
        labels = torch.from_numpy(np.asarray(self.labels[rows], dtype=np.int64))
        if self.pack:
            if self.multiple_of > 1:
                labels = torch.cat([labels, labels.new_full((1,), IGNORED)])
            batch = {**packed(self.sequences, first, self.longest, self.multiple_of), "labels": labels}
            if self.second is not None:
                pair = packed(self.sequences, self.second[rows], self.longest, self.multiple_of)
                batch |= {f"pair_{name}": tensor for name, tensor in pair.items()}
            return batch
        tokens, mask = padded(self.sequences, first, self.longest, self.width, self.multiple_of)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        if self.second is not None:
            tokens, mask = padded(self.sequences, self.second[rows], self.longest, self.width, self.multiple_of)
            batch |= {"pair_input_ids": tokens, "pair_attention_mask": mask}
        return batch

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """All samples in the order of this epoch, made when its first batch is asked for."""
        epoch = epoch if self.shuffle else 0
        order = self._orders.get(epoch)
        if order is None:
            order = self._make_order(epoch)
            self._orders.clear()
            self._orders[epoch] = order
        return order

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        count = len(self.labels)
        order = _shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count)
        if not (self.by_length and self.shuffle):
            return order
        lengths = self.sequences.lengths
        size = lengths[order] if self.first is None else lengths[self.first[order]]
        if self.second is not None:
            size = np.maximum(size, lengths[self.second[order]])
        size = np.minimum(size, self.longest)
        # Sort inside pools of batches, then shuffle whole batches: alike inside a batch, random from batch to batch.
        together = self.batch_size * self.ranks
        batches = count // together
        # What fills no batch is chosen before: after sorting it would always be the longest.
        sorted_part, rest = order[: batches * together], order[batches * together :]
        pool = np.arange(len(sorted_part)) // (together * POOL)
        whole = sorted_part[np.lexsort((size[: len(sorted_part)], pool))].reshape(batches, together)
        mixed = whole[np.random.default_rng([self.seed, epoch, 1]).permutation(batches)]
        return np.concatenate([mixed.reshape(-1), rest])


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """A long stream of tokens, cut into ``batch_size`` contiguous rows that are read window by window.

    ``batch`` gives ``input_ids`` and ``shift_labels``, the token after each, ``[batch_size, length]``. Nothing is
    shuffled, as in the paper's language models; epochs are alike. The last tokens of a row that fill no window are left
    out: a perplexity of all tokens needs windows of its own.
    """

    tokens: NDArray[Any]
    batch_size: int
    length: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        _check_share(self.rank, self.ranks)
        if self.batch_size % self.ranks != 0:
            raise ValueError(f"batch_size must be a multiple of the {self.ranks} ranks, got {self.batch_size}")
        if self.batch_size < 1 or self.length < 1:
            raise ValueError(f"batch_size and length must be at least 1, got {self.batch_size} and {self.length}")
        needed = self.batch_size * self.length + 1
        if len(self.tokens) < needed:
            raise ValueError(f"tokens must be at least {needed:,} for one batch, got {len(self.tokens):,}")

    @property
    def row(self) -> int:
        """Tokens of one row; the one after them is the last label."""
        return (len(self.tokens) - 1) // self.batch_size

    def __len__(self) -> int:
        return self.row // self.length

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in [0, {len(self)}), got {step}")
        mine = self.batch_size // self.ranks
        return np.arange(self.rank * mine, (self.rank + 1) * mine) * self.row + step * self.length

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        places = self.rows(epoch, step)[:, None] + np.arange(self.length + 1)
        tokens = torch.from_numpy(self.tokens[places].astype(np.int64))
        return {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Translations:
    """Pairs of sentences in batches of at most ``max_tokens`` tokens, padding counted, sentences of similar length.

    ``batch`` gives ``input_ids``, ``attention_mask`` and ``labels`` (-100 at padding), as the models take them. With
    several ranks an epoch leaves out fewer batches than there are ranks, other ones every time.
    """

    source: Sequences
    target: Sequences
    max_tokens: int
    """Of the longer side, on one rank."""
    multiple_of: int = 1
    """Round widths up: kernels like round numbers, compilers dislike many shapes."""
    seed: int = 0
    shuffle: bool = True
    pack: bool = False
    """Sentences in one row without padding, with ``cu_seq_lens_q`` in place of the mask and
    ``decoder_cu_seq_lens_q`` beside the labels. Both rows are rounded up, by a sentence that does not count."""
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        _check_share(self.rank, self.ranks)
        if len(self.source) != len(self.target):
            raise ValueError(
                f"source and target must have as many sentences, got {len(self.source)}, {len(self.target)}"
            )
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1, got {self.multiple_of}")
        if self.pack and self.multiple_of > self.max_tokens:
            raise ValueError(
                f"multiple_of must be at most max_tokens={self.max_tokens} where sentences are packed, "
                f"got {self.multiple_of}"
            )
        if not self.shuffle and self.ranks > 1:
            raise ValueError(f"shuffle=False must have one rank, since several leave batches out, got {self.ranks}")
        longest = int(self._widths.max(initial=0))
        if longest > self.max_tokens:
            raise ValueError(f"max_tokens must hold the longest sentence of {longest} tokens, got {self.max_tokens}")
        if len(self) == 0:
            raise ValueError(
                f"every one of {self.ranks} ranks must have a batch, got {len(self._cuts)} of at most "
                f"{self.max_tokens} tokens"
            )

    def __len__(self) -> int:
        return len(self._cuts) // self.ranks

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in [0, {len(self)}), got {step}")
        order = _shuffled(len(self._cuts), self.seed, epoch) if self.shuffle else np.arange(len(self._cuts))
        begin, end = self._cuts[order[step * self.ranks + self.rank]]
        return self._sorted[begin:end]

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        rows = self.rows(epoch, step)
        if self.pack:
            source = packed(self.source, rows, self.max_tokens, self.multiple_of)
            target = packed(self.target, rows, self.max_tokens, self.multiple_of)
            bounds, labels = target["cu_seq_lens_q"], target["input_ids"]
            labels[:, int(bounds[len(rows)]) :] = IGNORED
            return {**source, "labels": labels, "decoder_cu_seq_lens_q": bounds}
        tokens, mask = padded(self.source, rows, self.max_tokens, multiple_of=self.multiple_of)
        labels, label_mask = padded(self.target, rows, self.max_tokens, multiple_of=self.multiple_of)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}

    @property
    def _widths(self) -> NDArray[np.int64]:
        """What each pair takes of a batch: its longer side, rounded up where it will be padded."""
        longer = np.maximum(self.source.lengths, self.target.lengths)
        if self.pack:
            return longer
        return -(-longer // self.multiple_of) * self.multiple_of

    @functools.cached_property
    def _sorted(self) -> NDArray[np.int64]:
        """Sentences by length; those of one length in an order that the seed chose."""
        mixed = _shuffled(len(self.source), self.seed, 0)
        longer = np.maximum(self.source.lengths, self.target.lengths)
        return mixed[np.lexsort((self.target.lengths[mixed], longer[mixed]))]

    @functools.cached_property
    def _cuts(self) -> list[tuple[int, int]]:
        """Where each batch begins and ends among the sorted sentences: as many as fit once padded to the last one."""
        width = self._widths[self._sorted]
        cuts, begin = [], 0
        while begin < len(width):
            ahead = width[begin : begin + self.max_tokens]
            fits = ahead * np.arange(1, len(ahead) + 1) <= self.max_tokens
            end = begin + (int(np.argmin(fits)) if not fits.all() else len(fits))
            cuts.append((begin, end))
            begin = end
        return cuts
