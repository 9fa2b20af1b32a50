"""Ranks of matrices that are known, and of attention."""

import math

import numpy as np
import pytest
import torch
from analysis_cases import FixedCall, make_call, make_record

from mgk.analysis import attention_rank, matrix_rank


def stochastic(rows, columns, rank, seed=0):
    """A row-stochastic matrix of this rank: every row mixes the same few distributions."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(rows, rank, generator=generator, dtype=torch.float64)
    profiles = torch.rand(rank, columns, generator=generator, dtype=torch.float64)
    return (shares / shares.sum(-1, keepdim=True)) @ (profiles / profiles.sum(-1, keepdim=True))


@pytest.mark.parametrize("shape", [(40, 40), (20, 60), (60, 20)])
def test_a_matrix_of_rank_three(shape):
    matrix = stochastic(*shape, rank=3)
    found = matrix_rank(matrix)
    assert found.rank == found.numerical_rank == 3
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    assert np.allclose(found.singular_values.numpy(), expected, atol=1e-14)
    assert 1 < found.effective_rank < 3


def test_all_ranks_of_an_identity():
    found = matrix_rank(torch.eye(17))
    assert (found.rank, found.numerical_rank) == (17, 17)
    assert found.effective_rank == pytest.approx(17)


def test_uniform_attention_has_one_direction():
    found = matrix_rank(torch.full((50, 50), 1 / 50, dtype=torch.float64))
    assert (found.rank, found.numerical_rank) == (1, 1)
    assert found.effective_rank == pytest.approx(1)


def test_effective_rank_by_hand():
    values = torch.tensor([4.0, 2.0, 1.0, 1.0])
    share = values / 8
    expected = math.exp(-float((share * share.log()).sum()))
    assert matrix_rank(values.diag()).effective_rank == pytest.approx(expected, rel=1e-6)


def test_the_threshold_is_absolute_and_the_noise_is_not():
    """1e-5 is above the paper's threshold, and below what fp32 can tell from rounding beside a singular value of 1."""
    values = torch.ones(200, dtype=torch.float64)
    values[100:] = 1e-5
    values[150:] = 1e-7
    found = matrix_rank(values.diag())
    assert found.rank == 150
    assert found.numerical_rank == 100
    assert matrix_rank(values.diag(), threshold=1e-8).rank == 200
    assert matrix_rank(100 * values.diag()).rank == 200


def test_fp32_noise_is_next_to_the_threshold():
    """Why everything is in fp64, whatever the model computes in."""
    matrix = stochastic(500, 500, rank=5)
    noise = float(torch.linalg.svdvals(matrix.float())[5])
    assert 1e-7 < noise < 1e-5
    assert float(matrix_rank(matrix).singular_values[5]) < 1e-14
    # An fp32 matrix is decomposed in fp64 as well: what is left is the rounding of its entries.
    assert float(matrix_rank(matrix.float()).singular_values[5]) < noise / 50


def test_a_matrix_of_zeros():
    found = matrix_rank(torch.zeros(4, 4))
    assert (found.rank, found.numerical_rank, found.effective_rank) == (0, 0, 0.0)


def test_ranks_of_every_head_and_sample():
    weights = torch.stack(
        [torch.stack([stochastic(30, 30, rank, seed=rank) for rank in row]) for row in ((1, 3), (2, 5))]
    )
    (found,) = attention_rank(make_record(FixedCall(weights)))
    assert [[matrix.rank for matrix in heads] for heads in found.matrices] == [[1, 3], [2, 5]]
    assert found.num_queries == found.of_queries == found.num_keys == [30, 30]


def test_rows_are_taken_evenly_and_counted():
    call = make_call("mgk", queries=40)
    (part,) = attention_rank(make_record(call), num_queries=10)
    (whole,) = attention_rank(make_record(call), num_queries=None)
    assert (part.num_queries, part.of_queries, part.num_keys) == ([10], [40], [40])
    assert whole.num_queries == [40]
    expected = torch.linalg.svdvals(call.weights(0, 1, torch.arange(0, 40, 4)))
    assert torch.allclose(part.matrices[0][1].singular_values, expected, atol=1e-14)
    assert all(few.rank <= all_.rank for few, all_ in zip(part.matrices[0], whole.matrices[0], strict=True))


def test_the_number_of_threads_comes_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix_rank(torch.eye(3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_bad_matrices():
    with pytest.raises(ValueError, match=r"must have shape \[rows, columns\].*got \[2, 3, 4\]"):
        matrix_rank(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"got \[0, 4\]"):
        matrix_rank(torch.ones(0, 4))
    with pytest.raises(ValueError, match="matrix must hold finite numbers, got nan"):
        matrix_rank(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="threshold must be above 0, got 0"):
        matrix_rank(torch.eye(2), threshold=0)
