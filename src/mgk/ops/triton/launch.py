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

hooks = triton.knobs.runtime
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any], tile: Tile, *variants: dict[str,
    Any]
) -> None:  # fmt: skip
    """Start ``programs`` programs of ``kernel``, once for each of ``variants`` if there are any.

    Args:
        kernel: a function under ``triton.jit``.
        programs: the size of the grid, which has one axis.
        arguments: those that are not compile-time constants, in order.
        options: the compile-time constants, which come last in the kernel; it takes those it names.
        tile: warps, stages and registers.
        variants: compile-time constants that replace some of ``options``.
    """
    if programs == 0:
        return
    names = kernel.arg_names[len(arguments) :]
    kinds = () if is_interpreted() else tuple([_kind(argument) for argument in arguments])
    for variant in variants or ({},):
        every = {**options, **variant}
        _start(kernel, programs, arguments, tuple([every[name] for name in names]), kinds, tile)


def _start(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], kinds: tuple[Any, ...],
    tile: Tile,
) -> None:  # fmt: skip
    if is_interpreted():
        kernel[(programs,)](*arguments, *constants)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = (kernel, device, constants, tile[2:], kinds)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, **tile.settings())
    elif not (_is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook)):
        stream = driver.get_current_stream(device)
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *constants,
        )  # fmt: skip
    else:
        compiled[(programs, 1, 1)](*arguments, *constants)


def _is_set(hook: Any) -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(getattr(hook, "calls", hook))


def _kind(argument: Any) -> Any:
    """What the compiler may rely on: types, alignment to 16, and integers that are one or need 64 bits."""
    if type(argument) is int:
        return (argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31)
    if isinstance(argument, Tensor):
        return (argument.dtype, argument.data_ptr() % 16 == 0)
    if isinstance(argument, TensorDescriptor):
        return (argument.base.dtype, tuple(argument.block_shape), argument.padding)
    return type(argument)
