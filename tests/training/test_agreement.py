"""What makes two runs one configuration: the model as it was built, not the name of its architecture."""

import copy
import dataclasses
import hashlib
import json

import pytest
from training_cases import make_config, make_trainer, take_steps

from mgk import recipes
from mgk.commands.sweep.cell import finished
from mgk.models import MGKConfig, architecture
from mgk.models.architectures import ARCHITECTURES
from mgk.training import CheckpointError, evaluate, result
from mgk.training.agreement import free_to_change, recipe_differences, record_of, run_differences, was_packed
from mgk.training.configuration import to_mapping
from mgk.training.resolved_model import (
    FORMER_ARCHITECTURES,
    describe_model,
    model_of_record,
    resolve_model,
    with_model_of_record,
)
from mgk.training.run import finish, write_config

TASKS = ["classification", "pairs", "language", "translation"]


def old(config):
    """The record of a run of before results held their models."""
    values = to_mapping(config)
    del values["data"]["pack"]
    return {"config": values}


@pytest.mark.parametrize("task", TASKS)
def test_a_result_holds_the_model_that_was_built(corpora, tmp_path, task):
    """It is what the recipe resolves to, but for what the corpus decides, and JSON keeps it."""
    config = make_config(task, training={"steps": 4}, validation={"every": 4})
    trainer = make_trainer(config, tmp_path, corpora(task))
    take_steps(trainer, 4)
    found = finish(trainer)
    assert found["format"] == 2
    assert found["model"] == describe_model(trainer.model.config)
    assert found["model"]["hidden_size"] == 16
    assert found["packed"] is False
    assert not found["model"].keys() & {"transformers_version", "id2label", "_name_or_path", "architectures", "dtype"}
    read = result.read(tmp_path / "result.json")
    assert read["model"] == found["model"]
    assert recipe_differences(read, config) == {}
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, changes={"hidden_size": 18}))
    assert "model.hidden_size" in recipe_differences(read, wider)


@pytest.mark.parametrize("content", ["", "[", "[" * 100_000, "7" * 5_000, "[]", '{"recipe": "x"}'])
def test_a_file_that_is_no_result(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"x\.json must (be the JSON of a result|have recipe, row, seed and metrics), got "
    ):
        result.read(tmp_path / "x.json")


def test_every_field_that_decides_a_number_is_described():
    described = describe_model(MGKConfig())
    own = {field.name for field in dataclasses.fields(MGKConfig)} & MGKConfig.__annotations__.keys()
    assert own - {"use_cache"} <= described.keys()
    assert describe_model(architecture("lra-listops"))["num_labels"] == 10
    assert describe_model(architecture("modern", rope_parameters={"rope_type": "default", "rope_theta": 7.0}))[
        "rope_parameters"
    ] == {"rope_type": "default", "rope_theta": 7.0}
    assert json.loads(json.dumps(described)) == described


def test_where_a_value_comes_from_makes_no_difference():
    """From the architecture, the recipe or the command line."""
    named = make_config(model={"architecture": "lra-listops"})
    spelt = make_config(model={"architecture": "lra-listops", "activation_dropout": 0.1, "initialization": "torch"})
    assert run_differences(record_of(named), record_of(spelt)) == {}
    other = make_config(model={"activation_dropout": 0.2})
    assert run_differences(record_of(named), record_of(other)) == {"model.activation_dropout": (0.1, 0.2)}


def test_a_name_that_stands_for_something_else_today_is_another_run(monkeypatch):
    before = record_of(make_config())
    monkeypatch.setitem(ARCHITECTURES, "lra-listops", {**ARCHITECTURES["lra-listops"], "norm_eps": 1e-6})
    assert run_differences(before, record_of(make_config())) == {"model.norm_eps": (1e-5, 1e-6)}


@pytest.mark.parametrize("name", ["lra/listops", "lra/text", "lra/retrieval", "peerread"])
def test_results_of_before_had_no_dropout_after_the_activation(name):
    config = recipes.load(name).config("softmax-2")
    assert resolve_model(config)["activation_dropout"] == 0.1
    assert model_of_record(old(config))["activation_dropout"] == 0.0
    assert run_differences(old(config), record_of(config)) == {"model.activation_dropout": (0.0, 0.1)}
    told = recipes.load(name).config("softmax-2", ["model.activation_dropout=0.3"])
    assert model_of_record(old(told))["activation_dropout"] == 0.3


@pytest.mark.parametrize("name", ["demo", "enwik8", "wikitext103/small", "wikitext2", "iwslt14", "tatoeba", "wmt14"])
def test_other_results_of_before_are_those_of_today(name):
    config = recipes.load(name).config()
    assert run_differences(old(config), record_of(config)) == {}


def test_a_field_that_is_newer_than_the_record_counts_as_its_default():
    record = record_of(make_config())
    del record["model"]["pooling"], record["model"]["shift_init"]
    assert run_differences(record, record_of(make_config())) == {}
    changed = make_config(model={"pooling": "mean-over-length"})
    assert list(run_differences(record, record_of(changed))) == ["model.pooling"]


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"the model of a run must be a mapping, got 'lra-listops'"):
        model_of_record({**record_of(make_config()), "model": "lra-listops"})


@pytest.mark.parametrize("task", ["classification", "pairs"])
def test_layout_is_speed(task):
    """Of these tasks; batches of translation hold other sentences when they are packed."""
    plain = record_of(make_config(task))
    for data in ({"pack": True}, {"pack": False}, {"pad_to": 64}, {"multiple_of": 16}):
        assert run_differences(plain, record_of(make_config(task, data=data))) == {}
        assert run_differences(record_of(make_config(task, data=data)), plain) == {}
    assert list(run_differences(plain, record_of(make_config(task, data={"by_length": False})))) == ["data.by_length"]
    packed = record_of(make_config("translation", data={"pack": True}))
    assert list(run_differences(record_of(make_config("translation")), packed)) == ["data.pack"]
    assert "data.pack" not in free_to_change("language")


def test_what_a_recipe_fixes_has_to_be_so():
    """A recipe that leaves packing and precision to the machine takes both; one that names them does not."""
    run = {**record_of(make_config()), "packed": True, "precision": "bfloat16", "device": "NVIDIA H200"}
    assert recipe_differences(run, make_config()) == {}
    assert recipe_differences(run, make_config(data={"pack": True})) == {}
    assert recipe_differences(run, make_config(data={"pack": False})) == {"data.pack": (True, False)}
    assert recipe_differences(run, make_config(training={"precision": "bf16"})) == {}
    assert recipe_differences(run, make_config(training={"precision": "fp32"})) == {
        "training.precision": ("bfloat16", "fp32")
    }
    told = {**record_of(make_config(training={"precision": "fp32"})), "precision": "float32"}
    assert recipe_differences({**told, "device": "NVIDIA H200"}, make_config()) == {
        "training.precision": ("fp32", "auto")
    }
    # On a CPU that is what the recipe would have chosen.
    assert recipe_differences({**told, "device": "CPU, x86_64, 2 threads"}, make_config()) == {}
    assert not was_packed(old(make_config()))
    assert was_packed(record_of(make_config(data={"pack": True})))


def test_a_checkpoint_of_another_model_is_refused(corpus, tmp_path, monkeypatch):
    """Its shapes fit and its name is the same: it would have gone on silently."""
    config = make_config(training={"steps": 4, "checkpoint_every": 1})
    take_steps(make_trainer(config, tmp_path, corpus), 2)
    make_trainer(config, tmp_path, corpus)
    monkeypatch.setitem(ARCHITECTURES, "lra-listops", {**ARCHITECTURES["lra-listops"], "activation_dropout": 0.2})
    with pytest.raises(CheckpointError, match=r"got another: model\.activation_dropout was 0\.1, is 0\.2"):
        make_trainer(config, tmp_path, corpus)


def test_a_sweep_does_not_take_the_result_of_another_model(corpus, tmp_path, monkeypatch):
    config = make_config(training={"steps": 4}, validation={"every": 4})
    trainer = make_trainer(config, tmp_path, corpus)
    take_steps(trainer, 4)
    finish(trainer)
    assert finished(tmp_path, config, "cpu") is not None
    laid_out = make_config(data={"pack": True}, training={"steps": 4}, validation={"every": 4})
    assert finished(tmp_path, laid_out, "cpu") is not None
    monkeypatch.setitem(ARCHITECTURES, "lra-listops", {**ARCHITECTURES["lra-listops"], "activation_dropout": 0.2})
    with pytest.raises(ValueError, match=r"got one that differs in model\.activation_dropout$"):
        finished(tmp_path, config, "cpu")


def test_an_evaluation_is_of_the_model_that_was_trained(corpus, tmp_path, monkeypatch):
    """Pooling has no weights: a name that stands for another pooling today would be tested with the wrong one."""
    config = make_config(training={"steps": 4}, validation={"every": 4})
    trainer = make_trainer(config, tmp_path, corpus)
    take_steps(trainer, 4)
    found = finish(trainer)
    write_config(tmp_path, config)
    monkeypatch.setattr(evaluate, "open_or_prepare", lambda *_, **__: corpus)
    changed = {**ARCHITECTURES["lra-listops"], "pooling": "mean-over-length", "pooling_length": 3}
    monkeypatch.setitem(ARCHITECTURES, "lra-listops", changed)
    evaluated = evaluate.evaluate_run(tmp_path, device="cpu")
    assert evaluated["metrics"] == found["metrics"]["test"]
    assert evaluated["model"] == found["model"]
    assert run_differences(found, evaluated) == {}


def test_the_model_of_then():
    config = make_config()
    assert with_model_of_record(config, record_of(config)) is config
    then = with_model_of_record(config, old(config))
    assert then.model.changes["activation_dropout"] == 0.0
    assert resolve_model(then) == model_of_record(old(config))
    assert copy.deepcopy(then) == then


THEN = {
    "lra-listops": "eb6c6958a6929c95", "lra-text": "a2370402214f6190", "lra-retrieval": "a2370402214f6190",
    "wikitext103-small": "4b6136642982ff87", "wikitext103-medium": "1ff289043cca1550",
    "iwslt14": "c50fb2c80e626df2", "modern": "a4c999e5fbc8d35b",
}  # fmt: skip


@pytest.mark.parametrize("name", THEN)
def test_what_the_names_stood_for_when_results_did_not_hold_their_models(name):
    """If this fails, a name stands for something new: add what it was to FORMER_ARCHITECTURES, not to this test."""
    model = describe_model(architecture(name, **FORMER_ARCHITECTURES.get(name, {})))
    default = describe_model(MGKConfig())
    told = {key: value for key, value in model.items() if value != default[key]}
    assert hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16] == THEN[name], told


def test_every_architecture_of_then_is_pinned():
    assert FORMER_ARCHITECTURES.keys() <= THEN.keys() <= ARCHITECTURES.keys()
