"""Mixture attention on ``F.scaled_dot_product_attention``, which uses the fused kernel of the device and has autograd.

Expand |q - k|^2 and write everything in units of logit * variance. The terms beside q . k go into a few extra feature
columns, appended to query and key and padded to one width so that the fused kernels accept the call:

- *flattened*: a soft mixture is plain softmax attention over the M * Nk keys, each value repeated M times, with
  ``log_prior - |k_jr|^2 / 2`` as a bias per key. The bias is one column (times a column of ones).
- *factored*: shifted keys of one variance have logit = s_ij + u_ir + w_jr, so that
  ``sum_r exp(logit) = exp(s_ij) * sum_r A_ir B_jr``. One call over Nk keys with the value columns ``[B_jr v_j, B_jr]``
  gives every component's numerator and denominator; softmax's own normaliser cancels when A combines them.

In half precision a single column would be too coarse, so it is split into three columns whose sum is exact.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgk.ops.problem import MixtureProblem
from mgk.ops.validation import may_inspect_values

# Extra feature columns, each as a pair (for the query, for the key); None for the query is a column of ones. The first
# column, if there is one, is the bias of each key.
Columns: TypeAlias = list[tuple[Tensor | None, Tensor]]

# Largest sum of the spreads of u and w over components, in logits, for the factored form. Beyond it A_ir B_jr can
# underflow in all components at once: fp32 has 87 e-folds below 1, and exp(s - max) needs the rest of them.
FACTORED_SPREAD = 60.0

# cuDNN's backward gives NaN where all logits of a row lie below -88 and the keys do not fill its last tile: it
# exponentiates the tail, whose logits are 0, before it masks it. Dot products rarely go there; distances do.
CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Devices on which mixtures of half-precision inputs are computed in fp32.
FLOAT32_DEVICES = ("cpu",)

# Number of queries in a block under a causal mask that the stock kernels cannot express: few enough that little is
# computed beyond the diagonal, many enough to keep the kernels busy.
CAUSAL_BLOCK = 256

# Query-side factors of the three columns that carry one fp32 number in half precision. fp16 has few exponent bits: the
# high column is scaled down and the low one up. The middle factor is 1, so its gradient is the number's own.
SPLIT_FACTORS = {torch.bfloat16: (1.0, 1.0, 1.0), torch.float16: (2.0**11, 1.0, 2.0**-11)}
# Mantissa bits of fp32 that survive in the half type, as a mask over its int32 pattern.
SPLIT_BITS = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}

# Lowest value of a bias column. It is finite because 0 * inf would be NaN in the backward pass.
LOWEST = {torch.float64: -1e30, torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -60000.0 * 2.0**11}

# A log prior at or below this counts as a prior of zero, because callers often write the lowest number of the dtype.
DEAD_PRIOR = -1e30

# Distance of a masked key's logit below the logits of visible keys: exp(-1000) is 0 even in fp64.
MASKED_MARGIN = 1000.0


def unsupported(problem: MixtureProblem) -> str | None:
    """Name what the call needs and this backend lacks, or return ``None`` if the backend supports the call."""
    if problem.num_components > 1 and problem.assignment == "hard":
        return "assignment='hard' with several components"
    if problem.num_components > 1 and problem.dropout_p > 0 and not is_plain_softmax(problem):
        return "dropout_p > 0 with several components"
    return None


def attention(problem: MixtureProblem) -> Tensor:
    """Attention output, ``[B, H, Nq, Dv]``."""
    dtype = problem.query.dtype
    if problem.log_prior is not None and not problem.has_prior_by_key:
        # Normalising is exact, since only ratios of priors matter, and it keeps rounding errors out of the direction of
        # the gradient in which the output does not change.
        problem = problem._replace(log_prior=problem.log_prior.log_softmax(dim=1))
    if is_plain_softmax(problem):
        # u_ir does not depend on j, so shifts and priors change no weight: softmax-smgk is exactly softmax.
        problem = problem._replace(shift=None, log_prior=None)
    elif problem.assignment == "hard":
        problem = problem._replace(log_prior=None)
    if dtype != problem.compute_dtype and _needs_float32(problem):
        query, key, value = (tensor.float() for tensor in (problem.query, problem.key, problem.value))
        problem = problem._replace(query=query, key=key, value=value)

    if isinstance(problem.variance, Tensor):
        out = _flattened_unequal(problem)
    elif problem.shift is None:
        out = _flattened_projected(problem)
    else:
        out = _shifted(problem)
    return _zero_empty_rows(problem, out).to(dtype)


def is_plain_softmax(problem: MixtureProblem) -> bool:
    """Whether the call is plain softmax: dot similarity, with a shift and a prior that are the same for all keys."""
    one_key = problem.key.shape[2] == 1
    return problem.similarity == "dot" and problem.shares_variance and one_key and not problem.has_prior_by_key


def _needs_float32(problem: MixtureProblem) -> bool:
    """Whether half-precision inputs must be computed in fp32.

    ``k / variance_r`` must not be rounded to half precision. And the CPU kernels accumulate half-precision gradients in
    half precision, while they are hardly faster (bf16) or many times slower (fp16) than in fp32.
    """
    if isinstance(problem.variance, Tensor):
        return True
    stock_alone = is_plain_softmax(problem) and problem.key_mask is None and problem.query.dtype != torch.float16
    return problem.query.device.type in FLOAT32_DEVICES and not stock_alone


def _flattened_projected(problem: MixtureProblem) -> Tensor:
    """Attention with all components as separate keys, for one variance that is a Python number."""
    assert isinstance(problem.variance, float)
    query, key = _product_operands(problem)
    bias = _norm_and_prior(problem, key)
    columns: Columns = [] if bias is None else [(None, _interleave(bias))]
    return _attend(problem, query, _interleave(key), problem.value, columns, 1.0 / problem.variance)


def _flattened_unequal(problem: MixtureProblem) -> Tensor:
    """Attention with all components as separate keys, each divided by its own variance; fp32 or fp64 only."""
    inverse_variance = problem.inverse_variance()
    assert isinstance(inverse_variance, Tensor)
    query, key = problem.centred()
    key = problem.component_keys(key)
    bias = key.new_zeros(key.shape[:-1])
    if problem.similarity == "gaussian":
        bias = -0.5 * (key.square() * inverse_variance).sum(-1)
    if problem.log_prior is not None:
        bias = bias + problem.log_prior
    columns: Columns = [(None, _interleave(bias))]
    if problem.similarity == "gaussian" and not problem.shares_variance:
        norm_factor = (-0.5 * inverse_variance)[..., 0].expand(bias.shape)
        columns.append((query.square().sum(-1), _interleave(norm_factor)))
    return _attend(problem, query, _interleave(key * inverse_variance), problem.value, columns, 1.0)


def _shifted(problem: MixtureProblem) -> Tensor:
    """Attention with shifted keys of one variance, whose components share a product: q.(k_j + b_r) = q.k_j + q.b_r."""
    assert problem.shift is not None
    assert isinstance(problem.variance, float)
    shift, variance = problem.shift.to(problem.compute_dtype), problem.variance
    query, key = _product_operands(problem)
    key = key[:, :, 0]
    bias = _norm_and_prior(problem._replace(log_prior=None, shift=None), key)  # [B, Hkv, Nk], the part without r

    # u_ir + w_jr, measured from the origin so that a common offset of the data leaves both small.
    centred_query, centred_key = problem.centred()
    by_group = centred_query.unflatten(1, (-1, problem.group_size))
    u = torch.einsum("bhgid,hrd->bhgir", by_group, shift).flatten(1, 2)  # [B, H, Nq, M]
    w = centred_key.new_zeros(*key.shape[:-1], shift.shape[1])  # [B, Hkv, Nk, M]
    if problem.similarity == "gaussian":
        w = -torch.einsum("bhjd,hrd->bhjr", centred_key[:, :, 0], shift) - 0.5 * shift.square().sum(-1)[:, None]
    if problem.log_prior is not None:
        w = w + variance * problem.log_prior.mT

    unsafe = _rows_too_wide_to_factor(problem, u, w)
    if unsafe is None or bool(unsafe.all()):
        return _flattened_shifted(problem, query, key, bias, u, w)
    out = _factored(problem, query, key, bias, u.masked_fill(unsafe[..., None], 0.0), w)
    if bool(unsafe.any()):
        out = torch.where(unsafe[..., None], _flattened_shifted(problem, query, key, bias, u, w), out)
    return out


def _flattened_shifted(
    problem: MixtureProblem, query: Tensor, key: Tensor, bias: Tensor | None, u: Tensor, w: Tensor
) -> Tensor:
    """Attention over all components as separate keys, in which a one-hot column of component r selects u_ir - u_i0.

    The term u_i0 is dropped, because it is the same for every key.
    """
    components = w.shape[-1]
    bias = w if bias is None else w + bias[..., None]
    columns: Columns = [(None, bias.flatten(2))]
    one_hot = torch.eye(components, dtype=w.dtype, device=w.device)
    for r in range(1, components):
        columns.append((u[..., r] - u[..., 0], one_hot[r].expand(w.shape).flatten(2)))
    key = key.repeat_interleave(components, dim=2)
    return _attend(problem, query, key, problem.value, columns, 1.0 / float(problem.variance))


def _rows_too_wide_to_factor(problem: MixtureProblem, u: Tensor, w: Tensor) -> Tensor | None:
    """Mask of rows for which some ``sum_r A_ir B_jr`` may underflow, bool ``[B, H, Nq]``; ``None``: flatten all rows.

    A row is judged by the keys that it can see, so that later tokens do not change a bit of earlier rows. The mask is
    read on the host, so it is computed only where that neither stalls a device nor breaks a graph. In half precision
    the factored form is never used, because rounding ``B_jr v_j`` would cost the gradient of the key more precision
    than the flattened form does.
    """
    if problem.query.dtype != problem.compute_dtype or u.device.type != "cpu" or not may_inspect_values(u):
        return None
    with torch.no_grad():
        spread_u = u.amax(-1) - u.amin(-1)
        spread_w = (w.amax(-1) - w.amin(-1)).nan_to_num(0.0, posinf=math.inf)
        if problem.key_mask is not None:
            spread_w = spread_w.masked_fill(~problem.key_mask[:, None], 0.0)
        if problem.is_causal:
            last_visible = torch.arange(u.shape[2], device=u.device) + problem.causal_offset
            widest = spread_w.cummax(dim=-1).values[..., last_visible.clamp(min=0)]
        else:
            widest = spread_w.amax(dim=-1, keepdim=True)
        widest = widest.repeat_interleave(problem.group_size, dim=1)
        return spread_u + widest > FACTORED_SPREAD * float(problem.variance)


def _factored(problem: MixtureProblem, query: Tensor, key: Tensor, bias: Tensor | None, u: Tensor, w: Tensor) -> Tensor:
    inverse_variance = 1.0 / float(problem.variance)
    # The maxima cancel in the quotient below, so they are constants for autograd.
    u = u - u.detach().amax(-1, keepdim=True)
    w_maximum = w.detach().amax(-1, keepdim=True).clamp(min=LOWEST[w.dtype])
    a, b = (u * inverse_variance).exp(), ((w - w_maximum) * inverse_variance).exp()

    value = torch.cat([problem.value, problem.value.new_ones(*problem.value.shape[:-1], 1)], dim=-1)
    value = (b[..., None] * value[..., None, :]).flatten(3)  # [B, Hkv, Nk, M * (Dv + 1)]
    bias = w_maximum[..., 0] if bias is None else bias + w_maximum[..., 0]
    # The quotient below makes rows sum to one.
    out = _attend(problem, query, key, value, [(None, bias)], inverse_variance, sums_to_one=False)
    out = out.unflatten(-1, (a.shape[-1], -1))
    out = (a[..., None] * out).sum(-2)
    total = out[..., -1:]
    return out[..., :-1] / total.masked_fill(total == 0, 1.0)


def _product_operands(problem: MixtureProblem) -> tuple[Tensor, Tensor]:
    """Query and key for the product in the kernel: centred in fp32 and fp64, unchanged in half precision.

    Rounding a centred half-precision input would change the problem. Its norms in fp32 and the fp32 accumulator of the
    kernel keep the logits accurate without centring.
    """
    return problem.centred() if problem.query.dtype == problem.compute_dtype else (problem.query, problem.key)


def _norm_and_prior(problem: MixtureProblem, key: Tensor) -> Tensor | None:
    """``variance * log_prior - |k|^2 / 2`` in fp32 or better, or ``None`` where it is the same for all keys."""
    bias = None
    if problem.similarity == "gaussian":
        bias = -0.5 * key.to(problem.compute_dtype).square().sum(-1)
    if problem.log_prior is not None and (problem.num_components > 1 or problem.has_prior_by_key):
        scaled = float(problem.variance) * problem.log_prior
        bias = scaled.expand(key.shape[:-1]) if bias is None else bias + scaled
    return bias


def _interleave(per_component: Tensor) -> Tensor:
    """Flatten ``[B, Hkv, M, Nk, ...]`` to ``[B, Hkv, Nk * M, ...]``: a prefix of positions is a prefix of keys."""
    return per_component.transpose(2, 3).flatten(2, 3)


class _SplitColumn(torch.autograd.Function):
    """Split fp32 numbers into three in half precision, ``[..., 3]``, whose sum with ``SPLIT_FACTORS`` is exact."""

    @staticmethod
    def forward(ctx: Any, column: Tensor, dtype: torch.dtype) -> Tensor:
        rest = column.clamp(LOWEST[dtype], -LOWEST[dtype])
        parts = []
        for factor in SPLIT_FACTORS[dtype]:
            # Mask the bits instead of casting down and up, because a compiler may remove such a round trip.
            part = (rest.view(torch.int32) & SPLIT_BITS[dtype]).view(torch.float32) / factor
            part = part.masked_fill(part.abs() < torch.finfo(dtype).tiny, 0.0)
            parts.append(part)
            rest = rest - part * factor
        return torch.stack(parts, dim=-1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0][..., 1].float(), None


def _split_factors(like: Tensor) -> Tensor:
    """``SPLIT_FACTORS`` as a tensor ``[3]``, filled on the device.

    A copy from the host would synchronise with the device and could not be captured in a CUDA graph.
    """
    return torch.cat([like.new_full((1,), factor) for factor in SPLIT_FACTORS[like.dtype]])


def _columns_for_query(query: Tensor, columns: Columns) -> list[Tensor]:
    """Return the columns to append to the query, ``[B, H, Nq, 1 or 3]`` each. ``None`` is a column of ones."""
    if query.dtype not in SPLIT_FACTORS:
        ones = query.new_ones(*query.shape[:-1], 1)
        return [ones if on_query is None else on_query[..., None] for on_query, _ in columns]
    factors = _split_factors(query)
    return [
        factors.expand(*query.shape[:-1], 3) if on_query is None else _SplitColumn.apply(on_query, query.dtype)
        for on_query, _ in columns
    ]


def _columns_for_key(key: Tensor, columns: Columns) -> list[Tensor]:
    """Return the columns to append to the key, ``[B, Hkv, keys, 1 or 3]`` each.

    A column that belongs to one of the query is one-hot, hence exact in any dtype, and is multiplied by the factors.
    """
    if key.dtype not in SPLIT_FACTORS:
        return [on_key[..., None] for _, on_key in columns]
    factors = _split_factors(key)
    return [
        _SplitColumn.apply(on_key, key.dtype) if on_query is None else on_key.to(key.dtype)[..., None] * factors
        for on_query, on_key in columns
    ]


def _widened(tensor: Tensor, parts: list[Tensor], width: int) -> Tensor:
    """Append the parts and zeros up to ``width``, in one copy."""
    missing = width - tensor.shape[-1] - sum(part.shape[-1] for part in parts)
    if missing > 0:
        parts = [*parts, tensor.new_zeros(1).expand(*tensor.shape[:-1], missing)]
    return torch.cat([tensor, *parts], dim=-1) if len(parts) > 0 else tensor


def _attend(
    problem: MixtureProblem, query: Tensor, key: Tensor, value: Tensor, columns: Columns,
    scale: float, sums_to_one: bool = True,
) -> Tensor:  # fmt: skip
    """Softmax attention of ``query [B, H, Nq, D]`` over ``key [B, Hkv, Nk * repeat, D]`` under the problem's masks.

    The first column, if any, is the bias per key. It also carries the key mask, unless neither columns nor another mask
    are needed: then a mask is less work than a column.
    """
    repeat = key.shape[2] // problem.key.shape[3]
    group, num_queries, value_dim = problem.group_size, query.shape[2], value.shape[-1]
    if repeat > 1:
        value = value.repeat_interleave(repeat, dim=2)
    masked_by_pair = problem.attn_mask is not None or (problem.is_causal and num_queries > 1)
    hidden = _hidden_keys(problem)
    if hidden is not None:
        hidden = hidden.repeat_interleave(repeat, dim=-1)
    key_mask: Tensor | None = None
    if hidden is not None and len(columns) == 0 and not masked_by_pair:
        # Rows without a key may see all keys here; they are zeroed afterwards.
        key_mask = (~hidden | hidden.all(dim=-1, keepdim=True))[:, :, None]
    elif hidden is not None:
        bias = columns[0][1] if len(columns) > 0 else torch.zeros_like(key[..., 0], dtype=problem.compute_dtype)
        columns = [(None, bias.masked_fill(hidden, 0.0)), *columns[1:]]
        # The bound is doubled so that the margin is not rounded away where the bound is large.
        sentinel = 2.0 * _lowest_logit(query, key, columns) - MASKED_MARGIN / scale
        columns[0] = (None, torch.where(hidden, sentinel, columns[0][1]))
    columns = [(on_query, on_key.clamp(min=LOWEST[query.dtype])) for on_query, on_key in columns]
    for_query, for_key = _columns_for_query(query, columns), _columns_for_key(key, columns)

    # One more value column, the constant 1, is summed in the same order as the others, so dividing by its sum makes
    # rows sum to one exactly. Half precision would round that sum, and plain softmax goes to the stock kernel
    # unchanged.
    is_exact = query.dtype == problem.compute_dtype
    sums_to_one = sums_to_one and len(columns) > 0 and problem.dropout_p == 0 and is_exact
    for_value = [value.new_ones(1).expand(*value.shape[:-1], 1)] if sums_to_one else []
    width = max(query.shape[-1] + sum(part.shape[-1] for part in for_query), value_dim + len(for_value))
    if len(columns) > 0 or width != value_dim:
        width = -(-width // 8) * 8
    query, key = _widened(query, for_query, width), _widened(key, for_key, width)
    value = _widened(value, for_value, width)

    if group > 1 and not masked_by_pair:
        query = query.unflatten(1, (-1, group)).flatten(2, 3)
    elif group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))

    def stock(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        options = {"dropout_p": problem.dropout_p, "scale": scale, **mask}
        if query.device.type != "cuda" or len(columns) == 0:
            return F.scaled_dot_product_attention(query, key, value, **options)
        with sdpa_kernel(CUDA_KERNELS):
            return F.scaled_dot_product_attention(query, key, value, **options)

    if problem.attn_mask is not None:
        out = stock(query, key, value, attn_mask=_pair_mask(problem, repeat))
    elif not masked_by_pair:
        out = stock(query, key, value, attn_mask=key_mask)
    elif repeat == 1 and problem.causal_offset == 0:
        out = stock(query, key, value, is_causal=True)
    else:
        out = _causal_in_blocks(stock, query, key, value, repeat)
    if group > 1 and not masked_by_pair:
        out = out.unflatten(2, (group, num_queries)).flatten(1, 2)
    if sums_to_one:
        # The sum is a constant for autograd, since it is 1 up to rounding for all inputs.
        total = out[..., value_dim : value_dim + 1].detach()
        return out[..., :value_dim] / total.masked_fill(total == 0, 1.0)
    return out[..., :value_dim]


def _hidden_keys(problem: MixtureProblem) -> Tensor | None:
    """Mask of masked keys and of positions whose priors are all zero, bool, broadcastable to ``[B, Hkv, Nk]``."""
    hidden = None if problem.key_mask is None else ~problem.key_mask[:, None]
    if problem.log_prior is not None and problem.has_prior_by_key:
        dead = (problem.log_prior <= DEAD_PRIOR).all(dim=-2)
        dead = dead if dead.ndim == 3 else dead[None]
        hidden = dead if hidden is None else hidden | dead
    return hidden


@torch.no_grad()
def _lowest_logit(query: Tensor, key: Tensor, columns: Columns) -> Tensor:
    """Lower bound of ``q . k + columns`` over all pairs, a scalar.

    A stand-in for -inf must be below it, but not too far: kernels subtract the row normaliser, which is rounded
    differently, from the logits, and in a row of stand-ins of -1e30 the difference of the last digits would overflow.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    bound = (
        -torch.linalg.vector_norm(query, dim=-1, dtype=dtype).amax()
        * torch.linalg.vector_norm(key, dim=-1, dtype=dtype).amax()
    )
    for on_query, on_key in columns:
        finite = on_key.masked_fill(on_key <= DEAD_PRIOR, 0.0)
        bound = bound - finite.abs().amax() * (1.0 if on_query is None else on_query.abs().amax())
    return bound


def _causal_in_blocks(stock: Any, query: Tensor, key: Tensor, value: Tensor, repeat: int) -> Tensor:
    """Bottom-right causal attention over keys repeated ``repeat`` times, computed one block of queries at a time.

    Autograd saves the masks, and separate masks would add up to Nq x Nk, so the mask of every block is a slice of one
    shared tensor. Copies that CUDA kernels make of misaligned masks would add up as well, so keys are padded to
    multiples of 16.
    """
    num_queries, num_keys = query.shape[2], key.shape[2] // repeat
    offset, alignment = num_keys - num_queries, 16
    padded_keys = -(-num_keys // alignment) * alignment
    key, value = (F.pad(x, (0, 0, 0, (padded_keys - num_keys) * repeat)) for x in (key, value))
    # Counted from the end, all blocks have the same pattern: its last row sees every key, the row before all but one.
    height = CAUSAL_BLOCK + alignment
    column = torch.arange(padded_keys * repeat, device=query.device) // repeat
    row = torch.arange(height, device=query.device)[:, None]
    pattern = query.new_zeros(height, padded_keys * repeat).masked_fill(column > row + padded_keys - height, -math.inf)

    start = max(0, -offset)
    blocks = [query.new_zeros(*query.shape[:2], start, value.shape[-1])] if start > 0 else []
    while start < num_queries:
        stop = min(num_queries, ((offset + start) // CAUSAL_BLOCK + 1) * CAUSAL_BLOCK - offset)
        last_key = offset + stop
        aligned = -(-last_key // alignment) * alignment
        last_row = height - (aligned - last_key)
        mask = pattern[last_row - (stop - start) : last_row, (padded_keys - aligned) * repeat :]
        visible = slice(0, aligned * repeat)
        blocks.append(stock(query[:, :, start:stop], key[:, :, visible], value[:, :, visible], attn_mask=mask))
        start = stop
    return torch.cat(blocks, dim=2)


def _pair_mask(problem: MixtureProblem, repeat: int) -> Tensor:
    """Attention mask combined with causality. Rows without a key may see all keys here; they are zeroed afterwards."""
    visible = _visible_pairs(problem)
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    return visible.repeat_interleave(repeat, dim=-1) if repeat > 1 else visible


def _visible_pairs(problem: MixtureProblem) -> Tensor:
    assert problem.attn_mask is not None
    visible = problem.attn_mask
    if problem.is_causal:
        shape = (problem.query.shape[2], problem.key.shape[3])
        visible = visible & torch.ones(shape, dtype=torch.bool, device=visible.device).tril(problem.causal_offset)
    return visible


def _zero_empty_rows(problem: MixtureProblem, out: Tensor) -> Tensor:
    """Set the output of rows that see no key to zero, and with it their gradient; so far they attend to stand-ins."""
    hidden = _hidden_keys(problem)
    alive = None if hidden is None else ~hidden
    if alive is not None and alive.shape[1] > 1:
        alive = alive.repeat_interleave(problem.group_size, dim=1)
    num_queries, num_keys = problem.query.shape[2], problem.key.shape[3]
    if problem.attn_mask is not None:
        visible = _visible_pairs(problem)
        if alive is not None:
            visible = visible & alive[:, :, None]
        seen = visible.any(dim=-1)
    elif alive is not None:
        seen = alive.any(dim=-1, keepdim=True)
        if problem.is_causal:
            first = alive.to(torch.int8).argmax(dim=-1, keepdim=True)
            seen = seen & (torch.arange(num_queries, device=out.device) + problem.causal_offset >= first)
    elif problem.is_causal and num_queries > num_keys:
        seen = (torch.arange(num_queries, device=out.device) + problem.causal_offset >= 0)[None, None]
    else:
        return out
    return out.masked_fill(~seen[..., None], 0.0)
