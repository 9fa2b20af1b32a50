"""What the kernels cannot do is refused before any work, with a backend that can (7, 9, 19-21 of the catalogue)."""

import os
import subprocess
import sys

import pytest
import torch
from cases import make_inputs
from triton_cases import BACKEND, INTERPRETED, attend

import mgk

pytestmark = pytest.mark.skipif(BACKEND != "triton", reason="about the fused kernels alone")

T = torch.zeros

BAD = [
    # 7 head dimension
    ({"dim": 257}, ValueError, r"'triton' cannot do a head dimension above 256, got 257: use .*'chunked'"),
    ({"dim": 8, "value_dim": 300}, ValueError, r"'triton' cannot do a value dimension above 256, got 300: use"),
    ({"dropout_p": 0.98}, ValueError, r"'triton' cannot do a dropout_p above 0.96875, got 0.98: use .*'chunked'"),
    ({"components": 9}, ValueError, r"'triton' cannot do more than 8 components, got 9: use .*'chunked'"),
    ({"kind": "shifted", "components": 9}, ValueError, r"'triton' cannot do more than 8 components, got 9: use"),
    # 9 dtypes
    ({"dtype": torch.float64}, ValueError, r"'triton' cannot do float64: use .*'chunked'"),
]
WRONG = [
    # 9 dtypes
    ({"query": T(2, 2, 5, 8).int()}, TypeError, "query must be float64, float32, bfloat16 or float16, got torch.int32"),
    ({"key": T(2, 2, 2, 5, 8) + 0j}, TypeError, "bfloat16 or float16, got torch.complex64"),
    ({"value": T(2, 2, 5, 8).half()}, TypeError, "value must have the dtype of query"),
    # 13 masks
    ({"attn_mask": T(5, 5)}, TypeError, "attn_mask must be a bool tensor, True = attend, got torch.float32"),
    # 16 dropout
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must lie in \[0, 1\), got 1.0"),
]


@pytest.fixture
def _no_work(monkeypatch):
    monkeypatch.setattr(mgk.ops.triton, "attention", lambda _: pytest.fail("work began"))


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("settings", "error", "message"), BAD, ids=[str(settings) for settings, _, _ in BAD])
def test_what_the_kernels_cannot_do_is_refused(settings, error, message, device):
    """7, 9: and the message names a backend that can."""
    inputs = make_inputs(**{"queries": 5, "dim": 8, "dtype": torch.float32, **settings}, device=device)
    with pytest.raises(error, match=message):
        attend(inputs)
    mgk.mixture_attention(**inputs, backend="chunked")


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_bad_inputs_are_refused(changes, error, message, device):
    """9, 13, 16: what no backend can do is refused as it is everywhere."""
    inputs = make_inputs(queries=5, dim=8, dtype=torch.float32, device=device)
    changes = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    with pytest.raises(error, match=message):
        mgk.mixture_attention(**{**inputs, **changes}, backend="triton")


@pytest.mark.parametrize("function", [mgk.mixture_log_density, mgk.mixture_responsibilities])
def test_statistics_refuse_as_attention_does(function, device):
    """7, 9 for the statistics."""
    for settings, message in (({"dtype": torch.float64}, "cannot do float64"), ({"dim": 257}, "above 256, got 257")):
        inputs = make_inputs(**{"queries": 5, "dim": 8, "dtype": torch.float32, **settings}, device=device)
        inputs.pop("value")
        with pytest.raises(ValueError, match=message):
            function(**inputs, backend="triton")


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_the_interpreter_refuses_bfloat16():
    """9: whose products it gets wrong without a word."""
    with pytest.raises(ValueError, match=r"'triton' cannot do bfloat16 in Triton's interpreter: use"):
        mgk.mixture_attention(**make_inputs(queries=5, dtype=torch.bfloat16), backend="triton")


WITHOUT_INTERPRETER = """
import sys
sys.path[:0] = ["src", "tests"]
import torch
from cases import make_inputs
import mgk

inputs = make_inputs(queries=5, dtype=torch.float32)
try:
    mgk.mixture_attention(**inputs, backend="triton")
except ValueError as error:
    print(error)
mgk.mixture_attention(**inputs)
"""


def test_cpu_tensors_without_the_interpreter():
    """19: names the variable to set and the backends to use instead; `auto` just works."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERPRETER],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    for word in ("backend='triton' cannot do tensors on cpu", "TRITON_INTERPRET=1", "'chunked'"):
        assert word in finished.stdout


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path[:0] = ["src", "tests"]
import torch
from cases import make_inputs
import mgk

inputs = make_inputs(queries=5, dtype=torch.float32)
try:
    mgk.mixture_attention(**inputs, backend="triton")
except (ValueError, ImportError) as error:
    print(error)
mgk.mixture_attention(**inputs)
"""


def test_without_triton():
    """20: a machine that has none is told so, and `auto` does without."""
    finished = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "triton" in finished.stdout.lower()


@pytest.fixture
def unsupported_device():
    """Asked afresh each time, and forgotten afterwards."""
    from mgk.ops.triton import _unsupported_device

    _unsupported_device.cache_clear()
    yield _unsupported_device
    _unsupported_device.cache_clear()


def test_old_gpus(unsupported_device, monkeypatch):
    """20"""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert unsupported_device(0) == "GPUs of compute capability below 8.0, got 7.5"


@pytest.mark.parametrize(("version", "refused"), [("3.1.0", True), ("3.6.0", False), ("3.10.0+git1", False)])
def test_old_triton(unsupported_device, monkeypatch, version, refused):
    """20: by number, not by letter."""
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reason = unsupported_device(0)
    assert (reason is not None) == refused
    assert not refused or "got 3.1.0" in reason


@pytest.mark.gpu
def test_gpu_tensors_of_an_old_gpu(unsupported_device, monkeypatch):
    """20: through the public function, with the backends that serve the call; `auto` takes one of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    inputs = make_inputs(queries=5, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match=r"compute capability below 8.0, got 7.5: use .*'chunked'"):
        attend(inputs)
    mgk.mixture_attention(**inputs)
