"""Moving rows between tokens and places as a torch operation, whose gradient is the move back.

``torch.ops.mgk.move_tokens`` is what ``torch.compile`` sees. Indexing would do the same, but it fills the room with
zeros first, and adds gradients up one by one although no row comes twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk.ops.triton import call, tuning
from mgk.ops.triton.call import FOUR_WARPS
from mgk.ops.triton.kernels import moves
from mgk.ops.triton.launch import launch
from mgk.ops.triton.layout import count_blocks, on_device
from mgk.ops.triton.operator import shortest_way

# A program moves about so many numbers.
NUMBERS = 8192
MOST_COLUMNS = 512


def to_places(tokens: Tensor, blocks: Tensor) -> Tensor:
    """``[T, ...]`` to ``[places, ...]``, zeros where a place has no token. ``blocks``: see the kernel."""
    return _to(tokens, blocks, len(blocks) * call.PADDING, True)


def to_tokens(places: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """``[places, ...]`` to ``[num_tokens, ...]``."""
    return _to(places, blocks, num_tokens, False)


def _to(rows: Tensor, blocks: Tensor, length: int, is_placing: bool) -> Tensor:
    moved: Tensor = shortest_way(move_tokens, _Move, _move, (rows, blocks, length, is_placing))
    return moved


@torch.library.custom_op(
    "mgk::move_tokens",
    mutates_args=(),
    schema="(Tensor rows, Tensor blocks, SymInt length, bool is_placing) -> Tensor",
)
def move_tokens(rows: Tensor, blocks: Tensor, length: int, is_placing: bool) -> Tensor:
    """:func:`to_places` if ``is_placing``, else :func:`to_tokens`: ``length`` rows."""
    return _move(rows, blocks, length, is_placing)


@move_tokens.register_fake
def _(rows: Tensor, blocks: Tensor, length: int, is_placing: bool) -> Tensor:
    return rows.new_empty(length, *rows.shape[1:])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, blocks, _, ctx.is_placing = inputs
    ctx.length = rows.shape[0]
    ctx.save_for_backward(blocks)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The gradient of a move is the move back."""
    (blocks,) = ctx.saved_tensors
    return _to(grad, blocks, ctx.length, not ctx.is_placing), None, None, None


move_tokens.register_autograd(_backward, setup_context=_save_for_backward)


class _Move(torch.autograd.Function):
    """What the operation is, without the dispatcher, which takes the host longer than the kernel runs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_for_backward(ctx, inputs, inputs[0])
        return _move(*inputs)

    backward = staticmethod(_backward)


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
    values = {
        "p_from": flat, "p_to": moved, "p_blocks": blocks, "stride_from": flat.stride(0), "width": width,
        "num_chunks": chunks, "TO_PLACES": is_placing, "PADDING": call.PADDING, "ROWS": part, "COLUMNS": columns,
    }  # fmt: skip
    with on_device(rows):
        launch(moves.move_tokens, len(blocks) * (call.PADDING // part) * chunks, values, FOUR_WARPS)
    return moved
