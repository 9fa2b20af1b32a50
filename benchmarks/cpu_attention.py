"""A layer of mixture attention with half the heads against a stock softmax layer, on this CPU.

Every layer's output and gradients are compared with fp64 first; a layer that is wrong gets no time. All layers take
turns in one process, so that a slow moment of the machine hits all alike. Writes results/bench/layer-cpu.json and the
table of docs/benchmarks.md, from which a test reads whether ``backend="auto"`` chooses the fastest.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mgk
from mgk.benchmark.result import versions

FOLDER = Path(__file__).parent.parent
RESULT = FOLDER / "results" / "bench" / "layer-cpu.json"
PAGE = FOLDER / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks/cpu_attention.py -->", "<!-- end of what benchmarks/cpu_attention.py wrote -->"

WIDTH, HEAD_DIM, HEADS = 64, 32, 8
SHAPES = ((64, 32), (64, 64), (32, 256), (8, 1024), (2, 4096))  # batch, tokens
PRESETS = ("gaussian", "smgk", "mgk")
BACKENDS = ("cpu", "sdpa", "chunked", "reference")
STOCK = "stock"
LARGEST_ERROR = 1e-3  # gradients of priors cancel; outputs and the other gradients are near 1e-6
LARGEST_REFERENCE = 2**24  # pairs that the reference may write out: beyond, it takes seconds


class Row(NamedTuple):
    """What is timed."""

    preset: str
    heads: int
    backend: str


class StockSoftmax(nn.Module):
    """The projections of :class:`mgk.MixtureAttention` around ``F.scaled_dot_product_attention``, nothing else."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, heads * HEAD_DIM) for _ in range(3))
        self.out_proj = nn.Linear(heads * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, is_causal: bool) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))


def build(row: Row) -> nn.Module:
    if row.backend == STOCK:
        return StockSoftmax(row.heads)
    return mgk.build_attention(row.preset, WIDTH, row.heads, head_dim=HEAD_DIM, backend=row.backend)


def groups_of(batch: int, tokens: int) -> Iterator[list[Row]]:
    """What takes turns: `auto` beside the stock layers, then the backends of each preset beside each other."""
    stock = [Row("softmax", heads, STOCK) for heads in (HEADS, HEADS // 2)]
    yield stock + [Row(preset, HEADS // 2, "auto") for preset in PRESETS]
    few = batch * HEADS // 2 * tokens**2 <= LARGEST_REFERENCE
    for preset in PRESETS:
        yield [Row(preset, HEADS // 2, backend) for backend in BACKENDS if few or backend != "reference"]


def error(layer: nn.Module, x: Tensor, is_causal: bool) -> float:
    """The largest relative error of output and gradients against fp64, on a part of the input."""
    few = x.detach()[:1, :512]
    grad = torch.randn_like(few)

    def results(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, is_causal=is_causal)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    exact = copy.deepcopy(layer).double()
    if isinstance(exact, mgk.MixtureAttention):
        exact.backend = "reference"
    got, expected = results(layer, few, grad), results(exact, few.double(), grad.double())
    # Softmax cannot see the bias of the keys: its gradient is 0 but for rounding.
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True) if b.norm() > 1e-9)


def seconds(layer: nn.Module, x: Tensor, grad: Tensor, is_causal: bool) -> tuple[float, float]:
    """Of a forward pass for inference, and of a forward and backward pass."""
    start = time.perf_counter()
    with torch.no_grad():
        layer(x, is_causal=is_causal)
    middle = time.perf_counter()
    layer(x, is_causal=is_causal).backward(grad)
    end = time.perf_counter()
    x.grad = None
    layer.zero_grad()
    return middle - start, end - middle


def measure(rows: list[Row], batch: int, tokens: int, is_causal: bool, repeats: int) -> list[dict[str, Any]]:
    layers = {row: build(row) for row in rows}
    x = torch.randn(batch, tokens, WIDTH, requires_grad=True)
    grad = torch.randn(batch, tokens, WIDTH)
    for row, layer in layers.items():
        found = error(layer, x, is_causal)
        if not found <= LARGEST_ERROR:
            raise SystemExit(f"{row.preset} on {row.backend} is wrong by {found:.1e}: no times")
    samples: dict[Row, list[tuple[float, float]]] = {row: [] for row in layers}
    for _ in range(repeats):
        for row, layer in layers.items():
            # The first call of a turn is not counted: it finds the cache full of what another layer left there.
            seconds(layer, x, grad, is_causal)
            samples[row].append(seconds(layer, x, grad, is_causal))
    return [
        {
            "batch": batch, "tokens": tokens, "is_causal": is_causal, **row._asdict(),
            "forward_ms": 1e3 * statistics.median(forward for forward, _ in taken),
            "training_ms": 1e3 * statistics.median(training for _, training in taken),
        }
        for row, taken in samples.items()
    ]  # fmt: skip


def table(records: Iterable[dict[str, Any]]) -> str:
    """A line for each shape: what `auto` takes, as a ratio to stock layers."""
    lines = [
        "| batch x tokens | | `smgk`, 4 heads: forward | training | `mgk`, 4 heads: forward | training | "
        "`gaussian`, 4 heads, over softmax with 4: forward | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    records = list(records)
    for batch, tokens, is_causal in dict.fromkeys((r["batch"], r["tokens"], r["is_causal"]) for r in records):
        here = {
            (r["preset"], r["heads"], r["backend"]): r
            for r in records
            if (r["batch"], r["tokens"], r["is_causal"]) == (batch, tokens, is_causal)
        }
        cells = [f"{batch} x {tokens:,}", "causal" if is_causal else "full"]
        for preset, heads in (("smgk", HEADS), ("mgk", HEADS), ("gaussian", HEADS // 2)):
            for column in ("forward_ms", "training_ms"):
                stock = here["softmax", heads, STOCK][column]
                cells.append(f"{stock / here[preset, HEADS // 2, 'auto'][column]:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(found: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_page(found: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page_text(found)}\n\n{END}{after}", encoding="utf-8")


def page_text(found: dict[str, Any]) -> str:
    what = f"{found['device']}, {found['threads']} threads, fp32, torch {found['versions']['torch']}"
    return f"{what}, {found['written']}.\n\n{table(found['rows'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", action="append", help="batch x tokens, such as 8x1024; all five by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--causal", action="store_true", help="causal attention as well")
    parser.add_argument("--backends", action="store_true", help="every backend as well, not only what auto chooses")
    parser.add_argument("--write", action="store_true", help="write the JSON and the table of docs/benchmarks.md")
    arguments = parser.parse_args()
    shapes: Iterable[tuple[int, int]] = SHAPES
    if arguments.shape:
        try:
            shapes = [(int(batch), int(tokens)) for batch, tokens in (text.split("x") for text in arguments.shape)]
        except ValueError:
            parser.error(f"--shape must look like 8x1024, got {' '.join(arguments.shape)}")
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "benchmark": "layer",
        "device": "CPU",
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "written": time.strftime("%Y-%m-%d"),
        "config": {"width": WIDTH, "head_dim": HEAD_DIM, "heads": HEADS, "repeats": arguments.repeats},
        "rows": [],
    }
    print(f"x = time of a stock softmax layer with {HEADS} heads / time of the row; training = forward + backward")
    for is_causal in (False, True) if arguments.causal else (False,):
        for batch, tokens in shapes:
            groups = list(groups_of(batch, tokens))[: None if arguments.backends else 1]
            records = [
                record for rows in groups for record in measure(rows, batch, tokens, is_causal, arguments.repeats)
            ]
            found["rows"] += records
            show(records, batch, tokens, is_causal)
    if arguments.write and not arguments.backends:
        parser.error("--write needs --backends: the choice of auto is tested with them")
    if arguments.write:
        write(found, RESULT)
        write_page(found)


def show(records: list[dict[str, Any]], batch: int, tokens: int, is_causal: bool) -> None:
    print(
        f"\n{'causal' if is_causal else 'full'} attention, batch {batch}, {tokens} tokens, width {WIDTH}, "
        f"head_dim {HEAD_DIM}, fp32, {torch.get_num_threads()} threads"
    )
    print(f"{'':>10} {'heads':>5} {'backend':>10} {'forward ms':>11} {'x':>6} {'training ms':>12} {'x':>6}")
    stock = records[0]
    for record in records:
        forward, training = (stock[column] / record[column] for column in ("forward_ms", "training_ms"))
        print(
            f"{record['preset']:>10} {record['heads']:>5} {record['backend']:>10} {record['forward_ms']:>11.2f} "
            f"{forward:>5.2f}x {record['training_ms']:>12.2f} {training:>5.2f}x"
        )


if __name__ == "__main__":
    main()
