"""Tensors out of a file of ``torch.save``, read by a process of its own in which nothing but tensors can be made.

The process runs this file by its path and imports nothing else of the library. It reads with ``weights_only=True``,
never otherwise, and hands the tensors over as safetensors. Where the file holds a whole module of the authors' code
instead of its state, as their language models are saved, every class in it is replaced by one that only remembers what
it was given: neither their code nor torch's modules are run.
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

# Where the classes of such modules come from.
REPLACED = ("mem_transformer.", "utils.", "torch.nn.modules.", "torch.nn.parallel.")
# Under which names a state lies beside other things.
STATES = ("model_state_dict", "state_dict", "model")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, on the CPU; the path of a safetensors file is read as such."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"a checkpoint must be a file, got {path}, where none is")
    if path.suffix == ".safetensors":
        return load_file(path)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "tensors.safetensors"
        # -P: the folder of this file has modules of its own, which must not stand for others.
        finished = subprocess.run(
            [sys.executable, "-P", __file__, str(path), str(taken)], capture_output=True, text=True, check=False
        )
        if finished.returncode != 0:
            said = (finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"])[-1]
            raise ValueError(f"{path} must hold tensors by name and nothing that can run code, got {said}")
        return load_file(taken)


class Remembered:
    """Stands for an object of a class that is not there: it has attributes and can do nothing."""


def _read(path: Path) -> Any:
    names = []
    # An older format does not list what it needs; whole modules in it are refused.
    if zipfile.is_zipfile(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    replaced: list[Any] = [(type("Remembered", (Remembered,), {}), name) for name in names if name.startswith(REPLACED)]
    with torch.serialization.safe_globals(replaced):
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(found: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a state, or of a module that is only remembered, by its name."""
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
        # What torch says of it goes on for many lines, with advice that nobody should follow.
        raise SystemExit(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    if isinstance(found, Mapping):
        found = next((found[name] for name in STATES if isinstance(found.get(name), (Mapping, Remembered))), found)
    tensors = {name: each.detach().clone().contiguous() for name, each in _tensors(found)}
    if not tensors:
        raise SystemExit("no tensor")
    save_file(tensors, taken)


if __name__ == "__main__":
    _main(*sys.argv[1:])
