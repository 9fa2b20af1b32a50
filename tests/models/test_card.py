"""The README.md beside a saved model."""

import pytest
import torch
from huggingface_hub import ModelCard
from model_cases import KINDS, make_inputs, make_model
from transformers import AutoModel

from mgk.models import MGKForCausalLM, card

every_kind = pytest.mark.parametrize("kind", KINDS)


def table(text):
    """Names and values of the first table of a card."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line != "| | |"]
    return dict(row for row in rows if len(row) == 2)


@every_kind
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smlk"])
def test_a_saved_model_has_a_card(kind, attention, tmp_path):
    """It says what the model says, and reads back as the card that was written."""
    model = make_model(kind, attention, dtype=torch.float32, num_key_value_heads=2)
    model.save_pretrained(tmp_path)
    found = ModelCard.load(tmp_path / "README.md")
    assert found.data.library_name == "transformers"
    assert found.data.tags == ["mgk", f"attention-{attention}"]
    assert found.data.to_dict() == card.metadata(model).to_dict()
    said = table(found.text)
    assert said["attention"] == f"`{attention}`"
    assert said["heads"] == "4, 2 of keys and values"
    assert said["keys per position"] == ("1" if attention == "softmax" else "2")
    assert said["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert f"from mgk.models import {type(model).__name__}" in found.text
    assert ("cache" in said) == (kind not in ("classifier", "matcher"))


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
@pytest.mark.parametrize("kind", ["modern", "translation"])
def test_the_cache_that_a_card_names_is_the_one_that_is_filled(attention, kind):
    model = make_model(kind, attention, dtype=torch.float32, num_key_value_heads=2)
    inputs = make_inputs(kind, batch=1)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    cache = getattr(cache, "self_attention_cache", cache)
    tokens = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // tokens
    assert dict(card.facts(model))["cache"] == f"{held:,} bytes per token, in float32"


def test_loading_as_the_card_says(tmp_path):
    make_model("modern", dtype=torch.float32).save_pretrained(tmp_path)
    code = ModelCard.load(tmp_path / "README.md").text.split("```python\n")[1].split("```")[0]
    names = {}
    exec(code.replace("path/of/this/folder", str(tmp_path)), names)
    assert type(names["model"]) is MGKForCausalLM


def test_a_card_that_somebody_wrote_stays(tmp_path):
    """Ours is written again when the model changes, until a person has touched it."""
    path = tmp_path / "README.md"
    make_model("modern", "smgk").save_pretrained(tmp_path)
    make_model("modern", "mgk").save_pretrained(tmp_path)
    assert ModelCard.load(path).data.tags == ["mgk", "attention-mgk"]
    assert card.is_ours(path)
    for changed in (path.read_text().replace("## Licence", "## License"), "Mine.\n", "", path.read_text() + "More.\n"):
        path.write_text(changed)
        make_model("modern", "smgk").save_pretrained(tmp_path)
        assert path.read_text() == changed
    path.write_bytes(b"\xff\xfe not text")
    make_model("modern", "smgk").save_pretrained(tmp_path)
    assert path.read_bytes() == b"\xff\xfe not text"


def test_only_the_first_process_writes(tmp_path):
    make_model("modern").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


def test_a_trunk_has_a_card_too(tmp_path):
    model = make_model("translation")
    model.save_pretrained(tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "trunk")
    assert ModelCard.load(tmp_path / "trunk" / "README.md").data.pipeline_tag == "feature-extraction"
