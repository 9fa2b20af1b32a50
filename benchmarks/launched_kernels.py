"""What the fused kernels would be launched with, and the machine code of it, on a machine without a GPU.

The calls are made through the public operations on CPU tensors; what would start a kernel notes it instead, so nothing
is computed. It knows as little as possible of the code it looks at: :mod:`machine_code` runs it with other revisions
of the library as well, and :mod:`compile_everywhere` with other versions of Triton. Import it before the library, which
looks for a GPU when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# The library leaves the kernels out where torch was built without CUDA.
_built_for, torch.version.cuda = torch.version.cuda, torch.version.cuda or "12.8"
import mgk  # noqa: E402
import mgk.ops.triton  # noqa: E402
from mgk.benchmark.inputs import Inputs, draw  # noqa: E402
from mgk.benchmark.plan import CUDA_SHAPES, DECODE_CUDA_SHAPES, LINEAR_CUDA_SHAPES, USUAL_PRESETS  # noqa: E402
from mgk.benchmark.shape import Shape  # noqa: E402
from mgk.nn.presets import LINEAR_PRESETS  # noqa: E402
from mgk.ops.triton import launch, tuning  # noqa: E402

torch.version.cuda = _built_for

MULTIPROCESSORS = 132
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
WHOLE_BLOCKS, OTHERS = 512, 299
"""Lengths: softmax has no columns in whole blocks of keys, and so a kernel of its own for others. Beyond that no kernel
but that of a step depends on the numbers of sequences, heads or tokens."""


@dataclass(frozen=True)
class Specialisation:
    """One kernel as a launch wants it compiled."""

    kernel: Any
    signature: dict[str, str]
    """the type of each parameter, ``"constexpr"`` for what is known to the compiler"""
    constants: dict[str, Any]
    divisible: tuple[int, ...]
    """positions of parameters that are multiples of 16"""
    settings: dict[str, Any]
    """warps, stages, registers"""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def key(self) -> tuple[Any, ...]:
        """Equal for what is compiled to the same."""
        parts = (self.signature, self.constants, self.settings)
        return (
            self.name,
            self.divisible,
            *(tuple((name, repr(value)) for name, value in part.items()) for part in parts),
        )

    def compile(self, architecture: int = 90) -> Any:
        """As Triton would for a GPU of this compute capability, times ten; Triton keeps what it has compiled."""
        attributes = {(position,): [["tt.divisibility", 16]] for position in self.divisible}
        language: Any = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            language = GluonASTSource
        source = language(self.kernel, self.signature, self.constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=self.settings)


def specialise(kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], tile: Any) -> Specialisation:
    """What Triton's launcher would have compiled for these arguments."""
    names, signature, divisible = kernel.arg_names, {}, []
    values = dict(zip(names[len(arguments) :], constants, strict=True))
    for position, (name, argument) in enumerate(zip(names, arguments, strict=False)):
        is_free = name in kernel.do_not_specialize
        if argument is None or (type(argument) is int and argument == 1 and not is_free):
            signature[name], values[name] = "constexpr", argument
        elif isinstance(argument, torch.Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
            if argument.data_ptr() % 16 == 0 and not is_free and name not in kernel.do_not_specialize_on_alignment:
                divisible.append(position)
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif isinstance(argument, int):
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
            if argument % 16 == 0 and not is_free:
                divisible.append(position)
        else:
            shape = ",".join(map(str, argument.block_shape))
            layout = f",{launch.with_layout(argument).layout!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{TYPES[argument.base.dtype]}[{shape}]{layout}>"
    signature |= dict.fromkeys(names[len(arguments) :], "constexpr")
    settings = {name: value for name, value in tile.settings().items() if value is not None}
    return Specialisation(kernel, signature, values, tuple(divisible), settings)


def launched(call: Callable[[], object], architecture: str = "sm90") -> list[Specialisation]:
    """What ``call`` would start on a GPU of ``architecture``, in order, each specialisation once."""
    found: dict[tuple[Any, ...], Specialisation] = {}

    def note(kernel: Any, programs: int, arguments: Any, constants: Any, kinds: Any, tile: Any) -> None:
        one = specialise(kernel, arguments, constants, tile)
        found.setdefault(one.key(), one)

    # The operations refuse tensors that are on no GPU, wherever they ask.
    refuses = mgk.ops.triton.unsupported
    modules = [module for name, module in sys.modules.items() if name.startswith("mgk.ops")]
    asking = [(module, name) for module in modules for name, value in vars(module).items() if value is refuses]
    replaced = [(launch, "_start"), (tuning, "_architecture"), (tuning, "multiprocessors"), (torch, "randn"), *asking]
    before = [(module, name, vars(module)[name]) for module, name in replaced]
    vars(launch)["_start"] = note
    # Nobody looks at the numbers, but that they are some.
    vars(torch)["randn"] = torch.zeros
    vars(tuning).update(_architecture=lambda index: architecture, multiprocessors=lambda index: MULTIPROCESSORS)
    for module, name in asking:
        vars(module)[name] = lambda problem: None
    try:
        call()
    finally:
        for module, name, value in before:
            vars(module)[name] = value
    return list(found.values())


def attend(
    preset: str, shape: Shape, dropout_p: float = 0.0, is_padded: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Forward and backward of one call as the benchmark makes it. All heads of ``shape`` are the preset's."""
    inputs = _draw(preset, shape, dtype=dtype)
    mask = torch.ones(shape.batch, shape.tokens, dtype=torch.bool) if is_padded else None
    out = mgk.mixture_attention(
        inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
        similarity=inputs.similarity, assignment=inputs.assignment, is_causal=inputs.is_causal, dropout_p=dropout_p,
        key_mask=mask, query_mask=mask, backend="triton",
    )  # fmt: skip
    torch.autograd.grad(out, list(inputs.leaves().values()), torch.empty_like(out), allow_unused=True)


def attend_packed(preset: str, shape: Shape) -> None:
    """Likewise of two sequences in a row, the first of which ends within a block."""
    inputs = _draw(preset, shape)
    total = shape.batch * shape.tokens
    boundaries = torch.tensor([0, shape.tokens - 9, total], dtype=torch.int32)
    by_token = [each.movedim(-2, 1).flatten(0, 1) for each in (inputs.query, inputs.key, inputs.value)]
    out = mgk.mixture_attention_varlen(
        *by_token, cu_seqlens_q=boundaries, shift=inputs.shift, log_prior=inputs.log_prior,
        similarity=inputs.similarity, assignment=inputs.assignment, is_causal=inputs.is_causal, backend="triton",
    )  # fmt: skip
    torch.autograd.grad(out, list(inputs.leaves().values()), torch.empty_like(out), allow_unused=True)


def attend_linearly(preset: str, shape: Shape) -> None:
    """Forward and backward of linear attention."""
    inputs = _draw(preset, shape)
    assert inputs.feature_map is not None
    out = mgk.linear_mixture_attention(
        inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
        feature_map=inputs.feature_map, is_causal=inputs.is_causal, backend="triton",
    )  # fmt: skip
    torch.autograd.grad(out, list(inputs.leaves().values()), torch.empty_like(out), allow_unused=True)


@torch.no_grad()
def decode(preset: str, shape: Shape) -> None:
    """A step of generation, with keys as a cache has them: all components of a token together."""
    inputs = _draw(preset, shape, queries=1)
    if inputs.key.ndim == 5:
        inputs = replace(inputs, key=inputs.key.transpose(2, 3).contiguous().transpose(2, 3))
    mgk.mixture_attention(
        inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
        similarity=inputs.similarity, assignment=inputs.assignment, backend="triton",
    )  # fmt: skip


def responsibilities(preset: str, shape: Shape) -> None:
    """The E-step."""
    inputs = _draw(preset, shape)
    mgk.mixture_responsibilities(
        inputs.query, inputs.key, shift=inputs.shift, log_prior=inputs.log_prior, is_causal=inputs.is_causal,
        backend="triton",
    )  # fmt: skip


def _draw(preset: str, shape: Shape, queries: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return draw(
        preset, batch=shape.batch, heads=shape.heads, tokens=shape.tokens, head_dim=shape.head_dim, queries=queries,
        is_causal=shape.is_causal, dtype=dtype, device=torch.device("cpu"), needs_gradients=queries is None,
    )  # fmt: skip


def benchmark_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """The calls that the benchmark times, under a name each, as small as makes no difference: every preset at every
    shape, one with dropout, one with padding and one that is packed, the E-step, a step of generation, and linear
    attention."""
    for preset in USUAL_PRESETS:
        for shape in CUDA_SHAPES:
            small = _small(shape)
            yield _named(preset, small), partial(attend, preset, small)
    for shape in CUDA_SHAPES:
        small = _small(shape, OTHERS)
        yield f"{_named('softmax', small)}, {OTHERS} tokens", partial(attend, "softmax", small)
    usual = _small(CUDA_SHAPES[1])
    yield f"{_named('smgk', usual)}, dropout", partial(attend, "smgk", usual, dropout_p=0.1)
    yield f"{_named('smgk', usual)}, padding", partial(attend, "smgk", usual, is_padded=True)
    yield f"{_named('smgk', usual)}, fp32", partial(attend, "smgk", usual, dtype=torch.float32)
    yield f"{_named('smgk', usual)}, packed", partial(attend_packed, "smgk", usual)
    for preset in ("smgk", "mgk"):
        yield f"{_named(preset, usual)}, E-step", partial(responsibilities, preset, usual)
    # How many parts the keys are split into depends on the sizes: those of the benchmark, of a mixture.
    step = DECODE_CUDA_SHAPES[-1]
    step = replace(step, heads=step.mixture_heads)
    for preset in ("softmax", "smgk", "mgk"):
        yield f"{_named(preset, step)}, decode", partial(decode, preset, step)
    for preset in LINEAR_PRESETS:
        for is_causal in (False, True):
            small = replace(_small(LINEAR_CUDA_SHAPES[-1]), is_causal=is_causal)
            yield _named(preset, small), partial(attend_linearly, preset, small)


def _small(shape: Shape, tokens: int = WHOLE_BLOCKS) -> Shape:
    return replace(shape, batch=2, heads=2, tokens=tokens)


def _named(preset: str, shape: Shape) -> str:
    return f"{preset}, head_dim {shape.head_dim}, {'causal' if shape.is_causal else 'full'}"
