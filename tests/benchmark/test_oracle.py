"""What the benchmark judges by, and the paper's formula that it times."""

import oracle as direct
import pytest
import torch

from mgk.benchmark import eager, oracle
from mgk.benchmark.inputs import draw
from mgk.nn.presets import SOFTMAX_PRESETS

every_preset = pytest.mark.parametrize("preset", SOFTMAX_PRESETS)
both_masks = pytest.mark.parametrize("is_causal", [False, True])


def inputs_of(preset, is_causal, dtype=torch.float32):
    return draw(
        preset, batch=2, heads=3, tokens=19, head_dim=8, is_causal=is_causal, dtype=dtype, device=torch.device("cpu")
    )


@every_preset
@both_masks
def test_the_oracle_agrees_with_direct_differences(preset, is_causal):
    inputs = inputs_of(preset, is_causal)
    expected = direct.attention(dict(vars(inputs)))
    assert (oracle.attention(inputs) - expected).abs().max() < 1e-13
    rows = torch.tensor([4, 18, 0])
    assert (oracle.attention_rows(inputs, 1, 2, rows) - expected[1, 2, rows]).abs().max() < 1e-13


@every_preset
@both_masks
def test_the_formula_of_the_paper_is_the_attention(preset, is_causal):
    inputs = inputs_of(preset, is_causal)
    exact = inputs.in_float64()
    assert set(exact.leaves()) == set(inputs.leaves())
    got, expected = eager.attention(inputs), oracle.attention(exact)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-5
    grad = torch.randn_like(got)
    found = torch.autograd.grad(got, list(inputs.leaves().values()), grad)
    wanted = torch.autograd.grad(expected, list(exact.leaves().values()), grad.double())
    assert all((x - y).abs().max() < 1e-4 for x, y in zip(found, wanted, strict=True))


def test_parameters_are_as_the_layer_gives_them():
    inputs = inputs_of("smgk", False, torch.bfloat16)
    assert (inputs.query.dtype, inputs.shift.dtype, inputs.log_prior.dtype) == (torch.bfloat16, *2 * [torch.float32])
    assert (inputs.shift.shape, inputs.log_prior.shape) == ((3, 2, 8), (3, 2))
    assert set(inputs.leaves()) == {"query", "key", "value", "shift", "log_prior"}
    assert set(inputs_of("smgk-em", False).leaves()) == {"query", "key", "value", "shift"}
    assert inputs_of("mgk", False).key.shape == (2, 3, 2, 19, 8)
    assert [inputs_of(preset, False).num_components for preset in ("softmax", "smgk", "mgk")] == [1, 2, 2]
