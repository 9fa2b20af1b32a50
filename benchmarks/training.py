"""What the training loop costs beside the bare model step, and what batches of similar length gain.

    python benchmarks/training.py DATA [--heads 2 8] [--steps 150] [--to results/bench/training.json]

LRA Text, batch 32, softmax attention. Three things are timed in one process, in turn, several rounds, and the medians
compared:

- bare: forward, backward and optimiser of the compiled model on one batch that is already on the device;
- loop: :class:`mgk.training.Trainer` on real batches padded to the same 4,096 bytes, with its data, checks and log;
- by length: the same loop on batches of similar length, padded to their longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from mgk import recipes
from mgk.data.store import Corpus
from mgk.training.corpora import open_or_prepare
from mgk.training.distributed import build_fabric
from mgk.training.loop import Trainer
from mgk.training.result import device_name, versions

WIDTH = 4096
NAMES = ("bare", "loop", "by_length")
PUBLISHED = Path(__file__).parent.parent / "results" / "bench" / "training-h200.json"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bare:
    """The model step and nothing else."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batch = trainer.training_pass.on_device(trainer.batches.batch(0, 0))
        assert self.batch["input_ids"].shape[1] == WIDTH

    def step(self) -> None:
        trainer = self.trainer
        with trainer.training_pass.autocast():
            loss = trainer.model(**self.batch).loss
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)


def seconds(steps: int, device: torch.device, step: Callable[[], Any]) -> float:
    """Of one step, over many."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def check_losses(heads: int, fabric: Fabric, corpus: Corpus, folder: Path) -> None:
    """Recorded and compiled updates must learn what plain ones learn: the first few losses, without dropout."""
    common = ["model.dropout=0", "model.attention_dropout=0", "model.activation_dropout=0", f"data.pad_to={WIDTH}"]
    losses = []
    for name, changes in (("fast", []), ("plain", ["training.compile=false", "training.cuda_graphs=false"])):
        config = recipes.load("lra/text").config(f"softmax-{heads}", [*common, *changes])
        place = folder / f"{name}-{heads}"
        place.mkdir(parents=True)
        walker = Trainer(config, place, corpus, fabric)
        steps = walker.steps()
        for _ in range(8):
            next(steps)
        walker.wait()
        losses.append(walker.state.losses)
    worst = max(abs(fast - plain) for fast, plain in zip(*losses, strict=True))
    if not worst < 0.01:
        raise RuntimeError(f"losses of recorded and of plain updates must agree within 0.01, got {worst:.4f}")


def measure(heads: int, corpus: Corpus, steps: int, warmup: int, rounds: int, folder: Path) -> dict[str, Any]:
    """The three times of one model."""
    fabric = build_fabric()
    check_losses(heads, fabric, corpus, folder)
    text = recipes.load("lra/text")
    never = 10_000_000
    common = [f"training.steps={never}", f"validation.every={never}", f"training.checkpoint_every={never}"]
    trainers = {
        "bare": [f"data.pad_to={WIDTH}", "data.by_length=false"],
        "loop": [f"data.pad_to={WIDTH}", "data.by_length=false"],
        "by_length": ["data.by_length=true", "data.pack=false"],
    }
    steppers: dict[str, Callable[[], Any]] = {}
    runs: dict[str, Trainer] = {}
    for name, changes in trainers.items():
        config = text.config(f"softmax-{heads}", [*common, *changes])
        place = folder / f"{name}-{heads}"
        place.mkdir(parents=True)
        runs[name] = trainer = Trainer(config, place, corpus, fabric)
        if name == "bare":
            steppers[name] = Bare(trainer).step
        else:
            walk: Iterator[int] = trainer.steps()
            steppers[name] = lambda walk=walk: next(walk)  # type: ignore[misc]
    for name, step in steppers.items():
        # Until every width has been seen twice, which is when it is recorded.
        seconds(10 * warmup if name == "by_length" else warmup, fabric.device, step)
    for name, trainer in runs.items():
        # No number for a run that fell back to something else.
        recorded = trainer.updater.graphs
        if fabric.device.type == "cuda" and (recorded is None or recorded._failed):
            raise RuntimeError(f"updates must be recorded as CUDA graphs, got {name} without")
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(rounds):
        for name, step in steppers.items():
            times[name].append(seconds(steps, fabric.device, step))
    medians = {name: statistics.median(values) for name, values in times.items()}
    batch_size = runs["loop"].config.training.batch_size
    assert batch_size is not None
    return {
        "heads": heads,
        "batch_size": batch_size,
        "width": WIDTH,
        "precision": str(runs["loop"].share.precision or torch.float32).removeprefix("torch."),
        "seconds_per_step": medians,
        "all_seconds_per_step": times,
        "loop_over_bare": medians["loop"] / medians["bare"],
        "samples_per_second": {name: batch_size / value for name, value in medians.items()},
        "by_length_over_padded": medians["loop"] / medians["by_length"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if fabric.device.type == "cuda" else None,
    }


def table(path: Path = PUBLISHED) -> str:
    """The Markdown of docs/training.md."""
    lines = [
        "| heads | bare step | loop | over bare | batches of similar length | samples/s over padding to 4,096 |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        bare, loop, by_length = (f"{1000 * row['seconds_per_step'][name]:.2f} ms" for name in NAMES)
        lines.append(
            f"| {row['heads']} | {bare} | {loop} | {row['loop_over_bare']:.3f}x | {by_length} | "
            f"{row['by_length_over_padded']:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the IMDb files")
    parser.add_argument("--heads", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=150, help="of one measurement")
    parser.add_argument("--warmup", type=int, default=60, help="steps that do not count; ten times as many by length")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", type=Path, default=Path("results/bench/training.json"))
    options = parser.parse_args()
    config = recipes.load("lra/text").config()
    corpus = open_or_prepare(config.data, source=options.data)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(heads, corpus, options.steps, options.warmup, options.rounds, Path(folder))
            for heads in options.heads
        ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    written = {"device": device_name(device), "versions": versions(), "corpus": corpus.fingerprint, "rows": rows}
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(table(options.to))


if __name__ == "__main__":
    main()
