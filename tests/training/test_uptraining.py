"""A converted model that is trained further: the loop, its checkpoints, distillation, and what it says of itself."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from training_cases import make_trainer, take_steps
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import mgk
from mgk.cli import app
from mgk.data import subwords
from mgk.training import Trainer, evaluate_run, fit, open_or_prepare
from mgk.training.configuration import RunConfig, from_mapping, merge
from mgk.training.distributed import build_fabric
from mgk.training.uptraining import Uptraining, cache_bytes_per_token
from uptraining_cases import text, write_model, write_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def corpus(model, texts, tmp_path_factory):
    return open_or_prepare(make_config(model).data, source=texts, folder=tmp_path_factory.mktemp("cache") / "c")


def make_config(weights, **changes):
    values = {
        "name": "tiny", "task": "uptraining",
        "data": {"corpus": "subword-files", "options": {"tokenizer": str(weights)}, "longest": 16},
        "model": {"architecture": "converted", "attention": "smgk", "num_attention_heads": 4, "num_key_value_heads": 1},
        "conversion": {"model": str(weights), "fade_steps": 4},
        "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"},
        "training": {"steps": 6, "batch_size": 4, "log_every": 2, "checkpoint_every": 3},
        "validation": {"every": 3, "batch_size": 4, "metric": "loss"},
    }  # fmt: skip
    return from_mapping(RunConfig, merge(values, changes))


def batch_of(trainer):
    return trainer.batches.batch(0, 0)


def test_a_run_from_beginning_to_end(model, texts, corpus, tmp_path):
    """Train, test, save; the best model is one that mgk.load_converted loads, with its tokenizer and its card."""
    config = make_config(model)
    found = fit(config, tmp_path, corpus, build_fabric(device="cpu"), command="mgk uptrain tiny")
    assert found["metrics"]["test"]["perplexity"] == pytest.approx(math.exp(found["metrics"]["test"]["loss"]))
    # One key/value head of 8 numbers, keys and values, two layers, two bytes.
    assert found["cache_bytes_per_token"] == 8 * 2 * 2 * 2
    assert found["model"]["num_key_value_heads"] == 1
    assert len(found["model"]["weights_sha256"]) == 64
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(found))

    best = tmp_path / "checkpoints" / f"best-{found['best_step']:08}"
    loaded = mgk.load_converted(best).eval()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(best)((texts / "test.txt").read_text())["input_ids"])
    starts = range(0, len(tokens) - 1, 16)
    nats = 0.0
    for start in starts:
        window = tokens[start : start + 17]
        with torch.no_grad():
            nats += float(F.cross_entropy(loaded(window[None, :-1]).logits[0].double(), window[1:], reduction="sum"))
    assert nats / (len(tokens) - 1) == pytest.approx(found["metrics"]["test"]["loss"], rel=1e-5)
    # As if the first token, which nothing predicts, cost as much as the others.
    bits = nats * len(tokens) / (len(tokens) - 1) / math.log(2) / len((texts / "test.txt").read_bytes())
    assert found["metrics"]["test"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    card = (best / "README.md").read_text()
    assert "mgk.load_converted" in card
    assert "mgk uptrain tiny" in card

    again = evaluate_run(tmp_path, source=texts, device="cpu")
    assert again["metrics"]["loss"] == pytest.approx(found["metrics"]["test"]["loss"], rel=1e-6)


def test_it_learns(model, corpus, tmp_path):
    config = make_config(model, training={"steps": 40}, optimizer={"lr": 3e-3}, validation={"every": 40})
    trainer = make_trainer(config, tmp_path, corpus, Trainer)
    before = trainer.evaluate("valid")["loss"]
    take_steps(trainer, 40)
    assert trainer.evaluate("valid")["loss"] < before - 0.5


@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_stopped_and_resumed_is_the_same_run(model, corpus, tmp_path, distillation):
    """Weights, losses and the start that fades, to the bit; the fading goes on over the checkpoint."""
    config = make_config(model, conversion={"distillation": distillation})
    whole = make_trainer(config, tmp_path / "whole", corpus, Trainer)
    for _ in whole.steps():
        pass
    first = make_trainer(config, tmp_path / "halves", corpus, Trainer)
    take_steps(first, 3)
    first.validate()
    first.save()
    second = make_trainer(config, tmp_path / "halves", corpus, Trainer)
    assert second.state.step == 3
    starts = {name: int(value) for name, value in second.model.state_dict().items() if name.endswith("steps_left")}
    assert set(starts.values()) == {1}
    for _ in second.steps():
        pass
    expected = whole.model.state_dict()
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert second.state.best == whole.state.best


def test_the_loss_of_distillation(model, corpus, tmp_path):
    """The formula of the docstring, written out; only what was converted gets gradients."""
    config = make_config(model, conversion={"distillation": 0.3, "temperature": 2.0})
    trainer = make_trainer(config, tmp_path, corpus, Trainer)
    batch = batch_of(trainer)
    count = torch.tensor(float(batch["shift_labels"].numel()))
    loss = trainer.task.loss(trainer.model, batch, count)
    loss.backward()
    original = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        now, before = trainer.model(batch["input_ids"]).logits.double(), original(batch["input_ids"]).logits.double()
    p, q = (before / 2).softmax(-1), (now / 2).softmax(-1)
    divergence = (p * (p / q).log()).sum(-1).mean()
    entropy = F.cross_entropy(now.flatten(0, 1), batch["shift_labels"].flatten())
    assert float(loss) == pytest.approx(float(0.7 * entropy + 0.3 * 4 * divergence), rel=1e-5)
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    assert all(parameter.grad is None for parameter in trainer.task.teacher.parameters())
    assert not any(name.startswith("teacher") for name in trainer.model.state_dict())


@pytest.mark.parametrize("attention", ["softmax-mgk", "gaussian", "smgk"])
def test_the_first_step_is_the_old_model(model, corpus, tmp_path, attention):
    """With all heads kept, exact and near starts have nothing to learn from the model that they were."""
    config = make_config(
        model, model={"attention": attention, "num_key_value_heads": None},
        conversion={"distillation": 1.0, "perturbation": 0.0},
    )  # fmt: skip
    trainer = make_trainer(config, tmp_path, corpus, Trainer)
    loss = trainer.task.loss(trainer.model, batch_of(trainer), torch.tensor(1.0))
    assert abs(float(loss)) < 1e-4


@pytest.mark.parametrize(
    ("attention", "components", "numbers"), [("softmax", 1, 2), ("smgk", 2, 2), ("smgk", 4, 2), ("mgk", 2, 3)]
)
def test_bytes_of_the_cache(model, attention, components, numbers):
    """One key a token for shifted keys, M for projected ones; 8 numbers each, two layers, two bytes."""
    converted = AutoModelForCausalLM.from_pretrained(model)
    assert cache_bytes_per_token(converted) == 2 * 8 * 2 * 2 * 2
    mgk.convert(converted, attention, num_kv_heads=1, components=components)
    assert cache_bytes_per_token(converted) == numbers * 8 * 2 * 2


def test_a_skipped_update_is_explained(model, corpus, tmp_path):
    """The diagnosis of the loop works with models of other libraries too."""
    trainer = make_trainer(make_config(model), tmp_path, corpus, Trainer)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan
    take_steps(trainer, 1)
    assert trainer.state.skipped == 1
    line = json.loads((tmp_path / "skipped.jsonl").read_text())
    assert math.isnan(line["batches"][0]["loss_now"])


def test_mgk_uptrain(model, texts, tmp_path, monkeypatch):
    """mgk uptrain trains, goes on, and leaves a run that mgk evaluate tests."""
    monkeypatch.setenv("MGK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MGK_WEIGHTS", str(model.parent))
    monkeypatch.chdir(tmp_path)
    small = ["data.longest=16", "training.batch_size=4", "training.accumulate=1", "conversion.fade_steps=2"]
    small += ["schedule.warmup=1", "validation.every=2"]
    options = ["--data", str(texts), "--attention", "smgk", "--kv-heads", "1", "--components", "3", "--distill", "0.5"]
    options += ["--device", "cpu"]
    run = tmp_path / "runs" / "uptraining" / "tiny" / "smgk-4+num_components=3+num_key_value_heads=1" / "seed-0"
    done = CliRunner().invoke(app, ["uptrain", "tiny", *small, "training.steps=2", *options])
    assert done.exit_code == 0, done.output
    found = json.loads((run / "result.json").read_text())
    assert found["recipe"] == "uptraining/tiny"
    assert found["config"]["conversion"]["distillation"] == 0.5
    assert found["config"]["conversion"]["model"] == "tiny"
    assert str(tmp_path) not in json.dumps(found)
    done = CliRunner().invoke(app, ["uptrain", "tiny", *small, "training.steps=2", *options])
    assert done.exit_code == 0, done.output
    assert json.loads((run / "result.json").read_text())["steps"] == 2
    done = CliRunner().invoke(app, ["evaluate", str(run), "--data", str(texts), "--device", "cpu"])
    assert done.exit_code == 0, done.output


WRONG = [
    ({"conversion": None}, "conversion must be given for uptraining, with model.architecture=converted"),
    ({"model": {"architecture": "modern"}}, "conversion must be given for uptraining, with model.architecture=conver"),
    ({"conversion": {"fade_steps": 7}}, "conversion.fade_steps must be at most training.steps=6"),
    ({"conversion": {"distillation": 1.5}}, r"conversion.distillation must lie in \[0, 1\], got 1.5"),
    ({"conversion": {"temperature": 0.0}}, "conversion.temperature must be positive and finite, got 0"),
    ({"conversion": {"start": "soon"}}, "conversion.start must be one of auto, exact, near, immediate, got 'soon'"),
    ({"data": {"pack": True}}, "data.pack must be false or left out for uptraining"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_bad_configurations(model, changes, said):
    with pytest.raises(ValueError, match=said):
        make_config(model, **changes)


def test_bad_models(model, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"model of a conversion must have the keys attention, .* got 'dropout'"):
        Uptraining(make_config(model, model={"dropout": 0.1}), corpus).build_model()
    with pytest.raises(ValueError, match=r"data\.longest must be at most the model's 64, got 65"):
        Uptraining(make_config(model, data={"longest": 65}), corpus).build_model()
    other = write_model(tmp_path / "other", vocab_size=200)
    with pytest.raises(ValueError, match=r"data\.corpus must be made with the tokenizer of .*, whose model knows 200 "):
        Uptraining(make_config(other), corpus).build_model()
    with pytest.raises(ValueError, match=r"a model must be a folder with a config\.json, or a name on the Hub, got"):
        Uptraining(make_config(tmp_path / "nowhere"), corpus).build_model()


def test_other_tasks_are_what_they_were():
    """A run that converts nothing has no trace of it in its configuration."""
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    assert "conversion" in fields
    from training_cases import make_config as make_other

    from mgk.training import to_mapping

    assert "conversion" not in to_mapping(make_other())


def test_text_of_wikipedia(model, tmp_path, monkeypatch):
    """WikiText-2 to train on, WikiText-103 to be tried on; pieces of a text are its tokens."""
    for name in ("wikitext-2", "wikitext-103"):
        (tmp_path / name).mkdir()
        for split in ("train", "valid", "test"):
            (tmp_path / name / f"wiki.{split}.tokens").write_text(text(9, seed=len(name) + len(split)))
    monkeypatch.setattr(subwords, "PIECE", 50)
    options = {"tokenizer": str(model), "enwik8_bytes": 0}
    subwords.prepare_wiki(tmp_path, tmp_path / "prepared", **options)
    corpus = mgk.data.load(tmp_path / "prepared")
    assert set(corpus.splits) == {"train", "valid", "test"}
    for split, name in (("train", "wikitext-2"), ("valid", "wikitext-103"), ("test", "wikitext-103")):
        tokens = corpus.splits[split].sequences["text"].tokens
        written = (tmp_path / name / f"wiki.{split}.tokens").read_text()
        assert subwords.decode(corpus, "text", tokens) == written
        assert corpus.manifest["facts"][f"{split}: bytes"] == len(written)
    with pytest.raises(ValueError, match="tokenizer must be the folder of a model, or its name on the Hub, got None"):
        subwords.prepare_files(write_texts(tmp_path / "files"), tmp_path / "other")
    with pytest.raises(ValueError, match=r"enwik8_bytes must be an integer in \[0, 90,000,000\], got -1"):
        subwords.prepare_wiki(tmp_path, tmp_path / "other", **{**options, "enwik8_bytes": -1})
