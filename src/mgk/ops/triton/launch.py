"""Starting a kernel in a few microseconds.

Triton looks at every argument anew each time it starts a kernel, to find which of its compiled versions fits. With some
fifty arguments that takes the host longer than a short kernel runs. The same question is asked here with a key of our
own, no coarser than Triton's, and the compiled version is started directly.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton.tuning import Tile, is_interpreted

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any], tile: Tile) -> None:
    """Start ``programs`` programs of ``kernel``.

    Args:
        kernel: a function under ``triton.jit``.
        programs: the size of the grid, which has one axis.
        arguments: those that are not compile-time constants, in order.
        options: the compile-time constants, which come last in the kernel; it takes those it names.
        tile: warps, stages and registers.
    """
    if programs == 0:
        return
    constants = tuple([options[name] for name in kernel.arg_names[len(arguments) :]])
    if is_interpreted():
        kernel[(programs,)](*arguments, *constants)
        return
    device = triton.runtime.driver.active.get_current_device()
    key = (kernel, device, constants, tile[2:], tuple([_kind(argument) for argument in arguments]))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, **tile.settings())
    else:
        compiled[(programs, 1, 1)](*arguments, *constants)


def _kind(argument: Any) -> Any:
    """What the compiler may rely on: types, alignment to 16, and integers that are one or need 64 bits."""
    if type(argument) is int:
        return (argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31)
    if isinstance(argument, Tensor):
        return (argument.dtype, argument.data_ptr() % 16 == 0)
    if isinstance(argument, TensorDescriptor):
        return (argument.base.dtype, tuple(argument.block_shape), argument.padding)
    return type(argument)
