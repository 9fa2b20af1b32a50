"""The full configuration of a run's model, as results store it, or reconstructed for older results.

A run names an architecture, whose definition may change. Therefore every result and every checkpoint stores the whole
configuration of the model that was built, and runs are compared by it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from mgk.models import MGKConfig, architecture
from mgk.models.architectures import ARCHITECTURES
from mgk.training.configuration import ModelConfig, RunConfig, differences, from_mapping

# Architectures that had other values when results did not store the model yet (format 1, up to commit 9f406f4). Add
# only values with which such a result was made.
FORMER_ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: {"activation_dropout": 0.0} for name in ("lra-listops", "lra-text", "lra-retrieval")
}

# Fields that depend on the corpus, whose fingerprint is compared instead, or on the class of the model, which follows
# from the task. A recipe is read without either.
_OF_THE_CORPUS: dict[str, frozenset[str]] = {
    "uptraining": frozenset({"weights_sha256"}),
    "language": frozenset({"vocab_size", "is_decoder"}),
    "translation": frozenset(
        {
            "vocab_size", "source_vocab_size", "tokenizer_sha256", "source_tokenizer_sha256", "pad_token_id",
            "bos_token_id", "eos_token_id", "decoder_start_token_id",
        }
    ),
}  # fmt: skip

# Our fields that change no number, and fields of transformers that do.
_NO_NUMBER = {"use_cache"}
_OF_TRANSFORMERS = ("num_labels", "problem_type", "is_encoder_decoder", "rope_parameters")


def build_model_config(config: RunConfig, **of_the_corpus: Any) -> MGKConfig:
    """Build the configuration of the model. Values of the recipe override those that come from the corpus."""
    return _build(config, of_the_corpus, {})


def describe_model(model: MGKConfig) -> dict[str, Any]:
    """Return every field that affects a number, as JSON: neither the writer nor the names of labels, for example."""
    own = {field.name for field in dataclasses.fields(model)} & MGKConfig.__annotations__.keys()
    values = model.to_dict()
    found = {name: values.get(name) for name in (own - _NO_NUMBER) | {*_OF_TRANSFORMERS}}
    return {**found, "num_labels": model.num_labels}


def resolve_model(config: RunConfig) -> dict[str, Any]:
    """Return the model that this configuration builds today, as far as that is known without its corpus."""
    return _described(config, {}) if config.conversion is None else conversion_options(config)


CONVERTED = {
    "attention": "attention", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
    "num_components": "components", "learn_variance": "learn_variance", "variance_scale": "variance_scale",
    "shift_init_std": "shift_init_std",
}  # fmt: skip
"""Keys that a row may set for a converted model, with the names of the arguments of :func:`mgk.convert`."""


def conversion_options(config: RunConfig) -> dict[str, Any]:
    """Return the options with which a run converts its model, by the keys of rows."""
    changes = config.model.changes
    for name in changes:
        if name not in CONVERTED:
            raise ValueError(f"model of a conversion must have the keys {', '.join(CONVERTED)}, got {name!r}")
    if changes.get("attention") is None:
        raise ValueError("model.attention must be given for a conversion, got none")
    return {"architecture": config.model.architecture, **dict.fromkeys(CONVERTED), **changes}


def model_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model with which a result, an evaluation or a checkpoint was made.

    A field that is newer than the record counts as its default. A record without a model is resolved with the
    architectures of that time.
    """
    if "model" in record:
        if not isinstance(record["model"], Mapping):
            raise ValueError(f"the model of a run must be a mapping, got {record['model']!r}")
        return dict(record["model"]) if is_converted(record) else {**_defaults(), **record["model"]}
    config = from_mapping(RunConfig, record["config"])
    assert config.conversion is None, "records of conversions have always had a model"
    return _described(config, FORMER_ARCHITECTURES.get(config.model.architecture, {}))


def is_converted(record: Mapping[str, Any]) -> bool:
    """Whether the model of a record was converted."""
    return record["model"].get("architecture") == "converted"


def model_differences(before: Mapping[str, Any], now: Mapping[str, Any], task: str) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two described models differ, with both values, except for those of the corpus."""
    ignored = _OF_THE_CORPUS.get(task, frozenset())
    return {name: values for name, values in differences(before, now).items() if name not in ignored}


def with_model_of_record(config: RunConfig, record: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the model of the record, if the name of its architecture means another one today.

    Values in the configuration itself are not changed.
    """
    then, today = model_of_record(record), resolve_model(config)
    names = {name.partition(".")[0] for name in model_differences(then, today, config.task)} - {*config.model.changes}
    if not names:
        return config
    changes = {**config.model.changes, **{name: then.get(name) for name in names}}
    return dataclasses.replace(config, model=ModelConfig(architecture=config.model.architecture, changes=changes))


@functools.cache
def _defaults() -> Mapping[str, Any]:
    return describe_model(MGKConfig())


# A cache, since building a configuration takes milliseconds, and all results of a row need the same one.
_KNOWN: dict[str, dict[str, Any]] = {}


def _described(config: RunConfig, former: Mapping[str, Any]) -> dict[str, Any]:
    fields = {**ARCHITECTURES.get(config.model.architecture, {}), **former, **config.model.changes}
    key = json.dumps([config.model.architecture, fields, config.task, config.data.longest], sort_keys=True)
    if key not in _KNOWN:
        _KNOWN[key] = describe_model(_build(config, {}, former))
    return dict(_KNOWN[key])


def _build(config: RunConfig, of_the_corpus: Mapping[str, Any], former: Mapping[str, Any]) -> MGKConfig:
    try:
        found = architecture(config.model.architecture, **{**former, **of_the_corpus, **config.model.changes})
    except StrictDataclassError as error:
        # The error wraps ours or that of transformers and is no ValueError, so it would end a sweep at a row that
        # cannot be built.
        raise ValueError(f"model must be one that can be built, got: {error.__cause__ or error}") from error
    table, longest = found.max_position_embeddings, config.data.longest
    if found.positions == "learned" and config.task != "translation" and longest > table:
        raise ValueError(f"data.longest must be at most model.max_position_embeddings={table}, got {longest}")
    return found
