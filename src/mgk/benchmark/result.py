"""The JSON of a benchmark: measurements, device, date and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

import mgk
from mgk.benchmark.attention import Comparison
from mgk.ops import softmax_kernel
from mgk.training.result import device_name, read_json

KINDS = ("attention", "retrieval", "decode", "packed", "linear", "rows")
"""Values of the key ``benchmark``."""


def begin(kind: str, device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """Return a result without rows."""
    assert kind in KINDS
    return {
        "benchmark": kind,
        "device": device_name(device),
        "architecture": softmax_kernel.architecture(device.index or 0) if device.type == "cuda" else None,
        "versions": versions(),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config,
        "baselines": [],
        "rows": [],
        "failures": [],
        "skipped": [],
    }


def add(result: dict[str, Any], found: Comparison) -> None:
    """Add the comparison of a shape to a result."""
    for name in ("baselines", "rows", "failures", "skipped"):
        result[name] += getattr(found, name)


def read(path: Path) -> dict[str, Any]:
    """Read a result."""
    found = read_json(path, "the JSON of a benchmark")
    if not isinstance(found, dict) or found.get("benchmark") not in KINDS:
        raise ValueError(f"{path} must be a result of mgk bench {', '.join(KINDS)}, got something else")
    return found


def short_name(device: torch.device) -> str:
    """Name of the device for a file: ``h200`` or ``cpu``."""
    return "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device).split()[-1].lower()


def versions() -> dict[str, str]:
    """Versions of the software that may affect times."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "mgk": mgk.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none") if torch.cuda.is_available() else "none",
        "triton": triton,
    }
