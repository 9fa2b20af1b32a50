"""How alike heads are, where the answer is known."""

import math

import pytest
import torch
from analysis_cases import FixedCall, make_call, make_record

from mgk.analysis import head_redundancy
from mgk.analysis.redundancy import centred_gram, linear_cka


def random_weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


def test_identical_heads():
    one = random_weights(20, 20)
    (found,) = head_redundancy(make_record(FixedCall(torch.stack([one, one, one])[None])))
    assert torch.equal(found.distance, torch.zeros(3, 3).double())
    assert torch.allclose(found.similarity, torch.ones(3, 3).double(), atol=1e-12)
    assert found.mean_distance == 0
    assert found.mean_similarity == pytest.approx(1)


def test_heads_that_never_look_at_the_same_key():
    """Each query attends to itself, or to its neighbour."""
    identity = torch.eye(10)
    (found,) = head_redundancy(make_record(FixedCall(torch.stack([identity, identity.roll(1, dims=1)])[None])))
    assert found.distance[0, 1] == found.distance[1, 0] == 1
    # Both tell all queries apart, in the same way: a permutation of the keys is a rotation.
    assert found.similarity[0, 1] == pytest.approx(1)


def test_distance_by_hand():
    one = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    other = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])
    (found,) = head_redundancy(make_record(FixedCall(torch.stack([one, other])[None])))
    assert float(found.distance[0, 1]) == pytest.approx(0.125)


def test_cka_against_its_definition():
    """HSIC with explicit centring matrices, over two samples."""
    weights = random_weights(2, 2, 15, 15)
    (found,) = head_redundancy(make_record(FixedCall(weights)))
    centring = torch.eye(15).double() - 1 / 15
    expected = 0.0
    for sample in weights:
        k, l = (each @ each.T for each in sample)  # noqa: E741

        def hsic(a, b):
            return torch.trace(a @ centring @ b @ centring)

        expected += float(hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()) / 2
    assert float(found.similarity[0, 1]) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(found.similarity, found.similarity.T)


def test_cka_ignores_rotation_and_scale():
    x = torch.randn(30, 8).double()
    rotation, _ = torch.linalg.qr(torch.randn(8, 8).double())
    assert linear_cka(centred_gram(x), centred_gram(3 * x @ rotation + 5)) == pytest.approx(1)
    assert linear_cka(centred_gram(x), centred_gram(torch.randn(30, 8).double())) < 0.6


def test_a_head_that_tells_no_query_apart_has_no_similarity():
    uniform, other = torch.full((9, 9), 1 / 9), random_weights(9, 9)
    (found,) = head_redundancy(make_record(FixedCall(torch.stack([uniform.double(), other])[None])))
    assert math.isnan(float(found.similarity[0, 1]))
    assert float(found.similarity[1, 1]) == pytest.approx(1)
    assert 0 < float(found.distance[0, 1]) < 1


def test_one_head_has_nobody_to_compare_with():
    (found,) = head_redundancy(make_record(FixedCall(random_weights(1, 1, 5, 5))))
    assert math.isnan(found.mean_distance)
    assert math.isnan(found.mean_similarity)


def test_a_layer_with_equal_heads():
    call = make_call("smgk", heads=1, queries=16)
    twice = make_call(
        "smgk", heads=2, queries=16, query=call.query.repeat(1, 2, 1, 1), key=call.key.repeat(1, 2, 1, 1),
        shift=call.shift.repeat(2, 1, 1),
    )  # fmt: skip
    (found,) = head_redundancy(make_record(twice), num_queries=8)
    assert found.num_queries == 8
    assert found.mean_distance < 1e-12
    assert found.mean_similarity == pytest.approx(1, abs=1e-10)


def test_heads_that_attend_alike_for_every_query_have_no_cka():
    """Their rows differ by the rounding of a mean, in which all heads would be alike."""
    one, other = (torch.rand(1, 64).double().softmax(-1).expand(100, 64) for _ in range(2))
    for gram in (centred_gram(other), centred_gram(torch.rand(100, 64).double())):
        assert math.isnan(linear_cka(centred_gram(one), gram))
