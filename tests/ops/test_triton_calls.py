"""Which fused kernels a call of the library starts, on a machine where none can run: nothing is computed here."""

import itertools
import sys

import pytest
import torch
from cases import make_inputs
from linear_cases import make_linear
from packed_cases import attend_packed, make_packed

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import mgk
from mgk.ops.triton import call, launch, replay, tuning
from mgk.ops.triton.inputs import Options, Tensors
from mgk.ops.triton.kernels import forward

HALF = torch.bfloat16


PREFIXES = {"p": torch.Tensor, "d": TensorDescriptor, "stride": int, "num": int, "padded": int}


def check_places(kernel, arguments):
    """Every argument is what the name of its parameter says; what a call does not have is ``None``."""
    for name, argument in zip(kernel.arg_names, arguments, strict=False):
        expected = PREFIXES.get(name.split("_")[0])
        assert expected is None or argument is None or isinstance(argument, expected), f"{name}: {argument!r}"
        if name in ("scale", "natural_scale", "keep_scale", "keep_probability", "margin", "lowest_sum"):
            assert isinstance(argument, float), f"{name}: {argument!r}"


@pytest.fixture
def started(monkeypatch):
    """The names of the kernels that would have been started, each with its arguments in their places."""
    if not isinstance(forward.attention_forward, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: they would run")
    names = []

    def note(kernel, programs, arguments, *_):
        check_places(kernel, arguments)
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(tuning, "_architecture", lambda index: "sm90")
    monkeypatch.setattr(tuning, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch, "_start", note)
    monkeypatch.setattr("mgk.ops.triton.unsupported", lambda problem: None)
    monkeypatch.setattr("mgk.ops.dispatch._HAS_TRITON", True)
    monkeypatch.setattr("mgk.ops.dispatch.fused", mgk.ops.triton, raising=False)
    monkeypatch.setitem(mgk.ops.dispatch._BACKENDS, "triton", mgk.ops.triton)
    return names


def attend(**options):
    inputs = make_inputs(**{"dtype": HALF, "device": "cpu", "queries": 70, "dim": 32, **options})
    for name in ("query", "key", "value"):
        inputs[name].requires_grad_()
    return mgk.mixture_attention(**inputs, backend="triton")


FORWARD = ["logit_terms", "attention_forward", "attention_repair"]


@pytest.mark.parametrize(
    ("options", "backward"),
    [
        ({"kind": "shifted"}, ["attention_backward_key_value"] * 2 + ["attention_backward_query"] * 2),
        ({"kind": "projected"}, ["attention_backward_two_keys", "attention_backward_query"]),
        ({"kind": "projected", "components": 3}, ["attention_backward_key_value", "attention_backward_query"]),
    ],
    ids=str,
)
def test_training(options, backward, started):
    out = attend(**options)
    assert started == FORWARD
    started.clear()
    out.sum().backward()
    assert started == ["attention_delta", *backward, "parameter_gradients"]


ONE, TWO, PAIR = {"kind": "projected", "components": 1}, {"kind": "projected"}, {"kind": "shifted"}
SOFTMAX = {**ONE, "similarity": "dot", "prior": None}
LONG_MASK = torch.arange(128).expand(2, -1) < 100


@pytest.mark.parametrize(
    "options",
    [
        PAIR, {**PAIR, "assignment": "hard"}, ONE, SOFTMAX, {**SOFTMAX, "dtype": torch.float16},
        {**PAIR, "is_causal": True}, {**PAIR, "dim": 72, "value_dim": 96}, {**PAIR, "kv_heads": 1},
        {**PAIR, "is_causal": True, "queries": 60}, {**ONE, "keys": 81},
    ],
    ids=str,
)  # fmt: skip
def test_wide_heads_have_specialised_warps(options, started):
    if not tuning.HAS_WARP_SPECIALISATION:
        pytest.skip("warp specialisation is written for another version of Triton")
    attend(**{"dim": 128, "queries": 128, **options})
    assert "attention_forward_wide" in started
    assert "attention_forward" not in started


@pytest.mark.parametrize(
    "options",
    [
        TWO, {**TWO, "components": 3}, {**PAIR, "components": 3}, {**PAIR, "variance": "component"},
        {**PAIR, "dtype": torch.float16}, {**ONE, "dtype": torch.float16}, {**PAIR, "dtype": torch.float32},
        {**PAIR, "dim": 64}, {**PAIR, "value_dim": 64}, {**PAIR, "dim": 136, "value_dim": 136},
        {**PAIR, "dropout_p": 0.1}, {**PAIR, "key_mask": LONG_MASK}, {**PAIR, "query_mask": LONG_MASK},
        {**PAIR, "attn_mask": torch.ones(128, 128, dtype=torch.bool)}, {**SOFTMAX, "keys": 81},
        {**PAIR, "similarity": "dot", "prior": "position"}, {**PAIR, "is_causal": True, "keys": 100},
    ],
    ids=str,
)  # fmt: skip
def test_what_they_cannot_do_is_done_as_ever(options, started):
    attend(**{"dim": 128, "queries": 128, **options})
    assert "attention_forward" in started
    assert "attention_forward_wide" not in started


def test_a_triton_that_we_have_not_seen_specialises_no_warps(started, monkeypatch):
    monkeypatch.setattr(tuning, "HAS_WARP_SPECIALISATION", False)
    tuning._say_what_is_lost.cache_clear()
    with pytest.warns(UserWarning, match="for wide heads on Hopper"):
        attend(**PAIR, dim=128, queries=128)
    assert started == FORWARD


def test_dropout_draws_random_numbers(started):
    attend(kind="shifted", dropout_p=0.1)
    assert started == ["random_numbers", *FORWARD]


def test_dot_products_of_shifted_keys_are_softmax(started):
    """The shifts change no weight, so no term is prepared; they get a gradient all the same."""
    inputs = make_inputs(kind="shifted", similarity="dot", dtype=HALF, device="cpu", queries=128, dim=32)
    inputs["shift"].requires_grad_()
    out = mgk.mixture_attention(**inputs, backend="triton")
    assert started == ["attention_forward", "attention_repair"]
    assert (torch.autograd.grad(out.sum(), inputs["shift"])[0] == 0).all()


@pytest.mark.parametrize("variance", [None, "component", 2.0])
def test_statistics(variance, started):
    inputs = make_inputs(dtype=HALF, device="cpu", queries=70, dim=32, variance=variance)
    inputs.pop("value")
    mgk.mixture_log_density(**inputs, backend="triton")
    assert started == FORWARD
    started.clear()
    mgk.mixture_responsibilities(**inputs, backend="triton")
    assert started[-1] == "responsibilities"


@pytest.mark.parametrize("kind", ["projected", "shifted"])
def test_a_step(kind, started):
    inputs = make_inputs(kind=kind, dtype=HALF, device="cpu", queries=1, keys=300, dim=32)
    inputs["query_mask"] = torch.ones(2, 1, dtype=torch.bool)
    assert mgk.mixture_attention(**inputs, backend="triton").shape == (2, 2, 1, 32)
    assert started == ["decode_split", "decode_merge"]


def test_in_fp32_there_is_no_step(started):
    inputs = make_inputs(dtype=torch.float32, device="cpu", queries=1, keys=300, dim=32)
    mgk.mixture_attention(**inputs, backend="triton")
    assert "decode_split" not in started


@pytest.mark.parametrize("options", [{}, {"masked": True, "is_causal": True}, {"prior": "position"}], ids=str)
def test_packed_sequences_are_one_call(options, started):
    inputs = make_packed(dtype=HALF, device="cpu", **options)
    out = attend_packed(inputs, "triton")
    assert out.shape == (len(inputs["query"]), 2, 8)
    # Queries, keys, values, and priors of positions are moved once, and the outputs back.
    moved = 4 if "prior" in options else 3
    assert started == ["move_tokens"] * moved + FORWARD + ["move_tokens"]
    inputs.pop("value")
    started.clear()
    mgk.mixture_responsibilities_varlen(**inputs, backend="triton")
    assert started[-1] == "responsibilities"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"kind": "shifted", "normalization": "length"}], ids=str)
def test_linear_attention(options, started):
    inputs = make_linear(dtype=HALF, device="cpu", queries=70, masked=True, **options)
    leaves = {name: t.requires_grad_() for name, t in inputs.items() if torch.is_tensor(t) and t.is_floating_point()}
    out = mgk.linear_mixture_attention(**inputs, backend="triton")
    assert started == ["linear_states", "linear_add_states", "linear_forward"]
    started.clear()
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    assert started == [
        "linear_backward_query", "linear_reverse_states", "linear_add_states", "linear_backward_key_value",
        "linear_add_partials",
    ]  # fmt: skip
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves.values()]


def test_shapes_are_known_without_computing():
    """What ``torch.compile`` and a FLOP counter see."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from mgk.ops.triton import linear_operator

    with FakeTensorMode():
        query, key, value = torch.empty(2, 4, 70, 8), torch.empty(2, 2, 2, 70, 8), torch.empty(2, 2, 70, 16)
        prior = torch.empty(2, 2, 1)
        arguments = (query, key, value, None, prior, None, None, True, "elu")
        with FlopCounterMode(display=False) as counter:
            found = linear_operator.fused_linear_attention(*arguments)
        assert found[0].shape == (2, 4, 70, 16)
        assert counter.get_total_flops() == 2 * 2 * (4 * 70 + 2 * 70) * 8 * 17
        with FlopCounterMode(display=False) as counter:
            gradients = linear_operator.fused_linear_attention_backward(found[0], *found[1:], *arguments)
        assert [gradient.shape for gradient in gradients[:3]] == [query.shape, key.shape, value.shape]
        assert (gradients[3].numel(), gradients[4].shape) == (0, prior.shape)
        assert counter.get_total_flops() == 4 * 2 * (4 * 70 + 2 * 70) * 8 * 17


@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_terms_begin_where_the_copy_engine_can_read_them(assignment):
    """At multiples of 16 bytes, however many heads there are."""
    inputs = make_inputs(
        kind="shifted", assignment=assignment, dtype=HALF, device="cpu", batch=3, heads=7, queries=70, dim=128
    )
    key = inputs["key"][:, :, None]
    tensors = Tensors(inputs["query"], key, inputs["value"], inputs["shift"])
    lengths = call.TermsLayout(tensors, Options(0.1, True, hard=assignment == "hard")).lengths()._asdict()
    offsets = dict(zip(lengths, itertools.accumulate(lengths.values(), initial=0), strict=False))
    copied = [name for name in ("column", "column_second", "unscaled") if lengths[name]]
    assert len(copied) == (3 if assignment == "hard" else 2)
    assert all(offsets[name] * 4 % 16 == 0 for name in copied)


MOST_HOPS = 18


@pytest.mark.parametrize("preset", ["smgk", "mgk"])
def test_few_hops_from_the_layer_to_the_launch(preset, started, monkeypatch):
    """Functions that wait for each other between a layer and the start of a kernel, in eager mode with gradients, when
    calls are written down. Those of torch count as well."""
    hops = []

    def count(kernel, *_):
        frame, path = sys._getframe(), []
        while frame is not None and path[-1:] != ["MixtureAttention.forward"]:
            path.append(frame.f_code.co_qualname)
            frame = frame.f_back
        assert frame is not None, path
        hops.append(len(path))

    monkeypatch.setattr(launch, "_start", count)
    monkeypatch.setattr(replay, "is_possible", lambda device: True)
    monkeypatch.setattr(replay, "_recordings", {})
    layer = mgk.build_attention(preset, embed_dim=64, num_heads=2, head_dim=32, backend="triton").to(HALF)
    layer(torch.zeros(2, 70, 64, dtype=HALF))
    assert len(hops) == len(FORWARD)
    assert max(hops) <= MOST_HOPS, hops


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_programs_without_a_gpu(device):
    """Shapes are inferred where there is no multiprocessor to count."""
    expected = 2 if tuning.is_interpreted() else 2 * tuning.MULTIPROCESSORS_ELSEWHERE
    assert tuning.programs(torch.device(device)) == expected


def test_programs_are_twice_the_multiprocessors(monkeypatch):
    if tuning.is_interpreted():
        pytest.skip("TRITON_INTERPRET=1: there are none")
    monkeypatch.setattr(tuning, "multiprocessors", lambda index: 100 + index)
    assert tuning.programs(torch.device("cuda", 8)) == 216
    assert tuning.programs(torch.device("cuda", 8), waves=4) == 864
