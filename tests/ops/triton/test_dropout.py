"""P23: dropout of the normalised weight of a pair, one mask for forward and backward."""

import itertools

import oracle
import pytest
import torch
from cases import KINDS, OUTPUT_CAP, with_gradients
from triton_cases import (
    BRIEF_DTYPES,
    GRADIENT_CAP,
    HALF,
    INTERPRETED,
    ONE_DTYPE,
    PARAMETER_CAP,
    TOKENS,
    attend,
    error_of,
    exactly,
    gradient_errors,
    gradients_of,
    make_inputs,
    random_grad,
)  # fmt: skip

DROPOUT = 0.25
# As many keys as there may be value dimensions, so that an identity of values shows every weight.
KEYS = 40 if INTERPRETED else 64
# Far from zero, so that a weight of 0 is a dropped one even in half precision.
QUERIES = 20 if INTERPRETED else 37
BATCH = 1 if INTERPRETED else 2
SIZES = {"batch": BATCH, "heads": 2, "queries": QUERIES, "keys": KEYS, "dim": 16, "value_dim": KEYS, "scale": 0.5}

every_kind = pytest.mark.parametrize("kind", KINDS)
brief_dtypes = pytest.mark.parametrize("dtype", BRIEF_DTYPES, ids=str)
SETTINGS = [{}, {"kv_heads": 1}]
if INTERPRETED:
    OF_INTEREST = itertools.product(KINDS, [*SETTINGS, {"is_causal": True}, {"assignment": "hard"}])
else:
    # Causality and choices are compiled once each.
    OF_INTEREST = [(kind, settings) for kind in KINDS for settings in SETTINGS]
    OF_INTEREST += [("projected", {"is_causal": True, **settings}) for settings in SETTINGS]
    OF_INTEREST += [("shifted", {"assignment": "hard", **settings}) for settings in SETTINGS]
settings_of_interest = pytest.mark.parametrize(("kind", "settings"), list(OF_INTEREST), ids=str)


def seeded(inputs, grad=None, seed=1, dropout_p=DROPOUT):
    torch.manual_seed(seed)
    if grad is None:
        return attend(inputs, dropout_p=dropout_p)
    return gradients_of({**inputs, "dropout_p": dropout_p}, grad)


def identity_of_values(inputs):
    """The output becomes the weights."""
    value = torch.eye(KEYS, dtype=inputs["query"].dtype, device=inputs["query"].device)
    return {**inputs, "value": value.expand(BATCH, inputs["key"].shape[1], KEYS, KEYS)}


def kept_pairs(inputs, **options):
    return seeded(identity_of_values(inputs), **options) != 0


def attention_with(kept):
    """The oracle's attention under a given mask."""

    def function(inputs):
        weight = oracle.weights(inputs) * kept / (1 - DROPOUT)
        return weight @ inputs["value"].repeat_interleave(inputs["query"].shape[1] // inputs["value"].shape[1], dim=1)

    return function


@brief_dtypes
@settings_of_interest
def test_weights_are_dropped_and_scaled(kind, dtype, settings, device):
    """P23: keep-rate within 4 sigma, for every head and every sample, and 1 / (1 - p) on what is kept."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SIZES, **settings)
    weight, dropped = oracle.weights(inputs), seeded(identity_of_values(inputs)).double()
    seen = oracle.visible(inputs)
    kept = (dropped != 0) & seen
    assert error_of(dropped[kept], weight[kept] / (1 - DROPOUT)) <= OUTPUT_CAP[dtype]
    assert (dropped[~seen] == 0).all()
    for part, all_of_it in [(kept, seen), *zip(kept.flatten(0, 1), seen.flatten(0, 1), strict=True)]:
        pairs = int(all_of_it.sum())
        deviations = abs(float(part.sum()) / pairs - (1 - DROPOUT)) / (DROPOUT * (1 - DROPOUT) / pairs) ** 0.5
        assert deviations < 4


@brief_dtypes
@settings_of_interest
def test_backward_uses_the_mask_of_forward(kind, dtype, settings, device):
    """P23: gradients of everything against an oracle that is given the mask."""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **SIZES, **settings)
    kept = kept_pairs(inputs)
    grad = random_grad(inputs)
    out, got = seeded(inputs, grad)
    expected_out, expected = with_gradients(exactly(inputs), grad.double(), function=attention_with(kept))
    assert error_of(out, expected_out) <= OUTPUT_CAP[dtype]
    for name, error in gradient_errors(got, expected).items():
        cap = GRADIENT_CAP[dtype] if name in TOKENS else PARAMETER_CAP[dtype]
        assert error <= cap, name


@pytest.mark.parametrize("kind", KINDS if INTERPRETED else ["projected"])
def test_masks_together_with_dropout(kind, device):
    """P23: what is hidden stays hidden, and what is dropped does not depend on it."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **SIZES)
    everything = kept_pairs(inputs)
    inputs["key_mask"] = torch.rand(BATCH, KEYS, device=device) > 0.3
    inputs["attn_mask"] = torch.rand(QUERIES, KEYS, device=device) > 0.3
    kept = kept_pairs(inputs)
    assert torch.equal(kept, everything & oracle.visible(inputs))
    grad = random_grad(inputs)
    out, got = seeded(inputs, grad)
    expected_out, expected = with_gradients(exactly(inputs), grad.double(), function=attention_with(kept))
    assert error_of(out, expected_out) <= OUTPUT_CAP[ONE_DTYPE]
    assert max(gradient_errors(got, expected).values()) <= PARAMETER_CAP[ONE_DTYPE]


@every_kind
def test_seeds(kind, device):
    """P23: one seed, one mask; another seed, another; and a second call goes on."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **SIZES)
    first = kept_pairs(inputs, seed=1)
    second = attend(identity_of_values(inputs), dropout_p=DROPOUT) != 0
    assert torch.equal(first, kept_pairs(inputs, seed=1))
    for other in (second, kept_pairs(inputs, seed=2)):
        # Independent masks agree where both keep or both drop.
        agreement = (first == other).double().mean()
        expected = (1 - DROPOUT) ** 2 + DROPOUT**2
        assert abs(agreement - expected) < 4 * (expected * (1 - expected) / first.numel()) ** 0.5


def test_masks_of_heads_samples_rows_and_keys_differ(device):
    """P23: the counter runs over all four, so that no two slices repeat each other."""
    kept = kept_pairs(make_inputs(dtype=ONE_DTYPE, device=device, **SIZES))
    for slices in (kept.flatten(0, 1).flatten(1), kept[0, 0], kept[0, 0].T):
        assert len({tuple(row.tolist()) for row in slices}) == len(slices)
    # Neighbours are not correlated either.
    for shifted, trimmed in ((kept[..., 1:], kept[..., :-1]), (kept[:, :, 1:], kept[:, :, :-1])):
        agreement = (shifted == trimmed).double().mean()
        expected = (1 - DROPOUT) ** 2 + DROPOUT**2
        assert abs(agreement - expected) < 5 * (expected * (1 - expected) / shifted.numel()) ** 0.5


def test_rows_and_columns_keep_as_coins_would(device):
    """P23: keep counts spread like binomial ones, along rows and along columns, and four corners meet by chance."""
    kept = kept_pairs(make_inputs(dtype=ONE_DTYPE, device=device, **SIZES)).double()
    for axis in (-1, -2):
        counts = kept.sum(axis)
        spread = counts.var() / (kept.shape[axis] * DROPOUT * (1 - DROPOUT))
        assert abs(spread - 1) < 5 * (2 / counts.numel()) ** 0.5
    corners = kept[:, :, :-1, :-1] * kept[:, :, :-1, 1:] * kept[:, :, 1:, :-1] * kept[:, :, 1:, 1:]
    expected = (1 - DROPOUT) ** 4
    # Neighbouring squares share corners: count every other one.
    corners = corners[:, :, ::2, ::2]
    assert abs(corners.mean() - expected) < 4 * (expected * (1 - expected) / corners.numel()) ** 0.5


def random_numbers(device, **sizes):
    """Numbers of rows ``[heads, padded]`` and of two columns ``[heads, padded / 2]``."""
    from mgk.ops.triton.call import Call
    from mgk.ops.triton.inputs import Options, Tensors

    inputs = make_inputs(dim=16, dtype=ONE_DTYPE, device=device, **sizes)
    seed = torch.tensor([3], device=device)
    tensors = Tensors(inputs["query"], inputs["key"], inputs["value"], seed=seed)
    call = Call(tensors, Options(1.0, True, dropout_p=DROPOUT))
    rows, columns = call.values["p_row_random"], call.values["p_column_random"]
    return rows.view(-1, call.padded_queries), columns.view(-1, call.padded_keys // 2)


@pytest.mark.parametrize("parity", [0, 1], ids=["even", "odd"])
def test_rows_drop_independently_of_each_other(parity, device):
    """P23: as often together as coins would, but for one pair of rows in two hundred."""
    rows, columns = (keys[0].long() for keys in random_numbers(device, batch=1, heads=1, queries=1024, keys=4096))
    product = rows[:, None] * columns << (0 if parity else 16)
    kept = (product & 0x7FFFFFFF) >= round(DROPOUT * 2**15) << 16
    drops = (kept.double() - (1 - DROPOUT)) / (DROPOUT * (1 - DROPOUT)) ** 0.5
    assert abs(drops.mean()) < 4 / drops.numel() ** 0.5
    together = (drops @ drops.T / drops.shape[1] ** 0.5)[*torch.triu_indices(len(rows), len(rows), 1)]
    assert abs(together.mean()) < 0.05
    assert abs(together.std() - 1) < 0.1
    assert (together.abs() > 5).double().mean() < 0.005


def test_no_two_rows_or_columns_of_a_head_have_one_number(device):
    """P23: even columns are dropped by the lower halves of two numbers alone, which would soon meet by chance."""
    for heads in random_numbers(device, batch=2, heads=4, kv_heads=2, queries=900, keys=1500):
        assert (heads % 2 == 1).all()
        lower = heads & 0x7FFF
        assert all(len(head.unique()) == len(head) for head in lower)
        # Every head has an order of its own, and no two neighbours a common difference.
        assert len(lower[:, 0].unique()) == len(lower)
        assert all(len(steps.unique()) > len(steps) // 2 for steps in lower.diff())


def test_numbers_come_again_in_another_order(device):
    """P23: there are 2^14 lower halves, and long heads and packs have more tokens than that."""
    rows, _ = random_numbers(device, batch=1, heads=1, queries=2**14 + 300, keys=64)
    early, late = rows[0, :300] & 0x7FFF, rows[0, 2**14 : 2**14 + 300] & 0x7FFF
    assert (early == late).sum() < 5


@every_kind
@brief_dtypes
def test_a_rate_of_zero_is_no_dropout(kind, dtype, device):
    """P23"""
    inputs = make_inputs(kind=kind, dtype=dtype, device=device, **{**SIZES, "value_dim": 16})
    assert torch.equal(attend(inputs, dropout_p=0.0), attend(inputs))


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9, 0x7C00 / 2**15])
def test_rates(rate, device):
    """P23: the mean of the output does not depend on the rate."""
    inputs = make_inputs(dtype=ONE_DTYPE, device=device, **SIZES)
    dropped = seeded(identity_of_values(inputs), dropout_p=rate).double()
    rate = round(rate * 2**14) / 2**14  # of as many bits as the kernels compare
    pairs = dropped.numel()
    assert abs(float((dropped != 0).sum()) / pairs - (1 - rate)) < 4 * (rate * (1 - rate) / pairs) ** 0.5
    kept = dropped != 0
    assert error_of(dropped[kept], oracle.weights(inputs)[kept] / (1 - rate)) <= OUTPUT_CAP[ONE_DTYPE]


def test_dropped_rows_are_finite(device):
    """P23: a row whose every weight is dropped is zero, not 0 / 0."""
    inputs = make_inputs(batch=2, heads=2, queries=40, keys=2, dim=16, value_dim=64, dtype=ONE_DTYPE, device=device)
    out, gradients = seeded(inputs, random_grad(inputs), dropout_p=0.9)
    assert (out == 0).all(-1).any()
    assert all(gradient.isfinite().all() for gradient in (out, *gradients.values()))


@pytest.mark.gpu
@every_kind
def test_a_recorded_graph_drops_anew_at_each_replay(kind):
    """P23, G7: the seed is drawn on the device, so that every replay has a mask of its own, shared with backward."""
    inputs = make_inputs(kind=kind, dtype=HALF, device="cuda", dropout_p=DROPOUT, **SIZES)
    inputs = identity_of_values(inputs)
    inputs["value"] = inputs["value"].clone().requires_grad_()
    ones = torch.ones_like(inputs["value"][:, :, :QUERIES])

    def step():
        out = attend(inputs)
        return out, *torch.autograd.grad(out, inputs["value"], ones)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(out != 0)
        # The gradient of value j is the sum of its column of dropped weights: the mask of this very replay.
        assert error_of(gradient[..., 0], out.double().sum(2)) <= 1e-2
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
