"""Reads tensors from a file of ``torch.save`` in a separate process that can create nothing but tensors.

The process runs this file by its path and imports nothing else of the library. It always reads with
``weights_only=True`` and hands over the tensors as safetensors. If the file holds a whole module of the authors' code
instead of its state, as their language models do, every class in it is replaced by one that only stores its
attributes, so that neither their code nor torch's modules are run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Packages of the classes in such modules.
REPLACED = ("mem_transformer.", "utils.", "torch.nn.modules.", "torch.nn.parallel.")
# Keys under which a checkpoint may hold the state beside other things.
STATES = ("model_state_dict", "state_dict", "model")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, on the CPU. A safetensors file is read directly."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"a checkpoint must be a file, got {path}, where none is")
    if path.suffix == ".safetensors":
        return load_file(path)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "tensors.safetensors"
        # -P keeps the folder of this file off the path, because its modules must not shadow others.
        finished = subprocess.run(
            [sys.executable, "-P", __file__, str(path), str(taken)], capture_output=True, text=True, check=False
        )
        if finished.returncode != 0:
            said = (finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"])[-1]
            raise ValueError(f"{path} must hold tensors by name and nothing that can run code, got {said}")
        return load_file(taken)


class Remembered:
    """Stand-in for an object whose class is not available: it has attributes and no behaviour."""


def _read(path: Path) -> Any:
    names = []
    # The older format does not list the classes that it needs, so whole modules in it are refused.
    if zipfile.is_zipfile(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    replaced: list[Any] = [(type("Remembered", (Remembered,), {}), name) for name in names if name.startswith(REPLACED)]
    with torch.serialization.safe_globals(replaced):
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(found: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of a state, or of a stand-in of a module, with its name."""
    if isinstance(found, Tensor):
        yield prefix, found
    elif isinstance(found, Mapping):
        for name, each in found.items():
            yield from _tensors(each, f"{prefix}.{name}" if prefix else f"{name}")
    elif isinstance(found, Remembered):
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from _tensors(vars(found).get(kind, {}), prefix)


def _main(path: str, taken: str) -> None:
    try:
        found = _read(Path(path))
    except Exception as error:
        # torch's message goes on for many lines, with advice that nobody should follow.
        raise SystemExit(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    if isinstance(found, Mapping):
        found = next((found[name] for name in STATES if isinstance(found.get(name), (Mapping, Remembered))), found)
    tensors = {name: each.detach().clone().contiguous() for name, each in _tensors(found)}
    if not tensors:
        raise SystemExit("no tensor")
    save_file(tensors, taken)


if __name__ == "__main__":
    _main(*sys.argv[1:])
