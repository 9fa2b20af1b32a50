"""Mixture attention of sequences of different lengths, packed one after the other instead of padded."""

from __future__ import annotations

import itertools

from torch import Tensor

from mgk.ops.dispatch import BACKENDS, STATISTICS_BACKENDS, attend, responsibility_sums
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import check_choice, make_problem, may_inspect_values


def mixture_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    assignment: str = "soft",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`mgk.mixture_attention` of sequences that are packed one after the other, without padding.

    Sequence s has the queries ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]`` and the keys ``cu_seqlens_k[s] :
    cu_seqlens_k[s + 1]``; a query sees the keys of its own sequence. The fused kernels compute all sequences at once,
    every other backend one after the other.

    Args:
        query: ``[Tq, H, D]``, the tokens of all sequences.
        key: ``[Tk, Hkv, M, D]``, or ``[Tk, Hkv, D]`` for one component or shifted keys.
        value: ``[Tk, Hkv, Dv]``.
        cu_seqlens_q: int32 ``[S + 1]``, cumulative lengths of the queries: where each sequence begins, from 0, and
            where the last one ends, at ``Tq``.
        cu_seqlens_k: the same for the keys; ``None`` takes ``cu_seqlens_q``.
        max_seqlen_q: length of the longest sequence of queries, accepted because other libraries require it. It is only
            checked: a number that is too small is an error.
        max_seqlen_k: the same for the keys.
        shift: ``[Hkv, M, D]``.
        log_prior: ``[M]``, ``[Hkv, M]``, or ``[Hkv, M, Tk]`` with an entry for each key of each sequence.
        variance: a number, ``[M]`` or ``[Hkv, M]``.
        similarity: ``"gaussian"`` or ``"dot"``.
        assignment: ``"soft"`` or ``"hard"``.
        is_causal: aligned bottom-right within each sequence.
        key_mask: bool ``[Tk]``, True = attend.
        query_mask: bool ``[Tq]``; where it is False the output is 0.
        dropout_p: probability of dropping the normalised weight of a pair.
        backend: as in :func:`mgk.mixture_attention`.

    Returns:
        ``[Tq, H, Dv]`` in the dtype of ``query``.
    """
    check_choice("backend", backend, BACKENDS)
    check_tokens(query, key, value)
    visibility = packed_visibility(is_causal, key_mask, query_mask, cu_seqlens_q, cu_seqlens_k)
    mixture = Mixture(shift, log_prior, variance, similarity, assignment)
    problem = make_problem(as_batch(query), as_batch(key), as_batch(value), mixture, visibility, dropout_p)
    _check_longest("max_seqlen_q", max_seqlen_q, problem.cu_seqlens_q)
    _check_longest("max_seqlen_k", max_seqlen_k, problem.cu_seqlens_k)
    return attend(problem, backend)[0].transpose(0, 1)


def mixture_responsibilities_varlen(
    query: Tensor,
    key: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    shift: Tensor | None = None,
    log_prior: Tensor | None = None,
    variance: float | Tensor | None = None,
    similarity: str = "gaussian",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`mgk.mixture_responsibilities` of packed sequences, over the pairs within each, ``[Hkv, M]``.

    ``reduction`` and ``backend`` are those of :func:`mgk.mixture_responsibilities`, the other arguments are those of
    :func:`mixture_attention_varlen`.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    check_choice("reduction", reduction, ("mean", "sum"))
    check_tokens(query, key, None)
    visibility = packed_visibility(is_causal, key_mask, query_mask, cu_seqlens_q, cu_seqlens_k)
    mixture = Mixture(shift, log_prior, variance, similarity)
    sums = responsibility_sums(make_problem(as_batch(query), as_batch(key), None, mixture, visibility), backend)
    if reduction == "sum":
        return sums
    pairs = sums.sum(dim=1, keepdim=True)
    return sums / pairs.masked_fill(pairs == 0, 1.0)


def as_batch(tensor: Tensor) -> Tensor:
    """Reshape packed tokens ``[T, H, ..., D]`` to a batch of one row, ``[1, H, ..., T, D]``."""
    return tensor.movedim(0, -2)[None]


def packed_visibility(
    is_causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
) -> Visibility:
    """Visibility of packed tokens: the masks ``[T]`` get a batch axis like the tokens."""
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q must be an int32 tensor, got NoneType")
    return Visibility(
        is_causal, _with_batch("key_mask", key_mask), _with_batch("query_mask", query_mask), None, cu_seqlens_q,
        cu_seqlens_k,
    )  # fmt: skip


def _with_batch(name: str, mask: Tensor | None) -> Tensor | None:
    if mask is None or not isinstance(mask, Tensor):
        return mask
    if mask.ndim != 1:
        raise ValueError(f"{name} must have one entry for each token, [T], got {list(mask.shape)}")
    return mask[None]


def check_tokens(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    for name, tensor, dims, shape in (
        ("query", query, (3,), "[Tq, H, D]"),
        ("key", key, (3, 4), "[Tk, Hkv, M, D] or [Tk, Hkv, D]"),
        ("value", value, (3,), "[Tk, Hkv, Dv]"),
    ):
        if name == "value" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim not in dims:
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")


def _check_longest(name: str, limit: int | None, boundaries: Tensor | None) -> None:
    """Raise an error if a sequence is longer than ``limit``, the caller's ``max_seqlen``."""
    if limit is None:
        return
    assert boundaries is not None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(f"{name} must be a number of tokens, got {limit!r}")
    if not may_inspect_values(boundaries):
        return
    longest = max((later - earlier for earlier, later in itertools.pairwise(boundaries.tolist())), default=0)
    if limit < longest:
        raise ValueError(f"{name} must be at least the longest sequence, {longest}, got {limit}")
