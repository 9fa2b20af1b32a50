"""Attention maps, pooled to be looked at."""

import pytest
import torch
from analysis_cases import FixedCall, make_call, make_record

from mgk.analysis import pooled_maps


def test_short_sequences_have_a_cell_for_each_pair():
    weights = torch.rand(1, 2, 7, 7).double().softmax(-1)
    (found,) = pooled_maps(make_record(FixedCall(weights)))
    assert torch.allclose(found.weights, 7 * weights[0].float())
    assert (found.num_queries, found.num_keys) == (7, 7)


def test_long_sequences_are_averaged():
    weights = torch.rand(1, 1, 12, 12).double().softmax(-1)
    (found,) = pooled_maps(make_record(FixedCall(weights)), size=4)
    blocks = weights[0, 0].unflatten(0, (4, 3)).unflatten(2, (4, 3)).mean(dim=(1, 3))
    assert torch.allclose(found.weights[0], 12 * blocks.float(), atol=1e-6)


def test_uniform_attention_is_one_everywhere():
    call = make_call("mgk", key=torch.ones(1, 2, 2, 12, 4).double(), query=torch.rand(1, 2, 12, 4).double())
    (found,) = pooled_maps(make_record(call), size=5, num_queries=10)
    assert torch.allclose(found.weights, torch.ones(2, 5, 5), atol=1e-5)
    assert found.num_queries == 12


def test_bad_requests():
    with pytest.raises(ValueError, match=r"sample must lie in \[0, 1\), got 3"):
        pooled_maps(make_record(make_call()), sample=3)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        pooled_maps(make_record(make_call()), size=0)
