"""The default measurements of the attention benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mgk.benchmark.contestants import EAGER, FLEX
from mgk.benchmark.generation import Setting
from mgk.benchmark.shape import Shape
from mgk.benchmark.sweep import lengths
from mgk.benchmark.timing import Effort
from mgk.nn.presets import LINEAR_PRESETS, SOFTMAX_PRESETS
from mgk.ops.dispatch import BACKENDS

# All distinct kinds of calls: in a call, EM variants equal the learned ones, and softmax-smgk equals softmax.
USUAL_PRESETS = ("softmax", "gaussian", "smgk", "mgk", "smgk-hard", "mgk-hard", "softmax-mgk")
QUICK_PRESETS = ("softmax", "smgk", "mgk")
SWEPT_PRESETS = ("smgk", "mgk")
USUAL_BACKENDS = ("triton", "sdpa", "chunked", EAGER)
CUDA_BACKENDS = (*USUAL_BACKENDS, FLEX)
"""Default backends on a GPU. On a CPU FlexAttention takes a minute to compile and has no backward pass, so it must be
requested."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Heads as in Long Range Arena, wider ones, and those of two language models.
CUDA_SHAPES = (
    Shape(batch=32, heads=8, tokens=4096, head_dim=32),
    Shape(batch=32, heads=8, tokens=4096, head_dim=64),
    Shape(batch=8, heads=16, tokens=4096, head_dim=128, is_causal=True),
    Shape(batch=4, heads=16, tokens=16384, head_dim=64, is_causal=True),
)
# The lengths of Long Range Arena, and longer ones that softmax cannot afford, in batches that are limited by the device
# and not by the host.
LINEAR_CUDA_SHAPES = (
    *(
        Shape(batch=batch * 64 // head_dim, heads=8, tokens=tokens, head_dim=head_dim, is_causal=is_causal)
        for batch, tokens in ((128, 4096), (8, 65536))
        for head_dim in (32, 64)
        for is_causal in (False, True)
    ),
    # In the second shape, mixtures have as many heads as softmax has in the first.
    *(Shape(batch=4, heads=heads, tokens=16384, head_dim=64, is_causal=True) for heads in (8, 16)),
)
LINEAR_CPU_SHAPES = (
    Shape(batch=1, heads=8, tokens=1024, head_dim=32),
    Shape(batch=1, heads=8, tokens=1024, head_dim=32, is_causal=True),
)
# Tokens are those in the cache.
DECODE_CUDA_SHAPES = (
    Shape(batch=8, heads=16, tokens=32768, head_dim=128),
    Shape(batch=8, heads=16, tokens=8192, head_dim=64),
)
DECODE_CPU_SHAPES = (Shape(batch=1, heads=4, tokens=512, head_dim=16),)
WRITING = Setting(batch=8, prompt=8192 - 128, new_tokens=128)
CPU_WRITING = Setting(
    batch=2, prompt=40, new_tokens=6, layers=2, hidden_size=64, heads=4, head_dim=16, vocab_size=64
)  # fmt: skip
CPU_SHAPES = (
    Shape(batch=1, heads=8, tokens=1024, head_dim=32),
    Shape(batch=1, heads=8, tokens=1024, head_dim=64, is_causal=True),
)
CPU_QUICK_SHAPES = (Shape(batch=1, heads=4, tokens=256, head_dim=32),)
CUDA_LENGTHS = lengths(Shape(batch=1, heads=8, tokens=512, head_dim=64, is_causal=True), 131072)
LINEAR_CUDA_LENGTHS = lengths(CUDA_LENGTHS[0], 16384)
CPU_LENGTHS = lengths(Shape(batch=1, heads=4, tokens=256, head_dim=32, is_causal=True), 2048)
CPU_QUICK_LENGTHS = lengths(Shape(batch=1, heads=2, tokens=64, head_dim=16, is_causal=True), 256)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements of a benchmark, and their effort."""

    presets: Sequence[str]
    """Presets, with softmax among them, to which the cost of a mixture head is compared."""
    backends: Sequence[str]
    dtype: torch.dtype
    shapes: Sequence[Shape]
    swept_presets: Sequence[str]
    lengths: Sequence[Shape]
    """Lengths of the sweep; empty for none."""
    effort: Effort

    @property
    def swept_backends(self) -> list[str]:
        """Backends without FlexAttention, which would be compiled for every length."""
        return [name for name in self.backends if name != FLEX]

    def facts(self) -> dict[str, Any]:
        """Return the entries of the plan in the JSON."""
        return {
            "presets": list(self.presets),
            "backends": list(self.backends),
            "dtype": str(self.dtype).removeprefix("torch."),
            "rounds": self.effort.rounds,
            "seconds": self.effort.seconds,
            "slowest": self.effort.slowest,
        }


def make_plan(
    device: torch.device,
    *,
    presets: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    dtype: str = "auto",
    quick: bool = False,
    sweep: bool | None = None,
) -> Plan:
    """Return the plan for a device, with defaults for what is not given. A quick run has a sweep only on request."""
    is_cuda = device.type == "cuda"
    check_presets(presets or ())
    chosen = presets or (QUICK_PRESETS if quick else USUAL_PRESETS)
    if dtype == "auto":
        dtype = "bfloat16" if is_cuda else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    for name in backends or ():
        if name not in (*BACKENDS, EAGER, FLEX):
            raise ValueError(f"--backend must be one of {', '.join((*BACKENDS, EAGER, FLEX))}, got {name!r}")
    usual_backends = USUAL_BACKENDS[:2] if quick and is_cuda else CUDA_BACKENDS if is_cuda else USUAL_BACKENDS
    usual_shapes = CUDA_SHAPES if is_cuda else CPU_QUICK_SHAPES if quick else CPU_SHAPES
    usual_lengths = CUDA_LENGTHS if is_cuda else CPU_QUICK_LENGTHS if quick else CPU_LENGTHS
    return Plan(
        presets=list(dict.fromkeys(["softmax", *chosen])),
        backends=list(dict.fromkeys(backends or usual_backends)),
        dtype=DTYPES[dtype],
        shapes=[Shape.parse(text) for text in shapes] if shapes else usual_shapes,
        swept_presets=list(dict.fromkeys(presets or SWEPT_PRESETS)),
        lengths=usual_lengths if (not quick if sweep is None else sweep) else [],
        effort=usual_effort(device, quick),
    )


@dataclass(frozen=True, kw_only=True)
class DecodePlan(Plan):
    """The measurements of generation."""

    writing: Setting
    """Setting of the models that generate."""
    writing_presets: Sequence[str]
    writing_effort: Effort


def make_decode_plan(
    device: torch.device,
    *,
    presets: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    quick: bool = False,
) -> DecodePlan:
    """Return the plan for steps at some contexts, then for whole decoders."""
    is_cuda = device.type == "cuda"
    check_presets(presets or ())
    usual_shapes = DECODE_CPU_SHAPES if not is_cuda else DECODE_CUDA_SHAPES[:1] if quick else DECODE_CUDA_SHAPES
    return DecodePlan(
        presets=list(dict.fromkeys(["softmax", *(presets or USUAL_PRESETS)])),
        backends=["triton" if is_cuda else "auto"],
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        shapes=[Shape.parse(text) for text in shapes] if shapes else usual_shapes,
        swept_presets=[],
        lengths=[],
        effort=usual_effort(device, quick),
        writing=WRITING if is_cuda else CPU_WRITING,
        # Softmax with all heads is always measured, so it is not listed.
        writing_presets=[name for name in presets or SWEPT_PRESETS if name != "softmax"][:1],
        writing_effort=Effort(rounds=2 if quick else 5, seconds=20.0 if is_cuda else 4.0, fewest=2, slowest=60.0),
    )


def make_linear_plan(
    device: torch.device,
    *,
    presets: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    quick: bool = False,
) -> Plan:
    """Return the plan for linear attention at some shapes, and for lengths until it is faster than softmax."""
    is_cuda = device.type == "cuda"
    for name in presets or ():
        if name not in LINEAR_PRESETS:
            raise ValueError(f"--preset must be one of {', '.join(LINEAR_PRESETS)}, got {name!r}")
    usual = LINEAR_CUDA_SHAPES if is_cuda else LINEAR_CPU_SHAPES
    lengths_of = LINEAR_CUDA_LENGTHS if is_cuda else CPU_QUICK_LENGTHS if quick else CPU_LENGTHS
    return Plan(
        presets=[name for name in presets or LINEAR_PRESETS if name != "linear"],
        backends=["triton" if is_cuda else "chunked"],
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        shapes=[Shape.parse(text) for text in shapes] if shapes else usual[:1] if quick else usual,
        swept_presets=[],
        lengths=[replace(shape, is_causal=causal) for causal in (False, True) for shape in lengths_of],
        effort=usual_effort(device, quick),
    )


def usual_effort(device: torch.device, quick: bool) -> Effort:
    """Return the default effort of a measurement on a device."""
    if device.type == "cuda":
        return Effort(rounds=8 if quick else 20, seconds=0.2 if quick else 0.5, fewest=3, slowest=1.0)
    return Effort(rounds=3 if quick else 7, seconds=1.0 if quick else 4.0, fewest=3, slowest=1.0 if quick else 8.0)


def check_presets(names: Sequence[str], *, linear: bool = False) -> None:
    """Check the names of presets. Linear presets are allowed only if the benchmark measures ``linear`` attention."""
    for name in names:
        if linear and name in LINEAR_PRESETS:
            continue
        if name in LINEAR_PRESETS:
            usable = ", ".join(SOFTMAX_PRESETS)
            raise ValueError(f"--preset must not be linear attention, got {name!r}: use one of {usable}")
        if name not in SOFTMAX_PRESETS:
            raise ValueError(f"--preset must be one of {', '.join(SOFTMAX_PRESETS)}, got {name!r}")
