"""Perplexity of a language model on a stream of tokens, or of any model on batches with labels.

In a stream every token after the first is predicted exactly once, including the last ones, which do not fill a window.
:func:`disjoint` and :func:`sliding` differ in the length of the context of each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk.data.batches import Batches
from mgk.data.kind import Progress, no_progress
from mgk.evaluation.inference import inference
from mgk.evaluation.shares import check_ranks, reduce_sums, take_turns
from mgk.models import MGKForCausalLM
from mgk.models.loss import IGNORED


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The mean loss of a model over predicted tokens, and the perplexity that follows from it."""

    nats_per_token: float
    """Mean of ``-log p(token | earlier tokens in its window)``."""
    tokens: int
    """Number of predicted tokens; in a stream, all but the first."""

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    @property
    def bits_per_token(self) -> float:
        """``nats_per_token / log 2``, which for a stream of bytes is bits per byte."""
        return self.nats_per_token / math.log(2)


def disjoint(
    model: MGKForCausalLM,
    tokens: NDArray[Any],
    *,
    length: int,
    batch_size: int,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> Perplexity:
    """Compute the perplexity over consecutive windows, which is cheap but overestimates.

    The first predictions of a window have little context, so the perplexity is higher than that of :func:`sliding`.
    Training watches this one; the paper reports the other. The arguments are those of :func:`sliding`.
    """
    return sliding(
        model, tokens, length=length, stride=length, batch_size=batch_size, device=device, precision=precision,
        rank=rank, ranks=ranks, progress=progress,
    )  # fmt: skip


def sliding(
    model: MGKForCausalLM,
    tokens: NDArray[Any],
    *,
    length: int,
    stride: int = 1,
    batch_size: int,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> Perplexity:
    """Compute the perplexity with a window that moves by ``stride`` and counts its last ``stride`` positions.

    In the first window all positions count. ``stride=1`` is what the paper reports: every token beyond the first window
    is predicted from the ``length`` tokens before it. ``stride=length`` is :func:`disjoint`. In between, each token is
    predicted from at least ``length - stride + 1`` tokens, and the work shrinks by a factor of ``stride``. The last
    window ends with the stream and may be shorter; its tokens have the same context as in a full one.

    Only the positions that count get logits; an adaptive softmax computes only the clusters of their targets. Losses
    are summed in fp64 over batches, and in fp32 or better within a batch.

    Args:
        model: language model, not wrapped.
        tokens: integers ``[T]``, at least 2.
        length: length of a window.
        stride: from 1 to ``length``.
        batch_size: number of windows in a forward call.
        device: device of the model.
        precision: dtype of autocast; ``None`` computes in the dtype of the weights.
        rank: this rank. Every rank must call this, and all get the same result.
        ranks: number of ranks that share the work.
        progress: shows the progress.
    """
    check_ranks(rank, ranks)
    windows = _Windows(tokens=np.asanyarray(tokens), length=length, stride=stride, batch_size=batch_size)
    table = model.config.max_position_embeddings
    # Only our models are checked; those of other libraries check their length themselves.
    if getattr(model.config, "positions", None) == "learned" and windows.width(0) > table:
        raise ValueError(f"length must be at most max_position_embeddings={table}, got {length}")
    sums = _sums(model, windows, torch.device(device), precision, rank, ranks, progress)
    nats, count = (reduce_sums(sums) if ranks > 1 else sums).tolist()
    assert count == windows.positions
    return Perplexity(nats_per_token=nats / count, tokens=int(count))


def of_batches(
    model: nn.Module,
    batches: Batches,
    *,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> Perplexity:
    """Compute the perplexity of the labels in batches, such as :class:`mgk.data.Translations` with ``shuffle=False``.

    Every label that is not -100 counts once with equal weight, in the first epoch of the batches.

    Args:
        model: a translation model for batches with ``labels``, or a language model for batches with ``shift_labels``.
        batches: batches that are not split over ranks.
        device: see :func:`sliding`.
        precision: see :func:`sliding`.
        rank: see :func:`sliding`.
        ranks: see :func:`sliding`.
        progress: see :func:`sliding`.
    """
    check_ranks(rank, ranks)
    if len(batches) == 0:
        raise ValueError("batches must hold at least one batch, got none")
    sums = _sums(model, batches, torch.device(device), precision, rank, ranks, progress)
    nats, count = (reduce_sums(sums) if ranks > 1 else sums).tolist()
    if count == 0:
        raise ValueError("batches must hold at least one label that counts, got none")
    return Perplexity(nats_per_token=nats / count, tokens=int(count))


def _sums(
    model: nn.Module,
    batches: Batches,
    device: torch.device,
    precision: torch.dtype | None,
    rank: int,
    ranks: int,
    progress: Progress,
) -> Tensor:
    """Return one rank's sums of nats and tokens, ``[2]`` in fp64, on the device, so that the host does not wait."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with inference(model, device, precision):
        for turn, batch in take_turns(batches, rank, ranks, device, progress, "perplexity"):
            # logits_to_keep=0 keeps all positions.
            kept = batches.kept(turn.number) if isinstance(batches, _Windows) else 0
            # num_items_in_batch=1 makes the loss the sum over labels.
            outputs = model(**batch, logits_to_keep=kept, num_items_in_batch=1, use_cache=False)
            if turn.counts:
                labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
                sums[0] += outputs.loss.double()
                sums[1] += (labels[:, -kept:] != IGNORED).sum()
    return sums


@dataclass(frozen=True, kw_only=True, eq=False)
class _Windows:
    """Windows over a stream. Window i covers the inputs from ``i * stride`` on, and predicts the token after each.

    ``batch`` returns ``input_ids`` and ``shift_labels``, ``[windows, width]``. Labels beyond the end of the stream are
    ignored; a mask is not needed, because no token sees later ones. A batch keeps logits for the same positions of all
    its windows, so the first window, in which all positions count, has a batch of its own if ``stride`` is below
    ``length``.
    """

    tokens: NDArray[Any]
    length: int
    stride: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not np.issubdtype(self.tokens.dtype, np.integer) or len(self.tokens) < 2:
            got = f"{self.tokens.dtype} of shape {list(self.tokens.shape)}"
            raise ValueError(f"tokens must be integers of shape [T] with at least 2 of them, got {got}")
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if not 1 <= self.stride <= self.length:
            raise ValueError(f"stride must lie in [1, {self.length}], the length of a window, got {self.stride}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def positions(self) -> int:
        """Number of inputs that are followed by a token to predict."""
        return len(self.tokens) - 1

    @property
    def count(self) -> int:
        """Number of windows."""
        return 1 + max(0, -(-(self.positions - self.length) // self.stride))

    @property
    def _alone(self) -> int:
        """Number of windows at the beginning with a batch of their own."""
        return 0 if self.stride == self.length else 1

    def __len__(self) -> int:
        return self._alone - (self._alone - self.count) // self.batch_size

    def windows(self, step: int) -> range:
        """Numbers of the windows in a batch."""
        if step < self._alone:
            return range(1)
        begin = self._alone + (step - self._alone) * self.batch_size
        return range(begin, min(begin + self.batch_size, self.count))

    def width(self, step: int) -> int:
        """Width of the first window of a batch; only the last window of all can be shorter."""
        return min(self.length, self.positions - self.windows(step).start * self.stride)

    def kept(self, step: int) -> int:
        """Number of positions that count, from the end of the batch's width."""
        seen_before = 0 if self.windows(step).start == 0 else self.length - self.stride
        return self.width(step) - seen_before

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        windows = self.windows(step)
        return np.arange(windows.start, windows.stop, dtype=np.int64) * self.stride

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        places = self.rows(epoch, step)[:, None] + np.arange(self.width(step) + 1)
        tokens = torch.from_numpy(np.take(self.tokens, places, mode="clip").astype(np.int64))
        is_beyond = torch.from_numpy(places[:, 1:] > self.positions)
        return {
            "input_ids": tokens[:, :-1].contiguous(),
            "shift_labels": tokens[:, 1:].masked_fill(is_beyond, IGNORED),
        }
