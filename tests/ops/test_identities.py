"""What docs/what-is-true.md says about the formulas themselves, and about those of the paper and its published code."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import KINDS, attend, make_inputs, relative_error

import mgk
from mgk.ops.feature_maps import elu

every_kind = pytest.mark.parametrize("kind", KINDS)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_one_gaussian_is_softmax_with_a_bias_for_each_key():
    """|q|^2 is the same for all keys of a row; what stays is q . k and a number of the key."""
    inputs = make_inputs(components=1, prior=None)
    key = inputs["key"][:, :, 0]
    bias = -key.square().sum(-1)[:, :, None] / (2 * math.sqrt(8))
    expected = F.scaled_dot_product_attention(inputs["query"], key, inputs["value"], attn_mask=bias)
    assert relative_error(attend(inputs, "reference"), expected) < 1e-12


def test_shifted_keys_need_one_exponential_per_pair():
    """With one variance the logit is s_ij + u_ir + w_jr, and sum_r exp(logit) is exp(s_ij) sum_r A_ir B_jr."""
    inputs = make_inputs(kind="shifted", components=3)
    query, key, shift = (inputs[name] for name in ("query", "key", "shift"))
    variance = math.sqrt(8)
    a = (query @ shift.mT / variance).exp()  # [B, H, N, M]
    bias = inputs["log_prior"][:, None] - shift.square().sum(-1)[:, None] / (2 * variance)
    b = (bias - (key.square().sum(-1)[..., None] / 2 + key @ shift.mT) / variance).exp()
    weight = (query @ key.mT / variance).exp() * (a @ b.mT)
    expected = weight / weight.sum(-1, keepdim=True)
    inputs.pop("value")
    assert relative_error(mgk.mixture_weights(**inputs), expected) < 1e-12


@pytest.mark.parametrize("components", [1, 2, 3])
def test_a_shifted_mixture_multiplies_softmax_by_a_matrix_of_rank_m(components):
    """The weights of smgk over those of softmax, from the same queries and keys."""
    inputs = make_inputs(kind="shifted", components=components, batch=1, heads=1)
    mixture = mgk.mixture_weights(**{name: inputs[name] for name in ("query", "key", "shift", "log_prior")})
    softmax = mgk.mixture_weights(inputs["query"], inputs["key"], similarity="dot")
    assert torch.linalg.matrix_rank(mixture / softmax, rtol=1e-9).item() == components


def test_one_shift_is_redundant():
    """The key projection has a bias: what is added to it can be taken from every shift."""
    inputs = make_inputs(kind="shifted")
    offset = normal(2, 1, 8)
    moved = {**inputs, "key": inputs["key"] + offset, "shift": inputs["shift"] - offset}
    assert relative_error(attend(moved), attend(inputs)) < 1e-12


def test_one_shift_is_a_constant_of_the_queries():
    """|q - k - b|^2 = |(q - b) - k|^2; and that is a dot product of q - b, but for the lengths of the keys."""
    query, key, shift = normal(2, 3, 7, 8), normal(2, 3, 9, 8), normal(3, 1, 8)
    variance = math.sqrt(8)
    shifted = mgk.mixture_weights(query, key, shift=shift)
    assert relative_error(mgk.mixture_weights(query - shift, key), shifted) < 1e-12
    product = mgk.mixture_weights(query - shift, key, similarity="dot")
    factor = (-key.square().sum(-1) / (2 * variance)).exp()[:, :, None]
    expected = product * factor
    assert relative_error(expected / expected.sum(-1, keepdim=True), shifted) < 1e-12
    # Under a dot product the same shift does nothing.
    none = mgk.mixture_weights(query, key, similarity="dot")
    assert relative_error(mgk.mixture_weights(query, key, shift=shift, similarity="dot"), none) < 1e-12


@pytest.mark.parametrize("components", [1, 2, 3])
def test_what_several_shifts_are_to_second_order(components):
    """One Gaussian with their mean, and with I - C / variance between query and key: what is left is of third order."""
    query, key, shift = normal(1, 1, 6, 8), normal(1, 1, 9, 8), normal(1, components, 8)
    log_prior = normal(1, components).log_softmax(-1)
    variance = math.sqrt(8)
    share = (log_prior - shift.square().sum(-1) / (2 * variance)).softmax(-1)[0]
    mean = share @ shift[0]
    covariance = (share[:, None] * (shift[0] - mean)).mT @ (shift[0] - mean)
    between = torch.eye(8, dtype=torch.float64) - covariance / variance
    errors = []
    for size in (1e-2, 1e-3):
        q, k = size * query, size * key
        weights = mgk.mixture_weights(q, k, shift=shift, log_prior=log_prior)[0, 0]
        column = (-k @ mean - ((k @ between) * k).sum(-1) / 2)[0, 0] / variance
        logits = (q @ between @ k.mT)[0, 0] / variance + column
        errors.append((weights.log() - logits.log_softmax(-1)).abs().max().item() / size**2)
    assert errors[1] < 0.2 * errors[0] + 1e-9
    assert torch.linalg.matrix_rank(covariance, rtol=1e-9).item() == components - 1


def test_a_key_of_zeros_is_not_neutral():
    """It is nearer to a query than other keys are, so padding has to be masked; under a dot product it scores 0."""
    query, key = normal(1, 1, 200, 64), normal(1, 1, 100, 64)
    key[:, :, 0] = 0
    distance = mgk.mixture_weights(query, key)[..., 0].mean() * 100
    product = mgk.mixture_weights(query, key, similarity="dot")[..., 0].mean() * 100
    assert distance > 10
    assert product < 1


@pytest.mark.parametrize(("distance", "product"), [("gaussian", "softmax"), ("mgk", "softmax-mgk")])
def test_with_qk_norm_distance_and_dot_product_start_equal(distance, product):
    """All queries and keys then have one length, until the gains of the norm are no longer equal."""
    layer, other = (mgk.build_attention(name, 24, 2, qk_norm=True).double() for name in (distance, product))
    other.load_state_dict(layer.state_dict())
    x = normal(2, 9, 24)
    assert relative_error(layer(x), other(x)) < 1e-9
    for each in (layer, other):
        torch.nn.init.constant_(each.k_norm.weight, 1.7)
    assert relative_error(layer(x), other(x)) < 1e-9
    gains = 1 + 0.5 * normal(12)
    with torch.no_grad():
        for each in (layer, other):
            each.k_norm.weight.copy_(gains)
    assert relative_error(layer(x), other(x)) > 1e-4


def test_dropped_constants_are_a_prior():
    """(2 pi variance)^(-D/2) is left out. With one variance it cancels; with a second, three times as large, it is a
    prior of 3^(D/2) to 1: 6,561 to 1 for a head of 16."""
    query, key = normal(1, 1, 7, 16), normal(1, 1, 2, 9, 16)
    variance = torch.tensor([4.0, 12.0], dtype=torch.float64)
    prior = torch.tensor([6561.0, 1.0], dtype=torch.float64).log()
    kept = mgk.mixture_log_density(query, key, variance=variance, normalized=True)
    dropped = mgk.mixture_log_density(query, key, variance=variance, log_prior=prior)
    difference = kept - dropped
    assert (difference - difference[0, 0, 0]).abs().max() < 1e-10


def test_a_likelihood_near_zero_has_no_constants():
    """The paper's 0.18 nats at D = 32: with constants even queries that lie on their keys have more than 57."""
    query = normal(1, 1, 1, 32)
    key = query.expand(1, 1, 5, 32)
    assert -mgk.mixture_log_density(query, key, normalized=True).item() > 57
    assert -mgk.mixture_log_density(query, key).item() == pytest.approx(0, abs=1e-12)


def mean_log_density(query, key, log_prior):
    return mgk.mixture_log_density(query, key, log_prior=log_prior, variance=1.0).mean().item()


def mean_log_density_of_pairs(query, key, log_prior):
    """Every query under every position alone: the mean over i and j of log sum_r prior_r exp(...)."""
    every = [mgk.mixture_log_density(query, key[..., j : j + 1, :], log_prior=log_prior, variance=1.0) for j in (0, 1)]
    return torch.stack(every).mean().item()


def test_the_m_step_of_the_paper_may_lower_the_likelihood_of_the_queries():
    """It averages p(r | i, j) over all pairs alike. EM would weigh a pair by its attention p(j | i)."""
    query = torch.tensor([-3.0, 4.0], dtype=torch.float64).view(1, 1, 2, 1)
    key = torch.tensor([[-4.0, 3.0], [-3.0, 1.0]], dtype=torch.float64).view(1, 1, 2, 2, 1)
    uniform = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    updated = mgk.mixture_responsibilities(query, key, log_prior=uniform, variance=1.0)[0].log()
    assert mean_log_density(query, key, updated) < mean_log_density(query, key, uniform) - 0.1

    logit = uniform[:, None] - (query[0, 0, :, None] - key[0, 0, :, None, :, 0]).square() / 2  # [M, Nq, Nk]
    joint = logit.transpose(0, 1).flatten(1).softmax(-1).view(2, 2, 2)  # p(r, j | i)
    weighted = joint.sum(2).mean(0).log()
    assert mean_log_density(query, key, weighted) > mean_log_density(query, key, uniform) + 0.1


def test_the_m_step_of_the_paper_raises_the_likelihood_of_the_pairs():
    for _ in range(50):
        query, key = 3 * normal(1, 1, 4, 1), 3 * normal(1, 1, 2, 2, 1)
        log_prior = normal(2).log_softmax(-1)
        before = mean_log_density_of_pairs(query, key, log_prior)
        log_prior = mgk.mixture_responsibilities(query, key, log_prior=log_prior, variance=1.0)[0].log()
        assert mean_log_density_of_pairs(query, key, log_prior) >= before - 1e-12


def test_exponentials_without_the_row_maximum_vanish():
    """As published: without an epsilon 0 / 0, with one rows that sum to less than 1. Ours sum to 1."""
    query = torch.randn(1, 1, 50, 64)
    for deviation, cap in ((2.0, 0.05), (6.0, 0.0)):
        key = deviation * torch.randn(1, 1, 50, 64)
        kernel = (-torch.cdist(deviation * query, key).square() / 16).exp()
        total = kernel.sum(-1, keepdim=True)
        assert (kernel / (total + 1e-6)).sum(-1).mean() <= cap
        assert (mgk.mixture_weights(deviation * query, key).sum(-1) - 1).abs().max() < 1e-5
    assert (kernel / total).isnan().all()


@every_kind
def test_keys_mixed_before_the_feature_map_are_linear_attention(kind):
    """The published MLK and sMLK of the Long Range Arena: phi(sum_r prior_r k_r), and no denominator. The mixed key is
    one projection of the token with one bias, so nothing is left of the mixture."""
    x, query, value = normal(2, 1, 9, 24), normal(2, 1, 9, 8), normal(2, 1, 9, 8)
    weight, bias, prior = normal(2, 24, 8) / 5, 2 * normal(2, 8), torch.tensor([0.3, 0.7], dtype=torch.float64)
    if kind == "shifted":
        weight = weight[:1].expand(2, -1, -1)
    mixed = sum(prior[r] * (x @ weight[r] + bias[r]) for r in range(2))
    published = F.elu(query) + 1
    published = published @ ((F.elu(mixed) + 1).mT @ value) / 3

    one_weight, one_bias = (prior[:, None, None] * weight).sum(0), (prior[:, None] * bias).sum(0)
    linear = mgk.linear_mixture_attention(query, x @ one_weight + one_bias, value, normalization="length")
    assert relative_error(linear, published) < 1e-12

    keys = torch.stack([x @ weight[r] + bias[r] for r in range(2)], dim=2)
    options = {"log_prior": prior.log(), "normalization": "length"}
    assert relative_error(mgk.linear_mixture_attention(query, keys, value, **options), published) > 1e-2


def test_mlk_is_linear_attention_with_one_key_that_is_not_linear():
    """elu + 1 takes every positive number once, so a mixture of features is the feature of some key."""

    def one_key(tokens):
        features = (prior[:, None, None] * elu(tokens @ weight)).sum(0)
        return torch.where(features > 1, features - 1, features.log())

    prior = torch.tensor([0.3, 0.7], dtype=torch.float64)
    x, weight = normal(9, 24), normal(2, 24, 8)
    query, value = normal(1, 1, 9, 8), normal(1, 1, 9, 8)
    mixture = mgk.linear_mixture_attention(query, (x @ weight)[None, None], value, log_prior=prior.log())
    single = mgk.linear_mixture_attention(query, one_key(x)[None, None], value)
    assert relative_error(mixture, single) < 1e-12
    assert relative_error(one_key(2 * x), 2 * one_key(x)) > 1e-2
