"""Error of every backend against fp64 on the same rounded inputs: writes results/accuracy/<device>.json.

With ``--docs`` no measurement is made; the table in docs/numerics.md is written anew from the files that are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mgk
from mgk.benchmark.page import write_between

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "accuracy"
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- written by benchmarks/accuracy.py -->", "<!-- end -->"

PRESETS = ("gaussian", "mgk", "smgk")
BACKENDS = {"cpu": ("reference", "chunked", "cpu", "sdpa"), "cuda": ("reference", "chunked", "sdpa")}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OFFSETS = (0, 1, 4, 16)
SEEDS = (0, 1, 2)
SHAPE = {"batch": 2, "heads": 8, "tokens": 257, "head_dim": 32}


def draw(preset: str, dtype: torch.dtype, offset: float, is_causal: bool, device: str) -> dict[str, Any]:
    batch, heads, tokens, dim = SHAPE.values()
    shape = (batch, heads, 2, tokens, dim) if preset == "mgk" else (batch, heads, tokens, dim)
    inputs: dict[str, Any] = {
        "query": (torch.randn(batch, heads, tokens, dim) + offset).to(dtype),
        "key": (torch.randn(shape) + offset).to(dtype),
        "value": torch.randn(batch, heads, tokens, dim).to(dtype),
    }
    if preset == "smgk":
        inputs["shift"] = torch.randn(heads, 2, dim)
    if preset != "gaussian":
        inputs["log_prior"] = torch.randn(heads, 2).log_softmax(-1)
    return {**{name: tensor.to(device) for name, tensor in inputs.items()}, "is_causal": is_causal}


def run(inputs: dict[str, Any], grad: Tensor, backend: str) -> dict[str, Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items() if isinstance(t, Tensor)}
    out = mgk.mixture_attention(**{**inputs, **leaves}, backend=backend)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def measure(device: str) -> list[dict[str, Any]]:
    rows = []
    backends = BACKENDS[torch.device(device).type]
    for preset in PRESETS:
        for dtype in DTYPES:
            for offset in OFFSETS:
                errors: dict[str, dict[str, list[float]]] = {backend: {} for backend in backends}
                for seed in SEEDS:
                    torch.manual_seed(seed)
                    inputs = draw(preset, dtype, float(offset), seed % 2 == 1, device)
                    grad = torch.randn(inputs["value"].shape).to(dtype).to(device)
                    exact = {name: t.double() if isinstance(t, Tensor) else t for name, t in inputs.items()}
                    expected = run(exact, grad.double(), "reference")
                    for backend in backends:
                        for name, got in run(inputs, grad, backend).items():
                            errors[backend].setdefault(name, []).append(relative_error(got, expected[name]))
                for backend in backends:
                    mean = {name: statistics.mean(values) for name, values in errors[backend].items()}
                    row = {"preset": preset, "dtype": str(dtype).removeprefix("torch."), "offset": offset}
                    rows.append({**row, "backend": backend, "relative_error": mean})
    return rows


def table() -> str:
    """Worst preset per line; the two columns of each result are the output and the worst of dq, dk, dv."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    measured = [
        (result, backend)
        for result in results
        for backend in dict.fromkeys(row["backend"] for row in result["rows"])
        if backend != "reference"
    ]
    names = [f" {result['device']}, `{backend}`: output | gradient |" for result, backend in measured]
    lines = ["| dtype | offset |" + "".join(names), "|---" * (2 + 2 * len(measured)) + "|"]
    for dtype in ("float32", "float16", "bfloat16"):
        for offset in OFFSETS:
            cells = []
            for result, backend in measured:
                found = [
                    row["relative_error"]
                    for row in result["rows"]
                    if (row["dtype"], row["offset"], row["backend"]) == (dtype, offset, backend)
                ]
                cells.append(f"{max(row['output'] for row in found):.1e}")
                cells.append(f"{max(row[name] for row in found for name in ('query', 'key', 'value')):.1e}")
            lines.append(f"| {dtype} | {offset} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_docs() -> None:
    write_between(PAGE, BEGIN, END, f"\n{table()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default=None, help="file name under results/accuracy; default: the device")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--docs", action="store_true", help="only rewrite the table in docs/numerics.md")
    arguments = parser.parse_args()
    if not arguments.docs:
        start = time.perf_counter()
        rows = measure(arguments.device)
        is_cuda = arguments.device.startswith("cuda")
        result = {
            "device": torch.cuda.get_device_name() if is_cuda else "CPU",
            "config": {**SHAPE, "seeds": SEEDS},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "mgk": mgk.__version__},
            "wall_seconds": round(time.perf_counter() - start, 1),
            "rows": rows,
        }
        arguments.output.mkdir(parents=True, exist_ok=True)
        path = arguments.output / f"{arguments.name or arguments.device}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path.name}: {len(rows)} rows in {result['wall_seconds']} s")
    if arguments.output == RESULTS:
        write_docs()


if __name__ == "__main__":
    main()
