"""What a mixture has learned, read from layers whose parameters are known."""

import pytest
import torch
from analysis_cases import make_call, make_record
from model_cases import make_inputs, make_model

from mgk.analysis import learned_mixture, record_attention


def test_priors_and_variances():
    call = make_call("mgk", heads=2, learn_variance=True)
    logits = torch.tensor([[0.0, 0.0], [1.0, -1.0]]).double()
    with torch.no_grad():
        call.attention.prior.logits.copy_(logits)
        call.attention.variance.log_variance.copy_(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    (found,) = learned_mixture(make_record(call))
    assert torch.allclose(found.prior, logits.softmax(-1))
    assert torch.allclose(found.variance, torch.tensor([[0.0, 1.0], [2.0, 3.0]]).double().exp())


def test_where_nothing_is_learned():
    (found,) = learned_mixture(make_record(make_call("mgk-hard", heads=3, variance_scale=(1.0, 3.0), head_dim=4)))
    assert torch.equal(found.prior, torch.full((3, 2), 0.5).double())
    assert torch.allclose(found.variance, torch.tensor([[2.0, 6.0]]).double().expand(3, 2))


def test_distances_by_hand():
    """Components 3 apart along one axis, tokens on a line through another."""
    key = torch.zeros(1, 1, 2, 5, 4).double()
    key[0, 0, 1, :, 0] = 3.0
    key[..., 1] = torch.arange(5)
    (found,) = learned_mixture(make_record(make_call("mgk", heads=1, key=key, queries=5)))
    assert torch.allclose(found.distance[0], torch.tensor([[0.0, 3.0], [3.0, 0.0]]).double())
    # Tokens at 0 .. 4 are 2, 1, 0, 1, 2 from their mean.
    assert float(found.spread[0]) == pytest.approx(1.2)
    assert found.num_tokens == 5


def test_shifts_are_the_distance():
    call = make_call("smgk", heads=2, num_components=3)
    (found,) = learned_mixture(make_record(call))
    shift = call.attention.keys.shift.detach()
    assert torch.equal(found.shift, shift)
    assert found.projection_distance is None
    assert found.projection.shape == (2, 1, 4, 8)
    assert torch.allclose(found.distance, (shift[:, :, None] - shift[:, None, :]).norm(dim=-1), atol=1e-12)
    assert torch.allclose(found.keys, call.key[0, :, None] + shift[:, :, None])


def test_projections_of_each_component():
    call = make_call("mgk", heads=2)
    with torch.no_grad():
        # Head 2: the second component is the opposite of the first.
        weight = call.attention.k_proj.weight.view(2, 2, 4, 8)
        weight[1, 1] = -weight[1, 0]
    (found,) = learned_mixture(make_record(call))
    assert torch.equal(found.projection, weight.detach())
    assert found.shift is None
    assert float(found.projection_distance[1, 0, 1]) == pytest.approx(2)
    assert float(found.projection_distance[0, 0, 0]) == 0
    x = torch.randn(1, 3, 8).double()
    with torch.no_grad():
        key, _ = call.attention.project_key(x)
    bias = call.attention.k_proj.bias.view(2, 2, 4).detach()
    assert torch.allclose(torch.einsum("hrde,ne->hrnd", found.projection, x[0]) + bias[:, :, None], key[0])


def test_keys_of_the_first_tokens_without_padding():
    model, inputs = make_model("classifier", "smgk"), make_inputs("classifier", padding_side="left")
    inputs = {name: tensor.flip(0) for name, tensor in inputs.items()}
    found = learned_mixture(record_attention(model, **inputs), num_tokens=4)
    # The first sample has 4 tokens of padding and 5 others.
    assert found[0].keys.shape == (4, 2, 4, 8)
    assert found[0].num_tokens == 5 + 7 + 9


def test_linear_attention_has_no_variance():
    (found,) = learned_mixture(make_record(make_call("mlk")))
    assert found.variance is None
    assert torch.allclose(found.prior, torch.full((2, 2), 0.5).double())
