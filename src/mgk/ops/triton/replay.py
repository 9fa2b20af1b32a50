"""A call like an earlier one, done again without thinking.

Which kernels a call starts, with which numbers, and how large its buffers are depends on shapes, strides, types and
options alone. To find it all out takes Python longer than a short sequence takes the kernels, so it is written down
the first time. The next call with the same signature allocates, puts addresses where addresses were, and starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton.launch import IS_KNOWN, Start, current_stream, is_listened_to, recorded, run
from mgk.ops.triton.tuning import is_interpreted

# Every length has a recording of its own; with very many they all begin anew.
MOST_RECORDINGS = 1024

Signature = tuple[Any, ...]
Outputs = tuple[Tensor, ...]


class _Buffer(NamedTuple):
    """What a call has allocated, as it is allocated again."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Step(NamedTuple):
    """A start in which tensors are numbers: those of the inputs, then of the buffers."""

    compiled: Any
    """the version that Triton has compiled"""
    programs: int
    """the size of the grid"""
    arguments: list[Any]
    """with the constants; those that stand for an address are replaced"""
    addresses: list[tuple[int, int, int]]
    """position, tensor, and bytes from its beginning"""
    descriptors: list[tuple[int, int, int, TensorDescriptor]]
    """position, tensor, how many of its numbers come before, and a descriptor like it"""


class Recording:
    """What one call has done.

    Args:
        inputs: its tensors. What else it has read or written it has allocated itself.
        outputs: the buffers that it has returned.
        starts: the kernels it has started.
        zeroed: the number of an output, and the range of it that was set to zero before.

    Raises:
        NotRecordable: where a tensor cannot be found again.
    """

    def __init__(
        self, inputs: Sequence[Tensor | None], outputs: Outputs, starts: list[Start],
        zeroed: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self._count = len(inputs)
        self._inputs = {tensor.data_ptr(): number for number, tensor in enumerate(inputs) if tensor is not None}
        # Parts of flat inputs may be used on their own.
        self._flat = [
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), number)
            for number, tensor in enumerate(inputs)
            if tensor is not None and tensor.ndim == 1 and tensor.is_contiguous()
        ]
        self._taken = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor is not None}
        self._buffers: list[_Buffer] = []
        self._storages: dict[int, int] = {}
        numbers = [self._add(tensor) for tensor in outputs]
        written = {number for number, tensor in zip(numbers, outputs, strict=True) if tensor.numel()}
        self._outputs = len(outputs)
        self._steps = [self._write_down(start) for start in starts]
        used = {number for step in self._steps for _, number, *_ in (*step.addresses, *step.descriptors)}
        if not written <= used:
            raise NotRecordable("an output that no kernel has written")
        self._zeroed = None if zeroed is None else (self._count + zeroed[0], zeroed[1], zeroed[2])

    def _add(self, tensor: Tensor) -> int:
        """The number of a new buffer of which ``tensor`` is the whole."""
        storage = tensor.untyped_storage()
        if tensor.numel():
            if storage.data_ptr() in self._taken:
                raise NotRecordable("a part of an input")
            if tensor.numel() * tensor.element_size() != storage.nbytes() or tensor.storage_offset():
                raise NotRecordable("a part of a buffer that is nowhere whole")
        number = self._count + len(self._buffers)
        self._buffers.append(_Buffer(tuple(tensor.shape), tensor.stride(), tensor.dtype))
        if tensor.numel():
            self._storages[storage.data_ptr()] = number
        return number

    def _find(self, tensor: Tensor) -> tuple[int, int]:
        """The number of a tensor, and how many bytes behind its beginning this one begins."""
        address = tensor.data_ptr()
        if address in self._inputs:
            return self._inputs[address], 0
        for first, end, number in self._flat:
            if first <= address < end:
                return number, address - first
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._storages:
            self._add(tensor)
        return self._storages[storage], address - storage

    def _write_down(self, start: Start) -> _Step:
        arguments: list[Any] = [*start.arguments, *start.constants]
        addresses, descriptors = [], []
        for position, argument in enumerate(start.arguments):
            if isinstance(argument, Tensor):
                arguments[position] = None
                if argument.numel():
                    addresses.append((position, *self._find(argument)))
            elif isinstance(argument, TensorDescriptor):
                arguments[position] = None
                number, offset = self._find(argument.base)
                # Only what is flat has parts that begin at a number.
                is_flat = number >= self._count and len(self._buffers[number - self._count].shape) == 1
                if offset and not is_flat:
                    raise NotRecordable("a descriptor of a part of a buffer")
                first = offset // argument.base.element_size()
                descriptors.append((position, number, first, _descriptor_like(argument, None)))
        return _Step(start.compiled, start.programs, arguments, addresses, descriptors)

    def replay(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """The same for other tensors of the same signature."""
        tensors = [*inputs]
        device = tensors[0].device  # type: ignore[union-attr]
        for shape, strides, dtype in self._buffers:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._zeroed is not None:
            number, first, end = self._zeroed
            tensors[number][first:end].zero_()  # type: ignore[index]
        _, stream = current_stream()
        for step in self._steps:
            arguments = step.arguments.copy()
            for position, number, offset in step.addresses:
                arguments[position] = addresses[number] + offset
            for position, number, first, like in step.descriptors:
                base: Any = tensors[number]
                arguments[position] = _descriptor_like(like, base[first:] if first else base)
            run(step.compiled, step.programs, arguments, stream)
        return tuple(tensors[self._count : self._count + self._outputs])  # type: ignore[arg-type]


class NotRecordable(Exception):
    """A call that must be thought through each time."""


def _descriptor_like(like: TensorDescriptor, base: Any) -> TensorDescriptor:
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.padding = base, like.shape, like.strides, like.padding
    made.block_shape = like.block_shape
    return made


_recordings: dict[Signature, Recording | None] = {}


def signature_of(tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Signature:
    """All that a call depends on but the numbers in its tensors."""
    return (
        *[
            None
            if tensor is None
            else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0)
            for tensor in tensors
        ],
        *options,
    )


def is_possible(device: torch.device) -> bool:
    """Whether calls may be recorded at all, here and now."""
    return (
        device.type == "cuda"
        and device.index == torch.cuda.current_device()
        and IS_KNOWN
        and not is_interpreted()
        and not is_listened_to()
        and os.environ.get("MGK_AUTOTUNE") != "1"
    )


def once(
    call: Callable[[], Outputs],
    options: tuple[Any, ...],
    inputs: Sequence[Tensor | None],
    *,
    is_recordable: Callable[[], bool],
    zeroed: Callable[[], tuple[int, int, int] | None] = lambda: None,
) -> Outputs:
    """Make a call and write down what it does; or do that again if one with its signature has been made.

    Args:
        call: makes it.
        options: all that it depends on beside its tensors.
        inputs: all tensors that it reads, each once. The first says on which device.
        is_recordable: asked of the first such call: whether nothing but kernels works on its tensors.
        zeroed: see :class:`Recording`.
    """
    signature = signature_of(inputs, options)
    if signature in _recordings:
        recording = _recordings[signature]
        return call() if recording is None else recording.replay(inputs)
    addresses = [tensor.data_ptr() for tensor in inputs if tensor is not None]
    if len(set(addresses)) < len(addresses):
        # One tensor in two roles: the next call may have two.
        return call()
    if len(_recordings) >= MOST_RECORDINGS:
        _recordings.clear()
    with recorded() as starts:
        outputs = call()
    _recordings[signature] = None
    if is_recordable():
        with suppress(NotRecordable):
            _recordings[signature] = Recording(inputs, outputs, starts, zeroed())
    return outputs
