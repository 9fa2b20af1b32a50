"""Loading models of the library from folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

import mgk.models
from mgk.training.result import read_object

MODEL_CONFIG = "config.json"


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model in a folder for evaluation on the CPU. Raises an error if it is not a model of this library."""
    content = read_model_config(folder)
    kind = content.get("model_type")
    if kind != mgk.models.MGKConfig.model_type:
        raise ValueError(f"{folder} must hold a model of mgk, got model_type {kind!r}")
    names = [str(name) for name in content.get("architectures") or ["none"]]
    model_class = getattr(mgk.models, names[0], None) if names[0] in mgk.models.__all__ else None
    if not (isinstance(model_class, type) and issubclass(model_class, mgk.models.MGKPreTrainedModel)):
        raise ValueError(f"{folder / MODEL_CONFIG} must name an architecture of mgk.models, got {', '.join(names)}")
    if not any(folder.glob("model*.safetensors")):
        raise ValueError(f"{folder} must hold the weights of the model, model.safetensors, got none there")
    model: PreTrainedModel
    try:
        with _quiet():
            model, info = model_class.from_pretrained(folder, output_loading_info=True)
    except (RuntimeError, SafetensorError) as error:
        # The shapes differ, or there are no safetensors; only the first line of the long message is shown.
        said = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder} must hold weights that fit its configuration, got {said}") from error
    # transformers would initialise missing weights at random and continue.
    if missing := info["missing_keys"]:
        raise ValueError(f"{folder} must hold all weights of {names[0]}, got no {min(missing)}")
    if unexpected := info["unexpected_keys"]:
        raise ValueError(f"{folder} must hold the weights of {names[0]} alone, got {min(unexpected)} as well")
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' progress bar and report of weights."""
    had_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a saved model, which may be of any library."""
    return read_object(folder / MODEL_CONFIG, "the JSON of a model")
