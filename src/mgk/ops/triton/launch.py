"""Starting a kernel in a few microseconds.

Triton looks at every argument anew each time it starts a kernel, to find which of its compiled versions fits. With some
fifty arguments that takes the host longer than a short kernel runs. The same question is asked here with a key of our
own, no coarser than Triton's, and the compiled version is started directly.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
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
    names, is_free = _signature(kernel, len(arguments))
    kinds = () if is_interpreted() else tuple(map(_kind, arguments, is_free))
    for variant in variants or ({},):
        every = {**options, **variant}
        _start(kernel, programs, arguments, tuple([every[name] for name in names]), kinds, tile)


@functools.cache
def _signature(kernel: Any, count: int) -> tuple[list[str], list[bool]]:
    """Names of the compile-time constants, which follow ``count`` others, and which of those the compiler ignores."""
    free = () if is_interpreted() else (*kernel.do_not_specialize, *kernel.do_not_specialize_on_alignment)
    return kernel.arg_names[count:], [name in free for name in kernel.arg_names[:count]]


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


def _kind(argument: Any, is_free: bool) -> Any:
    """What the compiler may rely on: types, alignment to 16, and integers that are one or need 64 bits."""
    kind = type(argument)
    if kind is int:
        is_short = -(2**31) <= argument < 2**31
        return is_short if is_free else (argument == 1, argument % 16 == 0, is_short)
    if kind is float or argument is None:
        return kind
    if kind is TensorDescriptor:
        return (argument.base.dtype, argument.block_shape[1], argument.block_shape[2], argument.block_shape[3])
    return argument.dtype if is_free else (argument.dtype, argument.data_ptr() % 16 == 0)
