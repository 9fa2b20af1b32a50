"""The likelihood of queries, against the formula written out."""

import math

import pytest
import torch
from analysis_cases import make_call, make_record

from mgk.analysis import query_density


def nll(query, keys, prior, variance, normalized=False):
    """Mean of ``-log mean_j sum_r prior_r exp(-|q - k_jr|^2 / 2 variance_r)``; keys ``[M, N, D]``."""
    square = (query[None, :, None] - keys[:, None]).square().sum(-1)
    logit = prior.log()[:, None, None] - 0.5 * square / variance[:, None, None]
    if normalized:
        logit = logit - 0.5 * query.shape[-1] * (2 * math.pi * variance).log()[:, None, None]
    return -(logit.logsumexp(dim=(0, 2)) - math.log(keys.shape[1])).mean()


def learn(call, seed=1):
    """Give a layer priors, and variances where it learns them, that are not the first ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in call.attention.named_parameters():
            if name in ("prior.logits", "variance.log_variance"):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return call


@pytest.mark.parametrize("options", [{}, {"learn_variance": True}, {"variance_scale": (1.0, 3.0)}])
@pytest.mark.parametrize("preset", ["mgk", "smgk"])
def test_against_the_formula(preset, options):
    call = learn(make_call(preset, samples=2, heads=3, queries=14, **options))
    (found,) = query_density(make_record(call))
    assert found.num_queries == 28
    variances = torch.as_tensor(call.attention.variance(), dtype=torch.float64).detach().expand(3, 2)
    priors = call.attention.prior().detach().exp()
    for head in range(3):
        prior, variance = priors[head], variances[head]
        expected = dict.fromkeys(("mixture", "merged", "normalized_mixture", "normalized_merged", "first"), 0.0)
        for sample in range(2):
            query, keys = call.query[sample, head], call.component_keys(sample)[head]
            merged = (prior[:, None, None] * keys).sum(0, keepdim=True)
            width, one = (prior * variance).sum()[None], torch.ones(1).double()
            expected["mixture"] += nll(query, keys, prior, variance) / 2
            expected["merged"] += nll(query, merged, one, width) / 2
            expected["normalized_mixture"] += nll(query, keys, prior, variance, normalized=True) / 2
            expected["normalized_merged"] += nll(query, merged, one, width, normalized=True) / 2
            expected["first"] += nll(query, keys[:1], one, variance[:1]) / 2
        first = expected.pop("first")
        assert float(found.components[0, head]) == pytest.approx(float(first), rel=1e-10)
        for name, value in expected.items():
            assert float(getattr(found, name)[head]) == pytest.approx(float(value), rel=1e-10), name


def test_one_component_is_its_own_mixture():
    (found,) = query_density(make_record(make_call("gaussian")))
    assert torch.equal(found.mixture, found.merged)
    assert torch.equal(found.mixture, found.components[0])


def test_equal_components_gain_nothing():
    call = make_call("mgk")
    call = make_call("mgk", key=call.key[:, :, :1].repeat(1, 1, 2, 1, 1))
    (found,) = query_density(make_record(call))
    assert torch.allclose(found.mixture, found.merged, atol=1e-12)


def test_two_clusters_are_explained_by_two_components():
    """Queries lie around two points, and every position has a key at each: no single Gaussian is near both."""
    torch.manual_seed(0)
    centre = torch.tensor([4.0, 0.0, 0.0, 0.0]).double()
    query = torch.randn(1, 1, 40, 4).double() + torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)[:, None] * centre
    key = torch.stack([torch.randn(30, 4).double() + centre, torch.randn(30, 4).double() - centre])[None, None]
    (found,) = query_density(make_record(make_call("mgk", heads=1, query=query, key=key)))
    assert float(found.mixture) + 1 < float(found.merged)
    assert all(float(found.mixture) + 1 < float(alone) for alone in found.components)


def test_padding_and_the_future_do_not_count():
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 9:] = False
    whole = make_call("mgk", key_mask=mask, query_mask=mask, is_causal=True)
    (found,) = query_density(make_record(whole))
    cut = make_call("mgk", query=whole.query[:, :, :9], key=whole.key[..., :9, :], is_causal=True)
    (expected,) = query_density(make_record(cut))
    assert found.num_queries == 9
    assert torch.allclose(found.mixture, expected.mixture, atol=1e-12)
    query, keys = whole.query[0, 0, 0], whole.key[0, 0, :, 0]
    first = -torch.log(0.5 * torch.exp(-0.5 * (query - keys).square().sum(-1) / 2.0).sum())
    (alone,) = query_density(
        make_record(make_call("mgk", heads=2, query=whole.query[:, :, :1], key=whole.key[..., :1, :], is_causal=True))
    )
    assert float(alone.mixture[0]) == pytest.approx(float(first), rel=1e-10)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("mlk", "needs Gaussian keys, got linear attention in layer 1"),
        ("softmax", "got similarity='dot' in layer 1: a dot product is no density"),
    ],
)
def test_where_there_is_no_density(preset, message):
    with pytest.raises(ValueError, match=message):
        query_density(make_record(make_call(preset)))
