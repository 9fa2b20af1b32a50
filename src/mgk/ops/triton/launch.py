"""Starting a kernel in a few microseconds.

Triton looks at every argument anew each time it starts a kernel, to find which of its compiled versions fits. With some
fifty arguments that takes the host longer than a short kernel runs. The same question is asked here with a key of our
own, no coarser than Triton's, and the compiled version is started directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton.tuning import HAS_WARP_SPECIALISATION, Tile, is_interpreted

hooks = triton.knobs.runtime
# How a compiled version is started is no public matter: with a Triton that we have not seen, Triton starts it.
KNOWN_VERSIONS = ((3, 4), (3, 9))
IS_KNOWN = KNOWN_VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= KNOWN_VERSIONS[1]
Chosen = Callable[[dict[str, Any]], tuple[Any, ...]]
"""Finds some of the values that are given by name."""
# By the Python function of a kernel: Triton's own hash of a kernel is of its source, which takes longer to find.
_compiled: dict[tuple[Any, ...], Any] = {}
_signatures: dict[Any, tuple[Chosen, Chosen, list[bool]]] = {}


class Start(NamedTuple):
    """One kernel, started with these arguments."""

    compiled: Any
    """the version that Triton has compiled"""
    programs: int
    """the size of the grid"""
    arguments: tuple[Any, ...]
    """those that are not compile-time constants"""
    constants: tuple[Any, ...]
    """the compile-time constants, which follow them"""


class _Recorder(threading.local):
    starts: list[Start] | None = None


_recorder = _Recorder()


@contextmanager
def recorded() -> Iterator[list[Start]]:
    """Note what this thread starts meanwhile."""
    starts: list[Start] = []
    _recorder.starts = starts
    try:
        yield starts
    finally:
        _recorder.starts = None


def launch(kernel: Any, programs: int, values: dict[str, Any], tile: Tile, *variants: dict[str, Any]) -> None:
    """Start ``programs`` programs of ``kernel``, once for each of ``variants`` if there are any.

    Args:
        kernel: a function under ``triton.jit``.
        programs: the size of the grid, which has one axis.
        values: arguments and compile-time constants by name; the kernel takes those it names.
        tile: warps, stages, registers, and whether it is launched early.
        variants: compile-time constants that replace some of ``values``.
    """
    if programs == 0:
        return
    arguments_of, constants_of, is_free = _signature(kernel)
    arguments = arguments_of(values)
    kinds = () if is_interpreted() else tuple(map(_kind, arguments, is_free))
    for variant in variants or ({},):
        every = {**values, **variant} if variant else values
        _start(kernel, programs, arguments, constants_of(every), kinds, tile)


def run(compiled: Any, programs: int, arguments: Any, stream: int) -> None:
    """Start a compiled kernel, its constants among the arguments, when nobody listens."""
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
    )  # fmt: skip


def is_listened_to() -> bool:
    """Whether a profiler wants to hear of launches."""
    return _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook)


def current_stream() -> tuple[int, int]:
    """The current device, and its stream."""
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    return device, driver.get_current_stream(device)


def _signature(kernel: Any) -> tuple[Chosen, Chosen, list[bool]]:
    """What finds a kernel's arguments, what finds its compile-time constants (which come last, in capitals), and which
    of the arguments the compiler ignores."""
    found = _signatures.get(kernel.fn)
    if found is None:
        constants = [name for name in kernel.arg_names if name.isupper()]
        names = kernel.arg_names[: -len(constants)]
        free = () if is_interpreted() else (*kernel.do_not_specialize, *kernel.do_not_specialize_on_alignment)
        found = _signatures[kernel.fn] = _chosen(names), _chosen(constants), [name in free for name in names]
    return found


def _chosen(names: list[str]) -> Chosen:
    """What finds the values of these names, as fast as Python can."""
    return itemgetter(*names) if len(names) > 1 else lambda values: tuple([values[name] for name in names])


def _start(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], kinds: tuple[Any, ...],
    tile: Tile,
) -> None:  # fmt: skip
    if is_interpreted():
        kernel[(programs,)](*arguments, *constants)
        return
    if not IS_KNOWN:
        _compile_and_start(kernel, programs, arguments, constants, tile)
        return
    device, stream = current_stream()
    key = (kernel.fn, device, constants, tile[2:], kinds)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile_and_start(kernel, programs, arguments, constants, tile)
    elif is_listened_to():
        compiled[(programs, 1, 1)](*arguments, *constants)
    else:
        run(compiled, programs, (*arguments, *constants), stream)
    if _recorder.starts is not None:
        _recorder.starts.append(Start(compiled, programs, arguments, constants))


def _compile_and_start(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], tile: Tile
) -> Any:
    if HAS_WARP_SPECIALISATION and kernel.is_gluon():
        arguments = tuple([with_layout(each) if type(each) is TensorDescriptor else each for each in arguments])
    return kernel[(programs,)](*arguments, *constants, **tile.settings())


def with_layout(descriptor: TensorDescriptor) -> Any:
    """A descriptor as Gluon compiles for it, which says how blocks lie in shared memory. To start what is compiled, any
    descriptor will do."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    # Only the size of the type counts.
    number = {2: language.float16, 4: language.float32}[descriptor.base.element_size()]
    block_shape = list(descriptor.block_shape)
    layout = language.NVMMASharedLayout.get_default_for(block_shape, number)
    return GluonDescriptor(
        descriptor.base, list(descriptor.shape), list(descriptor.strides), block_shape, layout, descriptor.padding
    )


def _is_set(hook: Any) -> bool:
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
        return (argument.base.dtype, *argument.block_shape)
    return argument.dtype if is_free else (argument.dtype, argument.data_ptr() % 16 == 0)
