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
    """How well a classifier does."""

    accuracy: float
    """``correct / count``, in [0, 1]."""
    loss: float
    """Mean cross entropy of a sample, in nats."""
    correct: int
    count: int
    """Samples."""
    right: NDArray[np.bool_] | None = field(default=None, compare=False, repr=False)
    """``[count]``: which of them were right, in the order of the corpus, whatever the batches and ranks; ``None`` where
    the batches are only some of those of a :class:`Samples`."""


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
    """How often the largest logit is the label's, over all samples of one epoch.

    Every sample counts once and for the same: the code published with the paper drops the last batch where it is not
    full, and takes the mean of the batches' means.

    Args:
        model: gives ``logits [B, C]`` and a mean ``loss`` for the batches' tensors, ``labels [B]`` among them: a
            classifier of sequences or of pairs.
        batches: all samples, for one rank, such as those of :func:`in_order_of_length`. They are shared out here.
        device: where the model is.
        precision: autocast to this; ``None``: as the weights are.
        rank: which of the ``ranks``. Every rank calls this and gets the same score.
        ranks: how many share the work.
        progress: shows how far it is.
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
    """Of one rank: loss, correct answers, samples, ``[3]`` in fp64; and a 1 for each item that was right, ``[items]``.
    They stay on the device, which nobody waits for."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    hits: list[Tensor] = []
    numbers: list[int] = []
    with inference(model, device, precision):
        for turn, batch in take_turns(batches, rank, ranks, device, progress, "accuracy"):
            outputs = model(**batch)
            if turn.counts:
                labels = batch["labels"]
                found = outputs.logits.argmax(dim=-1) == labels
                sums[0] += outputs.loss.double() * len(labels)
                sums[1] += found.sum()
                sums[2] += len(labels)
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
) -> Samples:
    """Every sample once, in batches of similar length, so that little is padded; arguments as in :class:`Samples`.

    The longest come first: a batch that does not fit into memory shows at once.
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
        shuffle=False,
        drop_last=False,
    )
