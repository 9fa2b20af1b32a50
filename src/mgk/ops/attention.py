"""Attention with a mixture of keys: the public functions and their documentation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.ops.autograd import with_zero_gradients
from mgk.ops.dispatch import (
    BACKENDS,
    STATISTICS_BACKENDS,
    attend,
    log_normaliser,
    responsibility_sums,
    weights,
)
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import check_choice, make_problem


def mixture_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    assignment: str = "soft",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""Compute attention in which each key position holds a mixture of M keys.

    For query i, key position j and component r::

        logit[i,j,r] = log_prior[r] + similarity(q_i, k_jr; variance[r])
          gaussian:   -|q_i - k_jr|^2 / (2 variance[r])
          dot:         q_i . k_jr / variance[r]
        weight[i,j]  = softmax over j of ( soft: logsumexp_r logit    hard: max_r similarity )
        out[i]       = sum_j weight[i,j] v_j

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, Nk, D]`` for one component or shifted keys. ``H`` is a multiple of
            ``Hkv``: ``H / Hkv`` neighbouring query heads share a key/value head (multi-query, grouped-query).
        value: ``[B, Hkv, Nk, Dv]``.
        shift: ``[Hkv, M, D]``: the key of component r at position j is ``key_j + shift_r``.
        log_prior: ``[M]``, ``[Hkv, M]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``. ``None`` is uniform. It need not be
            normalised, and -inf switches a component off. The last two forms give every key position a prior of its
            own, shared by all samples or separate for each.
        variance: a number, ``[M]`` or ``[Hkv, M]``. ``None`` is ``sqrt(D)``. A number lets the fast backends rely on
            all components having the same variance.
        similarity: ``"gaussian"`` or ``"dot"``.
        assignment: ``"soft"`` sums over the components, ``"hard"`` takes the most similar one alone. Hard assignment
            ignores the prior, whose gradient is zero, and components that tie share the gradient evenly.
        is_causal: query i sees the keys up to ``i + Nk - Nq`` (aligned bottom-right).
        key_mask: bool ``[B, Nk]``, True = attend.
        query_mask: bool ``[B, Nq]``, False = padded query, whose output is 0.
        attn_mask: bool, broadcastable to ``[B, H, Nq, Nk]``, True = attend.
        dropout_p: probability of dropping the normalised weight of a pair (i, j).
        backend: ``"auto"`` picks the fastest one that supports the call. ``"reference"`` writes out the equations and
            materialises every pair, ``"chunked"`` supports every option in linear memory, ``"cpu"`` works in tiles that
            fit the cache of a CPU, ``"sdpa"`` uses PyTorch's fused kernels, and ``"triton"`` our own for GPUs.

    Returns:
        ``[B, H, Nq, Dv]`` in the dtype of ``query``. A row that sees no key is 0, and so is its gradient.
    """
    check_choice("backend", backend, BACKENDS)
    mixture = Mixture(shift, log_prior, variance, similarity, assignment)
    visibility = Visibility(is_causal, key_mask, query_mask, attn_mask)
    return attend(make_problem(query, key, value, mixture, visibility, dropout_p), backend)


def mixture_weights(
    query: Tensor,
    key: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    assignment: str = "soft",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The attention matrix ``weight[i,j]`` of :func:`mixture_attention`, ``[B, H, Nq, Nk]``, materialised for analysis.

    Each row sums to 1, or is 0 where the query sees no key.
    """
    mixture = Mixture(shift, log_prior, variance, similarity, assignment)
    return weights(make_problem(query, key, None, mixture, Visibility(is_causal, key_mask, query_mask, attn_mask)))


def mixture_log_density(
    query: Tensor,
    key: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    normalized: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Log-density of each query under the mixture of its visible keys, ``[B, H, Nq]``. Differentiable.

    ::

        log (1/n_i) sum_j sum_r prior[r] exp(similarity(q_i, k_jr))        n_i = number of keys that query i sees

    The result is fp32, or fp64 for fp64 inputs. Its negative mean is the paper's NLL. ``normalized=True`` keeps the
    constants ``(2 pi variance[r])^(-D/2)`` of the Gaussians, which attention drops; if the prior sums to one, the
    result is then the logarithm of a proper density. A query that sees no key, or is padding, gets -inf. Memory is
    linear in the sequence length.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    if normalized and similarity == "dot":
        raise ValueError("normalized=True needs similarity='gaussian', got 'dot': a dot product is no density")
    mixture = Mixture(shift, log_prior, variance, similarity)
    problem = make_problem(query, key, None, mixture, Visibility(is_causal, key_mask, query_mask, attn_mask))
    if 0 in problem.query.shape or problem.key.shape[3] == 0:
        empty = torch.full(problem.query.shape[:3], -math.inf, dtype=problem.compute_dtype, device=problem.query.device)
        return with_zero_gradients(empty, problem.query, problem.key, *problem.parameters)
    components = problem.num_components
    prior = problem.log_prior
    if prior is None:
        shape = (problem.key.shape[1], components, 1)
        prior = torch.full(shape, -math.log(components), dtype=problem.compute_dtype, device=problem.query.device)
    if normalized:
        half_dim = 0.5 * problem.query.shape[-1]
        if isinstance(problem.variance, Tensor):
            prior = prior - half_dim * (2 * math.pi * problem.variance.to(prior.dtype)).log()[:, :, None]
        else:
            prior = prior - half_dim * math.log(2 * math.pi * problem.variance)
    problem = problem._replace(log_prior=prior)
    density = log_normaliser(problem, backend)
    density = density - problem.count_visible_keys().to(density.dtype).clamp(min=1).log()
    if problem.query_mask is not None:
        density = density.masked_fill(~problem.query_mask[:, None], -math.inf)
    return density


def mixture_responsibilities(
    query: Tensor,
    key: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Mean posterior of each component over all visible pairs (i, j), ``[Hkv, M]``: the E-step. Not differentiable.

    ::

        p(r | i, j) = prior[r] exp(similarity(q_i, k_jr)) / sum_s prior[s] exp(similarity(q_i, k_js))

    ``reduction="sum"`` returns the sum over pairs instead, which can be added up over batches and devices; divided by
    its own sum over components, it gives the mean. If no pair is visible, the result is 0. Memory is linear in the
    sequence length.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    check_choice("reduction", reduction, ("mean", "sum"))
    mixture = Mixture(shift, log_prior, variance, similarity)
    problem = make_problem(query, key, None, mixture, Visibility(is_causal, key_mask, query_mask, attn_mask))
    sums = responsibility_sums(problem, backend)
    if reduction == "sum":
        return sums
    pairs = sums.sum(dim=1, keepdim=True)
    return sums / pairs.masked_fill(pairs == 0, 1.0)
