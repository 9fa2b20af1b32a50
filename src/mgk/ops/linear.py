"""Linear attention with a mixture of keys: the public entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops import linear_chunked, linear_reference
from mgk.ops.autograd import with_zero_gradients
from mgk.ops.dispatch import (
    LINEAR_BACKENDS,
    choose_linear_backend,
    may_move_values,
    move_values,
    sequences_of,
    without_autocast,
)
from mgk.ops.feature_maps import FeatureMap, Map, resolve
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.packed import as_batch, check_tokens, packed_visibility
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import check_choice, fill_padding, make_problem

NORMALIZATIONS = ("sum", "length")


def linear_mixture_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    feature_map: str | Map | FeatureMap = "elu",
    normalization: str = "sum",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Compute linear attention in which each key position holds a mixture of M keys: MLK and sMLK of the paper.

    .. math:: out_i = \frac{\phi(q_i)^T \sum_j (\sum_r \pi_r \phi(k_{jr})) v_j^T}
                           {\phi(q_i)^T \sum_j \sum_r \pi_r \phi(k_{jr})}

    Time and memory are linear in the sequence length. Where the denominator is zero, the output is 0.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, Nk, D]`` for one component or shifted keys.
        value: ``[B, Hkv, Nk, Dv]``.
        shift: ``[Hkv, M, D]``: the key of component r is ``key_j + shift_r``.
        log_prior: ``[M]``, ``[Hkv, M]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``; ``None`` is uniform.
        feature_map: ``"elu"`` (elu + 1), ``"relu"``, ``"dpfp"``, ``"favor"`` (positive random features with a fixed
            seed), a function from ``[..., D]`` to ``[..., F]`` whose values are not negative, or a
            :class:`mgk.FeatureMap` of two such functions.
        normalization: ``"sum"`` divides as above. ``"length"`` divides by the square root of the number of keys that
            the query sees instead, as the linear attention in the paper's Long Range Arena experiments does.
        is_causal: query i sees keys up to ``i + Nk - Nq``.
        key_mask: bool ``[B, Nk]``, True = attend. The features of masked keys are set to 0.
        query_mask: bool ``[B, Nq]``, False = padded query, whose output is 0.
        backend: ``"reference"`` materialises every pair, ``"chunked"`` works in linear memory, and ``"triton"`` is a
            fused kernel for the feature maps ``elu`` and ``relu`` on a GPU. ``"auto"`` takes ``"triton"`` for half
            precision on a GPU where it can, and otherwise ``"chunked"``.

    Returns:
        ``[B, H, Nq, Dv]`` in the dtype of ``query``.
    """
    check_choice("backend", backend, LINEAR_BACKENDS)
    mixture, visibility = Mixture(shift, log_prior), Visibility(is_causal, key_mask, query_mask)
    return attend_linearly(
        make_linear_problem(query, key, value, mixture, visibility, feature_map, normalization), backend
    )


def linear_mixture_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    state: Tensor | None = None,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    feature_map: str | Map | FeatureMap = "elu",
    is_causal: bool = True,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Continue :func:`linear_mixture_attention` from the state of an earlier call.

    A sequence may be cut anywhere, because later tokens need nothing of earlier ones but the state, whose size does not
    depend on the number of tokens. Arguments without a description have the meaning that they have in
    :func:`linear_mixture_attention`.

    Args:
        query: ``[B, H, Nq, D]``, the queries of the new tokens.
        key: ``[B, Hkv, M, Nk, D]`` or ``[B, Hkv, Nk, D]``, the keys of the new tokens.
        value: ``[B, Hkv, Nk, Dv]``, the values of the new tokens.
        state: ``[B, Hkv, F, Dv + 1]``, the state that the last call returned; ``None`` at the beginning.
        shift: ``[Hkv, M, D]``.
        log_prior: ``[M]``, ``[Hkv, M]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``.
        feature_map: a name, a function or a :class:`mgk.FeatureMap`.
        is_causal: whether the new tokens see each other causally; all of them see the earlier tokens.
        key_mask: bool ``[B, Nk]``, for the new tokens.
        query_mask: bool ``[B, Nq]``, for the new tokens.
        backend: ``"auto"``, ``"reference"``, ``"chunked"`` or ``"triton"``.

    Returns:
        The output ``[B, H, Nq, Dv]`` and the new state, which is fp32 or fp64.
    """
    check_choice("backend", backend, LINEAR_BACKENDS)
    mixture, visibility = Mixture(shift, log_prior), Visibility(is_causal, key_mask, query_mask)
    problem = make_linear_problem(query, key, value, mixture, visibility, feature_map, "sum")
    return attend_in_linear_step(problem, state, backend)


def linear_mixture_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    feature_map: str | Map | FeatureMap = "elu",
    normalization: str = "sum",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`linear_mixture_attention` of packed sequences, ``[T, H, D]``, without padding.

    The boundaries are those of :func:`mgk.mixture_attention_varlen`, masks are ``[T]``, and the other arguments are
    those of :func:`linear_mixture_attention`. The sequences are computed one after the other.

    Returns:
        ``[Tq, H, Dv]`` in the dtype of ``query``.
    """
    check_choice("backend", backend, LINEAR_BACKENDS)
    check_tokens(query, key, value)
    visibility = packed_visibility(is_causal, key_mask, query_mask, cu_seqlens_q, cu_seqlens_k)
    tokens = as_batch(query), as_batch(key), as_batch(value)
    problem = make_linear_problem(*tokens, Mixture(shift, log_prior), visibility, feature_map, normalization)
    return attend_linearly(problem, backend)[0].transpose(0, 1)


def linear_mixture_weights(
    query: Tensor,
    key: Tensor,
    *,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    feature_map: str | Map | FeatureMap = "elu",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """The weights of :func:`linear_mixture_attention`, ``[B, H, Nq, Nk]``, materialised for analysis."""
    mixture, visibility = Mixture(shift, log_prior), Visibility(is_causal, key_mask, query_mask)
    return linear_weights(make_linear_problem(query, key, None, mixture, visibility, feature_map, "sum"))


def make_linear_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mixture: Mixture,
    visibility: Visibility,
    feature_map: str | Map | FeatureMap,
    normalization: str,
) -> LinearProblem:
    """Validate one call of linear attention. Only shift and prior of ``mixture`` are used."""
    check_choice("normalization", normalization, NORMALIZATIONS)
    if visibility.attn_mask is not None:
        raise ValueError("linear attention never forms pairs that could be masked, got attn_mask")
    problem = make_problem(query, key, value, mixture._replace(similarity="dot"), visibility)
    return LinearProblem(fill_padding(problem), resolve(feature_map, query.shape[-1], normalization), normalization)


def attend_linearly(problem: LinearProblem, backend: str) -> Tensor:
    """Output of a validated call, ``[B, H, Nq, Dv]``; packed sequences are computed one after the other."""
    mixture = problem.mixture
    if mixture.cu_seqlens_q is None:
        return _attend(problem, backend)[0]
    outputs = [_attend(problem._replace(mixture=own), backend)[0] for own in sequences_of(mixture)]
    if not outputs:
        out = mixture.query.new_zeros(1, mixture.query.shape[1], 0, mixture.value.shape[-1])
        return with_zero_gradients(out, mixture.query, mixture.key, mixture.value, mixture.shift, mixture.log_prior)
    return torch.cat(outputs, dim=2)


def attend_in_linear_step(problem: LinearProblem, state: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Return the output of a validated call that continues from ``state``, and the new state."""
    if state is not None:
        _check_state(problem, state)
    return _attend(problem._replace(state=state), backend, wants_state=True)


def linear_weights(problem: LinearProblem) -> Tensor:
    """Normalised weights of a validated call, ``[B, H, Nq, Nk]``; a row whose weights are all zero stays 0."""
    if problem.mixture.cu_seqlens_q is not None:
        raise ValueError("the weights of packed sequences are not formed by linear attention, got cu_seqlens")
    with without_autocast(problem.mixture):
        weight = linear_reference.weights(problem._replace(mixture=problem.mixture.with_relative_prior()))
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def _attend_fused(problem: LinearProblem, wants_state: bool) -> tuple[Tensor, Any]:
    from mgk.ops.triton import linear_operator

    mixture = problem.mixture
    if wants_state:
        if mixture.is_empty:
            return _attend(problem, "chunked")
        with without_autocast(mixture):
            return linear_operator.attention_and_state(problem)
    if mixture.is_empty:
        out = mixture.query.new_zeros(*mixture.query.shape[:3], mixture.value.shape[-1])
        tensors = (mixture.query, mixture.key, mixture.value, mixture.shift, mixture.log_prior)
        return with_zero_gradients(out, *tensors), None
    with without_autocast(mixture):
        return linear_operator.attention(problem), None


def _attend(problem: LinearProblem, backend: str, wants_state: bool = False) -> tuple[Tensor, Any]:
    """Return output and state; the fused kernels return a state only if it is wanted."""
    mixture = problem.mixture
    backend = choose_linear_backend(problem, backend, wants_state)
    # A state holds sums of the original values and weights, so a call with a state must not change them.
    holds_state = wants_state or problem.state is not None
    if problem.normalization == "sum" and not holds_state:
        problem = problem._replace(mixture=mixture.with_relative_prior())
        mixture = problem.mixture
    if backend == "triton":
        return _attend_fused(problem, wants_state)
    implementation = linear_reference if backend == "reference" else linear_chunked
    moved = None
    if problem.normalization == "sum" and not holds_state and not mixture.is_empty and may_move_values(mixture):
        moved = move_values(mixture)
        problem = problem._replace(mixture=moved.problem)
    with without_autocast(mixture):
        found, state = implementation.sums(problem)
        numerator, total = found[..., :-1], found[..., -1:]
        if problem.normalization == "length":
            total = problem.counts().sqrt()[:, None, :, None]
        out = numerator / total.masked_fill(total == 0, 1.0)
    if moved is not None:
        out = moved.back(out, is_blind=total == 0)
    return out.to(mixture.query.dtype), state


def _check_state(problem: LinearProblem, state: Any) -> None:
    mixture = problem.mixture
    if not isinstance(state, Tensor):
        raise TypeError(f"state must be a tensor, got {type(state).__name__}")
    with torch.no_grad():
        features = problem.feature_map.key(mixture.key[:1, :1, :1, :0].to(mixture.compute_dtype)).shape[-1]
    expected = [mixture.query.shape[0], mixture.key.shape[1], features, mixture.value.shape[-1] + 1]
    if list(state.shape) != expected:
        raise ValueError(f"state must have shape [B, Hkv, F, Dv + 1] = {expected}, got {list(state.shape)}")
    if state.dtype != mixture.compute_dtype:
        raise TypeError(f"state must be {mixture.compute_dtype}, got {state.dtype}")
    if state.device != mixture.query.device:
        raise ValueError(f"state must be on the device of query, {mixture.query.device}, got {state.device}")
