"""Dispatch of a validated call: the choice of a backend, and the numerics policy that all backends share.

The policy centres the inputs to preserve precision. It applies where the kernel multiplies in the precision of the
inputs (fp32 and fp64); in half precision, moving a number would round it. Padded, packed and linear calls share it:

- *keys of dot products* are moved by the origin of their sequence, which leaves the softmax unchanged;
- *values* are moved by the constant that the values of a sequence have in common, and the output is moved back (in
  linear attention, too);
- *distances* are measured from the origin of the sequence. A backend that takes one sequence at a time does so itself
  when it prepares its operands (:meth:`MixtureProblem.centred`); for packed sequences it is done here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mgk.ops import chunked, cpu, reference, sdpa, softmax_kernel
from mgk.ops.autograd import first_order_only, with_value, with_zero_gradients
from mgk.ops.boundaries import pairs_within_sequences
from mgk.ops.linear_problem import LinearProblem
from mgk.ops.problem import MixtureProblem
from mgk.ops.transforms import composable_backend, is_differentiated, is_exported_to_onnx, is_mapped, is_transformed
from mgk.ops.validation import fill_padding, is_traced, may_inspect_values

# A GPU build of torch comes with Triton. Without a GPU its kernels run only in its interpreter.
_HAS_TRITON = find_spec("triton") is not None and (
    torch.version.cuda is not None or os.environ.get("TRITON_INTERPRET") == "1"
)
if _HAS_TRITON:
    from mgk.ops import triton as fused

BACKENDS = ("auto", "reference", "chunked", "cpu", "sdpa", "triton")
STATISTICS_BACKENDS = ("auto", "reference", "chunked", "triton")
LINEAR_BACKENDS = ("auto", "reference", "chunked", "triton")

# Largest attention mask, in elements and expanded over components, that `auto` passes to the stock kernels.
LARGEST_MASK = 2**24

# Fewest queries for which `auto` chooses the fused kernels: with fewer, launching several kernels takes longer than
# the work itself.
FEWEST_QUERIES = 16


class Backend(Protocol):
    """A module that computes attention. Its calls are not empty, and their padding is filled with zeros."""

    def unsupported(self, problem: MixtureProblem) -> str | None:
        """Name what the call needs and this backend lacks, or return ``None`` if the backend supports the call."""

    def attention(self, problem: MixtureProblem) -> Tensor:
        """Attention output, ``[B, H, Nq, Dv]``; the rows of padded queries are ignored."""


class StatisticsBackend(Backend, Protocol):
    """A backend that also computes densities and responsibilities."""

    def log_normaliser(self, problem: MixtureProblem) -> Tensor:
        """``log sum_j sum_r prior[r] exp(similarity)``, ``[B, H, Nq]``, -inf for a row without a visible key."""

    def responsibility_sums(self, problem: MixtureProblem) -> Tensor:
        """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``: the E-step. Not differentiable."""


class PackedBackend(StatisticsBackend, Protocol):
    """A backend that computes all packed sequences at once; the others get them one at a time."""

    def packed_attention(self, problem: MixtureProblem) -> Tensor:
        """Attention output of all sequences, ``[1, H, Tq, Dv]``."""

    def packed_responsibility_sums(self, problem: MixtureProblem) -> Tensor:
        """Responsibilities summed over the visible pairs within each sequence, ``[Hkv, M]``."""


_BACKENDS: dict[str, Backend] = {"reference": reference, "chunked": chunked, "cpu": cpu, "sdpa": sdpa}
if _HAS_TRITON:
    _BACKENDS["triton"] = fused
    # Marked here and not at its definition, because the mark imports the compiler, which a CPU does not need.
    torch.compiler.assume_constant_result(softmax_kernel.architecture)

# Double backward through these backends must be refused here, because they do not refuse it themselves.
_FIRST_ORDER = ("chunked", "sdpa")

# These backends normalise priors themselves.
_NORMALISE_PRIORS = ("sdpa", "triton")


def attend(problem: MixtureProblem, backend: str) -> Tensor:
    """Attention output of a validated call, ``[B, H, Nq, Dv]``, 0 at padded queries. Padding need not be filled yet."""
    if problem.cu_seqlens_q is not None and not _takes_sequences_at_once(problem, backend):
        return _attend_one_by_one(problem, backend)
    name = "triton" if problem.cu_seqlens_q is not None else choose_backend(problem, backend)
    if problem.is_empty:
        return _nothing(problem)
    if name == "triton" and problem.cu_seqlens_q is None and fused.is_step(problem):
        with without_autocast(problem):
            return fused.attend_in_step(problem)
    problem = fill_padding(problem)
    parameters = problem.parameters
    if name in _FIRST_ORDER:
        problem = _first_order_only(problem)
    problem = _with_centred_keys(problem)
    if name not in _NORMALISE_PRIORS:
        problem = problem.with_relative_prior()
    attention = _attention_of(name, problem)
    with without_autocast(problem):
        # Plain softmax goes to the stock kernels unchanged, and the CPU backend moves the values in its tiles.
        one_dot_product = problem.similarity == "dot" and problem.key.shape[2] == 1
        if name != "cpu" and not one_dot_product and may_move_values(problem):
            moved = move_values(problem)
            out = moved.back(attention(moved.problem))
        else:
            out = attention(problem)
    if problem.query_mask is not None:
        out = out.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    return out if name == "triton" else with_zero_gradients(out, *parameters)


def weights(problem: MixtureProblem) -> Tensor:
    """Attention matrix of a validated call, ``[B, H, Nq, Nk]``; rows of padded queries and rows without a key are 0."""
    batch, heads, num_queries, _ = problem.query.shape
    num_keys = problem.key.shape[3]
    if 0 in (batch, heads, num_queries, num_keys):
        empty = problem.query.new_zeros(batch, heads, num_queries, num_keys)
        return with_zero_gradients(empty, problem.query, problem.key, *problem.parameters)
    if problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None:
        # Every pair is materialised anyway, so boundaries can become a mask.
        pairs = pairs_within_sequences(
            problem.cu_seqlens_q, problem.cu_seqlens_k, num_queries, num_keys, problem.is_causal
        )
        problem = problem._replace(attn_mask=pairs, is_causal=False, cu_seqlens_q=None, cu_seqlens_k=None)
    with without_autocast(problem):
        weight = reference.weights(fill_padding(problem).with_relative_prior()).to(problem.query.dtype)
    if problem.query_mask is not None:
        weight = weight.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    return with_zero_gradients(weight, *problem.parameters)


def log_normaliser(problem: MixtureProblem, backend: str) -> Tensor:
    """``log sum_j sum_r prior[r] exp(similarity)``, ``[B, H, Nq]``, of a validated call with at least one pair."""
    implementation = choose_statistics(problem, backend)
    problem = fill_padding(problem)
    if implementation is chunked:
        problem = _first_order_only(problem)
    with without_autocast(problem):
        return implementation.log_normaliser(problem)


def responsibility_sums(problem: MixtureProblem, backend: str) -> Tensor:
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``, of a validated call. Not differentiable."""
    sums = torch.zeros(
        problem.key.shape[1], problem.num_components, dtype=problem.compute_dtype, device=problem.query.device
    )
    if 0 in problem.query.shape or problem.key.shape[3] == 0:
        return sums
    implementation = choose_statistics(problem, backend)
    problem = fill_padding(problem).with_relative_prior()
    with torch.no_grad(), without_autocast(problem):
        if problem.cu_seqlens_q is None:
            return implementation.responsibility_sums(problem)
        if _HAS_TRITON and implementation is fused:
            return fused.packed_responsibility_sums(_with_centred_keys(problem))
        for own in sequences_of(problem):
            if 0 not in own.query.shape and own.key.shape[3] > 0:
                sums = sums + implementation.responsibility_sums(own)
        return sums


def sequences_of(problem: MixtureProblem) -> Iterator[MixtureProblem]:
    """Yield the packed sequences one by one. Their lengths are read from the device."""
    assert problem.cu_seqlens_q is not None
    assert problem.cu_seqlens_k is not None
    if is_traced() or problem.query.device.type == "meta":
        raise NotImplementedError(
            "packed sequences can be traced with backend='triton' only, got a backend that must know their lengths"
        )
    if is_mapped(problem.cu_seqlens_q) or is_mapped(problem.cu_seqlens_k):
        raise ValueError("vmap cannot map over the boundaries of packed sequences, got a cu_seqlens that it maps")
    bounds, key_bounds = pairwise(problem.cu_seqlens_q.tolist()), pairwise(problem.cu_seqlens_k.tolist())
    by_key = problem.has_prior_by_key
    for (first, end), (first_key, end_key) in zip(bounds, key_bounds, strict=True):
        keys = slice(first_key, end_key)
        yield problem._replace(
            query=problem.query[:, :, first:end],
            key=problem.key[:, :, :, keys],
            value=problem.value[:, :, keys],
            # The batch axis keeps it recognisable as a prior by key even where the sequence has a single key.
            log_prior=problem.log_prior[None, :, :, keys] if by_key else problem.log_prior,  # type: ignore[index]
            key_mask=None if problem.key_mask is None else problem.key_mask[:, keys],
            query_mask=None if problem.query_mask is None else problem.query_mask[:, first:end],
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )


def choose_backend(problem: MixtureProblem, backend: str) -> str:
    """Name of the backend for a padded call; an error if ``backend`` names one that does not support the call."""
    if is_transformed():
        backend = composable_backend(backend)
    if backend != "auto":
        reason = fused_unsupported(problem) if backend == "triton" else _BACKENDS[backend].unsupported(problem)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return backend
    if _fused_is_fastest(problem):
        return "triton"
    if not sdpa.is_plain_softmax(problem) and cpu.unsupported(problem) is None:
        return "cpu"
    if sdpa.unsupported(problem) is not None or _stock_kernels_would_materialise(problem):
        return "chunked"
    # torch.compile unrolls the loop over blocks of causal queries and would compile once for each number of blocks.
    unrolls = problem.is_causal and problem.num_components > 1 and torch.compiler.is_compiling()
    return "chunked" if unrolls and problem.query.device.type == "cpu" else "sdpa"


def choose_statistics(problem: MixtureProblem, backend: str) -> StatisticsBackend:
    """Return the module that computes densities and responsibilities."""
    if is_transformed():
        backend = composable_backend(backend)
    if backend == "reference":
        return reference
    reason = fused_unsupported(problem)
    if backend == "triton":
        if reason is not None:
            raise ValueError(f"backend='triton' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return fused
    is_fast = backend == "auto" and problem.query.device.type == "cuda" and problem.query.dtype != torch.float32
    return fused if is_fast and reason is None else chunked


def choose_linear_backend(problem: LinearProblem, backend: str, wants_state: bool) -> str:
    """Name of the backend for a call of linear attention. ``wants_state``: the call must also return its state."""
    mixture = problem.mixture
    if backend == "triton":
        reason = _fused_linear_unsupported(problem, wants_state)
        if reason is not None:
            raise ValueError(f"backend='triton' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return backend
    if backend != "auto":
        return backend
    is_fast = mixture.query.device.type == "cuda" and mixture.query.dtype in (torch.bfloat16, torch.float16)
    is_fast = is_fast and not is_transformed() and mixture.query.shape[2] >= FEWEST_QUERIES
    return "triton" if is_fast and _fused_linear_unsupported(problem, wants_state) is None else "chunked"


def _fused_linear_unsupported(problem: LinearProblem, wants_state: bool) -> str | None:
    mixture = problem.mixture
    reason = fused_unsupported(mixture)
    tensors = (mixture.query, mixture.key, mixture.value, mixture.shift, mixture.log_prior, problem.state)
    if wants_state and torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        reason = "a state with gradients"
    if reason is None:
        from mgk.ops.triton import linear_operator

        reason = linear_operator.unsupported(problem)
    return reason


def fused_unsupported(problem: MixtureProblem) -> str | None:
    """Name what the call needs and the fused kernels lack, or return ``None`` if they support the call."""
    if is_transformed() and is_differentiated():
        return "a derivative of torch.func or an export to ONNX"
    if not _HAS_TRITON:
        return (
            "tensors without a GPU build of torch and Triton"
            if find_spec("triton") is not None and problem.query.device.type != "cpu"
            else "tensors on cpu, only on a GPU or with TRITON_INTERPRET=1 set before Python starts"
        )
    return fused.unsupported(problem)


def is_half_on_gpu(problem: MixtureProblem) -> bool:
    """Whether the fused kernels support the call and run it on tensor cores."""
    on_gpu = problem.query.device.type == "cuda" and problem.query.dtype != torch.float32
    return on_gpu and fused_unsupported(problem) is None


def without_autocast(problem: MixtureProblem) -> AbstractContextManager[object]:
    """Context in which autocast is off, because the backends choose every dtype themselves."""
    device_type = problem.query.device.type
    # Asking costs the host less than entering a context.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _fused_is_fastest(problem: MixtureProblem) -> bool:
    """Whether the fused kernels are the fastest: on a GPU in half precision, for plain softmax only where it is known.

    In fp32 neither our kernels nor the stock ones use tensor cores, because the products are exact. And a few queries
    with gradients do not fill a block: a single program would walk through all the keys.
    """
    if not is_half_on_gpu(problem):
        return False
    if sdpa.is_plain_softmax(problem) and not softmax_kernel.is_faster(problem):
        return False
    return problem.query.shape[2] >= FEWEST_QUERIES or fused.is_step(problem)


def _stock_kernels_would_materialise(problem: MixtureProblem) -> bool:
    """Whether the stock kernels would need memory for every pair of query and key."""
    if problem.query.device.type == "cpu":
        if problem.dropout_p > 0:
            return True
    elif problem.query.dtype == torch.float64:
        return True
    mask = problem.attn_mask
    return mask is not None and mask[..., :1].numel() * mask.shape[3] * problem.num_components > LARGEST_MASK


def _takes_sequences_at_once(problem: MixtureProblem, backend: str) -> bool:
    """Whether packed sequences go to the fused kernels.

    On one sequence the stock kernels may be faster, but they would have to be called for each.
    """
    return is_half_on_gpu(problem) if backend == "auto" else choose_backend(problem, backend) == "triton"


def _attend_one_by_one(problem: MixtureProblem, backend: str) -> Tensor:
    outputs = [attend(own, backend) for own in sequences_of(problem)]
    return torch.cat(outputs, dim=2) if outputs else _nothing(problem)


def _attention_of(name: str, problem: MixtureProblem) -> Callable[[MixtureProblem], Tensor]:
    return _BACKENDS[name].attention if problem.cu_seqlens_q is None else fused.packed_attention


def _nothing(problem: MixtureProblem) -> Tensor:
    """Output of a call without a single pair, or with empty values."""
    out = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[-1])
    return with_zero_gradients(out, problem.query, problem.key, problem.value, *problem.parameters)


def _first_order_only(problem: MixtureProblem) -> MixtureProblem:
    if is_transformed():  # the composable backends refuse a second derivative themselves
        return problem
    variance = problem.variance
    return problem._replace(
        query=first_order_only(problem.query),
        key=first_order_only(problem.key),
        value=first_order_only(problem.value),
        shift=None if problem.shift is None else first_order_only(problem.shift),
        log_prior=None if problem.log_prior is None else first_order_only(problem.log_prior),
        variance=first_order_only(variance) if isinstance(variance, Tensor) else variance,
    )


def _is_exact(problem: MixtureProblem) -> bool:
    """Whether the inputs may be moved, which in half precision would round them."""
    return problem.query.dtype == problem.compute_dtype


def _with_centred_keys(problem: MixtureProblem) -> MixtureProblem:
    """Return the problem with keys, and packed queries of distances, moved towards zero where that preserves precision.

    For dot products with one variance, moving the keys changes every logit of a row by the same number, which cancels
    in the softmax but leaves fp32 with smaller numbers. (One key for all components is plain softmax attention and goes
    to the stock kernels unchanged.) For distances only packed sequences are moved here, each by its own origin: the
    kernels that take all of them at once see a single row, which has one first token.
    """
    if not _is_exact(problem):
        return problem
    if problem.similarity == "gaussian":
        if problem.cu_seqlens_q is None:
            return problem
        query, key = problem.centred()
        return problem._replace(query=query, key=key)
    if problem.key.shape[2] == 1 or not problem.shares_variance:
        return problem
    return problem._replace(key=problem.key - problem.at_keys(problem.origin())[:, :, None])


def may_move_values(problem: MixtureProblem) -> bool:
    """Whether every row that sees a key also sees the first valid one, with weights that sum to one.

    An exported ONNX graph must also work for sequences of one token, which have no second value to compare with.
    """
    return (
        _is_exact(problem)
        and problem.dropout_p == 0
        and problem.attn_mask is None
        and not problem.has_prior_by_key
        and not is_exported_to_onnx()
    )


class MovedValues(NamedTuple):
    """A call whose nearly constant values were moved to zero, and the constant that is added back to its output.

    A weighted average does not depend on where zero is, but the rounding error of a long sum does.
    """

    problem: MixtureProblem
    first: Tensor
    """The first value of each sequence, ``[B, Hkv, S, Dv]``."""
    common: Tensor | None
    """What was subtracted from the values, ``[B, Hkv, S, Dv]``; ``None`` if nothing was."""

    def back(self, out: Tensor, is_blind: Tensor | None = None) -> Tensor:
        """Turn ``out [B, H, Nq, Dv]`` of the moved call into the output of the original call.

        Rows that are ``is_blind`` stay 0. A row that sees a single key gets exactly the value of that key, because the
        second value, which decides how far values move, must not change even its last bit.
        """
        problem = self.problem
        is_packed = problem.cu_seqlens_q is not None
        may_see_one = is_packed or problem.is_causal or problem.key_mask is not None or problem.key.shape[3] == 1
        if self.common is None and not may_see_one:
            return out
        with torch.no_grad():
            visible = problem.count_visible_keys()[..., None]
            if is_blind is not None:
                visible = visible.masked_fill(is_blind, 0)
            exact = out
            if self.common is not None:
                exact = out + problem.at_queries(self.common).masked_fill(visible == 0, 0.0)
            exact = torch.where(visible == 1, problem.at_queries(self.first), exact)
        return with_value(out, exact)


def move_values(problem: MixtureProblem) -> MovedValues:
    """Move the values of a call towards zero, where :func:`may_move_values` allows it."""
    first, common = problem.common_value()
    # Mostly there is no constant to move, which is checked where reading the value does not stall a device.
    if may_inspect_values(common) and not bool(common.any()):
        return MovedValues(problem, first, None)
    return MovedValues(problem._replace(value=problem.value - problem.at_keys(common)), first, common)
