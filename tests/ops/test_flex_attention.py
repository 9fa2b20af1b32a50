"""torch's FlexAttention, told of the mixture by a ``score_mod``, computes the same: an oracle that is not ours."""

import pytest
import torch
from cases import DEVICE, OUTPUT_CAP, attend, make_inputs, relative_error
from torch.nn.attention.flex_attention import flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def flex(inputs, bias):
    """Attention to all keys in a row ``[B, H, M * N, D]``, with ``bias(score, b, h, i, j, r)`` added to the scores."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    components = key.shape[2] if key.ndim == 5 else 1
    length = key.shape[-2]

    def score_mod(score, b, h, i, position):
        score = bias(score, b, h, i, position % length, position // length)
        return torch.where(position % length <= i, score, -float("inf")) if inputs.get("is_causal") else score

    keys = key.flatten(2, 3) if key.ndim == 5 else key
    values = value.repeat(1, 1, components, 1)
    return flex_attention(query, keys, values, score_mod, scale=query.shape[-1] ** -0.5)


def squared_norm_over_variance(x):
    return x.square().sum(-1) / (2 * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("components", [1, 2, 3])
def test_projected_keys(components, causal):
    """``gaussian`` and ``mgk``: M keys of a position are M positions, each with a bias."""
    inputs = make_inputs(components=components, dtype=torch.float32, device=DEVICE, is_causal=causal)
    log_prior, norm = inputs["log_prior"], squared_norm_over_variance(inputs["key"])
    expected = flex(inputs, lambda score, b, h, i, j, r: score + log_prior[h, r] - norm[b, h, r, j])
    assert relative_error(attend(inputs), expected) < OUTPUT_CAP[torch.float32]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_shifted_keys(assignment, causal):
    """``smgk`` and ``smgk-hard``: one score a pair, and what the components add to it."""
    inputs = make_inputs(
        kind="shifted", dtype=torch.float32, device=DEVICE, is_causal=causal, assignment=assignment
    )  # fmt: skip
    shift = inputs["shift"]
    row = torch.einsum("bhid,hrd->bhir", inputs["query"], shift) / inputs["query"].shape[-1] ** 0.5
    column = -squared_norm_over_variance(inputs["key"][:, :, :, None] + shift[:, None])
    if assignment == "soft":
        column = column + inputs["log_prior"][:, None]

    def bias(score, b, h, i, j, r):
        parts = [row[b, h, i, m] + column[b, h, j, m] for m in range(shift.shape[1])]
        return score + (torch.logaddexp(*parts) if assignment == "soft" else torch.maximum(*parts))

    assert relative_error(attend(inputs), flex(inputs, bias)) < OUTPUT_CAP[torch.float32]
