"""Mixture attention on a CPU: plain torch on tiles that fit the cache, with the online softmax of FlashAttention.

A tile is a few heads, a block of queries and a block of keys. With c = 1 / variance, the same for all components,

    logit[i,j,r] = c q_i . k_jr + column[j,r]        gaussian: column = log_prior[r] - c |k_jr|^2 / 2

since the term in |q|^2 cancels. *Separate* components need a product and an exponential each. *Shifted* ones can share
both: let k_j be the key of the first component and d_r = b_r - b_0 the offset of component r from it. Then

    sum_r exp(logit[i,j,r]) = exp(c q_i . k_j + column[j]) (1 + sum_{r>0} exp(of_query[i,r] + of_key[j,r]))
    of_query[i,r] = c q_i . d_r        of_key[j,r] = log_prior[r] - log_prior[0] - c k_j . d_r - c |d_r|^2 / 2

The backward pass recomputes each tile from the row normalisers. Four properties of torch's CPU kernels shape the code:

- ``exp2`` is faster than ``exp``, so the logits of a tile are in units of log 2;
- a matrix product with few rows is much faster than one with few columns, so the gradients of keys and values are
  summed transposed;
- a bias costs next to nothing as one more feature of query and key;
- touching memory for the first time costs more than the arithmetic on it, so everything but the results lives in a
  workspace that persists between calls.

``grid.py`` cuts a call into tiles, ``block.py`` prepares the operands of a block of heads, ``passes.py`` runs forward
and backward over the tiles of a block, and ``memory.py`` holds the workspace. One key per position is plain softmax
with a bias per key: ``stock.py`` runs its forward pass on PyTorch's kernel, and for short rows ``whole_rows.py`` has a
backward pass with fewer operations than tiles need. For very short rows, where starting an operation takes longer
than the arithmetic, ``kept_weights.py`` keeps the weights between the two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.cpu.block import LARGEST_LOG_RATIO, Block, Call, Inputs
from mgk.ops.cpu.grid import Grid
from mgk.ops.cpu.kept_weights import Forward, Kept, backward_with_weights, keeps_weights
from mgk.ops.cpu.memory import workspace
from mgk.ops.cpu.passes import backward_pass, forward_pass
from mgk.ops.cpu.stock import is_served, stock_forward
from mgk.ops.cpu.whole_rows import backward_of_rows, has_whole_rows
from mgk.ops.problem import CHANNEL_SPREAD, MixtureProblem
from mgk.ops.validation import may_inspect_values

# Largest |origin|^2 / variance for which distances are still measured from zero: logits of that size lose no precision,
# and data that is not moved need not be copied.
NEAR = 16.0


def unsupported(problem: MixtureProblem) -> str | None:
    """Name what the call needs and this backend lacks, or return ``None`` if the backend supports the call."""
    if problem.query.device.type != "cpu":
        return f"tensors on {problem.query.device.type}"
    if problem.num_components > 1 and problem.assignment == "hard":
        return "assignment='hard' with several components"
    if isinstance(problem.variance, Tensor):
        return "a variance that is a tensor"
    if problem.attn_mask is not None:
        return "an attn_mask that depends on the query"
    if problem.has_prior_by_key:
        return "a log_prior of each position"
    if problem.dropout_p > 0:
        return "dropout_p > 0"
    if not may_inspect_values(problem.query):
        return "a call that is traced or transformed"
    return None


def attention(problem: MixtureProblem) -> Tensor:
    """Attention output, ``[B, H, Nq, Dv]``."""
    dtype, compute_dtype = problem.query.dtype, problem.compute_dtype
    if dtype != compute_dtype:
        query, key, value = (x.to(compute_dtype) for x in (problem.query, problem.key, problem.value))
        problem = problem._replace(query=query, key=key, value=value)
    if problem.shift is None or problem.num_components == 1:
        out = _attend(problem, shares_key=False)
    else:
        origin = _origin(problem) if problem.similarity == "gaussian" else None
        wide = _wide_rows(problem, origin)
        if not bool(wide.any()):
            out = _attend(problem, shares_key=True)
        elif bool(wide.all()):
            out = _attend(problem, shares_key=False)
        else:
            # At the origin the components of a query do not differ, so that no ratio of the rows that are left out
            # overflows. The origin itself stays where it is, even if it was found by the first query.
            place = problem.query.new_zeros(()) if origin is None else problem.at_queries(origin)
            rest = problem._replace(query=torch.where(wide, place, problem.query))
            out = torch.where(wide, _attend(problem, shares_key=False), _attend(rest, shares_key=True))
    return out if dtype == compute_dtype else out.to(dtype)


@torch.no_grad()
def _wide_rows(problem: MixtureProblem, origin: Tensor | None) -> Tensor:
    """Mask of rows whose shifted components are too far apart to be ratios to the first one, bool ``[B, H, Nq, 1]``.

    ``origin`` is the point from which the ratios will be measured, ``[B, Hkv, 1, D]``, or ``None`` for zero. A row is
    judged by the keys that it can see, so that later tokens do not change a bit of earlier rows.
    """
    assert problem.shift is not None
    ways = (problem.shift[:, 1:] - problem.shift[:, :1]).to(problem.query.dtype)
    if origin is None:
        origin = ways.new_zeros(1, 1, 1, ways.shape[-1])
    origin = origin.mT
    by_group = problem.query.unflatten(1, (-1, problem.group_size))
    of_query = (ways[:, None] @ by_group.mT - (ways @ origin)[:, :, None]).abs().amax(dim=-2).flatten(1, 2)
    of_key = problem.key.new_zeros(*problem.key.shape[:2], 1, problem.key.shape[3])
    if problem.similarity == "gaussian":
        # Projections of the first component's key on the offsets to the other components.
        from_first = ways @ (problem.key[:, :, 0].mT - origin) + ways @ problem.shift[:, :1].to(ways.dtype).mT
        of_key = -from_first - 0.5 * ways.square().sum(-1, keepdim=True)
    of_key = of_key.abs().amax(dim=2)  # [B, Hkv, Nk]
    if problem.key_mask is not None:
        of_key = of_key.masked_fill(~problem.key_mask[:, None], 0.0)
    if problem.log_prior is not None:
        # The ratio of two zero priors is NaN, for which the comparison below finds every row too wide.
        ratio = (problem.log_prior[:, 1:] - problem.log_prior[:, :1]).abs().amax(dim=1)
        of_key = of_key + float(problem.variance) * ratio
    if problem.is_causal:
        last_visible = torch.arange(problem.query.shape[2], device=of_key.device) + problem.causal_offset
        of_key = of_key.cummax(dim=-1).values[..., last_visible.clamp(min=0)]
    else:
        of_key = of_key.amax(dim=-1, keepdim=True)
    largest = of_query + of_key.repeat_interleave(problem.group_size, dim=1)
    return ~(largest <= LARGEST_LOG_RATIO * float(problem.variance))[..., None]


def _attend(problem: MixtureProblem, *, shares_key: bool) -> Tensor:
    query, key, value, dtype = problem.query, problem.key, problem.value, problem.query.dtype
    is_gaussian = problem.similarity == "gaussian"
    shift, log_prior = problem.shift, problem.log_prior if problem.num_components > 1 else None
    # A row that sees a single key gets exactly the value of that key: no other value may change even its last bit.
    may_see_one = problem.is_causal or problem.key_mask is not None or key.shape[3] == 1
    may_see_none = problem.key_mask is not None or (problem.is_causal and problem.causal_offset < 0)
    visible = problem.count_visible_keys().expand(len(query), 1, query.shape[2]) if may_see_one else None
    call = Call(
        scale=1.0 / float(problem.variance),
        is_gaussian=is_gaussian,
        is_causal=problem.is_causal,
        shares_key=shares_key,
        origin=None,
        key_mask=problem.key_mask,
        common_value=None,
        is_blind=(visible == 0)[:, None, ..., None] if visible is not None and may_see_none else None,
    )
    single = None if visible is None else (visible == 1)[..., None]
    out: Tensor = _TiledAttention.apply(
        problem, call, single, query, key, value,
        None if shift is None else shift.to(dtype), None if log_prior is None else log_prior[..., 0].to(dtype),
    )  # fmt: skip
    return out


def _common_value(problem: MixtureProblem) -> tuple[Tensor | None, Tensor | None]:
    """Return the first visible value, if it is needed, and the constant that the values have in common, if any.

    Both are ``[B, Hkv, 1, Dv]``.
    """
    sees_all = not problem.is_causal and problem.key_mask is None
    value = problem.value.detach()
    if sees_all and value.shape[2] > 2:
        # Two values agree by chance in some channels. Where every row sees the last value, it may be compared as well.
        first, others = value[:, :, :1], value[:, :, 1 :: value.shape[2] - 2]
        distance = (others - first).abs_().amax(dim=2, keepdim=True)
        if not bool((distance <= CHANNEL_SPREAD * first.abs()).any()):
            return None, None
    first, common = problem.common_value()
    return first, common if bool(common.any()) else None


def _origin(problem: MixtureProblem) -> Tensor | None:
    """Origin from which distances are measured, ``[B, Hkv, 1, D]``, or ``None`` if the data need not be moved."""
    # The origin is never further from zero than the first key, so a first key near zero decides the matter.
    if problem.key_mask is None and problem.key.shape[2] == 1:
        norm = torch.linalg.vector_norm(problem.key.detach()[:, :, 0, 0], dim=-1).amax()
        if float(norm) ** 2 <= NEAR * float(problem.variance):
            return None
    origin = problem.origin()
    is_near = origin.square().sum(-1, keepdim=True) <= NEAR * float(problem.variance)
    origin = origin.masked_fill_(is_near, 0.0)
    return origin if bool(origin.any()) else None


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: MixtureProblem, call: Call, single: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        """Run the forward pass. ``call`` comes without an origin; whether the data has to be moved is decided here."""
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        batch, query_heads, queries, _ = inputs.query.shape
        heads, keys = inputs.key.shape[1], inputs.key.shape[3]
        grid = Grid(batch, heads, query_heads // heads, queries, keys, inputs.key.shape[-1], call.is_causal)
        ctx.block, bias, ctx.has_whole_rows, kept, normaliser = None, None, False, None, None
        keeps = any(ctx.needs_input_grad) and keeps_weights(inputs, grid)
        # Where all rows see all keys, the decision is made on copies of the operands, which lie in the cache.
        forward = Forward(inputs, call, grid) if keeps and single is None and keys > 2 else None
        first_value = None
        if forward is None or not forward.is_around_zero(NEAR, CHANNEL_SPREAD):
            forward = None
            first_value, common_value = _common_value(problem)
            call = call._replace(common_value=common_value, origin=_origin(problem) if call.is_gaussian else None)
        if keeps:
            forward = Forward(inputs, call, grid) if forward is None else forward
            out, kept = forward()
        elif is_served(inputs, call):
            out, normaliser, bias = stock_forward(inputs, call, grid.group)
            ctx.has_whole_rows = has_whole_rows(grid)
        else:
            # In memory the heads of a token are adjacent, as the output projection needs them.
            out = inputs.query.new_empty(batch, queries, query_heads, inputs.value.shape[-1]).transpose(1, 2)
            normaliser = inputs.query.new_empty(batch, heads, grid.rows)
            blocks = list(grid.blocks())
            # A call of a single block keeps its operands for the backward pass.
            stays = len(blocks) == 1 and any(ctx.needs_input_grad)
            for samples, block_heads in blocks:
                block = Block(inputs, call, grid, samples, block_heads, stays=stays)
                forward_pass(block, out, normaliser)
            ctx.block = block if stays else None
            if call.key_mask is not None and not stays:
                # Backward makes the operands again, and by then the caller may have reused the mask.
                call = call._replace(key_mask=call.key_mask.clone())
        workspace.drop_large_arrays()
        if call.is_blind is not None:
            out.masked_fill_(call.is_blind[:, 0], 0.0)
        if single is not None:
            assert first_value is not None
            torch.where(single, first_value.repeat_interleave(grid.group, dim=1), out, out=out)
        ctx.call, ctx.grid, ctx.keeps_weights = call, grid, kept is not None
        if kept is None:
            ctx.save_for_backward(*tensors, None if ctx.has_whole_rows else out, normaliser, bias)
        else:
            ctx.layouts = [(x.shape, x.is_contiguous()) for x in (inputs.query, inputs.key, inputs.value)]
            ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # double backward
            # The anchor makes the gradients differentiable, so that a second derivative raises an error. Without it
            # they would look like constants, and the second derivative would be silently wrong.
            anchor = grads[0].new_zeros((), requires_grad=True)
            return None, None, None, *_FirstGradients.apply(ctx, anchor, *grads)
        return None, None, None, *_gradients(ctx, grads[0])


class _FirstGradients(torch.autograd.Function):
    """The gradients of :class:`_TiledAttention`; differentiating them again raises an error."""

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Tensor, grad_out: Tensor) -> Inputs:
        return _gradients(call, grad_out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(NO_SECOND_ORDER)


def _gradients(ctx: Any, grad_out: Tensor) -> Inputs:
    """Compute the gradients of all inputs from what the forward pass saved in ``ctx``."""
    if ctx.keeps_weights:
        query, key, value = (_empty(grad_out, *layout) for layout in ctx.layouts)
        gradient = Inputs(query, key, value, None, None)
        backward_with_weights(Kept(*ctx.saved_tensors), ctx.call, ctx.grid, grad_out, gradient)
        workspace.drop_large_arrays()
        return gradient
    *tensors, out, normaliser, bias = ctx.saved_tensors
    inputs = Inputs(*tensors)
    gradient = Inputs(
        *(torch.empty_like(tensor) for tensor in (inputs.query, inputs.key, inputs.value)),
        *(None if tensor is None else torch.zeros_like(tensor) for tensor in (inputs.shift, inputs.log_prior)),
    )
    if ctx.has_whole_rows:
        backward_of_rows(inputs, ctx.call, ctx.grid, bias, normaliser, grad_out, gradient)
        workspace.drop_large_arrays()
        return gradient
    for samples, block_heads in ctx.grid.blocks():
        block = ctx.block
        if block is None:
            block = Block(inputs, ctx.call, ctx.grid, samples, block_heads, bias=bias)
        block.set_normaliser(normaliser)
        backward_pass(block, grad_out, out, gradient)
    workspace.drop_large_arrays()
    return gradient


def _empty(like: Tensor, shape: torch.Size, is_contiguous: bool) -> Tensor:
    """Allocate a gradient ``[B, H, ..., N, D]``. The heads of a token are adjacent unless the input was contiguous."""
    if is_contiguous:
        return like.new_empty(shape)
    by_token = like.new_empty(shape[0], shape[-2], shape[1], shape[-1]).transpose(1, 2)
    return by_token if len(shape) == 4 else by_token[:, :, None]
