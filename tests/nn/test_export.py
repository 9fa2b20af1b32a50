"""torch.export of layers with a dynamic batch and length, from the default backend."""

import pytest
import torch
from torch.export import Dim, export

import mgk
from mgk.nn import PRESETS
from mgk.nn.presets import LINEAR_PRESETS
from mgk.ops.linear_chunked import CHUNK

LENGTHS = (2, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 9)


def build(name: str, is_causal: bool, **options) -> mgk.MixtureAttention:
    torch.manual_seed(0)
    layer = mgk.build_attention(name, 16, 2, is_causal=is_causal, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def make_arguments(batch: int, length: int) -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    mask = torch.rand(batch, length) > 0.3
    mask[:, 0] = True
    return (torch.randn(batch, length, 16),), {"key_mask": mask}


def check(layer: mgk.MixtureAttention, strict: bool) -> torch.export.ExportedProgram:
    """Export from one batch and length, and run with others."""
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=4096)
    arguments, masks = make_arguments(2, CHUNK + 6)
    axes = {0: batch, 1: length}
    program = export(layer, arguments, masks, dynamic_shapes={"query": axes, "key_mask": axes}, strict=strict)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and "val" in node.meta]
    inputs = [shape for shape in shapes if any(isinstance(size, torch.SymInt) for size in shape)]
    assert len(inputs) == 2, "the batch and the length of the input and of its mask stay dynamic"
    assert all(isinstance(size, torch.SymInt) for shape in inputs for size in shape[:2])
    run = program.module()
    for number, length in enumerate(LENGTHS):
        arguments, masks = make_arguments(2 + number, length)
        expected = layer(*arguments, **masks)
        torch.testing.assert_close(run(*arguments, **masks), expected, rtol=1e-5, atol=1e-5)
    return program


def test_causal_linear_attention_exports_with_a_dynamic_length():
    """Lengths shorter than a chunk and no multiples of one, which padding to chunks must not fix."""
    check(build("smlk", is_causal=True), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR_PRESETS)
def test_causal_linear_attention_exports_when_traced_strictly(name):
    check(build(name, is_causal=True), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"feature_map": "dpfp"}, {"feature_map": "favor"}, {"normalization": "length"}])
def test_every_linear_attention_exports_with_a_dynamic_length(options):
    check(build("mlk", is_causal=True, **options), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_exports_with_a_dynamic_length(name, is_causal):
    program = check(build(name, is_causal), strict=False)
    kernels = {str(node.target) for node in program.graph.nodes}
    if name not in LINEAR_PRESETS:
        # Neither materialises the pairs.
        assert kernels & {"mgk.chunked_attention.default", "aten.scaled_dot_product_attention.default"}


def test_a_mixture_exports_without_its_pairs():
    program = check(build("smgk", is_causal=True), strict=False)
    assert "mgk.chunked_attention.default" in {str(node.target) for node in program.graph.nodes}


def test_a_state_goes_on_in_an_exported_step():
    """The state after an exported call is that of the same call, whatever chunks it was padded to."""

    class Step(torch.nn.Module):
        def forward(self, query, key, value, state):
            return mgk.ops.linear_mixture_step(query, key, value, state=state)

    def make(length: int) -> tuple[torch.Tensor, ...]:
        return (*(torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(3)), state)

    state = torch.rand(2, 2, 4, 5, dtype=torch.float64)
    axes = {2: Dim("length", min=2, max=4096)}
    program = export(Step(), make(70), dynamic_shapes=(axes, axes, axes, None))
    for length in (3, 150):
        arguments = make(length)
        got, expected = program.module()(*arguments), Step()(*arguments)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
