"""The ranks of a model's attention matrices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.record import NUM_QUERIES, AttentionRecord

# The paper's threshold: "we threshold the singular values smaller than 1e-6".
THRESHOLD = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixRank:
    """Three kinds of rank of a matrix, and its singular values."""

    singular_values: Tensor
    """Singular values in descending order, fp64."""
    rank: int
    """Number of singular values above the paper's threshold, which is absolute."""
    numerical_rank: int
    """Number of singular values above ``largest * max(rows, columns) * epsilon`` with the epsilon of fp32, which are
    too large to be rounding errors of an fp32 matrix. numpy's ``matrix_rank`` of an fp32 matrix has the same
    threshold."""
    effective_rank: float
    """``exp(-sum_k p_k log p_k)`` with ``p_k`` the share of singular value k in their sum (Roy and Vetterli, 2007). It
    needs no threshold and lies between 1 and the number of rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRank:
    """The ranks of one layer's attention matrices."""

    layer: str
    """Its name in the record."""
    matrices: Sequence[Sequence[MatrixRank]]
    """Ranks for each head of each sample, ``[samples][heads]``."""
    num_queries: Sequence[int]
    """Number of rows in the matrices of each sample, which no rank can exceed."""
    num_keys: Sequence[int]
    """Number of columns in the matrices of each sample."""
    of_queries: Sequence[int]
    """Number of queries of each sample. If it exceeds ``num_queries``, the rows are a part of the matrix."""
    threshold: float
    """Threshold of ``rank``."""


def matrix_rank(matrix: Tensor, threshold: float = THRESHOLD) -> MatrixRank:
    """Compute the ranks of one matrix ``[rows, columns]`` in fp64.

    The paper drops singular values below 1e-6, which is close to the noise of fp32: for an attention matrix of rank 5
    with 500 rows, a decomposition in fp32 has singular values of 7e-7 that should be zero, and larger matrices have
    larger ones (``test_fp32_noise_is_next_to_the_threshold``). Here the computation is in fp64, whose noise is below
    1e-14. The count still depends on the threshold: attention is an exponential kernel, whose singular values decay
    smoothly, without a gap that would define a rank. ``effective_rank`` has no threshold, and is the number by which to
    compare models.
    """
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"matrix must have shape [rows, columns], neither of them 0, got {list(matrix.shape)}")
    if threshold <= 0:
        raise ValueError(f"threshold must be above 0, got {threshold}")
    _check_finite("matrix", matrix)
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


def _check_finite(name: str, matrix: Tensor) -> None:
    wrong = matrix[~matrix.isfinite()]
    if len(wrong) > 0:
        raise ValueError(f"{name} must hold finite numbers, got {float(wrong[0])}")


def _singular_values(matrix: Tensor) -> Tensor:
    """Singular values in descending order."""
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    with _one_thread(matrix.device):
        if matrix.shape[0] > 1.5 * matrix.shape[1]:
            # R has the same singular values and is smaller.
            matrix = torch.linalg.qr(matrix, mode="r").R
        return torch.linalg.svdvals(matrix)


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Context with one LAPACK thread.

    The threads synchronise after small steps: two of them on a busy machine took 80 times as long as one.
    """
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
    """Compute the ranks of every attention matrix, layer by layer and head by head.

    Decomposing the matrix of N tokens takes N^3 operations: half a second for 1024 x 4096 on one core, more than a
    minute for 4096 x 4096. If there are more than ``num_queries`` queries, that many evenly spaced rows are taken with
    all their columns. Their rank is a lower bound of the rank of the whole matrix, and models can be compared by it if
    they have the same number of rows. ``num_queries=None`` decomposes the whole matrix, as the paper does.

    Args:
        record: record of a model on a batch.
        num_queries: most rows to take; ``None`` is all.
        threshold: threshold of the paper's rank.
    """
    found = []
    for call in record.calls:
        matrices, rows, columns, whole = [], [], [], []
        for sample in range(call.num_samples):
            call.check_has_tokens(sample)
            queries = call.queries(sample, num_queries)
            heads = []
            for head in range(call.num_heads):
                weights = call.weights(sample, head, queries)
                _check_finite(f"the attention weights of {call.name}", weights)
                heads.append(matrix_rank(weights, threshold))
            matrices.append(heads)
            rows.append(len(queries))
            columns.append(len(call.keys(sample)))
            whole.append(len(call.queries(sample)))
        ranks = AttentionRank(
            layer=call.name, matrices=matrices, num_queries=rows, num_keys=columns, of_queries=whole,
            threshold=threshold,
        )  # fmt: skip
        found.append(ranks)
    return found
