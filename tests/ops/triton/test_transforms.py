"""As a registered operation, under torch.compile, CUDA graphs, autocast, checkpointing and torch.func (G6-G8)."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import DEVICE, KINDS, OUTPUT_CAP, padding, relative_error, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton_cases import (
    BACKEND,
    BRIEF_DTYPES,
    DTYPES,
    FLOAT32,
    HALF,
    ONE_DTYPE,
    attend,
    error_of,
    gradients_of,
    make_inputs,
    random_grad,
    responsibilities,
)  # fmt: skip

every_kind = pytest.mark.parametrize("kind", KINDS)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)
SIZES = {"queries": 19, "dim": 16, "batch": 2, "heads": 1}

SHAPES = [
    {},
    {"kind": "shifted", "is_causal": True, "masked": True, "queries": 20, "keys": 33, "value_dim": 5},
    {"kind": "shifted", "variance": "component", "heads": 2, "kv_heads": 1, "queries": 3},
    {"prior": "position", "dropout_p": 0.3, "dtype": HALF, "queries": 1, "keys": 18, "value_dim": 64},
]


class Calls(TorchDispatchMode):
    """Every call of an operation of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "mgk":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def case_of(shape, device, masked=False):
    plain = {"dtype": ONE_DTYPE, "batch": 1, "heads": 1, "queries": 18, "dim": 16}
    inputs = make_inputs(**{**plain, **shape}, device=device)
    if masked:
        inputs["key_mask"] = padding(1, inputs["key"].shape[-2], device)
    return inputs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("call", "requires_grad"), [("attention", False), ("attention", True), ("responsibilities", False)]
)
def test_opcheck(shape, call, requires_grad, device):
    """G6: schema, autograd registration, fake kernels and dynamic shapes of every operation that a call reaches."""
    inputs = case_of({name: value for name, value in shape.items() if name != "masked"}, device, "masked" in shape)
    with Calls() as recorded:
        if call == "attention":
            gradients_of(inputs, random_grad(inputs))
        else:
            responsibilities({name: value for name, value in inputs.items() if name not in ("value", "dropout_p")})
    assert recorded.calls
    for function, args, kwargs in recorded.calls:
        # Only what users differentiate has a formula, a backward pass has none.
        differentiable = requires_grad and "backward" not in str(function)

        def fresh(value, differentiable=differentiable):
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().clone().requires_grad_(differentiable and value.is_floating_point())

        torch.library.opcheck(function, tuple(map(fresh, args)), {name: fresh(v) for name, v in kwargs.items()})


COMPILED_FIRST = """
import sys
sys.path[:0] = ["src", "tests"]
import torch
from cases import DEVICE, make_inputs, relative_error, with_gradients
import mgk

torch.manual_seed(0)
compiled = torch.compile(mgk.mixture_attention, fullgraph=True, dynamic=True, backend="{compiler}")

def run(inputs):
    inputs = dict(inputs)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    return compiled(query, key, value, backend="{backend}", **inputs)

for length in (21, 37):  # the second length must not need a new graph per length
    inputs = make_inputs(
        kind="{kind}", batch=1, queries=length, dim=16, dtype=torch.{dtype}, is_causal={causal}, device=DEVICE
    )
    inputs["key_mask"] = torch.arange(length, device=DEVICE)[None] < length - 3
    grad = torch.randn_like(inputs["value"])
    got = with_gradients(inputs, grad, function=run)
    expected = with_gradients(inputs, grad, "{backend}")
    tolerance = 1e-5 if "{dtype}" == "float32" else 2e-2
    assert relative_error(got[0], expected[0]) < tolerance, relative_error(got[0], expected[0])
    for name in expected[1]:
        assert relative_error(got[1][name], expected[1][name]) < 10 * tolerance, name
"""


@pytest.mark.parametrize(
    ("compiler", "kind", "causal", "dtype"),
    [("aot_eager", "projected", False, ONE_DTYPE), ("inductor", "shifted", True, HALF)],
)
def test_compiles_as_the_very_first_call(compiler, kind, causal, dtype):
    """G7: fullgraph, dynamic shapes, forward and backward, in a fresh process."""
    settings = {"compiler": compiler, "kind": kind, "causal": causal, "dtype": str(dtype).removeprefix("torch.")}
    source = textwrap.dedent(COMPILED_FIRST).format(backend=BACKEND, **settings)
    finished = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]


@every_kind
@pytest.mark.parametrize("settings", [{}, {"variance": "component"}, {"assignment": "hard"}], ids=str)
def test_compiled_is_eager(kind, settings, device):
    """G7: fullgraph and dynamic, to the last bit: the compiler only surrounds the kernel."""
    torch.compiler.reset()
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **SIZES, **settings)
    grad = random_grad(inputs)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    out, got = with_gradients(inputs, grad, function=compiled)
    expected_out, expected = gradients_of(inputs, grad)
    assert error_of(out, expected_out.double()) <= 1e-6
    for name, gradient in got.items():
        assert error_of(gradient, expected[name].double()) <= 1e-5, name


@every_kind
def test_compiled_lengths_share_graphs(kind, device):
    """G7: a new length needs no new graph."""
    torch.compiler.reset()
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, backend=compiler, dynamic=True, fullgraph=True)
    for length in (17, 20, 33, 37):
        inputs = make_inputs(
            kind=kind, batch=1, heads=1, queries=length, dim=16, dtype=ONE_DTYPE, device=device, is_causal=True
        )
        assert error_of(compiled(inputs), attend(inputs).double()) <= 1e-6
    assert len(graphs) <= 2


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_graph_replay_is_eager(kind, dtype):
    """G7: forward and backward recorded together; replayed with new numbers in the same memory."""
    inputs = make_inputs(kind=kind, dtype=dtype, device="cuda", is_causal=dtype == HALF, **{**SIZES, "queries": 150})
    names = [name for name in ("query", "key", "value", "shift", "log_prior") if name in inputs]
    for name in names:
        inputs[name].requires_grad_()
    grad = random_grad(inputs)

    def step():
        out = attend(inputs)
        return out, *torch.autograd.grad(out, [inputs[name] for name in names], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for scale in (1.0, 60.0):  # the second time on the exact path
        with torch.no_grad():
            for name in ("query", "key", "value"):
                inputs[name].copy_(scale * torch.randn_like(inputs[name]))
        graph.replay()
        for replayed, eager in zip(recorded, step(), strict=True):
            assert torch.equal(replayed, eager)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_kind
def test_autocast_computes_as_with_half_inputs(dtype, kind, device):
    """G8: fp32 inputs under autocast give what half-precision inputs give; the mixture parameters stay fp32."""
    inputs = make_inputs(kind=kind, dtype=FLOAT32, device=device, **SIZES)
    grad = torch.randn_like(inputs["value"]).to(dtype)

    def under_autocast(inputs):
        with torch.autocast(device.type, dtype=dtype):
            return attend(inputs)

    out, got = with_gradients(inputs, grad, function=under_autocast)
    assert out.dtype == dtype
    half = {**inputs, **{name: inputs[name].to(dtype) for name in ("query", "key", "value")}}
    expected_out, expected = gradients_of(half, grad)
    assert torch.equal(out, expected_out)
    for name, gradient in got.items():
        assert gradient.dtype == FLOAT32
        assert relative_error(gradient, expected[name]) <= OUTPUT_CAP[dtype], name


@every_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(kind, use_reentrant, dropout_p, device):
    """G8, P23: the recomputed forward pass drops the same pairs."""
    value_dim = 64 if dropout_p else 16
    inputs = make_inputs(kind=kind, dropout_p=dropout_p, dtype=ONE_DTYPE, device=device, value_dim=value_dim, **SIZES)
    grad = random_grad(inputs)

    def checkpointed(inputs):
        names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]

        def function(*tensors):
            return attend({**inputs, **dict(zip(names, tensors, strict=True))})

        return checkpoint(function, *(inputs[name] for name in names), use_reentrant=use_reentrant)

    torch.manual_seed(1)
    out, got = with_gradients(inputs, grad, function=checkpointed)
    torch.manual_seed(1)
    expected_out, expected = gradients_of(inputs, grad)
    assert torch.equal(out, expected_out)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@every_kind
@brief_dtypes
def test_gradient_accumulation_adds_up(kind, dtype, device):
    """G8: two micro-batches give the gradient of the batch."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, "batch": 4})
    inputs["key_mask"] = padding(4, 19, device)
    grad = random_grad(inputs)
    _, whole = gradients_of(inputs, grad)
    per_sample = ("query", "key", "value", "key_mask")
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        micro = {name: value[part] if name in per_sample else value for name, value in inputs.items()}
        halves.append(gradients_of(micro, grad[part])[1])
    for name, gradient in whole.items():
        combine = torch.cat if name in per_sample else sum
        assert relative_error(combine([half[name] for half in halves]), gradient) < 1e-5, name


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_func_grad_are_right_or_refused(device):
    """G7: a typed error or the right numbers, never wrong ones."""
    inputs = make_inputs(device=device, prior=None, dtype=ONE_DTYPE, **SIZES)
    keys = torch.stack([inputs["key"], inputs["key"].flip(3)])

    def function(key):
        return attend({**inputs, "key": key})

    mapped = torch.func.vmap(function)(keys)
    assert relative_error(mapped, torch.stack([function(key) for key in keys])) < 1e-6
    with pytest.raises(ValueError, match=r"backend='triton' cannot do a derivative of torch.func: use 'auto'"):
        torch.func.grad(lambda key: function(key).square().sum())(inputs["key"])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU needs no interpreter")
def test_the_interpreter_is_on_in_every_process():
    """Bad input 19: a process that this suite starts inherits the setting, so that none tests nothing."""
    assert BACKEND != "triton" or os.environ["TRITON_INTERPRET"] == "1"
