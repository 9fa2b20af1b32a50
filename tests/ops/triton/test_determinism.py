"""G9: the same bits every time, on any stream, in any memory; and no compilation for a new length."""

import pytest
import torch
from triton_cases import (
    BFLOAT16,
    CONFIGURATIONS,
    INTERPRETED,
    ONE_DTYPE,
    attend,
    gradients_of,
    log_density,
    make_case,
    make_inputs,
    name_of,
    random_grad,
    responsibilities,
)  # fmt: skip

REPEATS = 2 if INTERPRETED else 200
LENGTHS = {"queries": 18, "keys": 20} if INTERPRETED else {"queries": 300, "keys": 311}
CHOSEN = CONFIGURATIONS[:6] if INTERPRETED else CONFIGURATIONS[:24]


@pytest.mark.parametrize("configuration", CHOSEN, ids=name_of)
def test_repeats_are_equal_to_the_bit(configuration):
    """G9: forward and backward, 24 configurations, 200 times on a GPU."""
    inputs = make_case(configuration, number=1, **LENGTHS)
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    differing = torch.zeros((), dtype=torch.bool, device=out.device)
    for _ in range(REPEATS):
        again, again_gradients = gradients_of(inputs, grad)
        differing |= (again != out).any()
        for name, gradient in gradients.items():
            differing |= (again_gradients[name] != gradient).any()
    assert not differing


@pytest.mark.parametrize("kind", ["projected", "shifted"])
def test_dropout_repeats_under_a_seed(kind, device):
    """G9, P23"""
    inputs = make_inputs(kind=kind, dim=16, value_dim=64, dropout_p=0.3, dtype=ONE_DTYPE, device=device, **LENGTHS)
    grad = random_grad(inputs)
    torch.manual_seed(3)
    out, gradients = gradients_of(inputs, grad)
    for _ in range(REPEATS):
        torch.manual_seed(3)
        again, again_gradients = gradients_of(inputs, grad)
        assert torch.equal(again, out)
        assert all(torch.equal(again_gradients[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", ["projected", "shifted"])
def test_statistics_repeat(kind, device):
    """G9: log density and responsibilities."""
    inputs = make_inputs(kind=kind, dim=16, dtype=ONE_DTYPE, device=device, **LENGTHS)
    inputs.pop("value")
    density, posterior = log_density(inputs), responsibilities(inputs)
    for _ in range(REPEATS):
        assert torch.equal(log_density(inputs), density)
        assert torch.equal(responsibilities(inputs), posterior)


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", CONFIGURATIONS[:8], ids=name_of)
def test_side_streams_and_busy_memory(configuration):
    """G9: four streams at once, each with neighbours that allocate, fill and free."""
    inputs = make_case(configuration, number=1, **LENGTHS)
    grad = random_grad(inputs)
    out, gradients = gradients_of(inputs, grad)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for repeat in range(40):
        with torch.cuda.stream(streams[repeat % 4]):
            torch.full((repeat * 1000 + 1,), float("nan"), device="cuda")
            results.append(gradients_of(inputs, grad))
    torch.cuda.synchronize()
    for again, again_gradients in results:
        assert torch.equal(again, out)
        assert all(torch.equal(again_gradients[name], gradients[name]) for name in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["projected", "shifted"])
def test_a_new_length_compiles_nothing(kind):
    """G9: no stall on a new batch size, number of heads or length, whatever divides it."""
    triton = pytest.importorskip("triton")

    def run(batch, heads, queries, keys):
        inputs = make_inputs(
            kind=kind, batch=batch, heads=heads, queries=queries, keys=keys, dim=16, dtype=BFLOAT16, device="cuda"
        )
        gradients_of(inputs, random_grad(inputs))

    sizes = [(2, 2, 101, 99), (1, 1, 1, 1), (1, 3, 128, 1024), (16, 1, 16, 17), (1, 16, 1, 4096), (3, 5, 7, 8)]
    run(2, 2, 100, 100)
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        for sizes in (
            (2, 2, 101, 99),
            (1, 1, 1, 1),
            (1, 3, 128, 1024),
            (16, 1, 16, 17),
            (1, 16, 1, 4096),
            (3, 5, 7, 8),
        ):
            run(*sizes)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["masks", "dropout"])
def test_no_synchronisation(what):
    """G9: a call waits for nothing: not to choose a path, not to read a mask or a seed."""
    inputs = make_inputs(kind="shifted", dim=16, dtype=BFLOAT16, device="cuda", **LENGTHS)
    if what == "masks":
        inputs["key_mask"] = torch.ones(2, LENGTHS["keys"], dtype=torch.bool, device="cuda")
        inputs["query_mask"] = torch.ones(2, LENGTHS["queries"], dtype=torch.bool, device="cuda")
    else:
        inputs["value"] = inputs["value"].repeat(1, 1, 1, 4)
        inputs["dropout_p"] = 0.1
    inputs["query"].requires_grad_()
    attend(inputs).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
