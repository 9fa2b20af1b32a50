"""What it brings that training with an adaptive softmax is told where the words of its clusters are.

    python benchmarks/adaptive_softmax.py DATA [CHANGE ...] [--recipe wikitext2] [--row softmax-8] [--to FILE]

Two things are timed, in fresh memory each, after their first losses were compared with those of the first one:

- runs: updates of the training loop, whose rows are looked up by the device (as before) or part of the batch, eager or
  compiled, queued kernel by kernel or recorded as CUDA graphs;
- the loss: forward and backward of the adaptive softmax alone, on the targets of one batch.

CHANGE is one of the recipe, as for ``mgk train``. Where there is no GPU, nothing is recorded, and nothing compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mgk import recipes
from mgk.data.store import Corpus
from mgk.models import AdaptiveSoftmax
from mgk.training.clusters import ClusteredBatches, model_inputs
from mgk.training.corpora import open_or_prepare
from mgk.training.distributed import build_fabric
from mgk.training.loop import Trainer
from mgk.training.result import device_name, versions

NEVER = 10_000_000
CHECKED = 8
"""First losses that are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How an update is made."""

    name: str
    given: bool
    """The rows of the clusters are part of the batch."""
    compiled: bool = False
    recorded: bool = False


WAYS = (
    Way(name="looked up, eager", given=False),
    Way(name="given, eager", given=True),
    Way(name="looked up, compiled", given=False, compiled=True),
    Way(name="given, compiled", given=True, compiled=True),
    Way(name="given, recorded", given=True, recorded=True),
    Way(name="given, compiled and recorded", given=True, compiled=True, recorded=True),
)


class Stopwatch:
    """Seconds and peak memory on one device."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def __call__(self, calls: int, call: Callable[[], Any]) -> float:
        """Of one call, over many."""
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / calls

    def clear(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else None

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


class Bench:
    """One row of a recipe."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.recipe = recipes.load(options.recipe)
        self.fabric = build_fabric()
        self.watch = Stopwatch(self.fabric.device)
        self.corpus: Corpus = open_or_prepare(self.recipe.config().data, source=options.data)

    def trainer(self, way: Way, folder: Path, *changes: str) -> Trainer:
        folder.mkdir()
        config = self.recipe.config(
            self.options.row,
            [
                *self.options.changes, *changes, f"training.steps={NEVER}", f"validation.every={NEVER}",
                f"training.checkpoint_every={NEVER}", f"training.compile={str(way.compiled).lower()}",
                f"training.cuda_graphs={str(way.recorded).lower()}",
            ],
        )  # fmt: skip
        trainer = Trainer(config, folder, self.corpus, self.fabric)
        assert isinstance(trainer.batches, ClusteredBatches), "the recipe must have an adaptive softmax"
        if not way.given:
            trainer.batches = trainer.batches.batches
        return trainer

    def losses(self, way: Way, folder: Path) -> list[float]:
        quiet = [f"model.{name}=0" for name in ("dropout", "attention_dropout", "activation_dropout")]
        trainer = self.trainer(way, folder, *quiet)
        steps = trainer.steps()
        for _ in range(CHECKED):
            next(steps)
        trainer.wait()
        return trainer.state.losses

    def run(self, way: Way, folder: Path) -> dict[str, Any]:
        self.watch.clear()
        trainer = self.trainer(way, folder)
        steps = trainer.steps()
        start = time.perf_counter()
        # Until nothing is compiled any more, and what comes twice is recorded.
        warmup = self.watch(self.options.warmup, functools.partial(next, steps)) * self.options.warmup
        times = [self.watch(self.options.steps, functools.partial(next, steps)) for _ in range(self.options.rounds)]
        if way.recorded and (trainer.updater.graphs is None or trainer.updater.graphs._failed):
            raise RuntimeError(f"updates must be recorded as CUDA graphs, got {way.name} without")
        tokens = trainer.task.count_tokens(trainer.batches.batch(0, 0))
        return {
            "seconds_per_step": statistics.median(times),
            "all_seconds_per_step": times,
            "tokens_per_second": tokens / statistics.median(times),
            "peak_gib": self.watch.peak_gib(),
            "recordings": len(trainer.updater.graphs._recordings) if trainer.updater.graphs is not None else 0,
            "warmup_seconds": warmup,
            "seconds_in_all": time.perf_counter() - start,
        }

    def loss(self, way: Way, trainer: Trainer) -> dict[str, Any]:
        """Of the last layer alone."""
        head = trainer.model.lm_head
        assert isinstance(head, AdaptiveSoftmax)
        inputs = model_inputs(trainer.training_pass.on_device(trainer.batches.batch(0, 0)))
        target = inputs["shift_labels"].flatten()
        hidden = torch.randn(len(target), head.weight.shape[1], device=target.device, requires_grad=True)
        loss: Callable[..., torch.Tensor] = torch.compile(head.loss) if way.compiled else head.loss

        def step() -> None:
            with trainer.training_pass.autocast():
                total = loss(hidden, target, inputs.get("cluster_rows")).mean()
            total.backward()
            head.zero_grad()
            hidden.grad = None

        self.watch(3, step)
        self.watch.clear()
        before = torch.cuda.memory_allocated() if self.watch.is_cuda else 0
        times = [self.watch(self.options.calls, step) for _ in range(self.options.rounds)]
        peak = self.watch.peak_gib()
        return {
            "seconds": statistics.median(times),
            "all_seconds": times,
            "peak_gib": None if peak is None else peak - before / 2**30,
        }


def compare(name: str, losses: Sequence[float], expected: Sequence[float], tolerance: float) -> float:
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if not worst < tolerance:
        raise RuntimeError(f"losses of {name} must be those of {WAYS[0].name} within {tolerance}, got {worst:.2g} more")
    return worst


def measure(bench: Bench, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    expected: list[float] = []
    for way in WAYS:
        if not bench.watch.is_cuda and (way.compiled or way.recorded):
            continue
        place = folder / way.name.replace(", ", "-").replace(" ", "-")
        place.mkdir()
        losses = bench.losses(way, place / "checked")
        expected = expected or losses
        row = {**dataclasses.asdict(way), "worst_loss": compare(way.name, losses, expected, bench.options.tolerance)}
        row["run"] = bench.run(way, place / "timed")
        row["loss"] = bench.loss(way, bench.trainer(dataclasses.replace(way, recorded=False), place / "alone"))
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the raw files")
    parser.add_argument("changes", nargs="*", help="of the recipe, key=value")
    parser.add_argument("--recipe", default="wikitext2")
    parser.add_argument("--row", default="softmax-8")
    parser.add_argument("--steps", type=int, default=84, help="updates of one measurement")
    parser.add_argument("--calls", type=int, default=20, help="of the loss alone, in one measurement")
    parser.add_argument("--warmup", type=int, default=252, help="updates that do not count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=2e-2, help="relative, of the first losses")
    parser.add_argument("--to", type=Path, default=Path("results/bench/adaptive-softmax.json"))
    options = parser.parse_args()
    bench = Bench(options)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(bench, Path(folder))
    written = {
        "recipe": options.recipe,
        "row": options.row,
        "changes": options.changes,
        "device": device_name(bench.fabric.device),
        "versions": versions(),
        "corpus": bench.corpus.fingerprint,
        "rows": rows,
    }
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
