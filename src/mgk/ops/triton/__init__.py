"""Mixture attention in fused Triton kernels: one pass over the pairs, linear memory, deterministic gradients.

On NVIDIA GPUs from Ampere on, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from mgk.ops.autograd import with_zero_gradients
from mgk.ops.problem import MixtureProblem
from mgk.ops.triton.call import inverse_variance_of
from mgk.ops.triton.generation import attend_in_step, is_step
from mgk.ops.triton.operator import attend, fused_responsibilities
from mgk.ops.triton.tuning import is_interpreted

__all__ = ["attend_in_step", "attention", "is_step", "log_normaliser", "responsibility_sums", "unsupported"]

LARGEST_WIDTH = 256
MOST_COMPONENTS = 8
# Random numbers of pairs are read as those of fp16, of which the highest are infinite.
HIGHEST_DROPOUT = 0x7C00 / 2**15
OLDEST_CAPABILITY = (8, 0)
OLDEST_TRITON = (3, 4)


def unsupported(problem: MixtureProblem) -> str | None:
    """Why this backend cannot serve the call, or ``None``."""
    query = problem.query
    if query.dtype == torch.float64:
        return "float64"
    for name, width in (("head dimension", query.shape[-1]), ("value dimension", problem.value.shape[-1])):
        if width > LARGEST_WIDTH:
            return f"a {name} above {LARGEST_WIDTH}, got {width}"
    if problem.num_components > MOST_COMPONENTS:
        return f"more than {MOST_COMPONENTS} components, got {problem.num_components}"
    if problem.dropout_p > HIGHEST_DROPOUT:
        return f"a dropout_p above {HIGHEST_DROPOUT}, got {problem.dropout_p}"
    if query.device.type == "meta":
        return None
    if is_interpreted():
        if query.device.type != "cpu":
            return f"tensors on {query.device} in Triton's interpreter (TRITON_INTERPRET=1), which runs on the CPU"
        return "bfloat16 in Triton's interpreter" if query.dtype == torch.bfloat16 else None
    if query.device.type != "cuda":
        return f"tensors on {query.device}, only on a GPU or with TRITON_INTERPRET=1 set before Python starts"
    return _unsupported_device(query.device.index or 0)


@torch.compiler.assume_constant_result
@functools.cache
def _unsupported_device(index: int) -> str | None:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton below {'.'.join(map(str, OLDEST_TRITON))}, got {triton.__version__}"
    if torch.version.cuda is None:
        return "GPUs other than NVIDIA's"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return f"GPUs of compute capability below 8.0, got {capability[0]}.{capability[1]}"
    return None


def attention(problem: MixtureProblem, spans: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """``[B, H, Nq, Dv]``. ``spans`` of queries and of keys: see ``mgk.ops.packed``."""
    given = problem
    if problem.log_prior is not None and not problem.has_prior_by_key:
        # Exact, since only ratios of priors count; it keeps rounding errors out of the gradient's irrelevant direction.
        one = problem.num_components == 1
        problem = problem._replace(log_prior=None if one else problem.log_prior.log_softmax(dim=1))
    by_key = problem.has_prior_by_key
    if problem.assignment == "hard":
        problem = problem._replace(log_prior=None)
    elif problem.similarity == "dot" and problem.shares_variance and problem.key.shape[2] == 1 and not by_key:
        # u_ir does not depend on j: shifts and priors change no weight (softmax-smgk IS softmax).
        problem = problem._replace(shift=None, log_prior=None)
    # Drawn on the device: nothing waits for it, and a captured graph draws anew at each replay.
    seed = None
    if problem.dropout_p > 0:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=problem.query.device)
    out, _ = _attend(problem, problem.value, seed, spans)
    # What an identity has dropped gets a gradient of zero.
    pairs = ((given.shift, problem.shift), (given.log_prior, problem.log_prior))
    return with_zero_gradients(out, *[whole for whole, used in pairs if used is None])


def log_normaliser(problem: MixtureProblem) -> Tensor:
    """``log sum_j sum_r prior[r] exp(similarity)``, fp32 ``[B, H, Nq]``, -inf for a row without a visible key."""
    # The kernel wants values; the narrowest it takes, and they come to nothing.
    value = problem.query.new_zeros(1, 1, 1, 1).expand(*problem.key.shape[:2], problem.key.shape[3], 16)
    _, normaliser = _attend(problem, value, None)
    if problem.similarity == "gaussian" and problem.shares_variance:
        # With one variance the kernels leave out the term in |q|^2, which no softmax can see.
        inverse_variance = problem.inverse_variance()
        if isinstance(inverse_variance, Tensor):
            inverse_variance = inverse_variance[:, 0, 0].repeat_interleave(problem.group_size, dim=0)
        query, _ = _operands(problem)
        square = 0.5 * query.float().square().sum(-1) * inverse_variance
        normaliser = normaliser - square.masked_fill(normaliser == -torch.inf, 0.0)
    return normaliser


def responsibility_sums(problem: MixtureProblem, query_spans: Tensor | None = None) -> Tensor:
    """``sum over visible (i, j) of p(r | i, j)``, ``[Hkv, M]``: the E-step. Not differentiable."""
    with torch.no_grad():
        query, key = _operands(problem)
        scale, inverse_variance = inverse_variance_of(problem)
        return fused_responsibilities(
            query, key, problem.shift, problem.log_prior, inverse_variance, problem.attn_mask, problem.key_mask,
            problem.query_mask, query_spans, scale, problem.similarity == "gaussian", problem.is_causal,
        )  # fmt: skip


def _attend(
    problem: MixtureProblem,
    value: Tensor,
    seed: Tensor | None,
    spans: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    query, key = _operands(problem)
    scale, inverse_variance = inverse_variance_of(problem)
    return attend(
        query, key, value, problem.shift, problem.log_prior, inverse_variance, problem.attn_mask, problem.key_mask,
        problem.query_mask, seed, *spans, scale, problem.similarity == "gaussian", problem.is_causal,
        # Of one component there is nothing to choose.
        problem.assignment == "hard" and problem.num_components > 1, problem.dropout_p,
    )  # fmt: skip


def _operands(problem: MixtureProblem) -> tuple[Tensor, Tensor]:
    """Query and key as the kernels multiply them: products of half-precision numbers are exact in fp32 as they came,
    those of fp32 numbers lose digits far from zero."""
    return problem.centred() if problem.query.dtype == torch.float32 else (problem.query, problem.key)
