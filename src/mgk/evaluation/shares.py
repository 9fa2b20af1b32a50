"""Distribution of batches over ranks, and sums over ranks."""

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
    """Number of the batch."""
    counts: bool = True
    """Whether the batch counts; False if the rank takes part only because the others need it."""


def share(count: int, rank: int, ranks: int) -> list[Turn]:
    """Return the turns of one rank for ``count`` batches: ``rank, rank + ranks, ...``.

    Every rank gets the same number of turns, because under FSDP all ranks must take part in every forward call. A rank
    without a batch left repeats the last one, which then does not count.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    numbers = range(rank, rank + count + (-count) % ranks, ranks)
    return [Turn(number) if number < count else Turn(count - 1, counts=False) for number in numbers]


@dataclass(frozen=True)
class _Chosen:
    """A selection of batches, in the order of the turns."""

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
    """Yield the turns of a rank with their batches on the device, made ahead in a thread and copied asynchronously."""
    turns = share(len(batches), rank, ranks)
    made = iterate(_Chosen(batches, turns), 0, pin_memory=device.type == "cuda")
    for turn, batch in progress(zip(turns, made, strict=True), description, len(turns)):
        yield turn, {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def check_ranks(rank: int, ranks: int) -> None:
    """Check ``rank`` and ``ranks``, because the shares of ranks that do not exist would be missing in the score."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    if ranks > 1:
        present = dist.get_world_size() if _is_distributed() else 1
        if present != ranks:
            raise ValueError(f"ranks must be the {present} of torch.distributed, or 1, got {ranks}")


def reduce_sums(sums: Tensor) -> Tensor:
    """Add up the sums of all ranks in place, if torch.distributed is initialised, on any backend and its device."""
    if _is_distributed():
        dist.all_reduce(sums)
    return sums


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
