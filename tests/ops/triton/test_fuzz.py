"""No NaN and no infinity from finite inputs, however far, masked or lopsided (goal 5 of the catalogue, P17, P18)."""

import pytest
import torch
from cases import DEVICE, OUTPUT_CAP
from cases import attend as attend_with
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from triton_cases import (
    BFLOAT16,
    CONFIGURATIONS,
    FLOAT16,
    FLOAT32,
    INTERPRETED,
    WIDTHS,
    attend,
    error_of,
    exactly,
    gradients_of,
    in_one_version,
    is_softmax,
    rms,
)  # fmt: skip

LIMITS = {FLOAT32: 1e3, BFLOAT16: 1e3, FLOAT16: 200.0}
LONGEST = 20 if INTERPRETED else 150
# Shares are tests of their own, so that many processes can look at them.
EXAMPLES, SHARES = (40, 1) if INTERPRETED else (125, 12)

every_share = pytest.mark.parametrize("share", range(SHARES))


def look_at(examples, share, function):
    """Call ``function`` with so many examples, the same ones every time."""
    options = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    seed(share)(options(given(case=inputs())(function)))()


@st.composite
def inputs(draw):
    """Of a configuration that is compiled anyway, everything that is not."""
    configuration = draw(st.sampled_from(CONFIGURATIONS))
    dtype, components, shifted = (configuration[name] for name in ("dtype", "components", "kind"))
    shifted, limit = shifted == "shifted", LIMITS[dtype]
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]))
    lengths = draw(st.integers(1, LONGEST)), draw(st.integers(1, LONGEST))
    queries, keys = lengths if INTERPRETED else in_one_version(configuration, *lengths)
    dim = draw(st.sampled_from(WIDTHS[configuration["width"]]))
    value_dim = draw(st.sampled_from(WIDTHS[configuration["value_width"]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def tensor(*shape: int) -> torch.Tensor:
        """Near the origin, on a far shell, all equal, or at the very edge."""
        scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, limit]))
        offset = draw(st.sampled_from([0.0, 1.0, limit, -limit]))
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (scale * noise + offset).clamp(-limit, limit)

    key_shape = (batch, kv_heads, keys, dim) if shifted else (batch, kv_heads, components, keys, dim)
    case = {
        "query": tensor(batch, kv_heads * group, queries, dim).to(dtype),
        "key": tensor(*key_shape).to(dtype),
        "value": tensor(batch, kv_heads, keys, value_dim).to(dtype),
        "similarity": draw(st.sampled_from(["gaussian", "dot"])) if INTERPRETED else configuration["similarity"],
        "assignment": configuration["assignment"],
        "is_causal": configuration["is_causal"],
    }
    if shifted:
        case["shift"] = tensor(kv_heads, components, dim).float()
    # With shifts of dot products, only a prior of positions keeps all components alive.
    needs_positions = not INTERPRETED and is_softmax({**configuration, "prior": None})
    priors = ["position"] if needs_positions else ["none", "random", "one-hot", "position"]
    prior = draw(st.sampled_from(priors))
    if prior == "random":
        case["log_prior"] = torch.randn(kv_heads, components, generator=generator).log_softmax(-1)
    elif prior == "one-hot":
        case["log_prior"] = torch.full((components,), -torch.inf)
        case["log_prior"][draw(st.integers(0, components - 1))] = 0.0
    elif prior == "position":
        case["log_prior"] = torch.randn(kv_heads, components, keys, generator=generator)
        case["log_prior"][torch.rand(kv_heads, components, keys, generator=generator) < 0.5] = -torch.inf
        case["log_prior"][:, 0, 0] = 0.0
    if configuration["variance"] is not None:
        case["variance"] = 0.1 + 10 * torch.rand(kv_heads, components, generator=generator)
    elif draw(st.booleans()):
        case["variance"] = draw(st.sampled_from([0.1, 50.0]))
    if configuration["masks"] == "padding":
        for name, length in (("key_mask", keys), ("query_mask", queries)):
            case[name] = torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    elif configuration["masks"] == "pairs":
        case["attn_mask"] = torch.rand(batch, 1, queries, keys, generator=generator) < 0.5
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in case.items()}


@every_share
def test_finite_inputs_give_finite_results(share):
    """P17: outputs between the smallest and the largest value, gradients finite."""
    look_at(EXAMPLES, share, finite_results)


def finite_results(case):
    grad = torch.ones(*case["query"].shape[:3], case["value"].shape[-1], device=DEVICE)
    out, gradients = gradients_of(case, grad)
    assert out.isfinite().all()
    low, high = case["value"].double().amin(), case["value"].double().amax()
    slack = 0.02 * max(abs(low), abs(high)) + 1e-6
    assert (out >= min(low, 0) - slack).all()
    assert (out <= max(high, 0) + slack).all()
    for name, gradient in gradients.items():
        if case["query"].dtype != FLOAT16:
            assert gradient.isfinite().all(), name
        else:
            # Infinite where the number itself does not fit into fp16.
            assert not gradient.isnan().any(), name


@every_share
def test_fuzzed_outputs_are_right(share):
    """P21: against fp64; logits of size x are known to 1e-7 x, whoever computes them in fp32."""
    look_at(EXAMPLES // 2, share, right_outputs)


def right_outputs(case):
    exact = exactly(case)
    reach = sum(exact[name].abs().amax() for name in ("query", "key", "shift") if name in exact)
    variance = torch.as_tensor(case.get("variance", case["query"].shape[-1] ** 0.5)).amin()
    blur = 5e-7 * case["query"].shape[-1] * reach.square() / variance
    error = error_of(attend(case), attend_with(exact, "reference"), 0.1 * rms(case["value"]))
    assert error <= 2 * OUTPUT_CAP[case["query"].dtype] + blur


@pytest.mark.parametrize("is_causal", [False, True] if INTERPRETED else [False])
def test_grouped_heads_in_fp16_whose_gradients_cancel(is_causal):
    """P17, found by the fuzz: each head's gradient overflows fp16, with opposite signs, before the group is added.

    With keys of zero a distance has the same gradients as a product.
    """
    case = {
        "query": torch.tensor([[[[200.0, -58.0], [-200.0, 113.0]], [[-200.0, -200.0], [80.0, 167.0]]]]).half(),
        "key": torch.zeros(1, 1, 2, 2).half(),
        "value": torch.tensor([[[[-171.0], [200.0]]]]).half(),
        "shift": torch.zeros(1, 1 if INTERPRETED else 2, 2),
        "similarity": "dot" if INTERPRETED else "gaussian",
        "is_causal": is_causal,
        "variance": 0.1,
    }
    case = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    out, gradients = gradients_of(case, torch.ones(1, 2, 2, 1, device=DEVICE))
    assert out.isfinite().all()
    assert not any(gradient.isnan().any() for gradient in gradients.values())
