"""Batches shared out over ranks, and the sums that ranks make together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mgk.data.batches import Batches, iterate
from mgk.data.kind import Progress


@dataclass(frozen=True)
class Turn:
    """One forward call of a rank."""

    number: int
    """Of the batch."""
    counts: bool = True
    """False where the rank only keeps the others company."""


def share(count: int, rank: int, ranks: int) -> list[Turn]:
    """The batches of one rank out of ``count``: ``rank, rank + ranks, ...``.

    Every rank gets the same number of turns, since under FSDP the weights are gathered in each and all ranks must take
    part. A rank with none left repeats the last batch, which does not count.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    numbers = range(rank, rank + count + (-count) % ranks, ranks)
    return [Turn(number) if number < count else Turn(count - 1, counts=False) for number in numbers]


@dataclass(frozen=True)
class _Chosen:
    """Some of the batches, in the order of the turns."""

    batches: Batches
    turns: Sequence[Turn]

    def __len__(self) -> int:
        return len(self.turns)

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        return self.batches.batch(epoch, self.turns[step].number)

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        return self.batches.rows(epoch, self.turns[step].number)


def take_turns(
    batches: Batches, rank: int, ranks: int, device: torch.device, progress: Progress, description: str
) -> Iterator[tuple[Turn, dict[str, Tensor]]]:
    """The turns of a rank, each with its batch on the device. Made ahead in a thread and copied without waiting."""
    turns = share(len(batches), rank, ranks)
    made = iterate(_Chosen(batches, turns), 0, pin_memory=device.type == "cuda")
    for turn, batch in progress(zip(turns, made, strict=True), description, len(turns)):
        yield turn, {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def check_ranks(rank: int, ranks: int) -> None:
    """Ranks that do not exist would leave their share out of the score."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    if ranks > 1:
        present = dist.get_world_size() if _is_distributed() else 1
        if present != ranks:
            raise ValueError(f"ranks must be the {present} of torch.distributed, or 1, got {ranks}")


def reduce_sums(sums: Tensor) -> Tensor:
    """Add up the sums of all ranks, in place, where torch.distributed is initialised. Any backend, on its device."""
    if _is_distributed():
        dist.all_reduce(sums)
    return sums


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
