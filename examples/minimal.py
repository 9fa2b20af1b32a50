"""Attention with a mixture of Gaussian keys, equation by equation, in plain PyTorch.

Every position j holds M keys k_jr instead of one. A query q_i is seen as drawn from the mixture of Gaussians that the
keys span, and its attention to j is the posterior probability that it came from one of j's components:

    p(q_i | j) = sum_r prior_r N(q_i; k_jr, variance)
    weight_ij  = p(q_i | j) / sum_j' p(q_i | j')            out_i = sum_j weight_ij v_j

The library computes the same numbers faster, in linear memory, for every dtype and mask. Run this file to see it.
"""

import math

import torch
from torch import Tensor


def mixture_attention(query: Tensor, key: Tensor, value: Tensor, prior: Tensor) -> Tensor:
    """query [B, H, N, D], key [B, H, M, N, D], value [B, H, N, D], prior [H, M] -> [B, H, N, D]."""
    variance = math.sqrt(query.shape[-1])

    # |q_i - k_jr|^2 for every query i, position j and component r                             [B, H, M, N, N]
    difference = query[:, :, None, :, None, :] - key[:, :, :, None, :, :]
    squared_distance = difference.square().sum(-1)

    # log( prior_r exp(-|q_i - k_jr|^2 / 2 variance) ); the Gaussian's constant is the same for all, and cancels
    logit = prior.log()[:, :, None, None] - squared_distance / (2 * variance)

    # the mixture: sum over components; the posterior over positions: softmax over j           [B, H, N, N]
    weight = logit.logsumexp(dim=2).softmax(dim=-1)
    return weight @ value


def mgk(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, prior: Tensor) -> Tensor:
    """MGK: each component has its own projection, k_jr = W_r x_j. x [B, N, E], w_k [H, M, E, D]."""
    query = torch.einsum("bne,hed->bhnd", x, w_q)
    key = torch.einsum("bne,hred->bhrnd", x, w_k)
    value = torch.einsum("bne,hed->bhnd", x, w_v)
    return mixture_attention(query, key, value, prior)


def smgk(x: Tensor, w_q: Tensor, w_k: Tensor, shift: Tensor, w_v: Tensor, prior: Tensor) -> Tensor:
    """sMGK: one projection and M shifts, k_jr = W x_j + b_r. x [B, N, E], w_k [H, E, D], shift [H, M, D]."""
    query = torch.einsum("bne,hed->bhnd", x, w_q)
    key = torch.einsum("bne,hed->bhnd", x, w_k)[:, :, None] + shift[:, :, None, :]
    value = torch.einsum("bne,hed->bhnd", x, w_v)
    return mixture_attention(query, key, value, prior)


if __name__ == "__main__":
    import mgk as library

    torch.manual_seed(0)
    batch, length, embed, heads, components, dim = 2, 64, 32, 4, 2, 8
    x = torch.randn(batch, length, embed)
    w_q, w_v, w_k = (torch.randn(heads, embed, dim) / math.sqrt(embed) for _ in range(3))
    shift = torch.randn(heads, components, dim)
    prior = torch.randn(heads, components).softmax(-1)

    by_hand = smgk(x, w_q, w_k, shift, w_v, prior)
    q, k, v = (torch.einsum("bne,hed->bhnd", x, w) for w in (w_q, w_k, w_v))
    by_library = library.mixture_attention(q, k, v, shift=shift, log_prior=prior.log())
    print(f"sMGK by hand and by the library differ by at most {(by_hand - by_library).abs().max():.1e}")
