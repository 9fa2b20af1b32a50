"""Redundancy of heads: distances and similarities between the attention matrices of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.record import NUM_QUERIES, AttentionRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRedundancy:
    """Distances and similarities between the heads of one layer."""

    layer: str
    """Its name in the record."""
    distance: Tensor
    """``[H, H]``: total variation distance ``1/2 sum_j |a_ij - b_ij|``, averaged over queries and samples. It is 0 for
    heads that agree and 1 for heads that never attend to the same key."""
    similarity: Tensor
    """``[H, H]``: linear CKA of the two matrices, averaged over samples. It is 1 for heads that distinguish queries in
    the same way and near 0 for unrelated ones; NaN if a head attends in the same way for every query."""
    num_queries: int
    """Most rows of a matrix that were compared."""

    @property
    def mean_distance(self) -> float:
        """Mean over all pairs of different heads; NaN if there is only one head."""
        return _mean_of_pairs(self.distance)

    @property
    def mean_similarity(self) -> float:
        """Mean over all pairs of different heads; NaN if there is only one head."""
        return _mean_of_pairs(self.similarity)


def total_variation(one: Tensor, other: Tensor) -> float:
    """Total variation distance of two attention matrices, ``mean_i 1/2 sum_j |one_ij - other_ij|``."""
    return float(0.5 * (one - other).abs().sum(dim=-1).mean())


def centred_gram(matrix: Tensor) -> Tensor:
    """``X X^T``, ``[rows, rows]``, of the matrix minus the mean of its rows; 0 if all rows are the same."""
    centred = matrix - matrix.mean(dim=0, keepdim=True)
    if centred.norm() <= len(matrix) * torch.finfo(matrix.dtype).eps * matrix.norm():
        # The remainder is the rounding error of the mean, which is similar for any two matrices.
        centred = torch.zeros_like(centred)
    return centred @ centred.T


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two representations of the same rows (Kornblith et al., 2019), from their centred Gram matrices.

    ::

        <K, L> / (|K| |L|)        K = X X^T, L = Y Y^T, columns of X and Y centred

    It is invariant to rotating the columns and to scaling. It is NaN if one representation is constant over the rows.
    """
    scale = one.norm() * other.norm()
    return float((one * other).sum() / scale) if float(scale) > 0 else float("nan")


def head_redundancy(record: AttentionRecord, *, num_queries: int | None = NUM_QUERIES) -> list[HeadRedundancy]:
    """Compare all pairs of heads of each layer.

    The cost of CKA grows with the square of the number of queries, so if there are more than ``num_queries``, that many
    evenly spaced ones are compared. The matrices are computed and compared in fp64.

    Args:
        record: record of a model on a batch.
        num_queries: most rows to compare; ``None`` is all.
    """
    found = []
    for call in record.calls:
        heads = call.num_heads
        distance, similarity = torch.zeros(2, heads, heads, dtype=torch.float64)
        most = 0
        for sample in range(call.num_samples):
            call.check_has_tokens(sample)
            queries = call.queries(sample, num_queries)
            most = max(most, len(queries))
            weights = [call.weights(sample, head, queries) for head in range(heads)]
            grams = [centred_gram(each) for each in weights]
            for a in range(heads):
                for b in range(a + 1):
                    apart, alike = total_variation(weights[a], weights[b]), linear_cka(grams[a], grams[b])
                    distance[a, b] += apart / call.num_samples
                    similarity[a, b] += alike / call.num_samples
                    distance[b, a], similarity[b, a] = distance[a, b], similarity[a, b]
        found.append(HeadRedundancy(layer=call.name, distance=distance, similarity=similarity, num_queries=most))
    return found


def _mean_of_pairs(square: Tensor) -> float:
    heads = len(square)
    if heads < 2:
        return float("nan")
    return float(square[~torch.eye(heads, dtype=torch.bool)].nanmean())
