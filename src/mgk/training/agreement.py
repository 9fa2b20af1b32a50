"""Comparison of the configurations of two runs.

A *record* is the content of a result, of an evaluation, or of the manifest of a checkpoint. It has ``config``, and
since format 2 also ``model`` (the resolved configuration of the model) and ``packed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgk.training.configuration import RunConfig, differences, from_mapping, to_mapping
from mgk.training.resolved_model import model_differences, model_of_record, resolve_model

# Keys that may differ between a run and its continuation, because they change no number.
FREE_TO_CHANGE = {
    "name", "row", "data.multiple_of", "training.precision", "data.workers", "data.timeout",
    "training.log_every", "training.checkpoint_every", "training.cuda_graphs", "training.keep_checkpoints",
    "training.max_skipped",
}  # fmt: skip

# Keys of the memory layout of a batch. Batches of translation are cut by their padded width, so for them the layout
# also decides which sentences they hold.
LAYOUT = {"data.pack", "data.pad_to"}
_ONLY_LAID_OUT = ("classification", "pairs")


def free_to_change(task: str) -> set[str]:
    """Keys of a configuration that change no number of this task."""
    return FREE_TO_CHANGE | LAYOUT if task in _ONLY_LAID_OUT else FREE_TO_CHANGE


def record_of(config: RunConfig) -> dict[str, Any]:
    """Record of a run with this configuration, as far as it is known before the run."""
    return {"config": to_mapping(config), "model": resolve_model(config)}


def run_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that may change a number and differ between an earlier record and one of today, with both values.

    A key that is newer than the record counts as its default. The models are compared as they were built, whether a
    value came from the architecture, the recipe or the command line.
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
    """Keys in which a finished run differs from a recipe, with the value of the run and that of the recipe.

    Where the recipe leaves layout and precision to the machine, any layout agrees, and so does the precision that the
    recipe would have chosen on that device. Otherwise they must be equal.
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
    """Whether the batches of a run were packed; for records without ``packed``, whether the configuration set it."""
    return bool(record["packed"] if "packed" in record else record["config"]["data"].get("pack"))


def _precisions(name: str, record: Mapping[str, Any]) -> set[str]:
    """Precisions, by their names in records, that agree with the one of a configuration."""
    if name == "auto":
        is_cpu = str(record.get("device", "")).startswith("CPU")
        return {"float32"} if is_cpu else {"bfloat16"}
    return {{"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]}
