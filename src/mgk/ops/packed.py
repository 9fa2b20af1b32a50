"""Sequences of different lengths, packed one after the other instead of padded to the longest."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.ops.attention import BACKENDS, choose_backend, mixture_attention, without_autocast
from mgk.ops.problem import MixtureProblem
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
        log_prior: ``[M]``, ``[Hkv, M]`` or ``[Hkv, M, Tk]``.
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
    _check_tokens(query, key, value)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check_boundaries("cu_seqlens_q", cu_seqlens_q, query, "max_seqlen_q", max_seqlen_q)
    _check_boundaries("cu_seqlens_k", cu_seqlens_k, key, "max_seqlen_k", max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must bound as many sequences as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )
    options: dict[str, Any] = {
        "shift": shift, "variance": variance, "similarity": similarity, "assignment": assignment,
        "is_causal": is_causal, "dropout_p": dropout_p,
    }  # fmt: skip
    # All tokens as one sequence: what is checked does not care where they end.
    problem = make_problem(
        _as_batch(query), _as_batch(key), _as_batch(value), log_prior=log_prior, attn_mask=None,
        key_mask=_with_batch("key_mask", key_mask), query_mask=_with_batch("query_mask", query_mask), **options,
    )  # fmt: skip
    if not problem.is_empty and choose_backend(problem, backend) == "triton":
        out = _attend_at_once(problem, cu_seqlens_q, cu_seqlens_k)
    else:
        out = _attend_one_by_one(problem, log_prior, cu_seqlens_q, cu_seqlens_k, backend)
    if query_mask is not None:
        out = out.masked_fill(~query_mask[:, None, None], 0.0)
    return out


def _attend_one_by_one(
    problem: MixtureProblem, log_prior: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, backend: str
) -> Tensor:
    """``[Tq, H, Dv]``"""
    if is_traced():
        raise NotImplementedError(
            "packed sequences can be traced with backend='triton' only, got a backend that must know their lengths"
        )
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    per_position = log_prior is not None and log_prior.ndim == 3
    outputs = []
    for (first, end), (first_key, end_key) in zip(_pairs(starts), _pairs(key_starts), strict=True):
        keys = slice(first_key, end_key)
        outputs.append(
            mixture_attention(
                problem.query[:, :, first:end],
                problem.key[:, :, :, keys],
                problem.value[:, :, keys],
                shift=problem.shift,
                log_prior=log_prior[:, :, keys] if per_position and log_prior is not None else log_prior,
                variance=problem.variance,
                similarity=problem.similarity,
                assignment=problem.assignment,
                is_causal=problem.is_causal,
                key_mask=None if problem.key_mask is None else problem.key_mask[:, keys],
                query_mask=None if problem.query_mask is None else problem.query_mask[:, first:end],
                dropout_p=problem.dropout_p,
                backend=backend,
            )
        )
    if not outputs:
        return problem.query.new_zeros(0, problem.query.shape[1], problem.value.shape[-1])
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _pairs(boundaries: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(boundaries))


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
    sequence = torch.searchsorted(boundaries[1:], token, right=True)
    places = token + (starts - boundaries[:-1])[sequence]
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


def _attend_at_once(problem: MixtureProblem, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """``[Tq, H, Dv]``, in the fused kernels."""
    from mgk.ops import triton as fused
    from mgk.ops.triton import operator

    padding = operator.PADDING
    queries = _lay_out(cu_seqlens_q, problem.query.shape[2], padding)
    keys = _lay_out(cu_seqlens_k, problem.key.shape[3], padding)
    # Of places, not of tokens: the last query of a sequence sees its last key.
    causal_offset = keys.starts + keys.lengths - queries.starts - queries.lengths
    spans = (_spans(queries, keys, causal_offset, padding), _spans(keys, queries, causal_offset, padding))
    valid = torch.zeros(keys.total, dtype=torch.bool, device=problem.key.device)
    mask = True if problem.key_mask is None else problem.key_mask[0]
    valid[keys.places] = mask
    prior = problem.log_prior
    if prior is not None and prior.shape[-1] > 1:
        prior = _spread(prior, keys, dim=2)
    placed = problem._replace(
        query=_spread(problem.query, queries, dim=2),
        key=_spread(problem.key, keys, dim=3),
        value=_spread(problem.value, keys, dim=2),
        log_prior=prior,
        key_mask=valid[None],
        query_mask=None,
    )
    with without_autocast(problem):
        out = fused.attention(placed, spans)
    return out[0].transpose(0, 1).index_select(0, queries.places)


def _spread(tensor: Tensor, layout: _Layout, dim: int) -> Tensor:
    """Move tokens to their places, token by token in memory; zeros in between."""
    by_token = tensor.movedim(dim, 0)
    room = tensor.new_zeros(layout.total, *by_token.shape[1:])
    return room.index_copy(0, layout.places, by_token).movedim(0, dim)


def _as_batch(tensor: Tensor) -> Tensor:
    """``[T, H, ..., D]`` as ``[1, H, ..., T, D]``."""
    return tensor.movedim(0, -2)[None]


def _with_batch(name: str, mask: Tensor | None) -> Tensor | None:
    if mask is None or not isinstance(mask, Tensor):
        return mask
    if mask.ndim != 1:
        raise ValueError(f"{name} must have one entry for each token, [T], got {list(mask.shape)}")
    return mask[None]


def _check_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor, dims, shape in (
        ("query", query, (3,), "[Tq, H, D]"),
        ("key", key, (3, 4), "[Tk, Hkv, M, D] or [Tk, Hkv, D]"),
        ("value", value, (3,), "[Tk, Hkv, Dv]"),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim not in dims:
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")


def _check_boundaries(name: str, boundaries: Any, tokens: Tensor, limit_name: str, limit: int | None) -> None:
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
