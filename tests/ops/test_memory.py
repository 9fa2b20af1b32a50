"""Memory that grows with the length, not with its square."""

import subprocess
import sys
import textwrap

import pytest
import torch
from cases import make_inputs, with_gradients

SOURCE = """
import resource, sys
sys.path.insert(0, "tests")
import torch
from cases import make_inputs, with_gradients
import mgk

torch.set_num_threads(1)
inputs = make_inputs(
    kind="{kind}", batch=1, heads=1, queries={length}, dim=16, dtype=torch.float32, is_causal={causal}
)
with_gradients({{name: t[..., :64, :] if name in ("query", "key", "value") else t for name, t in inputs.items()}},
               torch.ones(1, 1, 64, 16))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if "{backend}" == "statistics":
    inputs.pop("value")
    mgk.mixture_log_density(**inputs), mgk.mixture_responsibilities(**inputs)
else:
    with_gradients(inputs, torch.randn(1, 1, {length}, 16), "{backend}")
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def peak_bytes(**settings) -> int:
    """Growth of the peak of a fresh process, forward and backward."""
    source = textwrap.dedent(SOURCE).format(**settings)
    finished = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return int(finished.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ru_maxrss in KiB")
@pytest.mark.parametrize(
    ("kind", "causal", "backend"),
    [
        # Fresh processes take their time: one case for each backend, the others with -m slow.
        pytest.param(kind, causal, backend, marks=[] if (kind, causal) == always else pytest.mark.slow)
        for backend, always in (
            ("chunked", ("projected", True)), ("sdpa", ("shifted", True)), ("statistics", ("shifted", False)),
        )
        for kind in ("projected", "shifted")
        for causal in (False, True)
    ],
)  # fmt: skip
def test_peak_memory_is_linear(kind, causal, backend):
    peaks = {length: peak_bytes(kind=kind, causal=causal, backend=backend, length=length) for length in (8192, 16384)}
    # One fp32 number for every pair and component would take 0.5 GB at 8192 and 2 GB at 16384. The blocks of `chunked`
    # are 16 MiB, of which a handful is alive, in the statistics too.
    allowed = 150e6
    assert peaks[8192] < allowed, peaks
    # The slack is for the allocator, which may or may not give a freed block back before the next.
    assert peaks[16384] < 2.2 * peaks[8192] + 100e6, peaks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["projected", "shifted"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_peak_memory_is_linear_on_a_gpu(kind, causal, dtype, backend):
    """At lengths that divide by nothing, where kernels that want aligned masks would copy them."""
    peaks = {}
    for length in (8195, 16387):
        inputs = make_inputs(
            kind=kind, batch=1, heads=1, queries=length, dim=32, dtype=dtype, device="cuda", is_causal=causal
        )
        grad = torch.randn_like(inputs["value"])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_gradients(inputs, grad, backend)
        peaks[length] = torch.cuda.max_memory_allocated() - before
    assert peaks[16387] < 2.2 * peaks[8195], peaks
    assert peaks[8195] < 500e6, peaks
