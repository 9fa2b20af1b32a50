"""torch.onnx.export of models with a dynamic batch and length, run by onnxruntime with others."""

import pytest
import torch
from model_cases import make_inputs, make_model
from torch.export import Dim

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = [
    ("classifier", "smgk"),
    pytest.param("classifier", "mgk-hard", marks=pytest.mark.slow),
    pytest.param("classifier", "mlk", marks=pytest.mark.slow),
    pytest.param("matcher", "smgk", marks=pytest.mark.slow),
    pytest.param("modern", "smgk", marks=pytest.mark.slow),
    pytest.param("modern", "mlk", marks=pytest.mark.slow),
    pytest.param("wikitext", "mgk", marks=pytest.mark.slow),
    pytest.param("translation", "smgk", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_a_model_computes_the_same_in_onnxruntime(kind, attention):
    """With an attention mask; a decoder without its cache."""
    options = {} if kind in ("classifier", "matcher") else {"use_cache": False}
    model = make_model(kind, attention, dtype=torch.float32, initializer_range=0.1, num_hidden_layers=1)
    inputs = make_inputs(kind, tokens=70, padding_side="right")
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs} | dict.fromkeys(options)
    program = torch.onnx.export(
        model, (), kwargs={**inputs, **options}, dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    for graph_input in program.model.graph.inputs:
        assert not any(isinstance(size, int) for size in graph_input.shape), "no silently fixed size"
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for tokens, side in ((9, "left"), (9, "right"), (130, "left"), (130, "right")):
        inputs = make_inputs(kind, tokens=tokens, padding_side=side, seed=tokens)
        with torch.no_grad():
            expected = model(**inputs, **options).logits
        got = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-5, atol=1e-5)
