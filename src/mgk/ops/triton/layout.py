"""Tensors as the kernels read them: in blocks, from addresses that the copy engine takes."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def block_width(width: int) -> int:
    """Columns of a block: a power of two that matrix units take."""
    return max(16, 1 << (int(width) - 1).bit_length())


def count_blocks(length: int, size: int) -> int:
    return -(-length // size)


def aligned(tensor: Tensor) -> Tensor:
    """``[..., N, D]`` as the copy engine reads it: rows start at multiples of 16 bytes. A copy only where needed."""
    step = 16 // tensor.element_size()
    if _strides_fit(tuple(tensor.shape), tensor.stride(), step) and tensor.data_ptr() % 16 == 0:
        return tensor
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    return strides[-1] == 1 and all(
        size == 1 or (stride > 0 and stride % step == 0) for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def by_name(name: str, tensor: Tensor) -> dict[str, Any]:
    """A tensor that a kernel reads without a descriptor, and how far its samples, heads, components (if it has five
    axes) and tokens lie apart, by the names of the kernel's arguments. The numbers of a token are neighbours."""
    return dict(zip(_names(name, tensor.ndim), (tensor, *tensor.stride()[:-1]), strict=True))


@functools.cache
def _names(name: str, ndim: int) -> list[str]:
    axes = ("batch", "head", "component", "token") if ndim == 5 else ("batch", "head", "token")
    return [f"p_{name}", *[f"stride_{name}_{axis}" for axis in axes]]


def aligned_width(tensor: Tensor) -> int:
    """How wide rows are that start at multiples of 16 bytes and hold those of ``tensor``."""
    step = 16 // tensor.element_size()
    return -(-tensor.shape[-1] // step) * step


def aligned_like(tensor: Tensor) -> Tensor:
    """Room for a gradient that the copy engine writes."""
    width = aligned_width(tensor)
    return torch.empty_like(tensor) if width == tensor.shape[-1] else tensor.new_empty(*tensor.shape[:-1], width)


def descriptor(tensor: Tensor, rows: int, heads: int = 1) -> TensorDescriptor:
    """Blocks of ``rows`` tokens of one head, or of neighbouring ones, of ``[B, H, N, D]`` or ``[B, H, M, N, D]``."""
    shape = tuple(tensor.shape)
    strides = _strides_for_copies(shape, tensor.stride(), tensor.element_size())
    return _descriptor(tensor, shape, strides, (1,) * (len(shape) - 3) + (heads, rows, block_width(shape[-1])))


def terms_descriptor(terms: Tensor | None, length: int, count: int) -> TensorDescriptor | None:
    """Blocks of ``count`` terms, of which ``length`` make a row."""
    return None if terms is None else _descriptor(terms, (terms.numel() // length, length), (length, 1), (1, count))


def _descriptor(
    base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]
) -> TensorDescriptor:
    # What the constructor would check again and again holds: `aligned` has seen to it.
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.padding, made.block_shape = base, shape, strides, "zero", block_shape
    return made


@functools.lru_cache(maxsize=1024)
def _strides_for_copies(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> tuple[int, ...]:
    """An axis of length one may have any stride, but the copy engine looks at it."""
    last = len(shape) - 1
    dense = [1] * len(shape)
    for axis in reversed(range(last)):
        dense[axis] = dense[axis + 1] * shape[axis + 1]
    step = 16 // element_size
    return tuple(
        stride if size > 1 or axis == last else max(step, -(-dense[axis] // step) * step)
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def by_token(like: Tensor, heads: int, length: int, width: int) -> Tensor:
    """``[B, heads, length, width]`` laid out token by token, so that a layer joins its heads without a copy."""
    return like.new_empty(like.shape[0], length, heads, width).transpose(1, 2)
