"""Mixture attention in blocks of queries: plain torch, linear memory, every option, any device.

Only the logits of one block exist at a time; the backward pass recomputes them from the saved row normalisers. Terms
whose size is linear in the sequence length (norms, priors, variances, shifts) are computed outside the blocks, where
autograd differentiates them, and enter the blocks as

    logit[i,j,r] = q_i . k_jr + row[i,r] + column[j,r]

The loop over the blocks is one custom operation in each direction, so ``torch.compile`` sees a single node for every
length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.problem import MixtureProblem
from mgk.ops.transforms import is_transformed

# Number of logits in a block: few enough for the caches of a CPU (16 MiB in fp32), elsewhere enough to keep the device
# busy (64 MiB).
BLOCK_ELEMENTS_CPU = 2**22
BLOCK_ELEMENTS = 2**24
# With fewer rows than this, starting a matrix kernel does not pay.
MINIMUM_ROWS = 16


def unsupported(problem: MixtureProblem) -> str | None:
    """Return ``None``: this backend supports every call."""
    return None


def attention(problem: MixtureProblem) -> Tensor:
    """Attention output, ``[B, H, Nq, Dv]``."""
    terms = _logit_terms(problem)
    # The seed is drawn on the CPU, where reading it stalls no device and activation checkpointing restores it.
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu") if problem.dropout_p > 0 else None
    out, _ = _attention_and_normaliser()(
        *terms, problem.value.to(terms.query.dtype), _grouped_mask(problem), seed,
        problem.is_causal, problem.assignment == "hard", problem.dropout_p,
    )  # fmt: skip
    return out.flatten(1, 2).to(problem.query.dtype)


def log_normaliser(problem: MixtureProblem) -> Tensor:
    """``log sum_j sum_r prior[r] exp(similarity)``, ``[B, H, Nq]``, -inf for a row without a visible key."""
    terms = _logit_terms(problem)
    _, normaliser = _attention_and_normaliser()(
        *terms,
        problem.value[..., :0].to(terms.query.dtype),
        _grouped_mask(problem),
        None,
        problem.is_causal,
        False,
        0.0,
    )
    if problem.similarity == "gaussian" and terms.row is None:
        # If components share a variance, the blocks leave out the term in |q|^2, because it cancels in the softmax.
        inverse_variance = problem.inverse_variance()
        if isinstance(inverse_variance, Tensor):
            inverse_variance = inverse_variance[:, :1, 0]
        square = 0.5 * terms.query.square().sum(-1) * inverse_variance
        normaliser = normaliser - square.masked_fill(normaliser == -math.inf, 0.0)
    return normaliser.flatten(1, 2)


def responsibility_sums(problem: MixtureProblem) -> Tensor:
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``: the E-step. Not differentiable."""
    with torch.no_grad():
        terms = _logit_terms(problem)
        return _chunked_responsibilities(*terms, problem.query_mask, _grouped_mask(problem), problem.is_causal)


def _attention_and_normaliser() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that runs the blocks: the custom operation, or its form for ``torch.func``."""
    return _ChunkedAttention.apply if is_transformed() else _chunked_attention


class _LogitTerms(NamedTuple):
    query: Tensor
    """``[B, Hkv, G, Nq, D]``, G query heads to a key/value head"""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, divided by the variance"""
    column: Tensor
    """``[B, Hkv, M, Nk]``, -inf at masked keys"""
    row: Tensor | None
    """``[B, Hkv, M, G, Nq]``, only where components differ in variance"""


def _logit_terms(problem: MixtureProblem) -> _LogitTerms:
    query, key = problem.centred()
    query = query.unflatten(1, (-1, problem.group_size))
    key = problem.component_keys(key)
    inverse_variance = problem.inverse_variance()

    row = None
    column = key.new_zeros(key.shape[:-1])
    if problem.similarity == "gaussian":
        column = -0.5 * (key.square() * inverse_variance).sum(-1)
        if isinstance(inverse_variance, Tensor) and not problem.shares_variance:
            row = -0.5 * query.square().sum(-1)[:, :, None] * inverse_variance
    if problem.log_prior is not None and problem.assignment == "soft":
        column = column + problem.log_prior
    if problem.key_mask is not None:
        column = column.masked_fill(~problem.key_mask[:, None, None, :], -math.inf)
    return _LogitTerms(query, key * inverse_variance, column, row)


def _grouped_mask(problem: MixtureProblem) -> Tensor | None:
    """Attention mask with five axes: its head axis is split like that of the query."""
    mask = problem.attn_mask
    if mask is None:
        return None
    return mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (-1, problem.group_size))


class _Block(NamedTuple):
    """One block of queries and the prefix of keys that it can see."""

    number: int
    rows: slice
    keys: slice


def _blocks(query: Tensor, key: Tensor, is_causal: bool) -> Iterator[_Block]:
    batch, kv_heads, group, num_queries, _ = query.shape
    components, num_keys = key.shape[2], key.shape[3]
    budget = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS
    height = max(MINIMUM_ROWS, budget // max(1, batch * kv_heads * group * components * num_keys))
    for number, start in enumerate(range(0, num_queries, height)):
        stop = min(start + height, num_queries)
        visible = max(0, min(num_keys, stop + num_keys - num_queries)) if is_causal else num_keys
        yield _Block(number, slice(start, stop), slice(0, visible))


def _block_logits(
    query: Tensor,
    key: Tensor,
    column: Tensor,
    row: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    block: _Block,
) -> Tensor:
    """Logits of one block, ``[B, Hkv, M, G, rows, keys]``."""
    logit = query[:, :, None, :, block.rows] @ key[:, :, :, None, block.keys].mT
    logit += column[:, :, :, None, None, block.keys]
    if row is not None:
        logit += row[..., block.rows, None]
    if is_causal:
        last_visible = torch.arange(query.shape[3], device=query.device)[block.rows] + key.shape[3] - query.shape[3]
        positions = torch.arange(key.shape[3], device=query.device)[block.keys]
        logit.masked_fill_(positions > last_visible[:, None], -math.inf)
    if attn_mask is not None:
        rows = block.rows if attn_mask.shape[3] > 1 else slice(None)
        logit.masked_fill_(~attn_mask[:, :, None, :, rows, block.keys], -math.inf)
    return logit


def _dropout_scale(seed: Tensor | None, dropout_p: float, block: _Block, like: Tensor) -> Tensor | None:
    """Dropout factor of each pair (i, j), ``0`` or ``1 / (1 - p)``, with the same draw in forward and backward."""
    if seed is None:
        return None
    generator = torch.Generator(like.device).manual_seed(int(seed) + block.number)
    kept = torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator) >= dropout_p
    return kept.to(like.dtype) / (1.0 - dropout_p)


@torch.library.custom_op("mgk::chunked_attention", mutates_args=())
def _chunked_attention(
    query: Tensor, key: Tensor, column: Tensor, row: Tensor | None, value: Tensor, attn_mask: Tensor | None,
    seed: Tensor | None, is_causal: bool, hard: bool, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``[B, Hkv, G, Nq, Dv]`` and row normaliser ``[B, Hkv, G, Nq]`` (log-sum-exp of the row's logits)."""
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    normaliser = query.new_empty(query.shape[:-1])
    # The normaliser is the sum over one more value column, the constant 1. Summed in the same order as the other
    # columns, it makes the rows sum to one exactly. (The width is a multiple of 16 because matrix kernels sum the
    # columns of an incomplete tile in another order.)
    value_and_one = F.pad(value, (0, 16 - value.shape[-1] % 16), value=1.0)
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(query, key, is_causal):
            logit = _block_logits(query, key, column, row, attn_mask, is_causal, block)
            if logit.shape[-1] == 0:
                out[..., block.rows, :] = 0.0
                normaliser[..., block.rows] = -math.inf
                continue
            if hard:
                logit = logit.amax(dim=2, keepdim=True)
            maximum = logit.amax(dim=(2, 5), keepdim=True)
            maximum.masked_fill_(maximum == -math.inf, 0.0)
            weight = logit.sub_(maximum).exp_().sum(dim=2)
            sums = weight @ value_and_one[:, :, None, block.keys]
            total = sums[..., -1:]
            scale = _dropout_scale(seed, dropout_p, block, weight)
            weighted = (
                sums[..., : value.shape[-1]] if scale is None else (weight * scale) @ value[:, :, None, block.keys]
            )
            normaliser[..., block.rows] = total.squeeze(-1).log() + maximum[:, :, 0, ..., 0]
            out[..., block.rows, :] = weighted / total.masked_fill(total == 0, 1.0)
    return out, normaliser


@torch.library.custom_op("mgk::chunked_attention_backward", mutates_args=())
def _chunked_attention_backward(
    grad_out: Tensor, grad_normaliser: Tensor, out: Tensor, normaliser: Tensor, query: Tensor, key: Tensor,
    column: Tensor, row: Tensor | None, value: Tensor, attn_mask: Tensor | None, seed: Tensor | None,
    is_causal: bool, hard: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, column, row (empty where there is none) and value.

    With w_ijr = exp(logit_ijr - normaliser_i) and dW_ij = dO_i . v_j:
    dlogit_ijr = w_ijr (dW_ij - dO_i . o_i + dnormaliser_i). Under hard assignment the components that tie for the
    maximum share w_ij.
    """
    grad_query, grad_key = torch.zeros_like(query), torch.zeros_like(key)
    grad_column, grad_value = torch.zeros_like(column), torch.zeros_like(value)
    grad_row = query.new_empty(0) if row is None else torch.zeros_like(row)
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(query, key, is_causal):
            logit = _block_logits(query, key, column, row, attn_mask, is_causal, block)
            if logit.shape[-1] == 0:
                continue
            share = None
            if hard:
                best = logit.amax(dim=2, keepdim=True)
                share = (logit == best).to(logit.dtype)
                share /= share.sum(dim=2, keepdim=True)
                logit = best
            # An empty row has normaliser -inf; any finite stand-in keeps exp(-inf - stand-in) = 0.
            stand_in = normaliser[..., block.rows].masked_fill(normaliser[..., block.rows] == -math.inf, 0.0)
            weight = logit.sub_(stand_in[:, :, None, ..., None]).exp_()
            grad_block = grad_out[..., block.rows, :]
            grad_weight = grad_block @ value[:, :, None, block.keys].mT
            pair_weight = weight.sum(dim=2)
            scale = _dropout_scale(seed, dropout_p, block, pair_weight)
            if scale is not None:
                grad_weight *= scale
                pair_weight = pair_weight * scale
            grad_value[:, :, block.keys] += (pair_weight.mT @ grad_block).sum(dim=2)

            centre = (grad_block * out[..., block.rows, :]).sum(-1) - grad_normaliser[..., block.rows]
            grad_logit = weight.mul_((grad_weight - centre[..., None])[:, :, None])
            if share is not None:
                grad_logit = grad_logit * share
            grad_query[..., block.rows, :] = (grad_logit @ key[:, :, :, None, block.keys]).sum(dim=2)
            grad_key[:, :, :, block.keys] += (grad_logit.mT @ query[:, :, None, :, block.rows]).sum(dim=3)
            grad_column[..., block.keys] += grad_logit.sum(dim=(3, 4))
            if row is not None:
                grad_row[..., block.rows] = grad_logit.sum(-1)
    return grad_query, grad_key, grad_column, grad_row, grad_value


@torch.library.custom_op("mgk::chunked_responsibilities", mutates_args=())
def _chunked_responsibilities(
    query: Tensor, key: Tensor, column: Tensor, row: Tensor | None, query_mask: Tensor | None,
    attn_mask: Tensor | None, is_causal: bool,
) -> Tensor:  # fmt: skip
    """Responsibilities summed over all visible pairs, ``[Hkv, M]``."""
    sums = query.new_zeros(key.shape[1:3])
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(query, key, is_causal):
            logit = _block_logits(query, key, column, row, attn_mask, is_causal, block)
            if query_mask is not None:
                logit.masked_fill_(~query_mask[:, None, None, None, block.rows, None], -math.inf)
            seen = logit.amax(dim=2, keepdim=True) > -math.inf
            posterior = torch.softmax(logit.masked_fill_(~seen, 0.0), dim=2).masked_fill_(~seen, 0.0)
            sums += posterior.sum(dim=(0, 3, 4, 5))
    return sums


@_chunked_attention.register_fake
def _(
    query: Tensor, key: Tensor, column: Tensor, row: Tensor | None, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(*query.shape[:-1], value.shape[-1]), query.new_empty(query.shape[:-1])


@_chunked_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_normaliser: Tensor, out: Tensor, normaliser: Tensor, query: Tensor, key: Tensor,
    column: Tensor, row: Tensor | None, value: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad_row = query.new_empty(0) if row is None else torch.empty_like(row)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(column), grad_row, torch.empty_like(value)


@_chunked_responsibilities.register_fake
def _(query: Tensor, key: Tensor, *_: Any) -> Tensor:
    return query.new_empty(key.shape[1:3])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, column, row, value, attn_mask, seed, is_causal, hard, dropout_p = inputs
    ctx.save_for_backward(*output, query, key, column, row, value, attn_mask, seed)
    ctx.options = (is_causal, hard, dropout_p)


def _backward(ctx: Any, grad_out: Tensor, grad_normaliser: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once, since activation checkpointing frees them when they are read
    has_row = saved[5] is not None
    grad_query, grad_key, grad_column, grad_row, grad_value = _chunked_attention_backward(
        grad_out, grad_normaliser, *saved, *ctx.options
    )
    return grad_query, grad_key, grad_column, grad_row if has_row else None, grad_value, *[None] * 5


_chunked_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _ChunkedAttention(torch.autograd.Function):
    """:func:`_chunked_attention` for ``torch.func.grad``, which cannot differentiate a ``torch.library`` operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return _chunked_attention(*inputs)

    setup_context = staticmethod(_save_for_backward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = _ChunkedAttentionBackward.apply(*grads, *saved, *ctx.options)
        grad_query, grad_key, grad_column, grad_row, grad_value = found
        return grad_query, grad_key, grad_column, None if saved[5] is None else grad_row, grad_value, *[None] * 5


class _ChunkedAttentionBackward(torch.autograd.Function):
    """Gradients of :class:`_ChunkedAttention`; differentiating them again raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _chunked_attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(NO_SECOND_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_SECOND_ORDER)


def _map_as_batch(operation: Any) -> None:
    """Register a rule for ``torch.func.vmap`` that makes the mapped axis a part of the batch."""

    def rule(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        size, dropout_p = info.batch_size, inputs[-1]
        if dropout_p > 0:
            # The dropout mask depends on the seed and on the shape, so every mapped call draws its own.
            return _one_by_one(operation, size, axes, inputs)
        batch = _one_of(inputs[0], axes[0], 0).shape[0]
        found = operation(*(_folded(x, axis, size, batch) for x, axis in zip(inputs, axes, strict=True)))
        # An output with a single axis is the empty gradient of an absent row term.
        apart = [x.unflatten(0, (size, batch)) if x.ndim > 1 else x.expand(size, -1) for x in found]
        return tuple(apart), (0,) * len(apart)

    operation.register_vmap(rule)


def _one_by_one(operation: Any, size: int, axes: tuple[int | None, ...], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    each = [
        operation(*(_one_of(x, axis, number) for x, axis in zip(inputs, axes, strict=True))) for number in range(size)
    ]
    if isinstance(each[0], Tensor):
        return torch.stack(each), 0
    found = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return found, (0,) * len(found)


def _one_of(tensor: Any, axis: int | None, number: int) -> Any:
    return tensor if axis is None else tensor.select(axis, number)


def _folded(tensor: Any, axis: int | None, size: int, batch: int) -> Any:
    """Fold the mapped axis, if there is one, into the batch: ``[B or 1, ...]`` becomes ``[size * B, ...]``."""
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.expand(-1, batch, *tensor.shape[2:]).flatten(0, 1)


_map_as_batch(_chunked_attention)
_map_as_batch(_chunked_attention_backward)


@_chunked_responsibilities.register_vmap
def _(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    # The operation sums over the batch, so the mapped axis cannot become a part of it.
    return _one_by_one(_chunked_responsibilities, info.batch_size, axes, inputs)
