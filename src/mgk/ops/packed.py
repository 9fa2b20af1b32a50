"""Sequences of different lengths, packed one after the other instead of padded to the longest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.attention import (
    BACKENDS,
    STATISTICS_BACKENDS,
    choose_backend,
    choose_statistics,
    is_half_on_gpu,
    mixture_attention,
    without_autocast,
)
from mgk.ops.problem import MixtureProblem
from mgk.ops.transforms import is_mapped
from mgk.ops.validation import check_choice, is_traced, make_problem, may_inspect_values


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
    """:func:`mgk.mixture_attention` of sequences that lie one after the other: there is no padding, and none is paid.

    Sequence s has the queries ``cu_seqlens_q[s] ... cu_seqlens_q[s + 1]`` and the keys ``cu_seqlens_k[s] ...``; each
    query sees the keys of its own sequence. The fused kernels do all of them at once; every other backend takes one
    after the other.

    Args:
        query: ``[Tq, H, D]``, the tokens of all sequences.
        key: ``[Tk, Hkv, M, D]``, or ``[Tk, Hkv, D]`` for one component or shifted keys.
        value: ``[Tk, Hkv, Dv]``.
        cu_seqlens_q: int32 ``[S + 1]``, from 0 to ``Tq``: where each sequence begins, and where the last one ends.
        cu_seqlens_k: the same for keys; those of the queries if not given.
        max_seqlen_q: what other libraries want to be told. Nothing depends on it; one that is too small is an error.
        max_seqlen_k: likewise.
        shift: ``[Hkv, M, D]``.
        log_prior: ``[M]``, ``[Hkv, M]`` or ``[Hkv, M, Tk]``, which has an entry for each key of each sequence.
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
    check_prior(log_prior)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_boundaries("cu_seqlens_q", cu_seqlens_q, query, "max_seqlen_q", max_seqlen_q)
    check_boundaries("cu_seqlens_k", cu_seqlens_k, key, "max_seqlen_k", max_seqlen_k)
    check_number_of_sequences(cu_seqlens_q, cu_seqlens_k)
    options: dict[str, Any] = {
        "shift": shift, "variance": variance, "similarity": similarity, "assignment": assignment,
        "is_causal": is_causal, "dropout_p": dropout_p,
    }  # fmt: skip
    # All tokens as one sequence: what is checked does not care where they end.
    problem = make_problem(
        as_batch(query), as_batch(key), as_batch(value), log_prior=log_prior, attn_mask=None,
        key_mask=with_batch("key_mask", key_mask), query_mask=with_batch("query_mask", query_mask), **options,
    )  # fmt: skip
    # The stock kernels, which may be faster on one sequence, would have to be called for each.
    is_fused = is_half_on_gpu(problem) if backend == "auto" else choose_backend(problem, backend) == "triton"
    if is_fused and not problem.is_empty:
        out = _attend_at_once(problem, cu_seqlens_q, cu_seqlens_k)
    else:
        out = _attend_one_by_one(problem, cu_seqlens_q, cu_seqlens_k, backend)
    if query_mask is not None:
        out = out.masked_fill(~query_mask[:, None, None], 0.0)
    return out


def _attend_one_by_one(problem: MixtureProblem, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, backend: str) -> Tensor:
    """``[Tq, H, Dv]``"""
    outputs = [
        mixture_attention(
            own.query, own.key, own.value, shift=own.shift, log_prior=_as_given(own.log_prior), variance=own.variance,
            similarity=own.similarity, assignment=own.assignment, is_causal=own.is_causal, key_mask=own.key_mask,
            query_mask=own.query_mask, dropout_p=own.dropout_p, backend=backend,
        )
        for own in sequences_of(problem, cu_seqlens_q, cu_seqlens_k)
    ]  # fmt: skip
    if not outputs:
        return problem.query.new_zeros(0, problem.query.shape[1], problem.value.shape[-1])
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _as_given(log_prior: Tensor | None) -> Tensor | None:
    """Without the axis that stands for all positions."""
    return log_prior[..., 0] if log_prior is not None and log_prior.shape[-1] == 1 else log_prior


def _pairs(boundaries: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(boundaries))


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
    """:func:`mgk.mixture_responsibilities` of packed sequences, over the pairs within each, ``[Hkv, M]``.

    Arguments as of :func:`mixture_attention_varlen`, ``reduction`` and backends as there.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    check_choice("reduction", reduction, ("mean", "sum"))
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_tokens(query, key, None)
    check_prior(log_prior)
    check_boundaries("cu_seqlens_q", cu_seqlens_q, query)
    check_boundaries("cu_seqlens_k", cu_seqlens_k, key)
    check_number_of_sequences(cu_seqlens_q, cu_seqlens_k)
    options: dict[str, Any] = {
        "shift": shift, "variance": variance, "similarity": similarity, "is_causal": is_causal,
    }  # fmt: skip
    problem = make_problem(
        as_batch(query), as_batch(key), None, log_prior=log_prior, assignment="soft", attn_mask=None,
        key_mask=with_batch("key_mask", key_mask), query_mask=with_batch("query_mask", query_mask), **options,
    )  # fmt: skip
    sums = torch.zeros(problem.key.shape[1], problem.num_components, dtype=problem.compute_dtype, device=query.device)
    if 0 not in problem.query.shape and problem.key.shape[3] > 0:
        implementation = choose_statistics(problem, backend)
        with torch.no_grad(), without_autocast(problem):
            if implementation.__name__ == "mgk.ops.triton":
                placed = _place(problem, cu_seqlens_q, cu_seqlens_k)
                sums = implementation.responsibility_sums(placed.problem, placed.spans[0])
            else:
                for own in sequences_of(problem, cu_seqlens_q, cu_seqlens_k):
                    if 0 not in own.query.shape and own.key.shape[3] > 0:
                        sums = sums + implementation.responsibility_sums(own)
    if reduction == "sum":
        return sums
    pairs = sums.sum(dim=1, keepdim=True)
    return sums / pairs.masked_fill(pairs == 0, 1.0)


def sequence_of_tokens(boundaries: Tensor, num_tokens: int) -> Tensor:
    """int64 ``[T]``: which sequence each token belongs to."""
    token = torch.arange(num_tokens, device=boundaries.device)
    # All boundaries, not those behind the first: the compiler of PyTorch 2.11 cannot search in a part of a tensor.
    return torch.searchsorted(boundaries.long(), token, right=True) - 1


def pairs_within_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, num_queries: int, num_keys: int
) -> Tensor:
    """bool ``[1, 1, Tq, Tk]``, True within a sequence: for whoever writes out every pair."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    own, others = sequence_of_tokens(cu_seqlens_q, num_queries), sequence_of_tokens(cu_seqlens_k, num_keys)
    return (own[:, None] == others[None, :])[None, None]


def sequences_of(problem: MixtureProblem, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[MixtureProblem]:
    """One after the other; the device is asked how long they are."""
    if is_traced():
        raise NotImplementedError(
            "packed sequences can be traced with backend='triton' only, got a backend that must know their lengths"
        )
    if is_mapped(cu_seqlens_q) or is_mapped(cu_seqlens_k):
        raise ValueError("vmap cannot map over the boundaries of packed sequences, got a cu_seqlens that it maps")
    bounds, key_bounds = _pairs(cu_seqlens_q.tolist()), _pairs(cu_seqlens_k.tolist())
    by_key = problem.has_prior_by_key
    for (first, end), (first_key, end_key) in zip(bounds, key_bounds, strict=True):
        keys = slice(first_key, end_key)
        yield problem._replace(
            query=problem.query[:, :, first:end],
            key=problem.key[:, :, :, keys],
            value=problem.value[:, :, keys],
            log_prior=problem.log_prior[:, :, keys] if by_key else problem.log_prior,  # type: ignore[index]
            key_mask=None if problem.key_mask is None else problem.key_mask[:, keys],
            query_mask=None if problem.query_mask is None else problem.query_mask[:, first:end],
        )


class _Layout(NamedTuple):
    """Where tokens lie so that no block of a kernel holds those of two sequences."""

    starts: Tensor
    """int64 ``[S]``: the first place of each sequence, a multiple of the padding."""
    lengths: Tensor
    """int64 ``[S]``"""
    places: Tensor
    """int64 ``[T]``, of every token"""
    total: int
    """Places, used or not: known without asking the device."""


def _lay_out(boundaries: Tensor, num_tokens: int, padding: int) -> _Layout:
    boundaries = boundaries.long()
    lengths = boundaries.diff()
    room = (lengths + padding - 1) // padding * padding
    starts = room.cumsum(0) - room
    token = torch.arange(num_tokens, device=boundaries.device)
    places = token + (starts - boundaries[:-1])[sequence_of_tokens(boundaries, num_tokens)]
    # Every sequence may leave all but one of its last places empty.
    total = -(-(num_tokens + len(lengths) * (padding - 1)) // padding) * padding
    return _Layout(starts, lengths, places, total)


def _spans(own: _Layout, other: _Layout, causal_offset: Tensor, padding: int) -> Tensor:
    """int32 ``[total / padding, 3]``: what the tokens of each block see of the ``other`` side of their sequence."""
    ends = own.starts + (own.lengths + padding - 1) // padding * padding
    block = torch.arange(0, own.total, padding, device=ends.device)
    sequence = torch.searchsorted(ends, block, right=True)
    table = torch.stack([other.starts, other.starts + other.lengths, causal_offset], dim=-1)
    # Blocks behind the last sequence see nothing.
    table = torch.cat([table, table.new_zeros(1, 3)])
    return table[sequence].to(torch.int32)


class _Placed(NamedTuple):
    """A call whose tokens lie in places, and what the kernels must know of their sequences."""

    problem: MixtureProblem
    queries: _Layout
    spans: tuple[Tensor, Tensor]


def _place(problem: MixtureProblem, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> _Placed:
    from mgk.ops.triton import call

    padding = call.PADDING
    queries = _lay_out(cu_seqlens_q, problem.query.shape[2], padding)
    if cu_seqlens_k is cu_seqlens_q and problem.query.shape[2] == problem.key.shape[3]:
        keys, spans = queries, (_spans(queries, queries, torch.zeros_like(queries.starts), padding),) * 2
    else:
        keys = _lay_out(cu_seqlens_k, problem.key.shape[3], padding)
        # Of places, not of tokens: the last query of a sequence sees its last key.
        causal_offset = keys.starts + keys.lengths - queries.starts - queries.lengths
        spans = (_spans(queries, keys, causal_offset, padding), _spans(keys, queries, causal_offset, padding))
    prior = problem.log_prior
    if prior is not None and problem.has_prior_by_key:
        prior = _spread(prior, keys, dim=2)
    placed = problem._replace(
        query=_spread(problem.query, queries, dim=2),
        key=_spread(problem.key, keys, dim=3),
        value=_spread(problem.value, keys, dim=2),
        log_prior=prior,
        key_mask=_valid_places(problem.key_mask, keys),
        query_mask=_valid_places(problem.query_mask, queries),
    )
    return _Placed(placed, queries, spans)


def _valid_places(mask: Tensor | None, layout: _Layout) -> Tensor:
    """bool ``[1, total]``"""
    valid = torch.zeros(layout.total, dtype=torch.bool, device=layout.places.device)
    valid[layout.places] = True if mask is None else mask[0]
    return valid[None]


def _attend_at_once(problem: MixtureProblem, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """``[Tq, H, Dv]``, in the fused kernels."""
    from mgk.ops import triton as fused

    placed = _place(problem, cu_seqlens_q, cu_seqlens_k)
    with without_autocast(problem):
        # Places without a query are never read.
        out = fused.attention(placed.problem._replace(query_mask=None), placed.spans)
    return out[0].transpose(0, 1).index_select(0, placed.queries.places)


def _spread(tensor: Tensor, layout: _Layout, dim: int) -> Tensor:
    """Move tokens to their places, token by token in memory; zeros in between."""
    by_token = tensor.movedim(dim, 0)
    room = tensor.new_zeros(layout.total, *by_token.shape[1:])
    return room.index_copy(0, layout.places, by_token).movedim(0, dim)


def as_batch(tensor: Tensor) -> Tensor:
    """``[T, H, ..., D]`` as ``[1, H, ..., T, D]``."""
    return tensor.movedim(0, -2)[None]


def with_batch(name: str, mask: Tensor | None) -> Tensor | None:
    if mask is None or not isinstance(mask, Tensor):
        return mask
    if mask.ndim != 1:
        raise ValueError(f"{name} must have one entry for each token, [T], got {list(mask.shape)}")
    return mask[None]


def check_number_of_sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must bound as many sequences as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )


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


def check_prior(log_prior: Any) -> None:
    """There is no axis of samples: ``[Hkv, M, Tk]`` tells the keys of different sequences apart by itself."""
    if isinstance(log_prior, Tensor) and log_prior.ndim == 4:
        raise ValueError(
            f"log_prior of packed sequences must have shape [M], [Hkv, M] or [Hkv, M, Tk], got {list(log_prior.shape)}"
        )


def check_boundaries(
    name: str, boundaries: Any, tokens: Tensor, limit_name: str = "", limit: int | None = None
) -> None:
    """``tokens [T, ...]``: what ``boundaries`` divide, on the same device; ``limit``: the longest sequence, if told."""
    if not isinstance(boundaries, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(boundaries).__name__}")
    if boundaries.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {boundaries.dtype}")
    if boundaries.ndim != 1 or len(boundaries) == 0:
        raise ValueError(f"{name} must have shape [S + 1], got {list(boundaries.shape)}")
    if boundaries.device != tokens.device:
        raise ValueError(f"{name} must be on the device of the tokens, {tokens.device}, got {boundaries.device}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(f"{limit_name} must be a number of tokens, got {limit!r}")
    if not may_inspect_values(boundaries):
        return
    values = boundaries.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {values[0]}")
    if any(later < earlier for earlier, later in _pairs(values)):
        raise ValueError(f"{name} must never decrease, got {values}")
    if values[-1] != len(tokens):
        raise ValueError(f"{name} must end with the number of tokens, {len(tokens)}, got {values[-1]}")
    longest = max((later - earlier for earlier, later in _pairs(values)), default=0)
    if limit is not None and limit < longest:
        raise ValueError(f"{limit_name} must be at least the longest sequence, {longest}, got {limit}")
