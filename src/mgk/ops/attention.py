"""Attention with a mixture of keys: the public functions, their documentation, and the choice of backend."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mgk.ops import chunked, cpu, reference, sdpa, softmax_kernel
from mgk.ops.autograd import first_order_only, with_value, with_zero_gradients
from mgk.ops.problem import MixtureProblem
from mgk.ops.transforms import composable_backend, is_differentiated, is_exported_to_onnx, is_transformed
from mgk.ops.validation import check_choice, fill_padding, make_problem, may_inspect_values

# Triton comes with torch where torch was built for a GPU; without one its kernels run in its interpreter alone.
_HAS_TRITON = find_spec("triton") is not None and (
    torch.version.cuda is not None or os.environ.get("TRITON_INTERPRET") == "1"
)
if _HAS_TRITON:
    from mgk.ops import triton as fused

BACKENDS = ("auto", "reference", "chunked", "cpu", "sdpa", "triton")
STATISTICS_BACKENDS = ("auto", "reference", "chunked", "triton")

# Elements of an attention mask, written out for every component, up to which `auto` gives it to the stock kernels.
LARGEST_MASK = 2**24

# Queries from which on `auto` gives a call to the fused kernels.
FEWEST_QUERIES = 16


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
    r"""Attention in which each position holds a mixture of M keys.

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
            normalised, and -inf switches a component off. The last two forms are a bias of each key position, one for
            all samples or one for each.
        variance: a number, ``[M]`` or ``[Hkv, M]``. ``None`` is ``sqrt(D)``. A number tells the fast backends that all
            components share it.
        similarity: ``"gaussian"`` or ``"dot"``.
        assignment: ``"soft"``, or ``"hard"``: the best component answers alone; the prior is ignored and gets a
            gradient of zero; components that tie share the gradient evenly.
        is_causal: query i sees the keys up to ``i + Nk - Nq`` (aligned bottom-right).
        key_mask: bool ``[B, Nk]``, True = attend.
        query_mask: bool ``[B, Nq]``, False = padded query, whose output is 0.
        attn_mask: bool, broadcastable to ``[B, H, Nq, Nk]``, True = attend.
        dropout_p: probability of dropping the normalised weight of a pair (i, j).
        backend: ``"auto"`` picks the fastest that serves the call. ``"reference"`` materialises and reads like the
            equations, ``"chunked"`` does everything in linear memory, ``"cpu"`` runs in tiles that fit the cache of a
            CPU, ``"sdpa"`` on the stock fused kernels, ``"triton"`` on our own, for GPUs.

    Returns:
        ``[B, H, Nq, Dv]`` in the dtype of ``query``. A row that sees no key is 0, and so is its gradient.
    """
    check_choice("backend", backend, BACKENDS)
    problem = make_problem(
        query, key, value, shift=shift, log_prior=log_prior, variance=variance, similarity=similarity,
        assignment=assignment, is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, attn_mask=attn_mask,
        dropout_p=dropout_p, fills_padding=False,
    )  # fmt: skip
    backend = choose_backend(problem, backend)
    if backend == "triton" and fused.is_step(problem) and not problem.is_empty:
        with without_autocast(problem):
            return fused.attend_in_step(problem)
    problem = fill_padding(problem)
    variance_tensor = problem.variance if isinstance(problem.variance, Tensor) else None
    parameters = (problem.shift, problem.log_prior, variance_tensor)

    if problem.is_empty:
        out = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[-1])
        return with_zero_gradients(out, problem.query, problem.key, problem.value, *parameters)
    if backend in ("chunked", "cpu", "sdpa"):  # the fused backward has no derivative, and says so itself
        problem = _first_order_only(problem)
    problem = _with_centred_dot_products(problem)
    with without_autocast(problem):
        if _may_centre_values(problem) and backend != "cpu":  # which does it in its tiles
            out = _attend_around_common_value(_ATTENTION[backend], problem)
        else:
            out = _ATTENTION[backend](problem)
    if problem.query_mask is not None:
        out = out.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    return out if backend == "triton" else with_zero_gradients(out, *parameters)


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
    problem = make_problem(
        query, key, None, shift=shift, log_prior=log_prior, variance=variance, similarity=similarity,
        assignment=assignment, is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, attn_mask=attn_mask,
    )  # fmt: skip
    batch, heads, num_queries, _ = problem.query.shape
    if 0 in (batch, heads, num_queries, problem.key.shape[3]):
        empty = problem.query.new_zeros(batch, heads, num_queries, problem.key.shape[3])
        return with_zero_gradients(empty, problem.query, problem.key)
    with without_autocast(problem):
        weight = reference.weights(problem).to(problem.query.dtype)
    if problem.query_mask is not None:
        weight = weight.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    return weight


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
    """How likely each query is under the mixture that its visible keys span, ``[B, H, Nq]``, differentiable.

    ::

        log (1/n_i) sum_j sum_r prior[r] exp(similarity(q_i, k_jr))        n_i = number of keys that query i sees

    in fp32, or fp64 for fp64 inputs. Its negative mean is the paper's NLL. ``normalized=True`` keeps the constants
    ``(2 pi variance[r])^(-D/2)`` of the Gaussians, which attention drops; with a prior that sums to one the result is
    the logarithm of a density. A query that sees no key, or is padding, has -inf. Memory is linear in the length.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    if normalized and similarity == "dot":
        raise ValueError("normalized=True needs similarity='gaussian', got 'dot': a dot product is no density")
    problem = make_problem(
        query, key, None, shift=shift, log_prior=log_prior, variance=variance, similarity=similarity,
        assignment="soft", is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, attn_mask=attn_mask,
    )  # fmt: skip
    if 0 in problem.query.shape or problem.key.shape[3] == 0:
        empty = torch.full(problem.query.shape[:3], -math.inf, dtype=problem.compute_dtype, device=problem.query.device)
        return with_zero_gradients(empty, problem.query, problem.key)
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
    implementation = choose_statistics(problem, backend)
    if implementation is chunked:
        problem = _first_order_only(problem)
    with without_autocast(problem):
        density = implementation.log_normaliser(problem)
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

    ``reduction="sum"`` gives the sum over pairs instead, which adds up over batches and devices; divided by its own
    sum over components it is the mean. Without any visible pair the result is 0. Memory is linear in the length.
    """
    check_choice("backend", backend, STATISTICS_BACKENDS)
    check_choice("reduction", reduction, ("mean", "sum"))
    problem = make_problem(
        query, key, None, shift=shift, log_prior=log_prior, variance=variance, similarity=similarity,
        assignment="soft", is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, attn_mask=attn_mask,
    )  # fmt: skip
    if 0 in problem.query.shape or problem.key.shape[3] == 0:
        return torch.zeros(
            problem.key.shape[1], problem.num_components, dtype=problem.compute_dtype, device=problem.query.device
        )
    implementation = choose_statistics(problem, backend)
    with torch.no_grad(), without_autocast(problem):
        sums = implementation.responsibility_sums(problem)
        if reduction == "sum":
            return sums
        pairs = sums.sum(dim=1, keepdim=True)
        return sums / pairs.masked_fill(pairs == 0, 1.0)


def without_autocast(problem: MixtureProblem) -> AbstractContextManager[object]:
    """The backends choose every dtype themselves."""
    device_type = problem.query.device.type
    # To enter a context costs the host more than to ask.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _with_centred_dot_products(problem: MixtureProblem) -> MixtureProblem:
    """Move the keys of a mixture of dot products: with one variance every logit of a row changes by the same number.

    Attention cannot see that, but fp32 sees smaller numbers. (Half precision would round the moved keys; one key for
    all components is plain softmax attention and is left to the stock kernels.)
    """
    is_exact = problem.query.dtype == problem.compute_dtype
    if problem.similarity != "dot" or problem.key.shape[2] == 1 or not problem.shares_variance or not is_exact:
        return problem
    return problem._replace(key=problem.key - problem.origin()[:, :, None])


def _may_centre_values(problem: MixtureProblem) -> bool:
    """Whether every row that sees a key sees the first valid one, and its weights sum to one.

    Half precision would round the moved values. Plain softmax is left to the stock kernels as it is. A graph of ONNX
    takes sequences of one token as well, which have no second value to compare with.
    """
    is_exact = problem.query.dtype == problem.compute_dtype
    one_dot_product = problem.similarity == "dot" and problem.key.shape[2] == 1
    return (
        is_exact
        and problem.dropout_p == 0
        and problem.attn_mask is None
        and not (problem.has_prior_by_key or one_dot_product)
        and not is_exported_to_onnx()
    )


def _attend_around_common_value(attention: Callable[[MixtureProblem], Tensor], problem: MixtureProblem) -> Tensor:
    """Attend to what differs between nearly constant values, then add the constant: it comes back exact.

    The average of values does not care where zero is, but the rounding of a long sum does. A row that sees one key
    alone is given its value: it must not learn of the second one, not even in its last bit.
    """
    first, common = problem.common_value()
    # Where it can be asked without stalling a device: mostly there is no constant to move.
    is_moved = not may_inspect_values(common) or bool(common.any())
    out = attention(problem._replace(value=problem.value - common) if is_moved else problem)
    if not (is_moved or problem.is_causal or problem.key_mask is not None or problem.key.shape[3] == 1):
        return out
    with torch.no_grad():
        visible = problem.count_visible_keys()[..., None]
        first, common = (x.repeat_interleave(problem.group_size, dim=1) for x in (first, common))
        exact = out + common.masked_fill(visible == 0, 0.0) if is_moved else out
        exact = torch.where(visible == 1, first, exact)
    return with_value(out, exact)


def _first_order_only(problem: MixtureProblem) -> MixtureProblem:
    if is_transformed():  # where a backend that composes says so itself
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


_ATTENTION = {
    "reference": reference.attention,
    "chunked": chunked.attention,
    "cpu": cpu.attention,
    "sdpa": sdpa.attention,
}
if _HAS_TRITON:
    _ATTENTION["triton"] = fused.attention


def fused_unsupported(problem: MixtureProblem) -> str | None:
    """Why the fused kernels cannot serve the call, or ``None``."""
    if is_transformed() and is_differentiated():
        return "a derivative of torch.func or an export to ONNX"
    if not _HAS_TRITON:
        return (
            "tensors without a GPU build of torch and Triton"
            if find_spec("triton") is not None and problem.query.device.type != "cpu"
            else "tensors on cpu, only on a GPU or with TRITON_INTERPRET=1 set before Python starts"
        )
    return fused.unsupported(problem)


def choose_statistics(problem: MixtureProblem, backend: str) -> Any:
    """The module that computes densities and responsibilities."""
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


def choose_backend(problem: MixtureProblem, backend: str) -> str:
    if is_transformed():
        backend = composable_backend(backend)
    if backend == "triton":
        reason = fused_unsupported(problem)
        if reason is not None:
            raise ValueError(f"backend='triton' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return backend
    if backend == "auto" and _fused_is_fastest(problem):
        return "triton"
    if backend == "cpu":
        reason = cpu.unsupported(problem)
        if reason is not None:
            raise ValueError(f"backend='cpu' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
        return backend
    if backend == "auto" and not sdpa.is_plain_softmax(problem) and cpu.unsupported(problem) is None:
        return "cpu"
    reason = sdpa.unsupported(problem)
    if backend == "sdpa" and reason is not None:
        raise ValueError(f"backend='sdpa' cannot do {reason}: use 'auto', 'chunked' or 'reference'")
    if backend != "auto":
        return backend
    if reason is not None or _stock_kernels_would_materialise(problem):
        return "chunked"
    # Blocks of causal queries unroll: compiled, each number of blocks would need a graph of its own.
    unrolls = problem.is_causal and problem.num_components > 1 and torch.compiler.is_compiling()
    return "chunked" if unrolls and problem.query.device.type == "cpu" else "sdpa"


def _fused_is_fastest(problem: MixtureProblem) -> bool:
    """On a GPU in half precision; for plain softmax only where a table says that the stock kernels are slower.

    In fp32 the products are exact and take no tensor cores, in our kernels as in the stock ones. And a few queries with
    gradients fill no block: one program would walk through all the keys alone.
    """
    if not is_half_on_gpu(problem):
        return False
    if sdpa.is_plain_softmax(problem):
        return softmax_kernel.is_faster(problem)
    return problem.query.shape[2] >= FEWEST_QUERIES or fused.is_step(problem)


def is_half_on_gpu(problem: MixtureProblem) -> bool:
    """Whether the fused kernels take a call and have tensor cores for it."""
    on_gpu = problem.query.device.type == "cuda" and problem.query.dtype != torch.float32
    return on_gpu and fused_unsupported(problem) is None


def _stock_kernels_would_materialise(problem: MixtureProblem) -> bool:
    """Whether the stock kernels need memory for every pair, where blocks do not."""
    if problem.query.device.type == "cpu":
        if problem.dropout_p > 0:
            return True
    elif problem.query.dtype == torch.float64:
        return True
    mask = problem.attn_mask
    return mask is not None and mask[..., :1].numel() * mask.shape[3] * problem.num_components > LARGEST_MASK
