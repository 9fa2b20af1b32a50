"""Whether two runs are of one configuration.

A *record* is what a run leaves: the content of a result, of an evaluation, or the manifest of a checkpoint. It has
``config``, and since format 2 ``model`` (the resolved configuration of the model) and ``packed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgk.training.configuration import RunConfig, differences, from_mapping, to_mapping
from mgk.training.resolved_model import model_differences, model_of_record, resolve_model

# What may differ between a run and its continuation: none of it changes a number.
FREE_TO_CHANGE = {
    "name", "row", "data.multiple_of", "training.precision", "data.workers", "data.timeout",
    "training.log_every", "training.checkpoint_every", "training.cuda_graphs", "training.keep_checkpoints",
    "training.max_skipped",
}  # fmt: skip

# How the sequences of a batch lie in memory. Batches of translation are cut by their padded width, so there it decides
# which sentences they hold.
LAYOUT = {"data.pack", "data.pad_to"}
_ONLY_LAID_OUT = ("classification", "pairs")


def free_to_change(task: str) -> set[str]:
    """The keys of a configuration that change no number of this task."""
    return FREE_TO_CHANGE | LAYOUT if task in _ONLY_LAID_OUT else FREE_TO_CHANGE


def record_of(config: RunConfig) -> dict[str, Any]:
    """What a run with this configuration would leave, as far as it is known before the run."""
    return {"config": to_mapping(config), "model": resolve_model(config)}


def run_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every key in which a record and one of today differ that may change a number, with both values.

    A key that is newer than the record counts as its default. The models are compared as they were built, so it makes
    no difference whether a value came from the architecture, the recipe or the command line.
    """
    old, new = to_mapping(from_mapping(RunConfig, dict(before["config"]))), now["config"]
    free = free_to_change(new["task"])
    found = {
        key: values
        for key, values in differences(old, new).items()
        if key not in free and key.partition(".")[0] != "model"
    }
    models = model_differences(model_of_record(before), model_of_record(now), new["task"])
    return {**found, **{f"model.{key}": values for key, values in models.items()}}


def recipe_differences(record: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """In what a finished run differs from what a recipe says: the key, what it was, and what the recipe has.

    Layout and precision are as the machine has them where the recipe leaves them open; where it does not, they have to
    be so. A precision that the recipe would not have chosen on that device is another one.
    """
    found = run_differences(record, record_of(config))
    if config.task in _ONLY_LAID_OUT and config.data.pack is not None and was_packed(record) != config.data.pack:
        found["data.pack"] = (was_packed(record), config.data.pack)
    wanted = config.training.precision
    asked = record["config"]["training"].get("precision", "auto")
    got = record.get("precision")
    if got is not None and asked != wanted and got not in _precisions(wanted, record):
        found["training.precision"] = (asked if asked != "auto" else got, wanted)
    return found


def was_packed(record: Mapping[str, Any]) -> bool:
    """Whether the batches of a run were packed; before records said so, only those were that were told to be."""
    return bool(record["packed"] if "packed" in record else record["config"]["data"].get("pack"))


def _precisions(name: str, record: Mapping[str, Any]) -> set[str]:
    """The names in a record of what a configuration asks for."""
    if name == "auto":
        is_cpu = str(record.get("device", "")).startswith("CPU")
        return {"float32"} if is_cpu else {"bfloat16"}
    return {{"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]}
