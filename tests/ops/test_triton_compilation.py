"""The fused kernels compile for a GPU, on a machine that has none.

The interpreter runs Python: it does not notice a pointer that is missing on a path that is not taken, or a number that
changes its type in a loop. So every kernel that a call would start is translated as far as Triton's own intermediate
language, and a few are compiled to the end.
"""

import importlib
import itertools
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from cases import make_inputs
from linear_cases import make_linear
from triton_cases import FACTORS, POOL, pairwise_configurations

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from mgk.ops.triton import call as prepared
from mgk.ops.triton import generation, launch, linear_operator, passes, tuning
from mgk.ops.triton.inputs import Options, Tensors

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
LEVELS = {
    **FACTORS,
    "width": (32, 64, 128, 256),
    "value_width": (16, 64, 256),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "dropout_p": (0.0, 0.1),
    "masks": ("none", "padding", "pairs", "packed"),
}
CONFIGURATIONS = pairwise_configurations(LEVELS)
KEYS = (
    ("shifted", 2, "gaussian"),
    ("projected", 2, "gaussian"),
    ("projected", 1, "gaussian"),
    ("projected", 1, "dot"),
)
PRESETS = [
    {"kind": kind, "components": components, "assignment": assignment, "similarity": similarity}
    for kind, components, similarity in KEYS
    for assignment in (("soft", "hard") if components > 1 else ("soft",))
]


@pytest.fixture
def started(monkeypatch):
    """What would have been started: kernel, arguments, compile-time constants and tile."""
    if not isinstance(passes.forward.attention_forward, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    record = []
    monkeypatch.setattr(tuning, "_architecture", lambda index: "sm90")
    monkeypatch.setattr(tuning, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(
        launch,
        "_start",
        lambda kernel, programs, arguments, constants, kinds, tile: record.append((kernel, arguments, constants, tile)),
    )
    return record


def call(configuration):
    """Forward and backward of one call on CPU tensors; nothing is computed."""
    names = ("components", "kind", "variance", "assignment", "similarity", "prior", "dtype", "is_causal")
    chosen = {name: configuration[name] for name in names if name in configuration}
    inputs = make_inputs(
        batch=2, heads=4, kv_heads=2, queries=70, keys=configuration.get("keys", 81), dim=configuration["width"],
        value_dim=configuration["value_width"], device="cpu", **chosen,
    )  # fmt: skip
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    key = key if key.ndim == 5 else key[:, :, None]
    prior, variance = inputs.get("log_prior"), inputs.get("variance")
    if prior is not None and prior.ndim == 2:
        prior = prior[..., None]
    inverse_variance = None
    if isinstance(variance, torch.Tensor):
        inverse_variance = variance.float().reciprocal().expand(2, configuration["components"])
    masks = configuration.get("masks", "none")
    attn_mask = torch.ones(2, 1, 70, 81, dtype=torch.bool) if masks == "pairs" else None
    key_mask = torch.ones(2, 81, dtype=torch.bool) if masks in ("padding", "packed") else None
    query_mask = torch.ones(2, 70, dtype=torch.bool) if masks == "padding" else None
    dropout = configuration.get("dropout_p", 0.0)
    seed = torch.zeros(1, dtype=torch.int64) if dropout else None
    spans = torch.zeros(1, 3, dtype=torch.int32) if masks == "packed" else None
    tensors = Tensors(
        query, key, value, inputs.get("shift"), prior, inverse_variance, attn_mask, key_mask, query_mask, seed, spans,
        spans,
    )  # fmt: skip
    options = Options(
        0.3, configuration["similarity"] == "gaussian", configuration["is_causal"],
        configuration["assignment"] == "hard", dropout,
    )  # fmt: skip
    results = passes.forward_pass(tensors, options)
    passes.backward_pass(torch.empty_like(results.out), None, results, tensors, options)
    passes.responsibility_pass(tensors._replace(seed=None), options._replace(hard=False, dropout_p=0.0))
    if query.dtype != torch.float32 and masks in ("none", "padding"):
        generation.run(tensors._replace(query=query[:, :, :3], query_mask=None), options)


def in_half_precision(preset, width=64):
    return {**preset, "width": width, "value_width": width, "dtype": torch.bfloat16, "is_causal": True}


def source_of(kernel, arguments, constants):
    signature, values = {}, {}
    for name, argument in zip(kernel.arg_names, (*arguments, *constants), strict=True):
        if name in kernel.arg_names[len(arguments) :] or argument is None:
            signature[name], values[name] = "constexpr", argument
        elif isinstance(argument, torch.Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif isinstance(argument, int):
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
        else:
            shape = ",".join(map(str, argument.block_shape))
            layout = f",{launch.with_layout(argument).layout!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{TYPES[argument.base.dtype]}[{shape}]{layout}>"
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values)


def translate(kernel, arguments, constants, tile):
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": tile.warps, "num_stages": tile.stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source = source_of(kernel, arguments, constants)
    return source.make_ir(TARGET, options, functions, backend.get_module_map(), context)


def compiled(kernel, arguments, constants, tile, target=TARGET):
    """To the end, with registers and shared memory."""
    settings = {name: value for name, value in tile.settings().items() if value is not None}
    return triton.compile(source_of(kernel, arguments, constants), target=target, options=settings)


LINEAR = [
    {"kind": kind, "is_causal": is_causal, "width": width, "dtype": dtype, "prior": prior, "masked": masked}
    for kind, is_causal, width, dtype, prior, masked in (
        ("shifted", True, 64, torch.bfloat16, "head", False), ("projected", False, 32, torch.bfloat16, "head", True),
        ("projected", True, 128, torch.float16, "position", True), ("shifted", False, 24, torch.float32, None, False),
    )
]  # fmt: skip


def call_linear(case):
    """Forward and backward of linear attention on CPU tensors; nothing is computed."""
    width = case["width"]
    inputs = make_linear(
        kind=case["kind"], heads=4, kv_heads=case.get("kv_heads", 2), queries=70, dim=width, dtype=case["dtype"],
        prior=case["prior"], masked=case["masked"], device="cpu",
    )  # fmt: skip
    key, prior = inputs["key"], inputs.get("log_prior")
    key = key if key.ndim == 5 else key[:, :, None]
    prior = prior[..., None] if prior is not None and prior.ndim == 2 else prior
    arguments = (
        inputs["query"], key, inputs["value"], inputs.get("shift"), prior, inputs.get("key_mask"), None,
        case["is_causal"], "elu",
    )  # fmt: skip
    found = linear_operator.fused_linear_attention(*arguments)
    linear_operator.fused_linear_attention_backward(torch.empty_like(found[0]), *found[1:], *arguments)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear_kernels_translate(case, started):
    call_linear(case)
    assert len(started) >= 7
    for each in started:
        translate(*each)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["shifted", "projected"])
def test_linear_kernels_compile_and_fit(kind, is_causal, width, dtype, started):
    case = {"kind": kind, "is_causal": is_causal, "width": width, "dtype": dtype, "prior": "head", "masked": False}
    for kv_heads in (4, 2):
        call_linear({**case, "kv_heads": kv_heads})
    for kernel, arguments, constants, tile in started:
        assert compiled(kernel, arguments, constants, tile).metadata.shared <= 227 * 1024, kernel.__name__


def test_small_kernels_work_on_whole_blocks(started):
    """Whatever the number of components: Triton takes powers of two, and no term is left over."""
    for components, width in itertools.product(range(1, 9), (16, 32, 64, 128, 256)):
        for rows in (prepared.rows_of_terms(components * width), prepared.rows_of_small_kernels(components * width)):
            assert rows.bit_count() == 1
            assert prepared.PADDING % rows == 0


def test_the_pool_of_the_tests_is_small(started):
    """One version of the forward kernel for each configuration; those of dropout and packed sequences make it 61."""
    versions = set()
    for configuration in POOL:
        call(configuration)
        (forward,) = [each for each in started if each[0].__name__.startswith("attention_forward")]
        kernel, arguments, constants, tile = forward
        # The compiler knows which arguments there are, too.
        missing = tuple(argument is None for argument in arguments)
        versions.add((kernel.__name__, arguments[0].base.dtype, missing, constants, tile[2:]))
        started.clear()
    assert len(versions) == len(POOL) <= 51


EVERY_OTHER = [pytest.param(case, marks=[pytest.mark.slow] * (i % 2)) for i, case in enumerate(CONFIGURATIONS)]


THREE_KEYS = {"kind": "projected", "components": 3, "assignment": "soft", "similarity": "gaussian"}


@pytest.mark.parametrize("configuration", [*EVERY_OTHER, *map(in_half_precision, [*PRESETS, THREE_KEYS])], ids=str)
def test_every_kernel_translates(configuration, started):
    call(configuration)
    assert {kernel.__name__ for kernel, *_ in started} >= {
        "attention_forward",
        "attention_repair",
        "attention_delta",
        "attention_backward_query",
        "responsibilities",
    }
    for kernel, arguments, constants, tile in started:
        assert "tt.func public" in str(translate(kernel, arguments, constants, tile))


@pytest.mark.parametrize("preset", [PRESETS[0], PRESETS[4]], ids=str)
def test_a_prior_of_each_sample_compiles(preset, started):
    """It is read by the kernel that makes terms, and by a step of generation."""
    call({**in_half_precision(preset), "prior": "sample"})
    readers = [each for each in started if "PRIOR_BY_SAMPLE" in each[0].arg_names]
    assert {kernel.__name__ for kernel, *_ in readers} == {"logit_terms", "decode_split"}
    for kernel, arguments, constants, tile in readers:
        assert "stride_prior_head" in compiled(kernel, arguments, constants, tile).asm["ttir"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_every_preset_compiles_and_fits(width, preset, started):
    """To the end, in half precision: registers, and shared memory of which a Hopper GPU has 227 kB for a program."""
    call(in_half_precision(preset, width))
    for kernel, arguments, constants, tile in started:
        assert compiled(kernel, arguments, constants, tile).metadata.shared <= 227 * 1024, kernel.__name__


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_products_do_not_wait_for_each_other(preset, width, is_causal, started):
    """For want of registers the compiler would serialise the matrix units, and say nothing."""
    call({**in_half_precision(preset, width), "is_causal": is_causal})
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    for each in started:
        if each[0].__name__.startswith(("attention_forward", "attention_backward")):
            arguments = [assembler, "-v", "--gpu-name", "sm_90a", "-", "-o", "/dev/null"]
            text = compiled(*each).asm["ptx"]
            said = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stderr
            assert "registers" in said
            assert "serialized" not in said, each[0].__name__


SPECIALISED = [
    pytest.param(preset, is_causal, marks=[pytest.mark.slow] * (not is_causal))
    for preset in (PRESETS[:2] + PRESETS[4:])
    for is_causal in (True, False)
]


@pytest.mark.parametrize(("preset", "is_causal"), SPECIALISED, ids=str)
def test_warps_are_specialised_with_wide_heads(preset, is_causal, started, monkeypatch):
    """One copies, eight multiply, and what the latter hold in registers stays there from block to block."""
    if not tuning.HAS_WARP_SPECIALISATION:
        pytest.skip("warp specialisation is written for another version of Triton")
    # Dot products have no columns where blocks of keys are whole.
    call({**in_half_precision(preset, 128), "is_causal": is_causal, "prior": None, "keys": 128})
    (forward,) = [each for each in started if each[0].__name__ == "attention_forward_wide"]
    found = compiled(*forward)
    assert found.metadata.shared <= 227 * 1024
    assert found.metadata.num_warps == 12
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    instructions = importlib.import_module("instructions")
    loops = instructions.loops_of(instructions.disassembled(found.asm["cubin"])[0])
    assert len(loops) == (4 if is_causal else 2)
    for loop in loops:
        assert not any("STL" in line or "LDL" in line for line in loop)
        assert sum("HGMMA" in line for line in loop) == 16
        assert sum("WARPGROUP.DEPBAR" in line for line in loop) == 2


@pytest.mark.slow
def test_eight_wide_keys_fit(started):
    """Projected keys of a block lie in shared memory all at once."""
    keys = {
        "kind": "projected",
        "components": 8,
        "variance": "component",
        "assignment": "soft",
        "similarity": "gaussian",
    }
    call({**keys, "width": 128, "value_width": 64, "dtype": torch.float16, "is_causal": True})
    for kernel, arguments, constants, tile in started:
        assert compiled(kernel, arguments, constants, tile).metadata.shared <= 227 * 1024, kernel.__name__


STRAIGHT = [
    ({"kind": "projected", "components": 1}, 64, "none", 0.0),
    *(
        pytest.param({"kind": "projected", "components": components}, width, masks, dropout_p, marks=pytest.mark.slow)
        for components, width in ((1, 32), (1, 64), (2, 64), (2, 128))
        for masks in ("none", "padding", "packed")
        for dropout_p in (0.0, 0.1)
    ),
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("keys", "width", "masks", "dropout_p"), STRAIGHT, ids=str)
def test_terms_go_straight_to_the_threads_that_hold_their_columns(keys, width, masks, dropout_p, is_causal, started):
    """Four at a time, in the order in which a warp group leaves the columns of a product."""
    preset = {**keys, "assignment": "soft" if keys["components"] == 1 else "hard", "similarity": "gaussian"}
    call({**in_half_precision(preset, width), "is_causal": is_causal, "masks": masks, "dropout_p": dropout_p})
    (forward,) = [each for each in started if each[0].__name__ == "attention_forward"]
    assert forward[3].direct
    text = compiled(*forward).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.MULTILINE))
    read = [line for line in text.splitlines() if "packed_element = 4" in line]
    assert len(read) == 1 + is_causal
    for line in read:
        (parent,) = set(re.findall(r"#ttg\.slice<\{dim = 0, parent = (#mma\d*)\}>", line))
        assert "versionMajor = 3" in layouts[parent]
        assert re.search(r"warpsPerCTA = \[\d+, 1\]", layouts[parent])


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("preset", PRESETS[:2], ids=str)
def test_a_step_with_masked_keys_has_no_work_for_warp_groups_after_its_copies(width, preset, started):
    """Such products read outside of shared memory on a GPU, which the fuzz there had found."""
    call({**in_half_precision(preset, width), "masks": "padding"})
    (step,) = [each for each in started if each[0].__name__ == "decode_split"]
    text = compiled(*step).asm["ttgir"]
    products = [line for line in text.splitlines() if "warp_group_dot " in line or "tt.dot " in line]
    groups = ["warp_group_dot" in line for line in products]
    assert any(groups)
    assert groups == sorted(groups, reverse=True)
    assert not groups[-1]


DROPPING = [
    (90, PRESETS[0], 64, True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((90,), PRESETS, (16, 128), (True, False))
    ),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((80, 100), PRESETS, (64,), (True,))),
]


@pytest.mark.parametrize(("architecture", "preset", "width", "is_causal"), DROPPING, ids=str)
def test_dropout_finds_two_neighbours_in_a_thread(architecture, preset, width, is_causal, started):
    """One number decides about both, so the first thing that a thread holds beside a pair must be the next column."""
    call({**in_half_precision(preset, width), "is_causal": is_causal, "dropout_p": 0.1})
    target = GPUTarget("cuda", architecture, 32)
    found = Counter()
    for kernel, arguments, constants, tile in started:
        if kernel.__name__ not in ("attention_forward", "attention_backward_query"):
            continue
        text = compiled(kernel, arguments, constants, tile, target).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.MULTILINE))
        for line in text.splitlines():
            if "packed_element = 2" in line:
                layout = layouts[re.findall(r"#(?:mma|linear|blocked)\d*", line)[-1]]
                # A product, or the sum of two that lie side by side.
                assert "nvidia_mma" in layout or re.search(r"register = \[\[(0, )+1\]", layout), layout
                found[kernel.__name__] += 1
    assert len(found) == 2, found
