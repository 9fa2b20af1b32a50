"""Wide heads on Hopper, where warps of the forward kernel are specialised: against fp64, and against the usual kernel.

Gluon has no interpreter: what these tests see, only a GPU can show. `tests/ops/test_triton_calls.py` has which calls
are served so, `tests/ops/test_triton_compilation.py` compiles them.
"""

import pytest
import torch
from cases import OUTPUT_CAP
from triton_cases import (
    FLOAT16,
    HALF,
    INTERPRETED,
    PARAMETER_CAP,
    attend,
    check,
    error_of,
    exactly,
    expected_with_gradients,
    gradient_errors,
    gradients_of,
    make_inputs,
    random_grad,
)  # fmt: skip

import mgk

if not INTERPRETED:
    from mgk.ops.triton import launch, replay, tuning

pytestmark = pytest.mark.gpu

PAIR = {"kind": "shifted", "dtype": HALF}
ONE = {"components": 1, "prior": None, "dtype": HALF}
KINDS = {
    "pair": PAIR,
    "causal pair": {**PAIR, "is_causal": True},
    "hard causal pair": {**PAIR, "is_causal": True, "assignment": "hard"},
    "causal gaussian": {**ONE, "is_causal": True},
    "causal softmax": {**ONE, "similarity": "dot", "is_causal": True},
    "softmax in fp16": {**ONE, "similarity": "dot", "dtype": FLOAT16},
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))
# (Nq, Nk), with a program to a tile: on both sides of a warp group, a tile and a block of keys.
LENGTHS = ((1, 1), (1, 65), (63, 129), (64, 64), (65, 127), (127, 128), (128, 1023), (129, 257), (300, 311), (257, 640))
# More tiles than a GPU has multiprocessors, with rows of very different lengths under causality.
MANY = {"batch": 3, "heads": 8, "kv_heads": 4, "queries": 1000, "keys": 1024, "dim": 128}


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0) or not tuning.HAS_WARP_SPECIALISATION:
        pytest.skip("warps are specialised on Hopper GPUs, with versions of Triton that the kernel knows")


@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that were started; a call that is replayed starts none."""
    replay._recordings.clear()
    names, start = [], launch._start

    def note(kernel, *rest):
        names.append(kernel.__name__)
        start(kernel, *rest)

    monkeypatch.setattr(launch, "_start", note)
    return names


def without_roles(function):
    """What the usual kernel makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "HAS_WARP_SPECIALISATION", False)
        patch.setattr(tuning, "_say_what_is_lost", lambda: None)
        replay._recordings.clear()
        result = function()
        replay._recordings.clear()
    return result


def lengths_of(kind, queries, keys):
    """Dot products are served so in whole blocks of keys."""
    return {"queries": queries, "keys": -(-keys // 128) * 128 if "softmax" in kind else keys}


@every_kind
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [128, 72])
def test_output_and_gradients(kind, lengths, dim, device, started):
    check(
        make_inputs(
            **KINDS[kind],
            **lengths_of(kind, *lengths),
            dim=dim,
            value_dim=200 - dim,
            heads=4,
            kv_heads=2,
            device=device,
        )
    )
    assert "attention_forward_wide" in started


@every_kind
@pytest.mark.parametrize("heads_in_section", [1, 5, 64])
def test_many_tiles_for_a_program(kind, heads_in_section, device, started, monkeypatch):
    """As exact as the usual kernel: sections of one head, a short last section, a single one."""
    monkeypatch.setattr(tuning, "heads_in_section", lambda keys, width: heads_in_section)
    compare_with_usual(make_inputs(**KINDS[kind], **MANY, device=device))
    assert "attention_forward_wide" in started


@every_kind
def test_many_tiles_of_one_block(kind, device, started):
    """Four for a program: the first block of a tile is the last one as well."""
    compare_with_usual(make_inputs(**KINDS[kind], batch=64, heads=8, queries=128, dim=128, device=device))
    assert "attention_forward_wide" in started


@every_kind
def test_an_odd_number_of_tiles(kind, device, started):
    """More than there are programs: under causality they take two at a time, and one takes the last alone."""
    compare_with_usual(make_inputs(**KINDS[kind], batch=3, heads=7, queries=1152, dim=128, device=device))
    assert "attention_forward_wide" in started


@every_kind
def test_a_recorded_call_waits_for_its_terms(kind, device, monkeypatch):
    """In a CUDA graph as well the kernel is launched before they are made."""
    monkeypatch.undo()  # to poison memory would come between the two
    inputs = make_inputs(**KINDS[kind], batch=2, heads=4, queries=640, dim=128, device=device)
    attend(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = attend(inputs)
    for _ in range(20):
        with torch.no_grad():
            for name in ("query", "key", "value"):
                inputs[name].copy_(torch.randn_like(inputs[name]))
        graph.replay()
        assert torch.equal(out, attend(inputs))


def compare_with_usual(inputs):
    out = attend(inputs)
    usual = without_roles(lambda: attend(inputs))
    expected = mgk.mixture_attention(**exactly(inputs), backend="reference")
    error = error_of(out, expected)
    assert error <= OUTPUT_CAP[out.dtype]
    assert error <= 1.2 * error_of(usual, expected)


@every_kind
def test_the_same_bits_two_hundred_times(kind, device, monkeypatch):
    """G9: a copy that comes too early or too late would show."""
    monkeypatch.undo()  # to poison memory would come between the kernels
    inputs = make_inputs(**KINDS[kind], **MANY, device=device)
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    differing = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(200):
        differing |= (attend(inputs) != out).any()
    again, again_gradients = gradients_of(inputs, grad)
    differing |= (again != out).any()
    for name, gradient in gradients.items():
        differing |= (again_gradients[name] != gradient).any()
    assert not differing


@pytest.mark.parametrize("kind", ["pair", "causal pair", "causal gaussian", "causal softmax"])
@pytest.mark.parametrize("scale", [4.0, 12.0])
def test_rows_that_leave_the_format_are_repaired(kind, scale, device):
    """Ratios beyond 2^40, sums beyond 2^60: as exact as the usual kernel, whose rows are repaired as well."""
    inputs = make_inputs(**KINDS[kind], queries=300, keys=384, dim=128, scale=scale, device=device)
    expected = mgk.mixture_attention(**exactly(inputs), backend="reference")
    error = error_of(attend(inputs), expected)
    assert error <= 1.2 * error_of(without_roles(lambda: attend(inputs)), expected) + 1e-3


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_tie_shares_the_gradient(is_causal, device, started):
    """G3, though rows are made by this kernel."""
    inputs = make_inputs(**PAIR, assignment="hard", is_causal=is_causal, queries=300, dim=128, device=device)
    inputs["shift"].select(1, 0).copy_(inputs["shift"].select(1, 1))
    grad = random_grad(inputs)
    _, got = gradients_of(inputs, grad)
    assert "attention_forward_wide" in started
    _, expected = expected_with_gradients(inputs, grad)
    assert max(gradient_errors(got, expected).values()) <= PARAMETER_CAP[HALF]


def test_one_long_sequence(device, started):
    """Few heads, of which each is a section of its own; many tiles for a program."""
    inputs = make_inputs(**KINDS["causal pair"], batch=1, heads=2, queries=65536, dim=128, device=device)
    out = attend(inputs)
    assert "attention_forward_wide" in started
    usual = without_roles(lambda: attend(inputs))
    # Weights of distances are rounded alike by both.
    assert error_of(out, usual.double()) <= 1e-3
