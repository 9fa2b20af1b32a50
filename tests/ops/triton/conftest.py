"""The fused kernels run compiled on a CUDA device, or on the CPU under the interpreter of Triton."""

import functools
import importlib.util
import inspect
import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton_cases import INTERPRETED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes its time: three in eleven cases run, the others are `slow`. On a GPU all run."""
    for item in items:
        if INTERPRETED and "ops/triton" in item.nodeid and zlib.crc32(item.nodeid.encode()) % 11 > 2:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _kernels_run_here() -> None:
    if INTERPRETED and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels need MGK_TEST_DEVICE=cuda, or TRITON_INTERPRET=1 before anything is imported")


@pytest.fixture(autouse=True, scope="session")
def _swift_interpreter(_kernels_run_here: None) -> Iterator[None]:
    """Half of the interpreter's time goes into finding the same names again, and a quarter into padding."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch_builtins(package, builder, scope):
        for name in builtins_of(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
        monkeypatch.setattr("mgk.ops.triton.call.PADDING", 32)
        yield


@pytest.fixture(autouse=True, scope="session")
def _products_of_one_order(_kernels_run_here: None) -> Iterator[None]:
    """A GPU sums the terms of a product in fp32 in one order, whatever the tile. NumPy's order changes with the shape
    and the machine, and forward and backward would disagree about a logit. Summed in fp64, it does not show."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, total, *rest):
        if a.data.dtype != np.float32:
            return dot(self, a, b, total, *rest)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True, scope="session")
def _guarded_memory(_swift_interpreter: None) -> Iterator[None]:
    """Whatever a kernel reads or writes must lie inside one of the tensors it was given: a GPU may say nothing."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    bring, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    starts, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def bring_and_remember(self, args, kwargs):
        nonlocal starts, ends
        brought = bring(self, args, kwargs)
        tensors = [getattr(each, "base", each) for each in (*brought[0], *brought[1].values())]
        spans = {
            (each.untyped_storage().data_ptr(), each.untyped_storage().nbytes())
            for each in tensors
            if isinstance(each, torch.Tensor)
        }
        starts = np.array(sorted(start for start, _ in spans), np.uint64)
        ends = np.array([start + size for start, size in sorted(spans)], np.uint64)
        return brought

    def check(pointers, mask):
        used = pointers.data[mask.data]
        if used.size:
            size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
            # As a rule all lie in the tensor in which the first one lies.
            span = int(np.searchsorted(starts, used.min(), side="right")) - 1
            if span >= 0 and used.max() + size <= ends[span]:
                return
            spans = np.searchsorted(starts, used, side="right").astype(np.int64) - 1
            outside = (spans < 0) | (used + size > ends[np.maximum(spans, 0)])
            assert not outside.any(), f"{outside.sum()} of {used.size} addresses lie outside of every tensor"

    def checked_load(self, pointers, mask, *rest, **options):
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self, pointers, value, mask, *rest, **options):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(executor, "_init_args_hst", bring_and_remember)
        monkeypatch.setattr(builder, "create_masked_load", checked_load)
        monkeypatch.setattr(builder, "create_masked_store", checked_store)
        yield


@pytest.fixture(autouse=True)
def _poisoned_buffers(_poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: what ``torch.empty`` hands out holds NaN, too."""
    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided))


def poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad and not torch.compiler.is_compiling():
            tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned
