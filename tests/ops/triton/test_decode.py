"""A step of generation: few queries, keys split between programs and merged (P16), empty slots of a cache."""

import math

import oracle
import pytest
import torch
from cases import KINDS, OUTPUT_CAP
from triton_cases import FLOAT16, FLOAT32, HALF, INTERPRETED, attend, error_of, make_inputs

import mgk
from mgk.ops.triton import generation, launch
from mgk.ops.triton.inputs import Options, Tensors

KEYS = 70 if INTERPRETED else 1000
SIZES = {"batch": 2, "heads": 2, "queries": 1, "keys": KEYS, "dim": 16, "value_dim": 12, "dtype": HALF}
OPTIONS = [
    {},
    {"components": 1, "prior": None},
    {"components": 3},
    {"assignment": "hard", "prior": None},
    {"similarity": "dot"},
    {"variance": "component"},
    {"variance": "component", "assignment": "hard", "prior": None, "similarity": "dot"},
    {"prior": "position"},
    {"queries": 5, "is_causal": True},
    {"queries": 3},
    {"heads": 4, "kv_heads": 1, "queries": 2, "is_causal": True},
    {"dim": 13, "value_dim": 5},
    {"keys": 1},
    {"offset": 3.0},
]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that are started."""
    names, start = [], launch._start
    monkeypatch.setattr(
        launch, "_start", lambda kernel, *args: (names.append(kernel.fn.__name__), start(kernel, *args))[1]
    )
    return names


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step(kind, options, device, started):
    """P16: split and merged is what it is in one pass, in fp64."""
    inputs = make_inputs(kind=kind, device=device, **{**SIZES, **options})
    out = attend(inputs)
    assert set(started) == {"decode_split", "decode_merge"}
    assert out.dtype == HALF
    assert error_of(out, oracle.attention(inputs)) <= OUTPUT_CAP[HALF]


@every_kind
def test_it_is_the_full_pass_row_by_row(kind, device):
    """P16: what a cache gives token by token is what a prompt gives at once."""
    inputs = make_inputs(kind=kind, device=device, **{**SIZES, "queries": 20, "keys": 20, "is_causal": True})
    whole = attend(inputs)
    for i in (0, 7, 19):
        step = {**inputs, "query": inputs["query"][:, :, i : i + 1]}
        step |= {name: inputs[name][..., : i + 1, :] for name in ("key", "value")}
        assert error_of(attend(step), whole[:, :, i : i + 1].double()) <= 2 * OUTPUT_CAP[HALF]


@every_kind
@pytest.mark.parametrize("side", ["unwritten", "left", "holes", "all"])
def test_slots_that_hold_nothing_are_not_read(kind, side, device):
    """P17, P18: NaN in them, and no copy of the cache to hide it."""
    inputs = make_inputs(kind=kind, device=device, **SIZES)
    valid = torch.ones(2, KEYS, dtype=torch.bool, device=device)
    if side == "unwritten":
        valid[0, 3:] = valid[1, KEYS - 20 :] = False
    elif side == "left":
        valid[0, : KEYS - 20] = False
    elif side == "holes":
        valid[:, 1::3] = False
    else:
        valid[1] = False
    inputs["key_mask"] = valid
    expected = oracle.attention(inputs)
    for name in ("key", "value"):
        inputs[name] = inputs[name].clone()
        for row in range(2):
            inputs[name][row][..., ~valid[row], :] = math.nan
    out = attend(inputs)
    assert error_of(out, expected) <= OUTPUT_CAP[HALF]
    if side == "all":
        assert (out[1] == 0).all()


def test_a_cache_laid_out_by_token(device):
    """Keys of M components lie side by side in a cache, ``[B, Hkv, N, M * D]``."""
    inputs = make_inputs(kind="projected", device=device, **SIZES)
    packed = inputs["key"].transpose(2, 3).flatten(3).contiguous()
    unpacked = packed.unflatten(-1, (2, 16)).transpose(2, 3)
    assert unpacked.stride() != inputs["key"].stride()
    assert torch.equal(attend({**inputs, "key": unpacked}), attend(inputs))


@every_kind
def test_how_keys_are_split_changes_rounding_alone(kind, device, monkeypatch):
    """P16"""
    inputs = make_inputs(kind=kind, device=device, **SIZES)
    expected = oracle.attention(inputs)
    for most in (1, 2, 5):
        monkeypatch.setattr(generation, "MOST_SPLITS", most)
        monkeypatch.setattr(generation, "LEAST_BLOCKS", 1)
        assert error_of(attend(inputs), expected) <= OUTPUT_CAP[HALF]


@every_kind
@pytest.mark.parametrize("scale", [10.0, 60.0])
def test_wide_queries_and_keys(kind, scale, device):
    """P6: a running maximum, and one exponential for each component."""
    inputs = make_inputs(kind=kind, device=device, scale=scale, **SIZES)
    out = attend(inputs)
    assert out.isfinite().all()
    assert error_of(out, oracle.attention(inputs)) <= max(OUTPUT_CAP[HALF], 1e-5 * scale**2)


def test_dead_components(device):
    """P5"""
    inputs = make_inputs(kind="shifted", device=device, **SIZES)
    inputs["log_prior"] = torch.tensor([[0.0, -math.inf]] * 2, device=device)
    assert error_of(attend(inputs), oracle.attention(inputs)) <= OUTPUT_CAP[HALF]


def test_query_mask(device):
    inputs = make_inputs(kind="shifted", device=device, **{**SIZES, "queries": 2})
    inputs["query_mask"] = torch.tensor([[True, False], [True, True]], device=device)
    out = attend(inputs)
    assert (out[0, :, 1] == 0).all()
    assert error_of(out, oracle.attention(inputs)) <= OUTPUT_CAP[HALF]


@pytest.mark.parametrize(
    "change",
    [
        {"queries": 16},
        {"dtype": FLOAT32},
        {"dropout_p": 0.1, "value_dim": 64},
        {"heads": 66, "kv_heads": 1, "batch": 1},
    ],
    ids=str,
)
def test_other_calls_go_the_long_way(change, device, started):
    attend(make_inputs(kind="shifted", device=device, **{**SIZES, **change}))
    assert "decode_split" not in started


def test_gradients_go_the_long_way(device, started):
    inputs = make_inputs(kind="shifted", device=device, **SIZES)
    inputs["query"].requires_grad_()
    attend(inputs).sum().backward()
    assert "decode_split" not in started
    with torch.no_grad():
        attend(inputs)
    assert "decode_split" in started


def test_opcheck(device):
    inputs = make_inputs(kind="shifted", device=device, **{**SIZES, "keys": 20, "dtype": FLOAT16})
    tensors = Tensors(
        inputs["query"], inputs["key"][:, :, None], inputs["value"], inputs["shift"], inputs["log_prior"][..., None]
    )
    torch.library.opcheck(torch.ops.mgk.fused_decode, (*tensors, *Options(scale=0.25, gaussian=True)))


def test_flops_are_counted(device):
    from torch.utils.flop_counter import FlopCounterMode

    inputs = make_inputs(kind="projected", device=device, **SIZES)
    with FlopCounterMode(display=False) as counter:
        attend(inputs)
    assert counter.get_total_flops() == 2 * 2 * 2 * KEYS * (2 * 16 + 12)


@pytest.mark.gpu
@every_kind
def test_auto_takes_it(kind, started):
    inputs = make_inputs(kind=kind, device="cuda", **SIZES)
    mgk.mixture_attention(**inputs)
    assert set(started) == {"decode_split", "decode_merge"}
