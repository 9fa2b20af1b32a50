"""Under torch.compile, autocast, activation checkpointing and gradient accumulation (G7, G8); torch.func: test_func."""

import subprocess
import sys
import textwrap

import pytest
import torch
from cases import BACKENDS, KINDS, OUTPUT_CAP, attend, make_inputs, padding, relative_error, with_gradients
from torch.utils.checkpoint import checkpoint

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)

COMPILED_FIRST = """
import sys
sys.path.insert(0, "tests")
import torch
from cases import make_inputs, relative_error, with_gradients
import mgk

torch.manual_seed(0)
compiled = torch.compile(mgk.mixture_attention, fullgraph=True, dynamic=True, backend="{compiler}")

def run(inputs):
    inputs = dict(inputs)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    return compiled(query, key, value, backend="{backend}", **inputs)

for length in (37, 61):  # the second length must not need a new graph per length
    inputs = make_inputs(kind="{kind}", queries=length, dim=16, dtype=torch.{dtype}, is_causal={causal})
    inputs["key_mask"] = torch.arange(length) < torch.tensor([[length], [length - 5]])
    grad = torch.randn_like(inputs["value"])
    got = with_gradients(inputs, grad, function=run)
    expected = with_gradients(inputs, grad, "{backend}")
    tolerance = 1e-5 if "{dtype}" == "float32" else 2e-2
    assert relative_error(got[0], expected[0]) < tolerance, relative_error(got[0], expected[0])
    for name in expected[1]:
        assert relative_error(got[1][name], expected[1][name]) < 10 * tolerance, name
"""


@pytest.mark.parametrize(
    ("compiler", "backend", "kind", "causal", "dtype"),
    [
        pytest.param("aot_eager", "reference", "projected", False, "float32", marks=pytest.mark.slow),
        pytest.param("aot_eager", "chunked", "shifted", True, "float32", marks=pytest.mark.slow),
        pytest.param("aot_eager", "sdpa", "shifted", False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("inductor", "sdpa", "projected", True, "float32", marks=pytest.mark.slow),
        pytest.param("inductor", "auto", "shifted", True, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_compiles_as_the_very_first_call(compiler, backend, kind, causal, dtype):
    """G7: fullgraph, dynamic shapes, forward and backward, in a fresh process."""
    settings = {"compiler": compiler, "backend": backend, "kind": kind, "causal": causal, "dtype": dtype}
    source = textwrap.dedent(COMPILED_FIRST).format(**settings)
    finished = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]


def test_split_columns_survive_the_compiler(device, monkeypatch):
    """A compiler may drop a round trip through bf16, and with it all that the second and third column carry."""
    monkeypatch.setattr("mgk.ops.sdpa.FLOAT32_DEVICES", ())
    torch.compiler.reset()
    inputs = make_inputs(dtype=torch.bfloat16, offset=16.0, dim=32, queries=64, device=device)
    compiled = torch.compile(lambda: attend(inputs, "sdpa"), fullgraph=True)
    assert relative_error(compiled(), attend(inputs, "sdpa")) <= OUTPUT_CAP[torch.bfloat16]


def counting(graphs: list):
    """A compiler that runs graphs as they are and notes each one."""

    def compiler(graph, _):
        graphs.append(graph)
        return graph.forward

    return compiler


@every_backend
@every_kind
def test_compiled_lengths_share_graphs(backend, kind, device):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(
        lambda inputs: attend(inputs, backend, is_causal=True), backend=counting(graphs), dynamic=True
    )
    for length in (20, 33, 57, 90, 130, 200):
        compiled(make_inputs(kind=kind, queries=length, device=device))
    assert len(graphs) <= 2


@every_kind
def test_any_number_of_lengths_compiles(kind):
    """`auto` keeps clear of what unrolls: twelve lengths, more than torch would compile graphs for."""
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(
        lambda inputs: attend(inputs, is_causal=True), backend=counting(graphs), dynamic=True, fullgraph=True
    )
    for length in range(100, 3400, 300):
        compiled(make_inputs(kind=kind, batch=1, heads=1, queries=length, dtype=torch.float32))
    assert len(graphs) <= 2


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_cuda_graph_replay_is_eager(kind, backend):
    """G7"""
    inputs = make_inputs(kind=kind, queries=64, dtype=torch.bfloat16, device="cuda", is_causal=True)
    for _ in range(3):
        attend(inputs, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(inputs, backend)
    for name in ("query", "key", "value"):
        inputs[name].copy_(torch.randn_like(inputs[name]))
    graph.replay()
    assert torch.equal(out, attend(inputs, backend))


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_as_with_half_inputs(backend, dtype, device):
    """G8: fp32 inputs under autocast give what half-precision inputs give; the mixture parameters stay fp32."""
    inputs = make_inputs(kind="shifted", queries=65, dtype=torch.float32, device=device)
    grad = torch.randn_like(inputs["value"]).to(dtype)

    def under_autocast(inputs):
        with torch.autocast(device.type, dtype=dtype):
            return attend(inputs, backend)

    out, got = with_gradients(inputs, grad, function=under_autocast)
    assert out.dtype == dtype
    half = {**inputs, **{name: inputs[name].to(dtype) for name in ("query", "key", "value")}}
    expected_out, expected = with_gradients(half, grad, backend)
    assert torch.equal(out, expected_out)
    for name, gradient in got.items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, expected[name]) <= OUTPUT_CAP[dtype], name


@every_backend
@every_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(backend, kind, use_reentrant, device):
    """G8"""
    dropout = 0.0 if backend == "sdpa" else 0.3
    inputs = make_inputs(kind=kind, dropout_p=dropout, device=device)
    grad = torch.randn_like(inputs["value"])

    def checkpointed(inputs):
        names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        tensors = [inputs[name] for name in names]

        def function(*tensors):
            return attend({**inputs, **dict(zip(names, tensors, strict=True))}, backend)

        return checkpoint(function, *tensors, use_reentrant=use_reentrant)

    torch.manual_seed(1)
    out, got = with_gradients(inputs, grad, function=checkpointed)
    torch.manual_seed(1)
    expected_out, expected = with_gradients(inputs, grad, backend)
    assert torch.equal(out, expected_out)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@every_backend
@every_kind
def test_gradient_accumulation_adds_up(backend, kind, device):
    """G8: two micro-batches give the gradient of the batch."""
    inputs = make_inputs(kind=kind, batch=4, device=device)
    inputs["key_mask"] = padding(4, 19, device)
    grad = torch.randn_like(inputs["value"])
    _, whole = with_gradients(inputs, grad, backend)
    per_sample = ("query", "key", "value", "key_mask")
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        micro = {name: value[part] if name in per_sample else value for name, value in inputs.items()}
        halves.append(with_gradients(micro, grad[part], backend)[1])
    for name, gradient in whole.items():
        combine = torch.cat if name in per_sample else sum
        assert relative_error(combine([half[name] for half in halves]), gradient) < 1e-12, name


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_dropout_drops_normalised_weights(backend, device):
    """P23: keep-rate, scale, and one mask for forward and backward."""
    inputs = make_inputs(batch=1, heads=2, queries=200, keys=200, value_dim=200, dropout_p=0.25, device=device)
    inputs["value"] = torch.eye(200, dtype=torch.float64, device=device).expand(1, 2, 200, 200)
    weight = attend({**inputs, "dropout_p": 0.0}, backend)
    out, gradients = with_gradients(inputs, torch.ones_like(inputs["query"][..., :1].expand(-1, -1, -1, 200)), backend)
    kept = out != 0
    assert relative_error(out[kept], weight[kept] / 0.75) < 1e-12
    deviations = (kept.double().mean() - 0.75).abs() / (0.25 * 0.75 / kept.numel()) ** 0.5
    assert deviations < 4
    # The gradient of value j, channel d is the dropped weight column: the same mask in backward.
    assert relative_error(gradients["value"][..., 0], out.sum(2)) < 1e-12


def test_dropout_on_the_stock_kernel_needs_one_component(device):
    for name, settings in {"softmax": {"similarity": "dot"}, "gaussian": {}}.items():
        inputs = make_inputs(components=1, prior=None, queries=128, device=device, **settings)
        inputs["value"] = torch.ones_like(inputs["value"])
        out = attend(inputs, "sdpa", dropout_p=0.5)
        assert out.std() > 0, name
        assert (out.mean() - 1).abs() < 0.1, name
    with pytest.raises(
        ValueError, match="'sdpa' cannot do dropout_p > 0 with several components: use 'auto', 'chunked'"
    ):
        attend(make_inputs(device=device), "sdpa", dropout_p=0.5)


def test_auto_serves_every_call(device):
    for kind in KINDS:
        for settings in ({}, {"assignment": "hard"}, {"dropout_p": 0.1}, {"variance": "component"}):
            out = attend(make_inputs(kind=kind, device=device, **settings), "auto")
            assert out.isfinite().all()
