"""Every wrong value of a configuration is refused, before anything runs, by its name, with what is expected."""

import dataclasses
import errno
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from training_cases import KINDS, make_config, make_trainer, make_values

from mgk.data import Sequences
from mgk.data.store import Split
from mgk.recipes import load, names
from mgk.training import build_fabric, fit
from mgk.training.configuration import (
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    differences,
    from_mapping,
    merge,
    override,
    parse_yaml,
    read_yaml,
    to_mapping,
)
from mgk.training.run import write_config


def refuse(expected, kind=ValueError, task="classification", **changes):
    with pytest.raises(kind, match=expected) as caught:
        make_config(task, **changes)
    assert type(caught.value) is kind


def refuse_at_start(expected, folder, corpus, task="classification", **changes):
    """What only the model or the data can know."""
    with pytest.raises(ValueError, match=expected):
        make_trainer(make_config(task, **changes), folder, corpus)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"optimiser": {}}, r"^optimiser is not a key \(did you mean 'optimizer'\?\)$"),
            ({"sead": 3}, r"^sead is not a key \(did you mean 'seed'\?\)$"),
            (
                {"optimizer": {"learning_rate": 1}},
                r"^optimizer\.learning_rate is not a key: there are lr, betas, ",
            ),
            ({"optimizer": {"beta": 1}}, r"^optimizer\.beta is not a key \(did you mean 'betas'\?\)$"),
            ({"training": {"batchsize": 1}}, r"^training\.batchsize is not a key \(did you mean 'batch_size'\?\)$"),
            ({"training": {"grad_clip_norm": 1}}, r"^training\.grad_clip_norm is not a key \(did you mean 'clip_norm'"),
            ({"validation": {"evry": 1}}, r"^validation\.evry is not a key \(did you mean 'every'\?\)$"),
            ({"data": {"corpora": "x"}}, r"^data\.corpora is not a key \(did you mean 'corpus'\?\)$"),
            ({"schedule": {"warm_up": 1}}, r"^schedule\.warm_up is not a key \(did you mean 'warmup'\?\)$"),
            ({"schedule": {3: 1}}, r"^schedule\.3 is not a key: there are kind, warmup, initial$"),
            ({"xyz": 1}, r"^xyz is not a key: there are name, row, task, data, "),
        ],
    )
    def test_with_the_nearest_one(self, changes, expected):
        refuse(expected, **{str(key): value for key, value in changes.items()})

    def test_of_the_model(self, tmp_path, corpus):
        expected = "MGKConfig has no key 'hiden_size': did you mean 'hidden_size'"
        refuse_at_start(expected, tmp_path, corpus, model={"hiden_size": 8})

    @pytest.mark.parametrize(
        "key", ["name", "task", "data", "model", "optimizer", "schedule", "training", "validation"]
    )
    def test_a_key_that_is_missing(self, key):
        values = make_values()
        del values[key]
        with pytest.raises(ValueError, match=f"^{key} must be given, got nothing$"):
            from_mapping(RunConfig, values)

    def test_a_nested_one_that_is_missing(self):
        refuse(r"^optimizer\.lr must be given, got nothing$", optimizer={"lr": None})
        refuse(r"^model\.architecture must be given, got nothing$", model={"architecture": None})
        refuse(r"^validation\.metric must be given, got nothing$", validation={"metric": None})


class TestTypes:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"optimizer": {"lr": "1e-3"}}, r"^optimizer\.lr must be a number, got '1e-3'$"),
            ({"optimizer": {"lr": True}}, r"^optimizer\.lr must be a number, got True$"),
            ({"optimizer": {"lr": [1e-3]}}, r"^optimizer\.lr must be a number, got \[0\.001\]$"),
            ({"optimizer": {"betas": 0.9}}, r"^optimizer\.betas must be a list of 2, got 0\.9$"),
            ({"optimizer": {"betas": [0.9]}}, r"^optimizer\.betas must be a list of 2, got \[0\.9\]$"),
            ({"optimizer": {"betas": [0.9, "x"]}}, r"^optimizer\.betas must be a number, got 'x'$"),
            ({"optimizer": 3}, r"^optimizer must be a mapping, got 3$"),
            ({"training": {"steps": True}}, r"^training\.steps must be an integer, got True$"),
            ({"training": {"steps": 10.0}}, r"^training\.steps must be an integer, got 10\.0$"),
            ({"training": {"steps": "10"}}, r"^training\.steps must be an integer, got '10'$"),
            ({"training": {"clip_norm": "none"}}, r"^training\.clip_norm must be a number, got 'none'$"),
            ({"training": {"compile": 1}}, r"^training\.compile must be true or false, got 1$"),
            ({"training": {"batch_size": False}}, r"^training\.batch_size must be an integer, got False$"),
            ({"data": {"corpus": 3}}, r"^data\.corpus must be text, got 3$"),
            ({"data": {"by_length": "no"}}, r"^data\.by_length must be true or false, got 'no'$"),
            ({"data": {"options": [1]}}, r"^data\.options must be a mapping, got \[1\]$"),
            ({"data": {"workers": None}}, r"^data\.workers must be an integer, got None$"),
            ({"name": 3}, r"^name must be text, got 3$"),
            ({"seed": "0"}, r"^seed must be an integer, got '0'$"),
            ({"seed": True}, r"^seed must be an integer, got True$"),
            ({"model": {"architecture": 3}}, r"^model\.architecture must be text, got 3$"),
        ],
    )
    def test_nothing_is_guessed(self, changes, expected):
        refuse(expected, TypeError, **changes)

    def test_not_even_a_mapping(self):
        with pytest.raises(TypeError, match=r"^the configuration must be a mapping, got \[\]$"):
            from_mapping(RunConfig, [])

    def test_an_integer_is_a_number(self):
        found = make_config(optimizer={"lr": 1, "betas": [0, 0.5]}).optimizer
        assert (found.lr, found.betas) == (1.0, (0.0, 0.5))
        assert all(isinstance(each, float) for each in (found.lr, *found.betas))

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"schedule": {"kind": "cosin"}}, r"kind must be one of onecycle, .*'cosin' \(did you mean 'cosine'"),
            ({"training": {"precision": "fp8"}}, r"precision must be one of auto, fp32, bf16, fp16, got 'fp8'"),
            ({"training": {"precision": 16}}, r"training\.precision must be one of auto, fp32, bf16, fp16, got 16"),
            ({"validation": {"metric": []}}, r"validation\.metric must be one of accuracy, loss, bleu, got \[\]"),
        ],
    )  # fmt: skip
    def test_choices(self, changes, expected):
        refuse(expected, **changes)

    def test_the_task(self):
        expected = r"task must be one of classification, .*got 'langauge' \(did you mean 'language'\?\)"
        with pytest.raises(ValueError, match=expected):
            from_mapping(RunConfig, {**make_values(), "task": "langauge"})

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"hidden_size": "64"}, "hidden_size.*expected int, got str"),
            ({"num_attention_heads": True}, "num_attention_heads.*expected int, got bool"),
            ({"dropout": "0.1"}, "dropout.*expected float, got str"),
            ({"attention": "sgmk"}, r"attention must be one of .* got 'sgmk' \(did you mean 'smgk'\?\)"),
            ({"attention": "linear", "learn_variance": True}, "learn_variance must be false with attention='linear'"),
            ({"architecture": "lra-listop"}, "must be one of lra-listops, .*got 'lra-listop'"),
        ],
    )
    def test_of_the_model(self, tmp_path, corpus, changes, expected):
        refuse_at_start(expected, tmp_path, corpus, model=changes)


class TestValues:
    def test_heads_that_do_not_divide_the_width(self, tmp_path, corpus):
        changes = {"hidden_size": 30, "num_attention_heads": 4, "head_dim": None}
        expected = "hidden_size must be a multiple of num_attention_heads, or head_dim given, got 30 and 4"
        refuse_at_start(expected, tmp_path, corpus, model=changes)

    def test_a_warm_up_longer_than_the_run(self):
        refuse(r"^schedule\.warmup must be at most training\.steps=80, got 81$", schedule={"warmup": 81})
        assert make_config(schedule={"warmup": 80})

    @pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        "name", ["optimizer.lr", "optimizer.eps", "training.clip_norm", "data.timeout"]
    )  # fmt: skip
    def test_what_must_be_positive_and_finite(self, name, value):
        section, key = name.split(".")
        refuse(rf"^{re.escape(name)} must be positive and finite, got ", **{section: {key: value}})

    @pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf])
    @pytest.mark.parametrize("name", ["optimizer.weight_decay", "schedule.initial"])
    def test_what_must_not_be_negative(self, name, value):
        section, key = name.split(".")
        refuse(rf"^{re.escape(name)} must be finite and not negative, got ", **{section: {key: value}})

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"optimizer": {"betas": [1.0, 0.9]}}, r"^optimizer\.betas must lie in \[0, 1\), got 1\.0$"),
            ({"optimizer": {"betas": [0.9, math.nan]}}, r"^optimizer\.betas must lie in \[0, 1\), got nan$"),
            ({"training": {"steps": 0}}, r"^training\.steps must be at least 1, got 0$"),
            ({"training": {"accumulate": 0}}, r"^training\.accumulate must be at least 1, got 0$"),
            ({"training": {"log_every": -1}}, r"^training\.log_every must be at least 1, got -1$"),
            ({"training": {"checkpoint_every": 0}}, r"^training\.checkpoint_every must be at least 1, got 0$"),
            ({"training": {"keep_checkpoints": 0}}, r"^training\.keep_checkpoints must be at least 1, got 0$"),
            ({"training": {"max_skipped": -1}}, r"^training\.max_skipped must be at least 0, got -1$"),
            ({"training": {"batch_size": 0}}, r"^training\.batch_size must be at least 1, got 0$"),
            ({"training": {"max_loss_ratio": 1}}, r"^training\.max_loss_ratio must be above 1, got 1\.0$"),
            ({"training": {"max_loss_ratio": math.nan}}, r"^training\.max_loss_ratio must be above 1, got nan$"),
            ({"training": {"label_smoothing": 1.0}}, r"^training\.label_smoothing must lie in \[0, 1\), got 1\.0$"),
            ({"training": {"label_smoothing": 0.1}}, r"^training\.label_smoothing must be 0 for classif\w+, got 0\.1"),
            ({"training": {"batch_size": None}}, r"batch_size must be given for classification and .*, got None"),
            ({"training": {"max_tokens": 10}}, r"batch_size must be given .* training\.max_tokens not, got 8 and 10"),
            ({"validation": {"every": 0}}, r"^validation\.every must be at least 1, got 0$"),
            ({"validation": {"batch_size": 0}}, r"^validation\.batch_size must be at least 1, got 0$"),
            ({"validation": {"limit": 0}}, r"^validation\.limit must be at least 1, got 0$"),
            ({"validation": {"metric": "bleu"}}, r"metric must be accuracy or loss for classification, got 'bleu'$"),
            ({"schedule": {"warmup": -1}}, r"^schedule\.warmup must be at least 0, got -1$"),
            ({"schedule": {"kind": "inverse_sqrt", "warmup": 0}}, r"must be at least 1 for inverse_sqrt, got 0$"),
            ({"schedule": {"initial": 0.1}}, r"^schedule\.initial must be at most optimizer\.lr=0\.001, got 0\.1$"),
            ({"data": {"longest": 0}}, r"^data\.longest must be at least 1, got 0$"),
            ({"data": {"workers": -1}}, r"^data\.workers must be at least 0, got -1$"),
            ({"data": {"pad_to": 63}}, r"^data\.pad_to must be at least data\.longest=64, got 63$"),
            (
                {"data": {"pad_to": 64, "pack": True}},
                r"^data\.pad_to must be left out where data\.pack is true, got 64$",
            ),
            ({"seed": -1}, r"^seed must be at least 0, got -1$"),
            ({"seed": 2**63}, r"^seed must be below 2\*\*63, got 9223372036854775808$"),
        ],
    )  # fmt: skip
    def test_what_must_lie_in_a_range(self, changes, expected):
        refuse(expected, **changes)

    def test_the_units_and_metrics_of_other_tasks(self):
        refuse("max_tokens must be given for translation", task="translation", training={"max_tokens": None})
        refuse("metric must be loss or bleu for translation", task="translation", validation={"metric": "accuracy"})
        refuse("metric must be loss for language", task="language", validation={"metric": "bleu"})
        refuse("data.pack must be false or left out for language", task="language", data={"pack": True})

    @pytest.mark.parametrize(("accumulate", "size"), [(3, 8), (16, 8)])
    def test_batches_that_cannot_be_shared_out(self, tmp_path, corpus, accumulate, size):
        expected = rf"training\.batch_size must be a multiple of ranks \* accumulate = 1 \* {accumulate}, got {size}"
        refuse_at_start(expected, tmp_path, corpus, training={"accumulate": accumulate, "batch_size": size})

    def test_tokens_that_cannot_be_shared_out(self, tmp_path, corpora):
        expected = r"training\.max_tokens must be a multiple of ranks \* accumulate = 1 \* 3, got 64"
        changes = {"training": {"accumulate": 3}}
        refuse_at_start(expected, tmp_path, corpora("translation"), "translation", **changes)

    @pytest.mark.parametrize("split", ["valid", "test"])
    def test_a_corpus_without_samples_to_validate_or_test_on(self, tmp_path, corpus, split):
        """It would be found out when hours of training are over."""
        empty = Split({"text": Sequences(np.zeros(0, np.uint8), np.zeros(1, np.int64))}, {"labels": np.zeros(0, int)})
        without = dataclasses.replace(corpus, splits={**corpus.splits, split: empty})
        refuse_at_start(f"the corpus listops must hold samples of every split, got none of {split}", tmp_path, without)

    def test_a_corpus_for_another_task(self, tmp_path, corpora):
        expected = "data.corpus must be one for classification, got enwik8, which is for language"
        refuse_at_start(expected, tmp_path, corpora("language"))


UNWRITABLE = "the run folder must be a folder that can be written to, got "


class TestPaths:
    def test_a_folder_that_cannot_be_made(self, tmp_path, corpus):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=f"{UNWRITABLE}.*file/run: Not a directory"):
            fit(make_config(), tmp_path / "file" / "run", corpus, build_fabric(device="cpu"))
        with pytest.raises(ValueError, match=f"{UNWRITABLE}.*file: File exists"):
            fit(make_config(), tmp_path / "file", corpus, build_fabric(device="cpu"))

    def test_a_folder_that_is_not_writable(self, tmp_path, corpus, monkeypatch):
        # Who tests as root may write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ValueError, match=f"{UNWRITABLE}.*: Permission denied"):
            fit(make_config(), tmp_path, corpus, build_fabric(device="cpu"))
        assert list(tmp_path.iterdir()) == []

    def test_no_room_for_the_configuration(self, tmp_path, corpus, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(ValueError, match=r"the run folder .* must have room for config\.yaml, got .*No space left"):
            write_config(tmp_path, make_config())

    def test_files_that_cannot_be_read(self, tmp_path):
        with pytest.raises(ValueError, match=r"none\.yaml must be a readable text file, got .*No such file"):
            read_yaml(tmp_path / "none.yaml")
        (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=r"x\.yaml must be a readable text file, got "):
            read_yaml(tmp_path / "x.yaml")
        (tmp_path / "x.yaml").write_text("- a\n- b\n")
        with pytest.raises(ValueError, match=r"x\.yaml must hold a mapping, got list"):
            read_yaml(tmp_path / "x.yaml")
        (tmp_path / "x.yaml").write_text("a: [")
        with pytest.raises(ValueError, match=r"x\.yaml must be YAML, got "):
            read_yaml(tmp_path / "x.yaml")

    def test_devices_that_are_not_there(self):
        with pytest.raises(ValueError, match="--device must be one of auto, cpu, cuda, got 'gpu'"):
            build_fabric(device="gpu")
        with pytest.raises(ValueError, match="--strategy must be one of auto, ddp, fsdp2, got 'fsdp'"):
            build_fabric(device="cpu", strategy="fsdp")
        with pytest.raises(ValueError, match="--devices and --nodes must be at least 1, got 0 and 1"):
            build_fabric(device="cpu", devices=0)


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1e-4", 1e-4), ("1E-4", 1e-4), ("1e4", 1e4), ("-2.5e+3", -2500.0), ("1.", 1.0), (".5", 0.5), ("1.5", 1.5),
            ("+1e-4", 1e-4), ("3", 3), ("-3", -3), ("0", 0), ("true", True), ("False", False), ("yes", "yes"),
            ("on", "on"), ("off", "off"), ("no", "no"), ("null", None), ("~", None), ("1e", "1e"), ("e5", "e5"),
            (".inf", math.inf), ("-.inf", -math.inf), ("[1, 2e-3]", [1, 2e-3]), ("{a: 1e-5}", {"a": 1e-5}),
            ("smgk-4", "smgk-4"), ("'1e-4'", "1e-4"), ("0.1.2", "0.1.2"),
            ("010", 10), ("08", 8), ("-007", -7), ("10_000", 10_000), ("0x1F", 31), ("12:30", "12:30"),
            ("0o10", "0o10"), ("2020-01-01", "2020-01-01"),
        ],
    )  # fmt: skip
    def test_numbers_and_words(self, text, expected):
        found = parse_yaml(text, "x")
        assert found == expected
        assert type(found) is type(expected)

    def test_a_seed_with_zeros_in_front_is_what_it_says(self):
        """YAML 1.1 would make 010 the seed 8, and a loop over 000, 001, ... would run some seeds twice."""
        assert from_mapping(RunConfig, override(make_values(), ["seed=010"])).seed == 10

    def test_a_number_that_no_float_holds(self):
        with pytest.raises(ValueError, match=r"optimizer\.lr must be a number that a float can hold, got 1000"):
            make_config(optimizer={"lr": 10**400})

    def test_not_a_number(self):
        assert math.isnan(parse_yaml(".nan", "x"))

    @pytest.mark.parametrize(
        "text",
        [
            "!!python/object/apply:os.system [ls]",
            "!!python/name:os.system",
            "!custom 3",
            "[",
            "a: b: c",
            "'",
            "!!binary aGk=",
            "!!set {a}",
            "!!timestamp 2020-01-01",
        ],
    )
    def test_nothing_else(self, text):
        with pytest.raises(ValueError, match=r"^optimizer must be YAML, got "):
            parse_yaml(text, "optimizer")

    def test_deep_nesting_is_an_error_of_the_user(self):
        with pytest.raises(ValueError, match=r"^x must be YAML, got "):
            parse_yaml("[" * 20_000, "x")


class TestOverride:
    def test_values_are_yaml(self):
        found = override(make_values(), ["optimizer.lr=2e-4", "seed=3", "model.dropout=0.2", "data.options.train=7"])
        config = from_mapping(RunConfig, found)
        assert config.optimizer.lr == 2e-4
        assert config.seed == 3
        assert config.model.changes["dropout"] == 0.2
        assert config.data.options == {"train": 7}
        assert config.optimizer.weight_decay == 0.01

    def test_values_may_hold_an_equals_sign_and_be_empty(self):
        assert override({}, ["a=b=c", "d="]) == {"a": "b=c", "d": None}

    def test_what_was_given_stays_as_it_was(self):
        values = make_values()
        before = make_values()
        override(values, ["optimizer.lr=9", "data.options.train=7"])
        assert values == before

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("seed", "a change must look like key=value, such as optimizer.lr=2e-4, got 'seed'"),
            ("=3", "a change must look like key=value, .* got '=3'"),
            ("seed.x=3", r"seed must be a group of keys, got 0 in seed\.x"),
            ("optimizer.lr.x=3", r"optimizer\.lr must be a group of keys, got 0\.001 in optimizer\.lr\.x"),
            ("optimizer.lr=[", r"optimizer\.lr must be YAML, got "),
        ],
    )
    def test_what_is_no_change(self, change, expected):
        with pytest.raises(ValueError, match=expected):
            override({"seed": 0, **make_values()}, [change])

    def test_unknown_keys_are_found_later(self):
        with pytest.raises(ValueError, match=r"optimizer\.beta is not a key \(did you mean 'betas'\?\)"):
            from_mapping(RunConfig, override(make_values(), ["optimizer.beta=3"]))


class TestMappings:
    @pytest.mark.parametrize("task", KINDS)
    def test_there_and_back(self, task):
        config = make_config(task)
        values = to_mapping(config)
        assert from_mapping(RunConfig, values) == config
        assert to_mapping(from_mapping(RunConfig, values)) == values

    @pytest.mark.parametrize("name", names())
    def test_every_recipe_there_and_back_through_yaml(self, name):
        config = load(name).config(seed=3)
        text = yaml.safe_dump(to_mapping(config), sort_keys=False)
        assert from_mapping(RunConfig, parse_yaml(text, "x")) == config

    @given(
        st.builds(
            OptimizerConfig, lr=st.floats(1e-30, 1e30), eps=st.floats(1e-30, 1), weight_decay=st.floats(0, 10),
            betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        )
    )  # fmt: skip
    def test_numbers_survive_yaml_to_the_bit(self, config):
        text = yaml.safe_dump(to_mapping(config))
        assert from_mapping(OptimizerConfig, parse_yaml(text, "x")) == config

    def test_every_field_says_what_it_is(self):
        """The names of the mapping are those of the dataclass."""
        assert list(to_mapping(make_config().training)) == [field.name for field in dataclasses.fields(TrainingConfig)]

    def test_merge(self):
        base = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1]}
        found = merge(base, {"b": {"d": {"g": 4}, "c": {"h": 5}}, "f": [2], "i": {"j": 6}})
        assert found == {"a": 1, "b": {"c": {"h": 5}, "d": {"e": 3, "g": 4}}, "f": [2], "i": {"j": 6}}
        assert base == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1]}
        assert merge(base, {"b": 3})["b"] == 3
        assert merge({}, base) == base

    def test_differences(self):
        old, new = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 1}}, {"a": 1, "b": {"c": 4, "g": 5}, "e": 7}
        expected = {"b.c": (2, 4), "b.d": (3, None), "b.g": (None, 5), "e": ({"f": 1}, 7)}
        assert differences(old, new) == expected
        assert differences(old, old) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("optimizer.lr=abc", "error: optimizer.lr must be a number, got 'abc'"),
        ("optimizer.beta=1", "error: optimizer.beta is not a key (did you mean 'betas'?)"),
        ("training.steps=1", "error: schedule.warmup must be at most training.steps=1, got 1000"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(change, expected, monkeypatch, capsys):
    from mgk.cli import main

    monkeypatch.setattr(sys, "argv", ["mgk", "train", "lra/listops", change])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.strip() == expected


def test_a_recipe_needs_no_lightning():
    """It would take seconds."""
    code = "import sys, mgk.training.configuration, mgk.recipes; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_evaluation_has_room_for_the_longest_sentence_rounded_up(corpora, tmp_path, multiple):
    """As on a GPU, where widths are rounded: no sentence is refused because it does not fit any more."""
    config = make_config("translation", data={"multiple_of": multiple}, training={"max_tokens": 64})
    trainer = make_trainer(config, tmp_path, corpora("translation"))
    trainer.task.config = make_config("translation", data={"multiple_of": multiple}, training={"max_tokens": 2})
    assert trainer.evaluate("test")["count"] > 0
