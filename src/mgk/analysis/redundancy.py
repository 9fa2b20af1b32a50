"""Whether heads do the same: distances and similarities between the attention matrices of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.record import NUM_QUERIES, AttentionRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRedundancy:
    """How alike the heads of one layer are."""

    layer: str
    """Its name in the record."""
    distance: Tensor
    """``[H, H]``: mean over queries and samples of ``1/2 sum_j |a_ij - b_ij|``, the share of the attention that two
    heads put elsewhere: 0 for heads that agree, 1 for heads that never look at the same key."""
    similarity: Tensor
    """``[H, H]``: linear CKA of the two matrices, mean over samples: 1 for heads that tell queries apart in the same
    way, near 0 for unrelated ones. NaN where a head attends alike for every query and so tells none apart."""
    num_queries: int
    """Rows of each matrix that were compared, at most."""

    @property
    def mean_distance(self) -> float:
        """Over all pairs of different heads; NaN where there is one head."""
        return _mean_of_pairs(self.distance)

    @property
    def mean_similarity(self) -> float:
        """Over all pairs of different heads; NaN where there is one head."""
        return _mean_of_pairs(self.similarity)


def total_variation(one: Tensor, other: Tensor) -> float:
    """``mean_i 1/2 sum_j |one_ij - other_ij|`` of two attention matrices."""
    return float(0.5 * (one - other).abs().sum(dim=-1).mean())


def centred_gram(matrix: Tensor) -> Tensor:
    """``X X^T`` of the matrix with the mean of its rows taken away, ``[rows, rows]``; 0 where all rows are the same."""
    centred = matrix - matrix.mean(dim=0, keepdim=True)
    if centred.norm() <= len(matrix) * torch.finfo(matrix.dtype).eps * matrix.norm():
        # What is left is the rounding of the mean, in which any two matrices are alike.
        centred = torch.zeros_like(centred)
    return centred @ centred.T


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two representations of the same rows (Kornblith et al., 2019), from their centred Gram matrices.

    ::

        <K, L> / (|K| |L|)        K = X X^T, L = Y Y^T, columns of X and Y centred

    It does not change where columns are rotated or all are scaled. NaN where one of them is constant over the rows.
    """
    scale = one.norm() * other.norm()
    return float((one * other).sum() / scale) if float(scale) > 0 else float("nan")


def head_redundancy(record: AttentionRecord, *, num_queries: int | None = NUM_QUERIES) -> list[HeadRedundancy]:
    """Compare all pairs of heads of each layer.

    CKA costs the square of the queries times the keys: of more than ``num_queries`` queries it takes so many, evenly
    spaced. The matrices are computed in fp64 and compared in it.

    Args:
        record: of a model and a batch.
        num_queries: rows to compare at most; ``None``: all.
    """
    found = []
    for call in record.calls:
        heads = call.num_heads
        distance, similarity = torch.zeros(2, heads, heads, dtype=torch.float64)
        most = 0
        for sample in range(call.num_samples):
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
