"""`mgk analyze` as a user runs it."""

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest
import torch
import yaml
from training_cases import make_corpus, make_values
from transformers import BertConfig, BertModel

from mgk.commands.analyze import corpus_batch, open_subject
from mgk.models import (
    MGKForCausalLM,
    MGKForSeq2SeqLM,
    MGKForSequenceClassification,
    MGKForSequencePairClassification,
    architecture,
)
from mgk.training.configuration import RunConfig, from_mapping
from mgk.training.task import build_task

LISTS = {"train": 40, "valid": 12, "test": 12, "minimum": 5, "maximum": 24}
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def trained(place, monkeypatch, run_command):
    """The folder of a tiny run, trained once."""
    monkeypatch.setenv("MGK_CACHE", str(place / "cache"))
    folder = place / "run"
    if not folder.exists():
        values = make_values(
            data={"options": LISTS}, training={"steps": 6, "log_every": 2, "checkpoint_every": 4},
            validation={"every": 3}, schedule={"warmup": 2},
        )  # fmt: skip
        del values["name"]
        (place / "tiny.yaml").write_text(yaml.safe_dump({"title": "A tiny one", **values}))
        run_command("train", place / "tiny.yaml", "--to", folder, "--device", "cpu")
    return folder


def save(kind, folder, name="lra-text", attention="smgk", **changes):
    torch.manual_seed(0)
    kind(architecture(name, attention=attention, **{**SMALL, **changes})).save_pretrained(folder)
    return folder


def refused(printed, message):
    """One line, and no traceback."""
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_the_table_fits_a_narrow_terminal(trained, tmp_path, run_command, monkeypatch):
    """No word is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_command("analyze", trained, "--to", tmp_path, "--device", "cpu").out.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    (names,) = [line.split() for line in lines if line.startswith("layer  ")]
    assert names[:4] == ["layer", "heads", "rank", "rank"]
    assert names[-2:] == ["prior", "distance"]
    assert any(line.startswith("layer 1 ") for line in lines)


def test_analyze_a_run(trained, tmp_path, run_command):
    printed = run_command("analyze", trained, "--to", tmp_path / "here", "--samples", "3", "--device", "cpu")
    assert "effective" in printed.out
    assert "layer 1" in printed.out
    pictures = sorted((tmp_path / "here").glob("*.png"))
    assert {path.stem for path in pictures} == {
        "attention-maps", "curves", "density", "key-projections", "keys", "mixture", "rank", "redundancy",
        "responsibilities", "shifts", "theorem",
    }  # fmt: skip
    assert f"{len(pictures)} figures and analysis.json" in printed.out
    for path in pictures:
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 200, path.name
        assert float((pixels[..., :3].min(axis=-1) < 0.9).mean()) > 0.01, path.name
    content = json.loads((tmp_path / "here" / "analysis.json").read_text())
    assert (content["corpus"], content["split"], content["samples"]) == ("listops", "test", 3)
    assert content["step"] in (3, 6)
    assert content["left_out"] == {}
    assert content["curves"]["points"]["training loss"]
    prior = content["mixture"][0]["prior"]
    weights = open_subject(trained).model.model.layers[0].self_attn.prior.logits.softmax(-1)
    assert torch.allclose(torch.tensor(prior), weights.detach(), atol=1e-6)


def test_the_usual_place_is_beside_the_model(tmp_path, run_command, monkeypatch):
    monkeypatch.setattr("mgk.analysis.draw_all", lambda findings, folder: [])
    folder = save(MGKForSequenceClassification, tmp_path / "model", attention="mlk", max_position_embeddings=32)
    printed = run_command("analyze", folder, "--queries", "8")
    assert "1 x 32 random tokens, since no data of it is at hand" in printed.out
    assert "left out: density: a density needs Gaussian keys, got linear attention in layer 1" in printed.out
    content = json.loads((folder / "analysis" / "analysis.json").read_text())
    assert content["density"] is None
    assert content["rank"][0]["queries"] == [8]
    assert content["rank"][0]["of_queries"] == [32]


def test_a_text_file_is_read_as_bytes(tmp_path):
    folder = save(MGKForSequencePairClassification, tmp_path / "model", "lra-retrieval")
    (tmp_path / "text.txt").write_text("Attention with a mixture of keys")
    subject = open_subject(folder, text=tmp_path / "text.txt", samples=2, tokens=10)
    assert subject.source == "2 x 10 tokens of text.txt"
    assert subject.inputs["input_ids"].tolist() == [
        [byte + 1 for byte in b"Attention "], [byte + 1 for byte in b"with a mix"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [(MGKForCausalLM, "modern"), (MGKForSeq2SeqLM, "iwslt14"), (MGKForSequenceClassification, "lra-text")],
)
def test_random_tokens_serve_every_kind(kind, name, tmp_path):
    from mgk.analysis import record_attention

    folder = save(kind, tmp_path, name, vocab_size=61, **({"decoder_layers": 1} if name == "iwslt14" else {}))
    subject = open_subject(folder, tokens=7)
    record = record_attention(subject.model, **subject.inputs)
    assert record.calls[0].query.shape[2] == 7
    again = open_subject(folder, tokens=7)
    assert torch.equal(subject.inputs["input_ids"], again.inputs["input_ids"])


@pytest.mark.parametrize("task", ["classification", "pairs", "language", "translation"])
def test_batches_of_every_kind_of_corpus(task, tmp_path):
    """They go through the model that the task builds, and hold what the corpus holds."""
    from mgk.analysis import record_attention

    config = from_mapping(RunConfig, make_values(task))
    corpus = make_corpus(task, tmp_path / "corpus")
    model = build_task(config, corpus).build_model()
    inputs, said = corpus_batch(model.config, config, corpus, "test", 2, 12)
    assert said == f"{corpus.name} test, first 2 of it"
    assert inputs["input_ids"].shape[0] == 2
    assert inputs["input_ids"].shape[1] <= 12
    record = record_attention(model, **inputs)
    content = corpus.splits["documents" if task == "pairs" else "test"]
    first = content.sequences["source" if task == "translation" else "text"]
    row = int(corpus.splits["test"].numbers["first"][0]) if task == "pairs" else 0
    tokens = first.tokens[:12] if task == "language" else first[row][:12]
    assert inputs["input_ids"][0, : len(tokens)].tolist() == list(map(int, tokens))
    assert len(record.calls[0].queries(0)) == len(tokens)
    with pytest.raises(ValueError, match="--split must be one of"):
        corpus_batch(model.config, config, corpus, "documents", 1, None)
    with pytest.raises(ValueError, match="--samples must"):
        corpus_batch(model.config, config, corpus, "test", 10**6, None)


def test_folders_that_hold_no_model_of_ours(tmp_path, run_command):
    refused(run_command("analyze", tmp_path / "none", code=1), "or of a saved model, got no such folder")
    refused(run_command("analyze", tmp_path, code=1), "or of a saved model (config.json), got neither there")
    other = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(other).save_pretrained(tmp_path / "bert")
    refused(run_command("analyze", tmp_path / "bert", code=1), "must hold a model of mgk, got model_type 'bert'")


def test_damaged_models(tmp_path, run_command):
    folder = save(MGKForSequenceClassification, tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    content, settings = weights.read_bytes(), config.read_text()
    weights.write_bytes(content[: len(content) // 2])
    refused(run_command("analyze", folder, code=1), "must hold safetensors, got a damaged or foreign file")
    weights.unlink()
    refused(run_command("analyze", folder, code=1), "must hold the weights of the model, model.safetensors, got none")
    config.write_text(settings[:20])
    refused(run_command("analyze", folder, code=1), "config.json must be the JSON of a model, got")
    config.write_text(settings.replace("MGKForSequenceClassification", "Path"))
    refused(run_command("analyze", folder, code=1), "must name an architecture of mgk.models, got Path")


def test_damaged_runs(trained, tmp_path, run_command):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    refused(run_command("analyze", folder, code=1), "must hold a measurement as JSON on each line, got 0")
    for path in folder.glob("checkpoints/best-*/model.safetensors"):
        path.write_bytes(b"x" + path.read_bytes()[1:])
    refused(run_command("analyze", folder, code=1), "must hold the best model of a run, got none (skipped the damaged")
    shutil.rmtree(folder / "checkpoints")
    refused(
        run_command("analyze", folder, code=1), "must hold the best model of a run, got none: has it validated yet?"
    )


def test_bad_options(tmp_path, run_command):
    folder = save(MGKForSequenceClassification, tmp_path / "model")
    refused(
        run_command("analyze", folder, "--text", tmp_path / "none", code=1), "--text must be a file that can be read"
    )
    (tmp_path / "short").write_text("ab")
    refused(
        run_command("analyze", folder, "--text", tmp_path / "short", "--samples", "2", code=1),
        "must hold at least two tokens for each of 2 samples, got 2",
    )
    small = save(MGKForSequenceClassification, tmp_path / "small", vocab_size=61)
    refused(
        run_command("analyze", small, "--text", tmp_path / "short", code=1),
        "--text needs a vocabulary of 256 or more to read bytes, or a tokenizer, got 61",
    )


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["smgk", "mgk"])
def test_a_retrieval_model_of_4096_tokens(attention, tmp_path):
    """2 layers of 4 heads, in a process of its own: under a minute and under 4 GB, figures and imports included."""
    torch.manual_seed(0)
    config = architecture("lra-retrieval", attention=attention, num_attention_heads=4)
    MGKForSequencePairClassification(config).save_pretrained(tmp_path)
    begin = time.monotonic()
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "mgk", "analyze", str(tmp_path), "--device", "cpu"], capture_output=True, text=True,
        check=False, env={"PYTHONPATH": source, "OMP_NUM_THREADS": "2", "HOME": str(tmp_path)},
    )  # fmt: skip
    seconds = time.monotonic() - begin
    # The largest of all children so far, in KiB: an upper bound for this one.
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "analysis" / "analysis.json").read_text())
    assert content["rank"][1]["keys"] == [4096]
    assert content["density"][0]["queries"] == 4096
    print(f"{attention}: {seconds:.1f} s, {gigabytes:.2f} GB")
    assert seconds < 60
    assert gigabytes < 4
