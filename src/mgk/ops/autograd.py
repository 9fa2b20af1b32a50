"""Functions that return a tensor unchanged and alter only its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mgk.ops.transforms import is_exported_to_onnx, is_transformed, needs_plain_torch

NO_SECOND_ORDER = "double backward needs backend='reference', got a backend with first gradients only"


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return (grads[0], *zeros)


class _ZeroGradientsTransformed(_ZeroGradients):
    """The same for ``torch.func``, which needs ``setup_context``. This form costs the host more than the eager one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs[1:]]


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return _RefuseSecondOrder.apply(grads[0])


class _RefuseSecondOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        raise NotImplementedError(NO_SECOND_ORDER)


def with_zero_gradients(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return ``out``, connected so that every input gets a gradient, of zeros where an identity drops the input.

    Data-parallel training waits for the gradient of every parameter.
    """
    # Under a transform of torch.func, requires_grad does not say whether a tensor needs a gradient.
    is_mapped = is_transformed()
    connected = [tensor for tensor in inputs if tensor is not None and (tensor.requires_grad or is_mapped)]
    if not connected or not torch.is_grad_enabled() or (is_mapped and needs_plain_torch()):
        return out
    function = _ZeroGradientsTransformed if is_mapped else _ZeroGradients
    return function.apply(out, *connected)


def first_order_only(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a gradient that raises an error when it is differentiated again."""
    if torch.compiler.is_compiling() or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _FirstOrderOnly.apply(tensor)


class _WithValue(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def with_value(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``tensor``, for two expressions that are equal up to rounding."""
    if is_transformed():
        # The difference is 0, and PyTorch knows every derivative of this form.
        return value if is_exported_to_onnx() else value.detach() + (tensor - tensor.detach())
    if not tensor.requires_grad:
        return value
    result: Tensor = _WithValue.apply(tensor, value)
    return result
