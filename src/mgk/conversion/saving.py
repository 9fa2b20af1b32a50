"""Saving and loading of converted models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mgk.conversion.attention import NAME
from mgk.conversion.installation import install
from mgk.conversion.record import FIELD, Record
from mgk.conversion.starts import NearStart
from mgk.models.pretrained import NO_PAGES
from mgk.nn import EMPrior, FixedVariance, LearnedPrior, LearnedVariance, ShiftedKeys

PREFIX = "MGK"
OURS = (EMPrior, FixedVariance, LearnedPrior, LearnedVariance, NearStart, ShiftedKeys)
FILE_OF_WEIGHTS = "load-this-folder-with-mgk.load_converted.safetensors"
"""A file that is not there. ``config.json`` names it as the weights, so that no other class loads a part of them."""
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class ConvertedModel:
    """Mix-in with the methods in which a converted model differs from its class in transformers."""

    config: PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, Record.read(config))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the attention implementation for the ``attn_implementation`` that transformers was asked for."""
        if requested_attention not in (None, NAME):
            raise ValueError(
                f"a converted model computes its mixture with attn_implementation {NAME!r} alone, "
                f"got {requested_attention!r}"
            )
        return NAME

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse continuous batching, whose attention reads keys from pages."""
        raise ValueError(f"{NO_PAGES}, got generate_batch")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy by the class in transformers, or of the user, because this one has no place in a module."""
        return _empty, (type(self).__bases__[1],), self.__getstate__()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, OURS):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Save as in transformers, with a model type of its own.

        ``config.json`` has the model type ``mgk-llama`` for a Llama, which the ``Auto`` classes refuse, and the weights
        under a name that sends other classes to :func:`mgk.load_converted`, instead of loading what they know.
        """
        if push_to_hub:
            raise ValueError("save_pretrained writes to a folder, got push_to_hub=True: call model.push_to_hub(name)")
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)  # type: ignore[misc]
        file = Path(save_directory) / "config.json"
        # If the model has adapters, transformers saves only the adapters.
        if is_main_process and file.exists() and not getattr(self, "_hf_peft_config_loaded", False):
            config = json.loads(file.read_text(encoding="utf-8"))
            config["model_type"] = f"{NAME}-{config['model_type'].removeprefix(f'{NAME}-')}"
            config["transformers_weights"] = FILE_OF_WEIGHTS
            file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_classes: dict[type[Any], type[Any]] = {}


def converted_class(base: type[Any]) -> type[Any]:
    """Return the class of converted models for the class ``base``, which is created once."""
    if issubclass(base, ConvertedModel):
        return base
    if base not in _classes:
        _classes[base] = _make_class(base)
    return _classes[base]


def _make_class(base: type[Any]) -> type[Any]:
    # transformers uses the name for losses, pipelines and `architectures`; pickle uses the qualified name.
    name = f"{PREFIX}{base.__name__}"
    members = {"__module__": __name__, "__qualname__": name, "__doc__": f"A {base.__name__} that was converted."}
    return type(base.__name__, (ConvertedModel, base), members)


def _empty(base: type[Any]) -> Any:
    """Return a converted model without any attribute, to which pickle then adds those of the model that it stored."""
    made: Any = converted_class(base)
    return made.__new__(made)


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Return classes such as ``MGKLlamaForCausalLM``, which pickle looks up by name."""
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return converted_class(base)


def load_converted(
    path: str | os.PathLike[str], model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model that was converted with :func:`mgk.convert` and saved with ``save_pretrained``.

    Args:
        path: a folder, or a name on the Hub.
        model_class: a class of models such as ``LlamaModel``; ``None`` is the class of transformers that was saved.
        options: options of ``from_pretrained``, such as ``dtype``, ``device_map`` and ``revision``.
    """
    if model_class is not None and not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise TypeError(
            "model_class must be a class of models such as LlamaForCausalLM, or None for the one that was saved, "
            f"got {getattr(model_class, '__name__', repr(model_class))}"
        )
    if "config" in options:
        raise ValueError("load_converted reads the configuration beside the weights, got another: give changed fields")
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    found, _ = PreTrainedConfig.get_config_dict(path, **hub)
    if FIELD not in found:
        raise ValueError(
            f"path must hold a model that mgk.convert made, got a {found.get('model_type')!r} in {os.fspath(path)!r}"
        )
    kind = found["model_type"] = found["model_type"].removeprefix(f"{NAME}-")
    if model_class is None:
        saved = (found.get("architectures") or ["none"])[0]
        model_class = getattr(transformers, saved, None)
        if model_class is None:
            raise ValueError(f"model_class must be given for a class outside transformers, got {saved}")
    elif model_class.config_class.model_type != kind:
        raise ValueError(f"model_class must be of the family {kind!r}, got {model_class.__name__}")
    # Only classes without mixtures are to look for this file.
    found.pop("transformers_weights", None)
    config, options = model_class.config_class.from_dict(found, return_unused_kwargs=True, **options)
    return converted_class(model_class).from_pretrained(path, config=config, **options)
