"""Accuracy of a classifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk.data.batches import Batches, Samples
from mgk.data.kind import Progress, no_progress
from mgk.data.store import Sequences
from mgk.evaluation.inference import inference
from mgk.evaluation.shares import check_ranks, reduce_sums, take_turns


@dataclass(frozen=True, kw_only=True)
class ClassificationScore:
    """Accuracy and loss of a classifier."""

    accuracy: float
    """``correct / count``, in [0, 1]."""
    loss: float
    """Mean cross entropy per sample, in nats."""
    correct: int
    count: int
    """Number of samples."""
    right: NDArray[np.bool_] | None = field(default=None, compare=False, repr=False)
    """``[count]``: which samples were right, in the order of the corpus; ``None`` if the batches are only a part of a
    :class:`Samples`."""


def accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> ClassificationScore:
    """Compute the accuracy and the loss of a classifier over all samples of one epoch.

    All samples have equal weight. (The code published with the paper drops an incomplete last batch and averages the
    means of batches.)

    Args:
        model: a classifier of sequences or pairs, which returns ``logits [B, C]`` and a mean ``loss`` for the tensors
            of a batch, ``labels [B]`` among them.
        batches: batches with all samples, not split over ranks, such as those of :func:`in_order_of_length`.
        device: device of the model.
        precision: dtype of autocast; ``None`` computes in the dtype of the weights.
        rank: this rank. Every rank must call this, and all get the same score.
        ranks: number of ranks that share the work.
        progress: shows the progress.
    """
    check_ranks(rank, ranks)
    if isinstance(batches, Samples) and (batches.drop_last or batches.ranks != 1):
        got = f"drop_last={batches.drop_last} and ranks={batches.ranks}"
        raise ValueError(f"batches must hold every sample once, with drop_last=False and ranks=1, got {got}")
    if len(batches) == 0:
        raise ValueError("batches must hold at least one batch, got none")
    sums, right = _tally(model, batches, torch.device(device), precision, rank, ranks, progress)
    if ranks > 1:
        sums = reduce_sums(sums)
        right = None if right is None else reduce_sums(right)
    loss, correct, count = sums.tolist()
    return ClassificationScore(
        accuracy=correct / count, loss=loss / count, correct=int(correct), count=int(count),
        right=None if right is None else right.cpu().numpy().astype(np.bool_),
    )  # fmt: skip


def _tally(
    model: nn.Module,
    batches: Batches,
    device: torch.device,
    precision: torch.dtype | None,
    rank: int,
    ranks: int,
    progress: Progress,
) -> tuple[Tensor, Tensor | None]:
    """Return one rank's sums of loss, correct answers and samples, ``[3]`` in fp64, and 1 per right item, ``[items]``.

    Both stay on the device, so that the host does not wait.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    hits: list[Tensor] = []
    numbers: list[int] = []
    with inference(model, device, precision):
        for turn, batch in take_turns(batches, rank, ranks, device, progress, "accuracy"):
            outputs = model(**batch)
            if turn.counts:
                # A packed batch may end with a sequence that only fills it up, and has no label.
                count = len(batches.rows(0, turn.number))
                found = (outputs.logits.argmax(dim=-1) == batch["labels"])[:count]
                sums[0] += outputs.loss.double() * count
                sums[1] += found.sum()
                sums[2] += count
                hits.append(found)
                numbers.append(turn.number)
    if not isinstance(batches, Samples):
        return sums, None
    right = torch.zeros(len(batches.labels), dtype=torch.uint8, device=device)
    if hits:
        items = np.concatenate([batches.items(0, number) for number in numbers])
        right[torch.from_numpy(items).to(device)] = torch.cat(hits).to(torch.uint8)
    return sums, right


def in_order_of_length(
    sequences: Sequences,
    labels: NDArray[Any],
    batch_size: int,
    first: NDArray[np.int64] | None = None,
    second: NDArray[np.int64] | None = None,
    longest: int = 4096,
    multiple_of: int = 1,
    pack: bool = False,
) -> Samples:
    """Return every sample once, in batches of similar length, which need little padding, or packed ones.

    The longest samples come first, so that a batch that does not fit into memory fails at once. The arguments are those
    of :class:`Samples`.
    """
    first = np.arange(len(labels)) if first is None else np.asarray(first)
    if not len(labels) == len(first) == len(first if second is None else second):
        got = f"{len(labels)} labels, {len(first)} first and {'no' if second is None else len(second)} second"
        raise ValueError(f"labels, first and second must be as many, got {got}")
    if len(labels) == 0:
        raise ValueError("labels must hold at least one sample, got none")
    lengths = np.minimum(sequences.lengths, longest)
    size = other = lengths[first]
    if second is not None:
        size, other = np.maximum(size, lengths[second]), np.minimum(size, lengths[second])
    order = np.lexsort((other, size))[::-1]
    return Samples(
        sequences=sequences,
        labels=np.asarray(labels)[order],
        batch_size=batch_size,
        first=first[order],
        second=None if second is None else np.asarray(second)[order],
        places=order,
        longest=longest,
        multiple_of=multiple_of,
        pack=pack,
        shuffle=False,
        drop_last=False,
    )
