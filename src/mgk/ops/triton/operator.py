"""The fused kernels as torch operations, with autograd, shape inference and a FLOP count.

``torch.ops.mgk.fused_attention`` and its backward are what ``torch.compile``, ``opcheck`` and FLOP counters see. Where
nobody looks, :func:`attend` calls the same code directly: to go through the dispatcher takes the host longer than it
takes to start the kernels. Torch hands over a flat list of values; here, and nowhere else, it gets its names again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.autograd import NO_SECOND_ORDER
from mgk.ops.triton import replay
from mgk.ops.triton.call import TermsLayout, is_prior_by_head, prior_by_name
from mgk.ops.triton.inputs import SCHEMA, Gradients, Options, Results, Tensors, named
from mgk.ops.triton.layout import aligned, aligned_width, by_token
from mgk.ops.triton.passes import backward_pass, forward_pass, responsibility_pass

OF_BACKWARD = "Tensor grad_out, Tensor? grad_normaliser, Tensor out, Tensor normaliser, Tensor terms"


@torch.library.custom_op("mgk::fused_attention", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor)")
def fused_attention(*values: Any) -> Results:
    """:func:`forward_pass` of ``*tensors, *options``."""
    return forward_pass(*named(values))


@torch.library.custom_op(
    "mgk::fused_attention_backward",
    mutates_args=(),
    schema=f"({OF_BACKWARD}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def fused_attention_backward(
    grad_out: Tensor, grad_normaliser: Tensor | None, out: Tensor, normaliser: Tensor, terms: Tensor, *values: Any
) -> Gradients:
    """:func:`backward_pass` after ``*results`` of ``*tensors, *options``."""
    return backward_pass(grad_out, grad_normaliser, Results(out, normaliser, terms), *named(values))


@torch.library.custom_op("mgk::fused_responsibilities", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def fused_responsibilities(*values: Any) -> Tensor:
    """:func:`responsibility_pass` of ``*tensors, *options``."""
    return responsibility_pass(*named(values))


@fused_attention.register_fake
def _(*values: Any) -> Results:
    tensors, options = named(values)
    query, value = tensors.query, tensors.value
    out = by_token(query, query.shape[1], query.shape[2], value.shape[-1])
    if value.shape[-1] * value.element_size() % 16 != 0:
        out = out.contiguous()
    terms = query.new_empty(sum(TermsLayout(tensors, options).lengths()), dtype=torch.float32)
    return Results(out, query.new_empty(query.shape[:-1], dtype=torch.float32), terms)


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_normaliser: Tensor | None, out: Tensor, normaliser: Tensor, terms: Tensor, *values: Any
) -> Gradients:
    tensors, _ = named(values)
    parameters = (tensors.shift, tensors.log_prior, tensors.inverse_variance)
    return Gradients(
        *[torch.empty_like(tensor) for tensor in (tensors.query, tensors.key, tensors.value)],
        *[normaliser.new_empty(0 if tensor is None else tensor.shape) for tensor in parameters],
    )


@fused_responsibilities.register_fake
def _(*values: Any) -> Tensor:
    tensors, options = named(values)
    components = TermsLayout(tensors, options).components
    return tensors.query.new_empty(tensors.key.shape[1], components, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.options = named(inputs)
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_normaliser: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    # Read once: activation checkpointing frees them as they are read.
    out, normaliser, terms, *saved = ctx.saved_tensors
    results, tensors, options = Results(out, normaliser, terms), Tensors(*saved), ctx.options
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if is_unwatched(grad_out) and not torch.is_grad_enabled():
        gradients = run_backward(grad_out, grad_normaliser, results, tensors, options)
    else:
        # With a graph of gradients the operation is asked, which refuses to be differentiated again.
        gradients = Gradients(*fused_attention_backward(grad_out, grad_normaliser, *results, *tensors, *options))
    by_input = Tensors(
        gradients.query, gradients.key, gradients.value, shift=_like(tensors.shift, gradients.shift),
        log_prior=_like(tensors.log_prior, gradients.log_prior),
        inverse_variance=_like(tensors.inverse_variance, gradients.inverse_variance),
    )  # fmt: skip
    return (*by_input, *[None] * len(options))


def _like(parameter: Tensor | None, grad: Tensor) -> Tensor | None:
    return None if parameter is None else grad.to(parameter.dtype)


def refuse_second_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(NO_SECOND_ORDER)


fused_attention.register_autograd(_backward, setup_context=_save_for_backward)
fused_attention_backward.register_autograd(refuse_second_order)


def run_forward(*values: Any) -> Results:
    """:func:`forward_pass` of ``*tensors, *options``, replayed if it has been run for such inputs before."""
    tensors, options = named(values)
    if not _may_come_again(tensors):
        return forward_pass(tensors, options)
    distinct, has_one_mask = _distinct(tensors)

    def zeroed() -> tuple[int, int, int] | None:
        layout = TermsLayout(tensors, options)
        lengths = layout.lengths()
        first = sum(lengths) - lengths.level - lengths.unfactored
        return (Results._fields.index("terms"), first, first + lengths.unfactored) if layout.factored else None

    return Results(*replay.once(
        partial(forward_pass, tensors, options), ("forward", has_one_mask, *options), distinct,
        is_recordable=lambda: _are_read_as_they_are(tensors), zeroed=zeroed,
    ))  # fmt: skip


def run_backward(
    grad_out: Tensor, grad_normaliser: Tensor | None, results: Results, tensors: Tensors, options: Options
) -> Gradients:
    """:func:`backward_pass`, likewise."""
    run = partial(backward_pass, grad_out, grad_normaliser, results, tensors, options)
    if grad_normaliser is not None or not _may_come_again(tensors):
        return run()
    distinct, has_one_mask = _distinct(tensors)

    def is_recordable() -> bool:
        has_one_gradient = tensors.shift is None or tensors.shift.shape[1] <= 2
        by_head = tensors.log_prior is None or is_prior_by_head(tensors.log_prior)
        return has_one_gradient and by_head and aligned(grad_out) is grad_out and _are_read_as_they_are(tensors)

    return Gradients(*replay.once(
        run, ("backward", has_one_mask, *options), (grad_out, *results, *distinct), is_recordable=is_recordable
    ))  # fmt: skip


def _may_come_again(tensors: Tensors) -> bool:
    """Whether nothing but kernels works on what a call has, and one like it is to be expected."""
    is_rare = (
        tensors.inverse_variance is not None or tensors.attn_mask is not None or tensors.query_spans is not None
        or tensors.key_spans is not None
    )  # fmt: skip
    return not is_rare and replay.is_possible(tensors.query.device)


def _distinct(tensors: Tensors) -> tuple[Tensors, bool]:
    """Each tensor once, and whether one mask serves keys and queries."""
    has_one_mask = tensors.key_mask is not None and tensors.query_mask is tensors.key_mask
    return tensors._replace(query_mask=None) if has_one_mask else tensors, has_one_mask


def _are_read_as_they_are(tensors: Tensors) -> bool:
    """Whether the kernels read these tensors without a copy, and write what has their width."""
    keys, shift, given_prior = tensors.key.flatten(1, 2), tensors.shift, tensors.log_prior
    prior = prior_by_name(given_prior)["p_prior"]
    return (
        keys.data_ptr() == tensors.key.data_ptr()
        and (prior is None or given_prior is None or prior.data_ptr() == given_prior.data_ptr())
        and all(aligned(t) is t and aligned_width(t) == t.shape[-1] for t in (tensors.query, keys, tensors.value))
        and (shift is None or (shift.dtype == torch.float32 and shift.is_contiguous()))
        and all(t is None or t.is_contiguous() for t in (tensors.key_mask, tensors.query_mask, tensors.seed))
    )


class _Attention(torch.autograd.Function):
    """What the operation is, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Results:
        output = run_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(output.terms)
        return output

    backward = staticmethod(_backward)


def attend(tensors: Tensors, options: Options) -> Results:
    """Attention and its row normaliser, the way that takes the host least time."""
    return Results(*shortest_way(fused_attention, _Attention, run_forward, (*tensors, *options)))


def shortest_way(operation: Any, function: type[torch.autograd.Function], run: Any, values: Sequence[Any]) -> Any:
    """Call torch's ``operation`` if somebody watches, else what it is without the dispatcher: the autograd ``function``
    if a gradient is needed, and else ``run`` itself."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not is_unwatched(*tensors):
        return operation(*values)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(*values)
    return run(*values)


def is_unwatched(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors with data, and no tracer, mode or transform wants to hear of operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in (Tensor, Parameter) or tensor.device.type == "meta"):
            return False
    return True


def visible_pairs(query_shape: Any, num_keys: int, is_causal: bool) -> int:
    """How many pairs of a query and a key it sees there are in all heads."""
    batch, heads, num_queries, _ = query_shape
    if not is_causal:
        return int(batch * heads * num_queries * num_keys)
    per_head = sum(max(0, i + 1 + num_keys - num_queries) for i in range(num_queries))
    return int(batch * heads * per_head)


@register_flop_formula(torch.ops.mgk.fused_attention)
def _forward_flops(*values: Any, **_: Any) -> int:
    """One product of query and key for each key tensor, one of weights and values. Pairs behind the diagonal are not
    counted; those behind other masks are, since their number depends on data."""
    return flops_of(values, of_keys=1, of_values=1)


@register_flop_formula(torch.ops.mgk.fused_attention_backward)
def _backward_flops(
    grad: Any, grad_normaliser: Any, out: Any, normaliser: Any, terms: Any, *values: Any, **_: Any
) -> int:
    """Both kernels compute logits and weight gradients; then come dv and dk, and dq."""
    return flops_of(values, of_keys=4, of_values=3)


def flops_of(values: tuple[Any, ...], of_keys: int, of_values: int) -> int:
    """So many products of queries and keys, and of weights and values. Shapes stand for tensors here."""
    shapes: Any
    shapes, options = named(values)
    _, _, key_tensors, num_keys, width = shapes.key
    pairs = visible_pairs(shapes.query, num_keys, options.is_causal)
    return int(2 * pairs * (of_keys * key_tensors * width + of_values * shapes.value[-1]))
