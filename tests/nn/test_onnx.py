"""torch.onnx.export of every preset, run by onnxruntime with other batch sizes and lengths than those exported."""

import pytest
import torch
from torch.export import Dim

import mgk
from mgk.nn import PRESETS

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")
# An export takes seconds. These go through all that is special: shifts and a mask, chunks, one token alone.
IN_EVERY_RUN = {("smgk", True, True), ("smlk", True, True)}
CASES = [
    pytest.param(
        name, is_causal, is_masked, marks=[] if (name, is_causal, is_masked) in IN_EVERY_RUN else [pytest.mark.slow]
    )
    for name in PRESETS
    for is_causal in (False, True)
    for is_masked in (False, True)
]
SHAPES = ((3, 5), (2, 64), (1, 129), (4, 2), (2, 1))


def build(name: str, is_causal: bool, **options) -> mgk.MixtureAttention:
    torch.manual_seed(0)
    layer = mgk.build_attention(name, 16, 2, is_causal=is_causal, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def make_arguments(batch: int, length: int, is_masked: bool) -> dict[str, torch.Tensor]:
    arguments = {"query": torch.randn(batch, length, 16)}
    if is_masked:
        arguments["key_mask"] = torch.rand(batch, length) > 0.3
        arguments["key_mask"][0] = False  # a row that sees no key
        arguments["key_mask"][1:, 0] = True
    return arguments


def export(layer: torch.nn.Module, is_masked: bool) -> torch.onnx.ONNXProgram:
    arguments = make_arguments(2, 70, is_masked)
    axes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=4096)}
    shapes = dict.fromkeys(arguments, axes)
    return torch.onnx.export(layer, (), kwargs=arguments, dynamic_shapes=shapes, dynamo=True, verbose=False)


@pytest.mark.parametrize(("name", "is_causal", "is_masked"), CASES)
def test_a_layer_computes_the_same_in_onnxruntime(name, is_causal, is_masked):
    layer = build(name, is_causal)
    program = export(layer, is_masked)
    for graph_input in program.model.graph.inputs:
        assert [str(size) for size in graph_input.shape[:2]] == ["batch", "length"], "no silently fixed size"
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for batch, length in SHAPES:
        arguments = make_arguments(batch, length, is_masked)
        (got,) = session.run(None, {name: tensor.numpy() for name, tensor in arguments.items()})
        expected = layer(**arguments)
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True}, {"learn_variance": True}, {"variance_scale": (1.0, 3.0)}, {"num_kv_heads": 1}],
    ids=str,
)
def test_every_option_of_a_layer_is_exported(options):
    layer = build("smgk", True, **options)
    session = onnxruntime.InferenceSession(export(layer, True).model_proto.SerializeToString())
    for batch, length in SHAPES:
        arguments = make_arguments(batch, length, True)
        (got,) = session.run(None, {name: tensor.numpy() for name, tensor in arguments.items()})
        torch.testing.assert_close(torch.from_numpy(got), layer(**arguments), rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_a_backend_without_nodes_in_onnx_says_so():
    with pytest.raises(Exception, match="backend='chunked' cannot do an export to ONNX: use 'auto' or 'reference'"):
        export(build("smgk", False, backend="chunked"), False)
