"""Posteriors of components, token by token."""

import pytest
import torch
from analysis_cases import make_call, make_record

import mgk
from mgk.analysis import token_responsibilities


def posterior_by_hand(call, head):
    """``[M, Nq, Nk]``, unmasked, and the weights."""
    keys = call.component_keys(0)[head]
    square = (call.query[0, head][None, :, None] - keys[:, None]).square().sum(-1)
    logit = call.attention.prior().detach()[head][:, None, None] - 0.5 * square / 2.0
    return logit.softmax(0), logit.logsumexp(0).softmax(-1)


@pytest.mark.parametrize("preset", ["mgk", "smgk"])
def test_against_the_formula(preset):
    call = make_call(preset, heads=2, num_components=3, queries=9, keys=11)
    with torch.no_grad():
        call.attention.prior.logits.copy_(torch.randn(2, 3))
    (found,) = token_responsibilities(make_record(call))
    for head in range(2):
        posterior, weight = posterior_by_hand(call, head)
        assert torch.allclose(found.of_keys[head], posterior.mean(1).T, atol=1e-12)
        assert torch.allclose(found.of_queries[head], torch.einsum("ij,rij->ir", weight, posterior), atol=1e-12)
        assert torch.allclose(found.mean[head], posterior.mean(dim=(1, 2)), atol=1e-12)


@pytest.mark.parametrize("preset", ["mgk", "smgk-em", "mgk-hard", "softmax-mgk"])
def test_they_sum_to_one(preset):
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 10:] = False
    call = make_call(preset, is_causal=True, key_mask=mask, query_mask=mask)
    (found,) = token_responsibilities(make_record(call))
    assert found.keys.tolist() == found.queries.tolist() == list(range(10))
    for each in (found.of_queries, found.of_keys, found.mean):
        assert torch.allclose(each.sum(-1), torch.ones(each.shape[:-1]).double(), atol=1e-12)
        assert bool((each >= 0).all())


def test_the_mean_is_the_e_step_of_the_library(monkeypatch):
    """In blocks of a few rows."""
    from mgk.analysis import responsibilities

    monkeypatch.setattr(responsibilities, "BLOCK_ELEMENTS", 100)
    call = make_call("smgk", queries=20, is_causal=True)
    (found,) = token_responsibilities(make_record(call))
    expected = mgk.mixture_responsibilities(
        call.query, call.key, shift=call.shift.detach(), log_prior=call.attention.prior().detach(), is_causal=True
    )
    assert torch.allclose(found.mean, expected, atol=1e-10)


def test_equal_components_answer_by_their_prior():
    key = make_call("mgk").key[:, :, :1].repeat(1, 1, 2, 1, 1)
    call = make_call("mgk", key=key)
    with torch.no_grad():
        call.attention.prior.logits.copy_(torch.tensor([[0.0, 2.0], [1.0, 1.0]]))
    (found,) = token_responsibilities(make_record(call))
    prior = call.attention.prior().detach().exp()
    assert torch.allclose(found.of_keys, prior[:, None].expand(2, 12, 2))
    assert torch.allclose(found.of_queries, prior[:, None].expand(2, 12, 2))


def test_hard_assignment_is_all_or_nothing():
    call = make_call("mgk-hard", queries=1)
    (found,) = token_responsibilities(make_record(call))
    assert set(found.of_keys.flatten().tolist()) == {0.0, 1.0}
    square = (call.query[0, :, None, :1] - call.component_keys(0)).square().sum(-1)
    assert torch.equal(found.of_keys[..., 0] == 1, (square[:, 0] < square[:, 1]))


def test_the_component_beside_the_queries_answers():
    key = torch.zeros(1, 1, 2, 6, 4).double()
    key[:, :, 1] = 100.0
    near, far = torch.zeros(1, 1, 3, 4).double(), torch.full((1, 1, 3, 4), 100.0).double()
    (found,) = token_responsibilities(
        make_record(make_call("mgk", heads=1, query=torch.cat([near, far], dim=2), key=key))
    )
    assert torch.allclose(found.of_queries[0, :, 0], torch.tensor([1.0, 1, 1, 0, 0, 0]).double())
    assert torch.allclose(found.of_keys[0, :, 0], torch.full((6,), 0.5).double())


def test_a_query_that_sees_nothing_gets_nothing():
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask[..., 3, :] = False
    mask[..., 5] = False
    (found,) = token_responsibilities(make_record(make_call("mgk", attn_mask=mask)))
    assert torch.equal(found.of_queries[:, 3], torch.zeros(2, 2).double())
    assert torch.equal(found.of_keys[:, 5], torch.zeros(2, 2).double())
    assert bool(found.of_queries.isfinite().all())


def test_where_there_are_no_components():
    with pytest.raises(ValueError, match="need at least two components, got one in layer 1"):
        token_responsibilities(make_record(make_call("gaussian")))
    with pytest.raises(ValueError, match="got linear attention in layer 1"):
        token_responsibilities(make_record(make_call("mlk")))
    with pytest.raises(ValueError, match=r"sample must lie in \[0, 1\), got 1"):
        token_responsibilities(make_record(make_call("mgk")), sample=1)
