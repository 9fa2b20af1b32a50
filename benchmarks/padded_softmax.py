"""Plain softmax attention of a padded batch on a GPU: our kernel beside two ways to the stock ones.

    python benchmarks/padded_softmax.py --to results/bench/padded-softmax-h200.json   # on a GPU
    python benchmarks/padded_softmax.py --write                                       # the table in the docs, anywhere

The lengths of the sequences are drawn between half the width and all of it. Three candidates take turns, each after its
output and gradients were compared with fp64:

- fused: our kernel, which does not visit padding;
- mask: the stock kernels with a mask ``[B, 1, 1, N]``, as ``backend="sdpa"`` calls them;
- columns: the stock kernels with another column of queries and keys, which hides padded keys. That is what
  ``backend="sdpa"`` did before this was measured, and still does for mixtures and under causality.

``mgk bench choose`` takes the sizes at which our kernel is faster into the table of :mod:`mgk.ops.softmax_kernel`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mgk
from mgk.benchmark.page import write_between
from mgk.benchmark.timing import Candidate, Effort, take_turns, usual_clock
from mgk.training.result import device_name, versions

SHAPES = ((128, 8, 1024, 32), (32, 8, 4096, 32), (32, 8, 1024, 64), (16, 16, 2048, 128), (32, 8, 256, 64))
"""Batch, heads, width and size of a head."""
CAP = 8e-3
"""Largest relative error of bf16."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    return mgk.mixture_attention(query, key, value, similarity="dot", key_mask=valid, backend="triton")


def columns(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    # A prior by key, even of ones, goes into a column, and with it the mask.
    prior = query.new_zeros(query.shape[1], 1, query.shape[2], dtype=torch.float32)
    return mgk.mixture_attention(query, key, value, similarity="dot", log_prior=prior, key_mask=valid, backend="sdpa")


def mask(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=valid[:, None, None])


ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "results" / "bench" / "padded-softmax-h200.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks/padded_softmax.py -->", "<!-- end of padded softmax -->"
WAYS: dict[str, Attend] = {"fused": fused, "columns": columns, "mask": mask}


def draw(shape: tuple[int, int, int, int], device: torch.device) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Query, key and value, which keys are valid, and a gradient that is 0 at padded queries."""
    batch, heads, tokens, head_dim = shape
    query, key, value, gradient = (
        torch.randn(batch, heads, tokens, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    lengths = torch.randint(tokens // 2, tokens + 1, (batch,), device=device)
    valid = torch.arange(tokens, device=device) < lengths[:, None]
    return (query, key, value), valid, gradient * valid[:, None, :, None]


def step(attend: Attend, inputs: tuple[Tensor, ...], valid: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key and value."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(leaves[0], leaves[1], leaves[2], valid)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def error(attend: Attend, shape: tuple[int, int, int, int], device: torch.device) -> float:
    """The largest relative error of the output at valid queries and of the gradients, on two sequences of this size."""
    inputs, valid, gradient = draw((2, 2, min(shape[2], 1024), shape[3]), device)
    exact = step(mask, tuple(each.double() for each in inputs), valid, gradient.double())
    found = step(attend, inputs, valid, gradient)
    seen = valid[:, None, :, None]
    return max(
        float(((one.double() - other) * seen).norm() / (other * seen).norm())
        for one, other in zip(found, exact, strict=True)
    )


def measure(shape: tuple[int, int, int, int], device: torch.device, effort: Effort) -> dict[str, Any]:
    inputs, valid, gradient = draw(shape, device)
    errors, candidates = {}, []
    for name, attend in WAYS.items():
        errors[name] = error(attend, shape, device)
        if not errors[name] < CAP:
            raise RuntimeError(f"the error of {name} must be below {CAP}, got {errors[name]:.2g} at {shape}")
        forward = functools.partial(attend, inputs[0], inputs[1], inputs[2], valid)
        training = functools.partial(step, attend, inputs, valid, gradient)
        candidates += [
            Candidate(name=f"{name} forward", call=forward, context=torch.no_grad),
            Candidate(name=f"{name} training", call=training),
        ]
    for candidate in candidates:
        with candidate.context():
            candidate.call()
    timings = take_turns(candidates, usual_clock(device), effort)
    return {
        **dict(zip(("batch", "heads", "tokens", "head_dim"), shape, strict=True)),
        "errors": errors,
        "ms": {name: timing.device_ms for name, timing in timings.items()},
        "host_ms": {name: timing.host_ms for name, timing in timings.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    """The measurement as Markdown. A call takes as long as the host needs for it, if the device is done earlier."""
    lines = [
        "| batch, heads, tokens, head width | direction | ours, ms | stock with a mask, ms | stock with a column, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        size = ", ".join(f"{row[name]:,}" for name in ("batch", "heads", "tokens", "head_dim"))
        for direction in ("forward", "training"):
            names = [f"{way} {direction}" for way in ("fused", "mask", "columns")]
            times = [f"{max(row['ms'][name], row['host_ms'][name]):.2f}" for name in names]
            lines.append(f"| {size} | {direction} | {' | '.join(times)} |")
    return "\n".join(lines)


def write_table(page: Path = PAGE, result: Path = RESULT) -> None:
    """Write the table of a result into the docs."""
    written = table(json.loads(result.read_text(encoding="utf-8")))
    write_between(page, BEGIN, END, f"\n{written}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--to", type=Path, default=Path("results/bench/padded-softmax.json"))
    parser.add_argument("--write", action="store_true", help="only write the table of the committed result")
    options = parser.parse_args()
    if options.write:
        write_table()
        return
    device = torch.device("cuda")
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, device, Effort(rounds=options.rounds, seconds=1.0)))
        times = rows[-1]["ms"]
        print(f"{shape}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), flush=True)
    written = {"device": device_name(device), "dtype": "bfloat16", "versions": versions(), "rows": rows}
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
