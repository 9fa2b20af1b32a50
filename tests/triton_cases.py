"""Cases for the fused kernels: what is compiled, what it is compared with, and how closely."""

from __future__ import annotations

import itertools
import os
import random

import oracle
import pytest
import torch
from cases import DEVICE, OUTPUT_CAP, make_inputs, padding, with_gradients
from cases import attend as attend_with
from torch import Tensor

import mgk

BACKEND = os.environ.get("MGK_TEST_TRITON_BACKEND", "triton")
"""MGK_TEST_TRITON_BACKEND=chunked lets another backend stand in: a test of the tests, with the cases of a GPU."""

INTERPRETED = BACKEND == "triton" and DEVICE.type == "cpu"
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT32, FLOAT16) if INTERPRETED else (FLOAT32, FLOAT16, BFLOAT16)
HALF = DTYPES[-1]
ONE_DTYPE = FLOAT32 if INTERPRETED else HALF
"""For tests of what no dtype changes: with each more kernels would be compiled, or interpreted, to find nothing new."""
BRIEF_DTYPES = (FLOAT32, FLOAT16) if INTERPRETED else (HALF,)
"""For identities that rounding may break; compiled in fp32 they would cost time that the other cases take already."""

# Relative RMS errors of gradients against fp64 on the same rounded inputs.
GRADIENT_CAP = {FLOAT32: 2e-5, FLOAT16: 1e-2, BFLOAT16: 1e-2}
PARAMETER_CAP = {FLOAT32: 1e-4, FLOAT16: 2e-2, BFLOAT16: 2e-2}
TOKENS = ("query", "key", "value")

# A head dimension is rounded up to one of these, and each is compiled on its own.
WIDTHS = {16: (16, 8, 1), 32: (24, 32), 64: (33, 64), 128: (80, 96, 111, 128), 256: (256, 136)}
FACTORS = {
    "width": tuple(WIDTHS),
    "value_width": (16, 64, 256),
    "components": (1, 2, 3, 4, 8),
    "kind": ("projected", "shifted"),
    "variance": (None, "component"),
    "assignment": ("soft", "hard"),
    "is_causal": (False, True),
    "masks": ("none", "padding", "pairs"),
    "similarity": ("gaussian", "dot"),
    "prior": (None, "head", "position"),
    "dtype": (FLOAT32, FLOAT16, BFLOAT16),
}
# The interpreter takes its time, and cannot do bf16.
SHORT_FACTORS = {**FACTORS, "width": (16, 32, 64), "value_width": (16, 32), "dtype": (FLOAT32, FLOAT16)}
COMPILED = ("width", "value_width", "components", "kind", "variance", "assignment", "is_causal", "masks", "dtype")
"""What a kernel is compiled for. Everything else varies freely between the cases of one configuration."""

# (Nq, Nk): on both sides of every tile size, squeezed and stretched; under causality with rows before the first key.
LENGTHS = (
    (1, 1), (1, 65), (2, 15), (15, 40), (16, 17), (17, 2), (63, 129), (64, 64), (65, 127), (127, 128), (129, 63),
    (128, 1023), (1025, 16), (1023, 1025), (31, 33), (192, 191), (257, 255), (95, 320), (300, 129),
)  # fmt: skip
SHORT_LENGTHS = ((1, 1), (1, 33), (2, 15), (16, 17), (17, 2), (31, 49), (33, 31), (15, 16), (35, 40), (48, 16))


def pairs_of(configuration: dict) -> set:
    return {(a, configuration[a], b, configuration[b]) for a, b in itertools.combinations(configuration, 2)}


def pairwise_configurations(factors: dict[str, tuple]) -> list[dict]:
    """Every two levels of two factors meet in some configuration: each time the best of many random candidates."""
    rng = random.Random(0)
    unmet = {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    configurations = []
    while unmet:
        candidates = []
        for a, x, b, y in rng.sample(sorted(unmet, key=str), min(60, len(unmet))):
            candidates.append({name: rng.choice(levels) for name, levels in factors.items()} | {a: x, b: y})
        configurations.append(max(candidates, key=lambda candidate: len(pairs_of(candidate) & unmet)))
        unmet -= pairs_of(configurations[-1])
    return configurations


def is_softmax(configuration: dict) -> bool:
    """Shifts of dot products change no weight: the kernel of one component runs, whatever else the levels say."""
    changes = {"kind": "shifted", "similarity": "dot", "variance": None, "assignment": "soft"}
    return changes.items() <= configuration.items() and configuration["prior"] != "position"


PLAIN = {
    "width": 16, "value_width": 16, "components": 2, "kind": "projected", "variance": None, "assignment": "soft",
    "is_causal": False, "masks": "none", "similarity": "gaussian", "prior": "head", "dtype": BFLOAT16,
}  # fmt: skip
SHIFTED, CAUSAL, HARD = {"kind": "shifted"}, {"is_causal": True}, {"assignment": "hard"}
UNEQUAL, DOT = {"variance": "component"}, {"similarity": "dot"}
PADDED, PAIRS = {"masks": "padding"}, {"masks": "pairs"}


def components(count: int) -> dict:
    return {"components": count}


def widths(width: int, value_width: int) -> dict:
    return {"width": width, "value_width": value_width}


SOFTMAX = {**PLAIN, **DOT, **components(1), "prior": None}
# What the tests of single properties ask for, by name and not by configuration.
USUAL = [
    {**PLAIN, **change}
    for change in (
        components(1) | widths(64, 64), SHIFTED | HARD | CAUSAL | widths(64, 64),
        {}, SHIFTED, CAUSAL, SHIFTED | CAUSAL, PADDED, SHIFTED | PADDED, CAUSAL | PADDED, SHIFTED | CAUSAL | PADDED,
        HARD, SHIFTED | HARD, UNEQUAL, SHIFTED | UNEQUAL, components(1), components(3), SHIFTED | components(3),
        DOT, DOT | SHIFTED | {"prior": "position"}, DOT | SHIFTED | HARD, DOT | HARD | CAUSAL, SOFTMAX,
        SHIFTED | PAIRS, PAIRS | components(3) | widths(32, 16),
        UNEQUAL | HARD | components(4) | widths(32, 16), SHIFTED | UNEQUAL | HARD | components(8) | widths(64, 16),
        SHIFTED | UNEQUAL | components(1) | widths(64, 16),
        widths(32, 32), widths(64, 64), SHIFTED | CAUSAL | widths(64, 64), SHIFTED | widths(128, 128),
        SHIFTED | widths(256, 256) | {"prior": "position"}, components(8) | widths(256, 256),
        {"dtype": FLOAT32}, SHIFTED | {"dtype": FLOAT32}, {"dtype": FLOAT16}, SHIFTED | {"dtype": FLOAT16},
    )
]  # fmt: skip
# With these every two levels of two factors meet; one search has found so few.
UNUSUAL = [
    dict(zip(FACTORS, levels, strict=True))
    for levels in (
        (128, 64, 8, "projected", "component", "soft", False, "padding", "dot", None, FLOAT16),
        (256, 16, 4, "projected", "component", "hard", False, "padding", "dot", "head", FLOAT16),
        (32, 256, 8, "shifted", "component", "soft", True, "pairs", "dot", "position", FLOAT32),
        (128, 16, 4, "shifted", "component", "hard", False, "pairs", "dot", None, FLOAT32),
        (16, 256, 8, "projected", None, "hard", True, "none", "gaussian", "position", FLOAT32),
        (16, 64, 4, "shifted", None, "hard", True, "none", "gaussian", "head", FLOAT32),
        (64, 16, 2, "projected", None, "soft", True, "pairs", "gaussian", None, FLOAT32),
        (64, 256, 3, "shifted", "component", "soft", True, "none", "gaussian", "position", FLOAT32),
        (128, 256, 3, "shifted", "component", "soft", True, "padding", "gaussian", None, FLOAT16),
        (128, 16, 1, "projected", None, "soft", False, "pairs", "gaussian", "position", FLOAT16),
        (64, 256, 4, "projected", None, "soft", False, "padding", "dot", "position", FLOAT16),
        (32, 64, 1, "shifted", None, "hard", False, "padding", "gaussian", None, FLOAT16),
        (256, 64, 3, "projected", None, "hard", True, "pairs", "dot", "position", BFLOAT16),
        (256, 256, 1, "projected", "component", "hard", True, "padding", "dot", None, FLOAT32),
    )
]  # fmt: skip
POOL = [*UNUSUAL, *USUAL]
"""What the tests on a GPU have compiled, but for a few kernels with dropout and for packed sequences. Each costs
seconds; other lengths, heads, batches, values, priors and head dimensions within a width cost nothing."""

CONFIGURATIONS = pairwise_configurations(SHORT_FACTORS) if INTERPRETED else POOL


def in_one_version(configuration: dict, queries: int, keys: int) -> tuple[int, int]:
    """Lengths near these for which no second version of a configuration's kernels is compiled.

    A mask of a single row is one of keys, and dot products of whole blocks of keys have no column: the first is left to
    a configuration that has a twin with padding, the second to plain softmax.
    """
    if configuration["masks"] == "pairs" and {**configuration, "masks": "padding"} not in POOL:
        queries = max(queries, 2)
    if configuration["similarity"] == "dot" and configuration["masks"] != "padding" and configuration != SOFTMAX:
        keys += keys % 128 == 0
    return queries, keys


def name_of(configuration: dict) -> str:
    dtype = str(configuration["dtype"]).removeprefix("torch.")
    words = [f"D{configuration['width']}", f"Dv{configuration['value_width']}", f"M{configuration['components']}"]
    words += [configuration[name] for name in ("kind", "assignment", "similarity")]
    words += ["unequal"] * (configuration["variance"] is not None) + ["causal"] * configuration["is_causal"]
    return "-".join([*words, configuration["masks"], f"prior={configuration['prior']}", dtype])


def make_case(configuration: dict, number: int = 0, **settings: object) -> dict:
    """Inputs of one configuration; the number picks the head dimensions within it, the heads and the masks."""
    chosen = {name: configuration[name] for name in FACTORS if name not in ("width", "value_width", "masks")}
    dims, value_dims = WIDTHS[configuration["width"]], WIDTHS[configuration["value_width"]]
    heads, kv_heads = ((1, 1), (2, 1))[number % 2] if INTERPRETED else ((2, 2), (2, 1), (4, 2))[number % 3]
    chosen |= {"dim": dims[number % len(dims)], "value_dim": value_dims[number % len(value_dims)]}
    chosen |= {"heads": heads, "kv_heads": kv_heads, "batch": 1 if INTERPRETED else 2, "device": DEVICE}
    inputs = make_inputs(**{**chosen, **settings})
    add_masks(inputs, configuration["masks"], number)
    return inputs


def add_masks(inputs: dict, masks: str, number: int = 0) -> None:
    """Padding of keys and queries on either side, or a random mask of pairs with a row that sees nothing."""
    batch, heads, queries, _ = inputs["query"].shape
    keys = inputs["key"].shape[-2]
    if masks == "padding":
        side = ("right", "left")[number % 2]
        inputs["key_mask"] = padding(batch, keys, DEVICE, side)
        inputs["query_mask"] = padding(batch, queries, DEVICE, side)
    elif masks == "pairs":
        shape = ((batch, heads, queries, keys), (1, heads, queries, keys), (batch, 1, queries, keys), (queries, keys))
        inputs["attn_mask"] = torch.rand(*shape[number % 4], device=DEVICE) > 0.4
        inputs["attn_mask"][..., queries // 2, :] = False


def attend(inputs: dict, **options: object) -> Tensor:
    refuse_what_the_interpreter_gets_wrong(inputs)
    return attend_with(inputs, BACKEND, **options)


def gradients_of(inputs: dict, grad: Tensor) -> tuple[Tensor, dict]:
    """Output and gradients of the backend under test."""
    return with_gradients(inputs, grad, function=attend)


def log_density(inputs: dict, **options: object) -> Tensor:
    refuse_what_the_interpreter_gets_wrong(inputs)
    return mgk.mixture_log_density(**inputs, backend=BACKEND, **options)


def responsibilities(inputs: dict, **options: object) -> Tensor:
    refuse_what_the_interpreter_gets_wrong(inputs)
    return mgk.mixture_responsibilities(**inputs, backend=BACKEND, **options)


def refuse_what_the_interpreter_gets_wrong(inputs: dict) -> None:
    """Its bf16 products multiply the bits of the numbers, and nothing says so."""
    if INTERPRETED and BFLOAT16 in {value.dtype for value in inputs.values() if isinstance(value, Tensor)}:
        pytest.fail("the interpreter cannot multiply bfloat16: test it with MGK_TEST_DEVICE=cuda")


def random_grad(inputs: dict) -> Tensor:
    shape = (*inputs["query"].shape[:3], inputs["value"].shape[-1])
    return torch.randn(shape, device=inputs["query"].device).to(inputs["query"].dtype)


def exactly(inputs: dict) -> dict:
    """The same rounded numbers in fp64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def expected_with_gradients(inputs: dict, grad: Tensor) -> tuple[Tensor, dict]:
    """In fp64, by the oracle, or by the reference: for positions without a prior, and where memory is short."""
    batch, heads, queries, dim = inputs["query"].shape
    components = inputs["shift"].shape[1] if inputs.get("shift") is not None else inputs["key"].shape[2]
    differences = batch * heads * components * queries * inputs["key"].shape[-2] * dim
    prior = inputs.get("log_prior")
    if differences <= 2**23 and (prior is None or prior.isfinite().all()):
        return with_gradients(exactly(inputs), grad.double(), function=oracle.attention)
    return with_gradients(exactly(inputs), grad.double(), "reference")


def error_of(got: Tensor, expected: Tensor, floor: float | Tensor = 0.0) -> float:
    """RMS of the error over RMS of what is expected, or over ``floor`` where that is larger. NaN never passes."""
    scale = torch.clamp(rms(expected), min=float(floor))
    error = rms(got.detach().double() - expected)
    return float(error / scale) if scale > 0 else float(error)


def rms(tensor: Tensor) -> Tensor:
    return tensor.detach().double().square().mean().sqrt()


def output_floor(inputs: dict) -> Tensor:
    """Few outputs may all happen to cancel; their rounding does not."""
    return 0.3 * rms(inputs["value"]) / inputs["value"].shape[2] ** 0.5


def gradient_errors(got: dict, expected: dict) -> dict[str, float]:
    """Error of every gradient, on a scale that does not vanish when the gradient does.

    One key alone has weight 1 whatever the query: its gradient is zero but for rounding, which is of the size of the
    value's gradient; in half precision, where the output is rounded, nearer to it. Of two keys most queries may see
    one. A parameter's gradient sums those of the keys, which may cancel; their rounding does not.
    """
    value = got["value"]
    # Packed tokens, which have no batch, are never so few.
    is_rounding = not INTERPRETED and value.dtype != FLOAT32 and value.ndim == 4 and value.shape[-2] <= 2
    token_floor = (1.0 if is_rounding else 0.1) * rms(expected["value"])
    key_norm = expected["key"].double().norm()
    errors = {}
    for name, gradient in got.items():
        reference = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        floor = token_floor if name in TOKENS else torch.maximum(key_norm / reference.numel() ** 0.5, token_floor)
        errors[name] = error_of(gradient, reference.double(), floor)
    return errors


def gradient_caps(inputs: dict, scale: float = 1.0) -> dict[str, float]:
    """A tie of hard components that rounding breaks moves a gradient from one key to another, whoever computes it."""
    dtype = inputs["query"].dtype
    caps = {name: scale * GRADIENT_CAP[dtype] if name in TOKENS else scale * PARAMETER_CAP[dtype] for name in inputs}
    if inputs.get("assignment") == "hard":
        caps |= {name: max(cap, 2e-2) for name, cap in caps.items() if name != "value"}
    return caps


def check(inputs: dict, scale: float = 1.0) -> tuple[Tensor, dict]:
    """The output and every gradient against fp64; ``scale`` widens the caps."""
    grad = random_grad(inputs)
    out, got = gradients_of(inputs, grad)
    expected_out, expected = expected_with_gradients(inputs, grad)
    assert out.dtype == inputs["query"].dtype
    assert out.shape == expected_out.shape
    error = error_of(out, expected_out, output_floor(inputs))
    assert error <= scale * OUTPUT_CAP[out.dtype], error
    caps = gradient_caps(inputs, scale)
    too_large = {name: error for name, error in gradient_errors(got, expected).items() if not error <= caps[name]}
    assert not too_large, too_large
    return out, got
