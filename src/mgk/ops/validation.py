"""Checks of user input. Each raises before any computation, with one sentence: what was expected, what came."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mgk.ops.problem import Mixture, MixtureProblem, Visibility
from mgk.ops.transforms import is_transformed

FLOATING_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIMILARITIES = ("gaussian", "dot")
ASSIGNMENTS = ("soft", "hard")

_debug_checks = False


def debug_checks(enabled: bool) -> None:
    """Switch on or off the checks of values inside GPU tensors.

    Python numbers and values of CPU tensors are always checked. On a GPU the checks synchronise with the device at
    every call, so they are off by default.
    """
    global _debug_checks
    _debug_checks = bool(enabled)


def is_traced() -> bool:
    """Whether a graph is being traced, which must not depend on the values of one example."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def may_inspect_values(tensor: Tensor) -> bool:
    """Whether reading values of ``tensor`` causes neither a device synchronisation nor a graph break.

    A tensor that a transform has wrapped may hold the values of many calls, or none, so its values are never read.
    """
    if is_traced() or is_transformed() or tensor.device.type == "meta" or type(tensor) not in (Tensor, Parameter):
        return False
    return tensor.device.type == "cpu" or _debug_checks


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_integer(name: str, value: object) -> int:
    """Return a count as an ``int``, also one of NumPy."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def check_number(name: str, value: object) -> float:
    """Return a real number as a ``float``, also one of NumPy."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mixture: Mixture,
    visibility: Visibility,
    dropout_p: float = 0.0,
) -> MixtureProblem:
    """Validate one call and return it in canonical form. If ``value`` is ``None``, a value of width 0 takes its place.

    Padding is not filled here but in :func:`fill_padding`, so that a step of generation does not copy the cache.
    """
    _check_options(mixture, visibility, dropout_p)
    query, key, value = _canonical_operands(query, key, value)
    batch, num_heads, num_queries, _ = query.shape
    _, num_kv_heads, key_components, num_keys, _ = key.shape
    shift = mixture.shift
    if shift is not None:
        _check_shift(shift, query, key)
    num_components = key_components if shift is None else shift.shape[1]
    lacks_axis = num_components == 1 and shift is None

    log_prior = _canonical_log_prior(mixture.log_prior, query, num_kv_heads, num_components, num_keys, lacks_axis)
    variance = _canonical_variance(mixture.variance, query, num_kv_heads, num_components)
    key_mask = _check_mask("key_mask", visibility.key_mask, (batch, num_keys), query)
    query_mask = _check_mask("query_mask", visibility.query_mask, (batch, num_queries), query)
    attn_mask = _canonical_attn_mask(visibility.attn_mask, (batch, num_heads, num_queries, num_keys), query)
    if attn_mask is not None and attn_mask.shape[1] == 1 and attn_mask.shape[2] == 1:
        # A mask that depends on neither head nor query is a key mask, which every backend handles in linear memory.
        same_for_all = attn_mask[:, 0, 0].expand(batch, num_keys)
        key_mask = same_for_all if key_mask is None else key_mask & same_for_all
        attn_mask = None
    cu_seqlens_q, cu_seqlens_k = visibility.cu_seqlens_q, visibility.cu_seqlens_k
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("packed sequences need the boundaries of their queries, got those of the keys alone")
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_packed(query, num_keys, cu_seqlens_q, cu_seqlens_k, visibility.attn_mask)

    return MixtureProblem(
        query, key, value, shift, log_prior, variance, mixture.similarity, mixture.assignment, visibility.is_causal,
        key_mask, query_mask, attn_mask, float(dropout_p), cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip


def _check_options(mixture: Mixture, visibility: Visibility, dropout_p: float) -> None:
    check_choice("similarity", mixture.similarity, SIMILARITIES)
    check_choice("assignment", mixture.assignment, ASSIGNMENTS)
    if not isinstance(visibility.is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {type(visibility.is_causal).__name__}")
    if not isinstance(dropout_p, Real):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    log_prior = mixture.log_prior
    if visibility.cu_seqlens_q is not None and isinstance(log_prior, Tensor) and log_prior.ndim == 4:
        # A prior for each sample is not needed, since [Hkv, M, Tk] has an entry for each key of each sequence.
        raise ValueError(
            f"log_prior of packed sequences must have shape [M], [Hkv, M] or [Hkv, M, Tk], got {list(log_prior.shape)}"
        )


def _canonical_operands(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check_floating("query", query)
    _check_floating("key", key)
    if value is not None:
        _check_floating("value", value)
    query, key, value = _as_autocast_would(query, key, value)
    for name, tensor in (("key", key), ("value", value)):
        if tensor is None:
            continue
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        _check_device(name, tensor, query)

    if query.ndim != 4:
        raise ValueError(f"query must have shape [B, H, Nq, D], got {_shape(query)}")
    if key.ndim not in (4, 5):
        raise ValueError(f"key must have shape [B, Hkv, M, Nk, D] or [B, Hkv, Nk, D], got {_shape(key)}")
    if key.ndim == 4:
        key = key[:, :, None]
    batch, num_heads, _, head_dim = query.shape
    key_batch, num_kv_heads, key_components, num_keys, key_dim = key.shape
    if value is None:
        value = key.new_zeros(batch, num_kv_heads, num_keys, 0)
    if value.ndim != 4:
        raise ValueError(f"value must have shape [B, Hkv, Nk, Dv], got {_shape(value)}")
    value_batch, value_heads, num_values, _ = value.shape
    for name, size in (("key", key_batch), ("value", value_batch)):
        if size != batch:
            raise ValueError(f"{name} must have the batch size of query, {batch}, got {size}")
    if head_dim == 0:
        raise ValueError("query must have a head dimension of at least 1, got 0")
    if key_dim != head_dim:
        raise ValueError(f"key must have the head dimension of query, {head_dim}, got {key_dim}")
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"the heads of query must be a multiple of those of key, got {num_heads} and {num_kv_heads}")
    if value_heads != num_kv_heads:
        raise ValueError(f"value must have as many heads as key, {num_kv_heads}, got {value_heads}")
    if num_values != num_keys:
        raise ValueError(f"value must have as many positions as key, {num_keys}, got {num_values}")
    if key_components == 0:
        raise ValueError("key must have at least one component, got M = 0")
    return query, key, value


def _check_shift(shift: Tensor, query: Tensor, key: Tensor) -> None:
    _check_floating("shift", shift)
    _check_device("shift", shift, query)
    num_kv_heads, key_components, head_dim = key.shape[1], key.shape[2], key.shape[4]
    if key_components != 1:
        raise ValueError(
            f"key must have shape [B, Hkv, Nk, D] when shift is given, got {key_components} components in key"
        )
    if shift.ndim != 3 or shift.shape[0] != num_kv_heads or shift.shape[1] == 0 or shift.shape[2] != head_dim:
        raise ValueError(f"shift must have shape [Hkv, M, D] = [{num_kv_heads}, M, {head_dim}], got {_shape(shift)}")


def _check_packed(query: Tensor, num_keys: int, cu_seqlens_q: Any, cu_seqlens_k: Any, attn_mask: Tensor | None) -> None:
    """Check the boundaries of packed sequences, whose tokens lie in one row, ``query [1, H, T, D]``."""
    if len(query) != 1:
        raise ValueError(f"packed sequences must lie in one row, got {len(query)} rows")
    if attn_mask is not None:
        raise ValueError("packed sequences take no attn_mask, got cu_seqlens and attn_mask")
    check_boundaries("cu_seqlens_q", cu_seqlens_q, query.shape[2], query.device)
    check_boundaries("cu_seqlens_k", cu_seqlens_k, num_keys, query.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must bound as many sequences as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )


def check_boundaries(name: str, boundaries: Any, num_tokens: int, device: torch.device) -> None:
    """Check that ``boundaries`` divide ``num_tokens`` tokens and are on their device."""
    if not isinstance(boundaries, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(boundaries).__name__}")
    if boundaries.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {boundaries.dtype}")
    if boundaries.ndim != 1 or len(boundaries) == 0:
        raise ValueError(f"{name} must have shape [S + 1], got {list(boundaries.shape)}")
    if boundaries.device != device:
        raise ValueError(f"{name} must be on the device of the tokens, {device}, got {boundaries.device}")
    if not may_inspect_values(boundaries):
        return
    values = boundaries.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {values[0]}")
    if any(later < earlier for earlier, later in itertools.pairwise(values)):
        raise ValueError(f"{name} must never decrease, got {values}")
    if values[-1] != num_tokens:
        raise ValueError(f"{name} must end with the number of tokens, {num_tokens}, got {values[-1]}")


def fill_padding(problem: MixtureProblem) -> MixtureProblem:
    """Return the problem with zeros in padded keys, values and queries."""
    if problem.key_mask is None and problem.query_mask is None:
        return problem
    query, key, value = problem.query, problem.key, problem.value
    if problem.key_mask is not None:
        key = key.masked_fill(~problem.key_mask[:, None, None, :, None], 0.0)
        value = value.masked_fill(~problem.key_mask[:, None, :, None], 0.0)
    if problem.query_mask is not None:
        query = query.masked_fill(~problem.query_mask[:, None, :, None], 0.0)
    return problem._replace(query=query, key=key, value=value)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _check_floating(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING_DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")


def _as_autocast_would(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast, cast query, key and value to its dtype, as ``F.scaled_dot_product_attention`` does."""
    device_type = query.device.type
    if query.dtype == torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return query, key, value
    dtype = torch.get_autocast_dtype(device_type)
    return query.to(dtype), key.to(dtype), None if value is None else value.to(dtype)


def _canonical_log_prior(
    log_prior: Tensor | None, query: Tensor, num_kv_heads: int, num_components: int, num_keys: int, lacks_axis: bool
) -> Tensor | None:
    if log_prior is None:
        return None
    _check_floating("log_prior", log_prior)
    _check_device("log_prior", log_prior, query)
    if log_prior.ndim not in (1, 2, 3, 4):
        forms = "[M], [Hkv, M], [Hkv, M, Nk] or [B, Hkv, M, Nk]"
        raise ValueError(f"log_prior must have shape {forms}, got {_shape(log_prior)}")
    batch = query.shape[0]
    if log_prior.ndim == 4 and log_prior.shape[0] != batch:
        raise ValueError(f"log_prior must have the batch size of query, {batch}, got {log_prior.shape[0]}")
    components = log_prior.shape[-1 if log_prior.ndim < 3 else -2]
    if components != num_components:
        hint = ": key needs a component axis, [B, Hkv, M, Nk, D]" if lacks_axis else ""
        raise ValueError(f"log_prior must have as many components as key, {num_components}, got {components}{hint}")
    if log_prior.ndim == 1:
        log_prior = log_prior.expand(num_kv_heads, num_components)
    if log_prior.ndim == 2:
        log_prior = log_prior[:, :, None]
    elif log_prior.shape[-1] != num_keys:
        raise ValueError(f"log_prior must cover all {num_keys} key positions, got {log_prior.shape[-1]}")
    if log_prior.shape[-3] != num_kv_heads:
        raise ValueError(f"log_prior must have as many heads as key, {num_kv_heads}, got {log_prior.shape[-3]}")
    # In fp32, because a large number in fp64 may be infinite there.
    log_prior = log_prior.to(torch.promote_types(query.dtype, torch.float32))
    if may_inspect_values(log_prior) and log_prior.numel():
        if not bool((log_prior < math.inf).all()):
            raise ValueError("log_prior must hold numbers below infinity, got NaN or infinity")
        # A prior for each sample may be all -inf: the rows of that sample are 0, as if its keys were masked.
        if log_prior.ndim == 3 and bool((log_prior.amax(dim=(1, 2)) == -math.inf).any()):
            raise ValueError("log_prior must leave every head a component with a prior above zero, got all -inf")
    return log_prior


def _canonical_variance(
    variance: float | Tensor | None, query: Tensor, num_kv_heads: int, num_components: int
) -> float | Tensor:
    if variance is None:
        return math.sqrt(query.shape[-1])
    if isinstance(variance, Real) and not isinstance(variance, bool):
        if not 0.0 < variance < math.inf:
            raise ValueError(f"variance must be positive and finite, got {variance}")
        return float(variance)
    if not isinstance(variance, Tensor):
        raise TypeError(f"variance must be a number or a tensor, got {type(variance).__name__}")
    _check_floating("variance", variance)
    _check_device("variance", variance, query)
    if list(variance.shape) not in ([num_components], [num_kv_heads, num_components]):
        raise ValueError(
            f"variance must be a number or have shape [M] = [{num_components}] or "
            f"[Hkv, M] = [{num_kv_heads}, {num_components}], got {_shape(variance)}"
        )
    # What is positive and finite in fp64 may be neither in the dtype that it is used in.
    used = variance.detach().to(torch.promote_types(query.dtype, torch.float32))
    if may_inspect_values(used) and not bool(((used > 0) & (used < math.inf)).all()):
        raise ValueError(f"variance must be positive and finite, got values from {used.min():g} to {used.max():g}")
    return variance.expand(num_kv_heads, num_components)


def _check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...], query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    _check_bool(name, mask, query)
    if mask.ndim != len(shape) or any(got != expected for got, expected in zip(mask.shape, shape, strict=True)):
        raise ValueError(f"{name} must have shape {list(shape)}, got {_shape(mask)}")
    return mask


def _canonical_attn_mask(mask: Tensor | None, shape: tuple[int, ...], query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    _check_bool("attn_mask", mask, query)
    aligned = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(got not in (1, expected) for got, expected in zip(aligned, shape, strict=True)):
        raise ValueError(f"attn_mask must be broadcastable to [B, H, Nq, Nk] = {list(shape)}, got {_shape(mask)}")
    return mask.reshape(aligned).expand(-1, -1, -1, shape[3])


def _check_bool(name: str, mask: Any, query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a bool tensor, True = attend, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, True = attend, got {mask.dtype}")
    _check_device(name, mask, query)
