"""Packed sequences in the fused kernels: P14, P17, P18 of packed tokens, whose blocks each belong to one sequence."""

import itertools

import pytest
import torch
from cases import KINDS, OUTPUT_CAP
from packed_cases import KEY_LENGTHS, attend_packed, attend_padded, boundaries, make_packed, with_gradients
from triton_cases import (
    BACKEND,
    BRIEF_DTYPES,
    FLOAT32,
    GRADIENT_CAP,
    INTERPRETED,
    ONE_DTYPE,
    TOKENS,
    error_of,
    exactly,
    gradient_caps,
    gradient_errors,
)  # fmt: skip

import mgk
from mgk.ops.triton import call, movement, placement

SETTINGS = [
    {},
    {"is_causal": True},
    {"assignment": "hard", "is_causal": True},
    {"similarity": "dot"},
    {"variance": "component"},
    {"prior": "position", "is_causal": True},
    {"masked": True, "is_causal": True},
    {"key_lengths": KEY_LENGTHS},
    {"key_lengths": KEY_LENGTHS, "is_causal": True},
    {"heads": 4, "kv_heads": 2, "components": 3},
    {"components": 1, "prior": None},
    {"dim": 13, "value_dim": 5},
]
CASES = list(itertools.product(KINDS, SETTINGS))
COMPILED = {"projected": {}, "shifted": {"is_causal": True}}
"""How packed sequences of either kind are compiled; and once with everything else that has a kernel of its own."""
if not INTERPRETED:
    free = [
        {}, {"prior": "position"}, {"prior": None}, {"masked": True}, {"key_lengths": KEY_LENGTHS},
        {"heads": 4, "kv_heads": 2}, {"dim": 13, "value_dim": 5}, {"variance": 2.0},
        {"masked": True, "key_lengths": KEY_LENGTHS},
    ]  # fmt: skip
    CASES = [(kind, {**COMPILED[kind], **settings}) for kind in KINDS for settings in free]
    rest = {"components": 3, "variance": "component", "assignment": "hard", "similarity": "dot", "is_causal": True}
    CASES += [("projected", {**rest, **settings}) for settings in free[:2] + free[3:7]]

every_kind = pytest.mark.parametrize("kind", KINDS)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)


@brief_dtypes
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_packed_is_padded(kind, dtype, options, device):
    """P14: against fp64, sequence by sequence."""
    inputs = make_packed(kind=kind, dtype=dtype, device=device, **options)
    grad = torch.randn(len(inputs["query"]), inputs["query"].shape[1], inputs["value"].shape[-1], device=device)
    grad = grad.to(dtype)
    out, gradients = with_gradients(attend_packed, inputs, BACKEND, grad)
    expected, expected_gradients = with_gradients(attend_padded, exactly(inputs), "reference", grad.double())
    assert error_of(out, expected) <= OUTPUT_CAP[dtype]
    caps = gradient_caps(inputs)
    for name, error in gradient_errors(gradients, expected_gradients).items():
        assert error <= caps[name], name


@every_kind
def test_packed_is_fused_one_by_one(kind, device):
    """P14: nothing but rounding differs between one call and one for each sequence."""
    options = {"is_causal": True} if INTERPRETED else COMPILED[kind]
    inputs = make_packed(kind=kind, dtype=ONE_DTYPE, device=device, **options)
    out, expected = attend_packed(inputs, BACKEND), attend_padded(inputs, BACKEND)
    assert error_of(out, expected.double()) <= (1e-6 if ONE_DTYPE == FLOAT32 else OUTPUT_CAP[ONE_DTYPE])


@every_kind
@pytest.mark.parametrize("poison", [30.0, float("nan")])
def test_a_sequence_does_not_know_the_others(kind, poison, device):
    """P18: NaN, infinity and far tokens of one sequence stay there, forward and backward."""
    inputs = make_packed(kind=kind, dtype=ONE_DTYPE, device=device, **({} if INTERPRETED else COMPILED[kind]))
    grad = torch.randn(len(inputs["query"]), 2, 8, device=device).to(ONE_DTYPE)
    out, gradients = with_gradients(attend_packed, inputs, BACKEND, grad)
    poisoned = {name: value.clone() if name in TOKENS else value for name, value in inputs.items()}
    for name in TOKENS:
        poisoned[name][45:78] = poison
    got, got_gradients = with_gradients(attend_packed, poisoned, BACKEND, grad)
    others = torch.ones(len(out), dtype=torch.bool, device=device)
    others[45:78] = False
    assert torch.equal(got[others], out[others])
    # Where two shifted keys lie too far apart for some token of a head, backward takes its longer way for all of them.
    tolerance = 0.0 if kind == "projected" else GRADIENT_CAP[ONE_DTYPE]
    for name in TOKENS:
        assert error_of(got_gradients[name][others], gradients[name][others].double()) <= tolerance, name


def moved_by_index(tokens, bounds, places_of):
    """What :func:`to_places` does, token by token."""
    out = torch.zeros(places_of[-1], *tokens.shape[1:], dtype=tokens.dtype, device=tokens.device)
    for first, end, place in zip(bounds, bounds[1:], places_of, strict=False):
        out[place : place + end - first] = tokens[first:end]
    return out


@pytest.mark.parametrize("lengths", [(5, 0, 40, 33, 1, 17), (32,), (0, 0), (1, 31, 33, 64)], ids=str)
@pytest.mark.parametrize("shape", [(2, 16), (3, 1, 5), (1,), (2, 300)], ids=str)
def test_tokens_are_moved_and_brought_back(shape, lengths, device):
    layout = placement._lay_out(boundaries(lengths, device), sum(lengths))
    bounds = [0, *itertools.accumulate(lengths)]
    rooms = [-(-length // call.PADDING) * call.PADDING for length in lengths]
    places_of = [0, *itertools.accumulate(rooms)]
    for dtype in (torch.float32, torch.float16, torch.int32):
        tokens = torch.randint(-9, 9, (sum(lengths), *shape), device=device).to(dtype)
        placed = movement.to_places(tokens, layout.blocks)
        assert torch.equal(placed[: places_of[-1]], moved_by_index(tokens, bounds, places_of))
        assert not placed[places_of[-1] :].any()
        assert torch.equal(movement.to_tokens(placed, layout.blocks, sum(lengths)), tokens)
    # Rows that lie apart, and rows whose numbers do.
    tokens = torch.randn(sum(lengths), *shape, 2, device=device)[..., 0]
    assert torch.equal(movement.to_places(tokens, layout.blocks), movement.to_places(tokens.clone(), layout.blocks))
    apart = torch.randn(2 * sum(lengths), *shape, device=device)[::2]
    assert torch.equal(movement.to_places(apart, layout.blocks), movement.to_places(apart.clone(), layout.blocks))


def test_a_move_is_the_gradient_of_the_other(device):
    """To any order, watched and unwatched; and places without a token are 0 whatever is next to them."""
    layout = placement._lay_out(boundaries((5, 0, 40), device), 45)
    tokens = torch.randn(45, 2, 3, device=device, requires_grad=True)
    weights = torch.randn(len(layout.blocks) * call.PADDING, 2, 3, device=device, requires_grad=True)
    move = torch.ops.mgk.move_tokens
    for place, take in (
        (movement.to_places, movement.to_tokens),
        (
            lambda tokens, blocks: move(tokens, blocks, len(blocks) * call.PADDING, True),
            lambda places, blocks, length: move(places, blocks, length, False),
        ),
    ):
        (grad,) = torch.autograd.grad((place(tokens, layout.blocks) * weights).sum(), tokens, create_graph=True)
        assert torch.equal(grad, movement.to_tokens(weights, layout.blocks, 45))
        (again,) = torch.autograd.grad(grad.square().sum(), weights)
        assert torch.equal(again, 2 * movement.to_places(grad, layout.blocks))
        taken = take(weights, layout.blocks, 45)
        (grad,) = torch.autograd.grad((taken * tokens.detach()).sum(), weights)
        assert torch.equal(grad, movement.to_places(tokens.detach(), layout.blocks))
    assert not movement.to_places(torch.full_like(tokens, torch.nan), layout.blocks)[5:32].any()
    for arguments in ((tokens, layout.blocks, len(weights), True), (weights, layout.blocks, 45, False)):
        torch.library.opcheck(move, arguments)


@pytest.mark.parametrize("lengths", [(0,), (3, 0), (0, 3), (1, 1, 1, 1), (16, 16), (15, 17, 0, 32)], ids=str)
def test_lengths_around_a_block(lengths, device):
    inputs = make_packed(lengths=lengths, dtype=ONE_DTYPE, device=device)
    out = attend_packed(inputs, BACKEND)
    expected = attend_padded(exactly(inputs), "reference")
    assert out.shape == expected.shape
    if len(out):
        assert error_of(out, expected) <= 2 * OUTPUT_CAP[ONE_DTYPE]


def test_queries_without_keys_are_zero(device):
    """P17: output and gradient."""
    inputs = make_packed(lengths=(4, 3), key_lengths=(0, 5), dtype=ONE_DTYPE, device=device)
    out, gradients = with_gradients(attend_packed, inputs, BACKEND, torch.ones(7, 2, 8, device=device))
    assert (out[:4] == 0).all()
    assert (gradients["query"][:4] == 0).all()
    assert (out[4:] != 0).all()


def test_dropout_keeps_what_it_keeps(device):
    """P23: the same pairs forward and backward, and no pair of two sequences."""
    inputs = make_packed(lengths=(20, 30), dtype=ONE_DTYPE, device=device, dropout_p=0.4, prior=None)
    inputs["value"] = torch.eye(50, 8, device=device, dtype=ONE_DTYPE)[:, None]
    torch.manual_seed(3)
    out = attend_packed(inputs, BACKEND)
    torch.manual_seed(3)
    assert torch.equal(attend_packed(inputs, BACKEND), out)
    assert (out[20:] == 0).all()
    assert 0.3 < float((out[:20] == 0).double().mean()) < 0.5


@every_kind
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "masked": True}, {"key_lengths": KEY_LENGTHS}], ids=str)
def test_responsibilities(kind, options, device):
    """P14 of the E-step."""
    inputs = make_packed(kind=kind, dtype=ONE_DTYPE, device=device, **options)
    inputs.pop("value")
    got = mgk.mixture_responsibilities_varlen(**inputs, backend=BACKEND)
    expected = mgk.mixture_responsibilities_varlen(**exactly(inputs), backend="reference")
    assert error_of(got, expected) <= (1e-5 if ONE_DTYPE == FLOAT32 else 1e-3)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
@every_kind
def test_compiled_is_eager(kind, device):
    """One graph for any lengths: nothing asks the device how long a sequence is."""
    inputs = make_packed(kind=kind, dtype=ONE_DTYPE, device=device, **COMPILED[kind])
    compiled = torch.compile(lambda inputs: attend_packed(inputs, BACKEND), fullgraph=True, dynamic=True)
    for lengths in ((5, 0, 40, 33, 1, 17), (1, 30, 20, 20, 20, 5)):
        other = make_packed(kind=kind, dtype=ONE_DTYPE, device=device, lengths=lengths)
        case = {**inputs, "cu_seqlens_q": other["cu_seqlens_q"], "cu_seqlens_k": other["cu_seqlens_k"]}
        assert torch.equal(compiled(case), attend_packed(case, BACKEND))


FAR = {
    "mixture of dot products": ({"similarity": "dot"}, (64.0, 64.0), 0.0, 1e-4),
    "distances": ({}, (64.0, -128.0), 0.0, 5e-6),
    "values": ({"is_causal": True}, (0.0, 0.0), 1000.0, 5e-6),
}


@pytest.mark.skipif(not INTERPRETED, reason="asks nothing of the kernels that the other tests do not compile")
@pytest.mark.parametrize("name", FAR)
def test_sequences_far_from_the_origin_in_fp32(name, device):
    """Every sequence is measured from its own origin, like a padded one; errors were 1e-3 to 0.2 without."""
    options, offsets, value_offset, cap = FAR[name]
    inputs = make_packed(dtype=FLOAT32, device=device, lengths=(17, 33), prior=None, **options)
    far = torch.tensor(offsets).repeat_interleave(torch.tensor([17, 33]))
    inputs["query"] += far[:, None, None]
    inputs["key"] += far[:, None, None, None]
    if value_offset:
        inputs["value"] = 0.05 * inputs["value"] + value_offset
    grad = torch.randn(50, 2, 8, device=device)
    out, gradients = with_gradients(attend_packed, inputs, BACKEND, grad)
    expected, expected_gradients = with_gradients(attend_padded, exactly(inputs), "reference", grad.double())
    # In units of how far apart the values are; a number of this size has no more digits.
    spread = (expected - value_offset).abs().max()
    assert (out.double() - expected).abs().max() <= cap * spread + value_offset * 2**-23
    for leaf, error in gradient_errors(gradients, expected_gradients).items():
        assert error <= 2 * cap, leaf
