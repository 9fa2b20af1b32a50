"""Models of which accelerate keeps a part on the CPU or on disk."""

import accelerate
import pytest
import torch
from accelerate.utils import send_to_device
from model_cases import GENERATIVE, KINDS, make_inputs, make_model

from mgk.models.positions import Rotation
from mgk.nn import PRESETS

CPU = torch.device("cpu")
# That the parameters lie on another device than the tokens is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate")


def outputs(model, kind):
    with torch.no_grad():
        return model(**make_inputs(kind, padding_side="left")).logits


def generate(model, kind, **options):
    inputs = make_inputs(kind, padding_side="left")
    inputs.pop("decoder_input_ids", None)
    return model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, **options)


@pytest.mark.parametrize("attention", PRESETS)
def test_an_offloaded_decoder_generates_the_same(attention, tmp_path):
    model = make_model("modern", attention, dtype=torch.float32)
    expected, tokens = outputs(model, "modern"), generate(model, "modern")
    accelerate.disk_offload(model, str(tmp_path), execution_device=CPU)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert torch.equal(outputs(model, "modern"), expected)
    assert torch.equal(generate(model, "modern"), tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["smgk", "smlk"])
def test_every_kind_of_model_is_offloaded(kind, attention):
    model = make_model(kind, attention, dtype=torch.float32)
    expected = outputs(model, kind)
    tokens = generate(model, kind) if kind in GENERATIVE else None
    accelerate.cpu_offload(model, execution_device=CPU)
    assert torch.equal(outputs(model, kind), expected)
    if tokens is not None:
        assert torch.equal(generate(model, kind), tokens)


@pytest.mark.parametrize("attention", ["smgk", "mgk-em", "smlk"])
def test_a_model_is_loaded_where_memory_is_short(attention, tmp_path):
    """`device_map="auto"`: what does not fit stays on disk."""
    model = make_model("modern", attention, dtype=torch.float32, num_hidden_layers=6)
    expected, tokens = outputs(model, "modern"), generate(model, "modern")
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in model.parameters())
    loaded = type(model).from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": size * 2 // 3},
        offload_folder=str(tmp_path / "offload"),
    )
    places = {parameter.device.type for parameter in loaded.parameters()}
    assert places == {"cpu", "meta"}, loaded.hf_device_map
    assert torch.equal(outputs(loaded, "modern"), expected)
    assert torch.equal(generate(loaded, "modern"), tokens)
    static = generate(model, "modern", cache_implementation="static", disable_compile=True)
    assert torch.equal(generate(loaded, "modern", cache_implementation="static", disable_compile=True), static)


def test_a_rotation_moves_with_its_layer():
    """Between layers on different devices accelerate moves the arguments that it can take apart."""
    moved = send_to_device(Rotation(torch.ones(1, 2, 4), torch.zeros(1, 2, 4)), "meta")
    assert isinstance(moved, Rotation)
    assert moved.cos.is_meta
    assert moved.sin.is_meta
