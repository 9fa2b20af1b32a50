"""Linear attention with a mixture of keys: the public entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops import linear_chunked, linear_reference
from mgk.ops.attention import fused_unsupported, without_autocast
from mgk.ops.autograd import with_zero_gradients
from mgk.ops.feature_maps import FeatureMap, Map, resolve
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.packed import (
    as_batch,
    check_boundaries,
    check_number_of_sequences,
    check_prior,
    check_tokens,
    sequences_of,
    with_batch,
)
from mgk.ops.transforms import is_transformed
from mgk.ops.validation import check_choice, make_problem

LINEAR_BACKENDS = ("auto", "reference", "chunked", "triton")
# Below this, what is left to do is less than what starting several kernels takes.
FEW_QUERIES = 16
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
    r"""Linear attention in which every position holds a mixture of M keys: MLK and sMLK of the paper.

    .. math:: out_i = \frac{\phi(q_i)^T \sum_j (\sum_r \pi_r \phi(k_{jr})) v_j^T}
                           {\phi(q_i)^T \sum_j \sum_r \pi_r \phi(k_{jr})}

    Time and memory grow with the length, not with its square. A denominator of zero gives 0.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, Nk, D]`` for one component or shifted keys.
        value: ``[B, Hkv, Nk, Dv]``.
        shift: ``[Hkv, M, D]``: the key of component r is ``key_j + shift_r``.
        log_prior: ``[M]``, ``[Hkv, M]``, ``[Hkv, M, Nk]`` or ``[B, Hkv, M, Nk]``; ``None`` is uniform.
        feature_map: ``"elu"`` (elu + 1), ``"relu"``, ``"dpfp"``, ``"favor"`` (positive random features, always the
            same), a function from ``[..., D]`` to ``[..., F]`` whose values are not negative, or a
            :class:`mgk.FeatureMap` of two such functions.
        normalization: ``"sum"``, as above; ``"length"``: no denominator, but the square root of the number of keys
            that a query sees, which is what the linear attention of the paper's Long Range Arena does.
        is_causal: query i sees keys up to ``i + Nk - Nq``.
        key_mask: bool ``[B, Nk]``, True = attend. It is the features of the others that are 0.
        query_mask: bool ``[B, Nq]``; where it is False the output is 0.
        backend: ``"reference"`` materialises every pair, ``"chunked"`` does not; ``"triton"`` is fused, for the feature
            maps ``elu`` and ``relu`` on a GPU, where ``"auto"`` takes it in half precision, and else ``"chunked"``.

    Returns:
        ``[B, H, Nq, Dv]`` in the dtype of ``query``.
    """
    problem = _make(
        query, key, value, shift, log_prior, feature_map, normalization, is_causal, key_mask, query_mask, None
    )
    return _attend(problem, backend)[0]


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
    """:func:`linear_mixture_attention` that goes on where an earlier call ended.

    A sequence may be cut anywhere: all that later tokens need of earlier ones is the state, whose size does not depend
    on how many there were.

    Args:
        query: ``[B, H, Nq, D]``, and all others as of :func:`linear_mixture_attention`, of the new tokens alone.
        key: likewise.
        value: likewise.
        state: ``[B, Hkv, F, Dv + 1]``, what the last call returned; ``None`` at the beginning.
        shift: as there.
        log_prior: as there.
        feature_map: as there.
        is_causal: within the new tokens; all of them see what came before.
        key_mask: as there.
        query_mask: as there.
        backend: as there.

    Returns:
        ``[B, H, Nq, Dv]``, and the new state, in fp32 at least.
    """
    problem = _make(query, key, value, shift, log_prior, feature_map, "sum", is_causal, key_mask, query_mask, state)
    return _attend(problem, backend, wants_state=True)


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
    """:func:`linear_mixture_attention` of sequences that lie one after the other, ``[T, H, D]``, without padding.

    Boundaries as of :func:`mgk.mixture_attention_varlen`, all else as of :func:`linear_mixture_attention`; masks are
    ``[T]``. One sequence is done after the other.

    Returns:
        ``[Tq, H, Dv]`` in the dtype of ``query``.
    """
    check_choice("backend", backend, LINEAR_BACKENDS)
    check_tokens(query, key, value)
    check_prior(log_prior)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_boundaries("cu_seqlens_q", cu_seqlens_q, query)
    check_boundaries("cu_seqlens_k", cu_seqlens_k, key)
    check_number_of_sequences(cu_seqlens_q, cu_seqlens_k)
    together = _make(
        as_batch(query), as_batch(key), as_batch(value), shift, log_prior, feature_map, normalization, is_causal,
        with_batch("key_mask", key_mask), with_batch("query_mask", query_mask), None,
    )  # fmt: skip
    outputs = [
        _attend(together._replace(mixture=own), backend)[0]
        for own in sequences_of(together.mixture, cu_seqlens_q, cu_seqlens_k)
    ]
    if not outputs:
        return query.new_zeros(0, query.shape[1], value.shape[-1])
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


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
    problem = _make(query, key, None, shift, log_prior, feature_map, "sum", is_causal, key_mask, query_mask, None)
    with without_autocast(problem.mixture):
        weight = linear_reference.weights(problem)
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def _make(
    query: Tensor, key: Tensor, value: Tensor | None, shift: Tensor | None, log_prior: Tensor | None,
    feature_map: Any, normalization: str, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None,
    state: Tensor | None,
) -> LinearProblem:  # fmt: skip
    check_choice("normalization", normalization, NORMALIZATIONS)
    mixture = make_problem(
        query, key, value, shift=shift, log_prior=log_prior, variance=None, similarity="dot", assignment="soft",
        is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, attn_mask=None,
    )  # fmt: skip
    return LinearProblem(mixture, resolve(feature_map, query.shape[-1], normalization), normalization, state)


def _fused_unsupported(problem: LinearProblem, wants_state: bool) -> str | None:
    """What the fused kernels cannot do of a call, or ``None``."""
    mixture = problem.mixture
    tensors = (mixture.query, mixture.key, mixture.value, mixture.shift, mixture.log_prior, problem.state)
    reason = fused_unsupported(mixture)
    if wants_state and torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        reason = "a state with gradients"
    if reason is None:
        from mgk.ops.triton import linear_operator

        reason = linear_operator.unsupported(problem)
    return reason


def _is_fused_best(problem: LinearProblem, wants_state: bool) -> bool:
    query = problem.mixture.query
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16) or is_transformed():
        return False
    return query.shape[2] >= FEW_QUERIES and _fused_unsupported(problem, wants_state) is None


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
    """Output and state; the fused kernels leave one only if it is wanted."""
    check_choice("backend", backend, LINEAR_BACKENDS)
    mixture = problem.mixture
    if problem.state is not None:
        _check_state(problem)
    if backend == "triton":
        reason = _fused_unsupported(problem, wants_state)
        if reason is not None:
            raise ValueError(f"backend='triton' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return _attend_fused(problem, wants_state)
    if backend == "auto" and _is_fused_best(problem, wants_state):
        return _attend_fused(problem, wants_state)
    implementation = linear_reference if backend == "reference" else linear_chunked
    with without_autocast(mixture):
        found, state = implementation.sums(problem)
        numerator, total = found[..., :-1], found[..., -1:]
        if problem.normalization == "length":
            total = problem.counts().sqrt()[:, None, :, None]
        out = numerator / total.masked_fill(total == 0, 1.0)
    return out.to(mixture.query.dtype), state


def _check_state(problem: LinearProblem) -> None:
    mixture, state = problem.mixture, problem.state
    assert state is not None
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
