"""Moving rows between tokens and places as torch operations: each is the gradient of the other.

``torch.ops.mgk.place_tokens`` and ``take_tokens`` are what ``torch.compile`` sees. Indexing would do the same, but it
fills the room with zeros first, and adds gradients up one by one although no row comes twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.triton import call, tuning
from mgk.ops.triton.call import FOUR_WARPS
from mgk.ops.triton.kernels.moves import move_tokens
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import count_blocks, on_device
from mgk.ops.triton.operator import is_unwatched

# A program moves about so many numbers.
NUMBERS = 8192
MOST_COLUMNS = 512


def to_places(tokens: Tensor, blocks: Tensor) -> Tensor:
    """``[T, ...]`` to ``[places, ...]``, zeros where a place has no token. ``blocks``: see :func:`move_tokens`."""
    if is_unwatched(tokens, blocks):
        return _run(tokens, blocks, len(blocks) * call.PADDING, is_placing=True)
    placed: Tensor = place_tokens(tokens, blocks)
    return placed


def to_tokens(places: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """``[places, ...]`` to ``[num_tokens, ...]``."""
    if is_unwatched(places, blocks):
        return _run(places, blocks, num_tokens, is_placing=False)
    taken: Tensor = take_tokens(places, blocks, num_tokens)
    return taken


@torch.library.custom_op("mgk::place_tokens", mutates_args=(), schema="(Tensor tokens, Tensor blocks) -> Tensor")
def place_tokens(tokens: Tensor, blocks: Tensor) -> Tensor:
    """:func:`to_places`, for who watches."""
    return _move(tokens, blocks, len(blocks) * call.PADDING, True)


@torch.library.custom_op(
    "mgk::take_tokens", mutates_args=(), schema="(Tensor places, Tensor blocks, SymInt num_tokens) -> Tensor"
)
def take_tokens(places: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """:func:`to_tokens`, likewise."""
    return _move(places, blocks, num_tokens, False)


@place_tokens.register_fake
def _(tokens: Tensor, blocks: Tensor) -> Tensor:
    return tokens.new_empty(blocks.shape[0] * call.PADDING, *tokens.shape[1:])


@take_tokens.register_fake
def _(places: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    return places.new_empty(num_tokens, *places.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_tokens = inputs[0].shape[0]


def _gradient_of_placing(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (blocks,) = ctx.saved_tensors
    return to_tokens(grad, blocks, ctx.num_tokens), None


def _gradient_of_taking(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (blocks,) = ctx.saved_tensors
    return to_places(grad, blocks), None, None


place_tokens.register_autograd(_gradient_of_placing, setup_context=_save)
take_tokens.register_autograd(_gradient_of_taking, setup_context=_save)


def _run(rows: Tensor, blocks: Tensor, length: int, *, is_placing: bool) -> Tensor:
    """Without the dispatcher, which takes the host longer than the kernel runs."""
    if torch.is_grad_enabled() and rows.requires_grad:
        moved: Tensor = _Move.apply(rows, blocks, length, is_placing)
        return moved
    return _move(rows, blocks, length, is_placing)


class _Move(torch.autograd.Function):
    """Both operations."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, blocks: Tensor, length: int, is_placing: bool) -> Tensor:
        ctx.save_for_backward(blocks)
        ctx.length, ctx.is_placing = rows.shape[0], is_placing
        return _move(rows, blocks, length, is_placing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (blocks,) = ctx.saved_tensors
        back = to_tokens(grad, blocks, ctx.length) if ctx.is_placing else to_places(grad, blocks)
        return back, None, None, None


def _move(rows: Tensor, blocks: Tensor, length: int, is_placing: bool) -> Tensor:
    moved = rows.new_empty(length, *rows.shape[1:])
    # A view where a row's numbers are neighbours, as a layer makes them.
    flat = rows.flatten(1)
    width = flat.shape[1]
    if width == 0:
        return moved
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    columns = 1 << (width - 1).bit_length()
    if not tuning.is_interpreted():
        columns = min(columns, MOST_COLUMNS)
    part = call.PADDING if tuning.is_interpreted() else max(1, min(call.PADDING, NUMBERS // columns))
    chunks = count_blocks(width, columns)
    with on_device(rows):
        launch(
            move_tokens,
            len(blocks) * (call.PADDING // part) * chunks,
            (flat, moved, blocks, flat.stride(0), width, chunks),
            {"TO_PLACES": is_placing, "PADDING": call.PADDING, "ROWS": part, "COLUMNS": columns},
            FOUR_WARPS,
        )
    return moved
