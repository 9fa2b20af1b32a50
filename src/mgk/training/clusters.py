"""Batches that say which of their targets lie in each cluster of an adaptive softmax.

Counted on the device, they would have to be waited for, and an update could not be recorded. Here they are known before
the batch is copied: the shape of a recording says how many there may be, and a batch with more has another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mgk.data.batches import Batches
from mgk.models import cluster_rows

_PREFIX = "cluster_rows_"


@dataclass(frozen=True, kw_only=True)
class ClusteredBatches:
    """Batches with ``shift_labels``, and with the rows of each cluster beside them, one tensor each.

    Args:
        batches: without them.
        cutoffs: of the model.
        multiple_of: as in :func:`mgk.models.cluster_rows`.
    """

    batches: Batches
    cutoffs: list[int]
    multiple_of: int

    def __len__(self) -> int:
        return len(self.batches)

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        return self.batches.rows(epoch, step)

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        batch = self.batches.batch(epoch, step)
        rows = cluster_rows(batch["shift_labels"].flatten(), self.cutoffs, self.multiple_of)
        return batch | {f"{_PREFIX}{number}": row for number, row in enumerate(rows)}


def is_cluster(name: str) -> bool:
    """Whether a part of a batch is the rows of a cluster. Batches differ in how many there are."""
    return name.startswith(_PREFIX)


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """A batch as a language model takes it: the rows of all clusters are one argument."""
    inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if not is_cluster(name)}
    rows = [tensor for name, tensor in batch.items() if is_cluster(name)]
    return inputs | {"cluster_rows": rows} if rows else inputs
