"""How many directions the attention matrices of a model span."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.record import NUM_QUERIES, AttentionRecord

# The paper's: "we threshold the singular values smaller than 1e-6".
THRESHOLD = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixRank:
    """Three answers to how many directions a matrix has, and what they come from."""

    singular_values: Tensor
    """In descending order, fp64."""
    rank: int
    """How many are above the paper's threshold, an absolute number."""
    numerical_rank: int
    """How many are above ``largest * max(rows, columns) * epsilon`` with the epsilon of fp32: those that the rounding
    of an fp32 matrix could not have made. numpy's ``matrix_rank`` of an fp32 matrix has the same threshold."""
    effective_rank: float
    """``exp(-sum_k p_k log p_k)`` with ``p_k`` the share of singular value k in their sum (Roy and Vetterli, 2007): no
    threshold at all. Between 1 and the number of rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRank:
    """The ranks of one layer's attention matrices."""

    layer: str
    """Its name in the record."""
    matrices: Sequence[Sequence[MatrixRank]]
    """One for each head of each sample, ``[samples][heads]``."""
    num_queries: Sequence[int]
    """Rows of the matrices of each sample: what no rank can exceed."""
    num_keys: Sequence[int]
    """Columns of the matrices of each sample."""
    of_queries: Sequence[int]
    """How many queries each sample has; where that is more than ``num_queries``, the rows are a part of the matrix."""
    threshold: float
    """What ``rank`` counts singular values above."""


def matrix_rank(matrix: Tensor, threshold: float = THRESHOLD) -> MatrixRank:
    """The ranks of one matrix ``[rows, columns]``, in fp64 whatever its dtype.

    The paper drops singular values below 1e-6. That is next to the noise of fp32: of an attention matrix of rank 5 with
    500 rows, a decomposition in fp32 gives singular values of 7e-7 where there should be none, and more of larger ones
    (``test_fp32_noise_is_next_to_the_threshold``). Here everything is in fp64, where the same noise is below 1e-14. The
    count still depends on where the threshold is: attention is an exponential kernel, whose singular values fall off
    smoothly, without a gap that would make a rank plain. ``effective_rank`` has no threshold, and is the number to
    compare models by.
    """
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"matrix must have shape [rows, columns], neither of them 0, got {list(matrix.shape)}")
    if threshold <= 0:
        raise ValueError(f"threshold must be above 0, got {threshold}")
    values = _singular_values(matrix.detach().to(torch.float64)).cpu()
    largest, total = float(values[0]), float(values.sum())
    noise = largest * max(matrix.shape) * torch.finfo(torch.float32).eps
    share = values / total if total > 0 else values
    entropy = float(-torch.special.xlogy(share, share).sum())
    return MatrixRank(
        singular_values=values,
        rank=int((values > threshold).sum()),
        numerical_rank=int((values > noise).sum()),
        effective_rank=math.exp(entropy) if total > 0 else 0.0,
    )


def _singular_values(matrix: Tensor) -> Tensor:
    """In descending order."""
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    with _one_thread(matrix.device):
        if matrix.shape[0] > 1.5 * matrix.shape[1]:
            # The triangle has the same singular values, and is smaller.
            matrix = torch.linalg.qr(matrix, mode="r").R
        return torch.linalg.svdvals(matrix)


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """LAPACK's small steps wait for each other's threads: two on a busy machine took 80 times as long as one."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attention_rank(
    record: AttentionRecord, *, num_queries: int | None = NUM_QUERIES, threshold: float = THRESHOLD
) -> list[AttentionRank]:
    """The ranks of every attention matrix, layer by layer, head by head.

    To decompose the matrix of N tokens takes N^3 operations: half a second for 1024 x 4096 on one core, a minute and
    more for 4096 x 4096. Of more than ``num_queries`` queries this takes so many rows, evenly spaced, with all their
    columns. The rank of these rows is a lower bound of that of the whole, and models are comparable where they have as
    many rows. ``num_queries=None`` decomposes the whole, as the paper does.

    Args:
        record: of a model and a batch.
        num_queries: rows to take at most; ``None``: all.
        threshold: what the paper's rank counts singular values above.
    """
    found = []
    for call in record.calls:
        matrices, rows, columns, whole = [], [], [], []
        for sample in range(call.num_samples):
            queries = call.queries(sample, num_queries)
            weights = (call.weights(sample, head, queries) for head in range(call.num_heads))
            matrices.append([matrix_rank(each, threshold) for each in weights])
            rows.append(len(queries))
            columns.append(len(call.keys(sample)))
            whole.append(len(call.queries(sample)))
        ranks = AttentionRank(
            layer=call.name, matrices=matrices, num_queries=rows, num_keys=columns, of_queries=whole,
            threshold=threshold,
        )  # fmt: skip
        found.append(ranks)
    return found
