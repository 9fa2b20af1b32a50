"""Train our model from the weights with which the published code began, in the batches that it took.

A run of ours and a run of ``published_control.py`` with the same seed begin with other weights and take other batches,
so the steps at which they leave the plateau of ListOps differ by chance as well. This script takes the chance out: it
makes the published model under the seed of the control, draws the control's batches, and hands both to our Trainer. If
the losses and the step of escape are then those of the control, our training does the same.

::

    python benchmarks/same_start.py path/to/Nystromformer --heads 8 --dropout 0 --seed 0
    python benchmarks/same_start.py path/to/Nystromformer --every --time 540   # all controls at once, on a GPU
    python benchmarks/same_start.py path/to/Nystromformer --heads 8 --dropout 0.1 --seeds 0 1 2 3 --only weights

Without dropout the two runs differ only in how numbers are rounded. The recipe is ``lra/listops`` or
``lra/listops-dropout-0``; ``--set`` changes it, which a result says in its configuration. Results go to
``results/controls/``, next to those of the control, and the page ``fidelity`` compares the two. With ``--to`` runs have
a folder, and go on there if they were stopped. With ``--only`` a run takes the weights and our batches, or the batches
and our weights, which tells what of the start decides when a run leaves the plateau; no control is needed for that.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import published_control
import torch
from lightning.fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

import mgk
import mgk.recipes
from mgk.commands.sweep.mps import MultiProcessService
from mgk.data.registry import open_corpus
from mgk.data.store import Corpus
from mgk.models import import_checkpoint
from mgk.reproduction.controls import read_controls
from mgk.reproduction.results import CONTROLS
from mgk.training import Trainer
from mgk.training.configuration import to_mapping
from mgk.training.errors import Interrupted
from mgk.training.result import device_name, write
from mgk.training.signals import GracefulStop
from mgk.training.tracking import METRICS, Display

ROOT = Path(__file__).parent.parent
NAME = "same-start-listops-softmax"
RECIPES = {0.0: "lra/listops-dropout-0", 0.1: "lra/listops"}
"""The recipe that has as much dropout."""
PARTS = ("weights", "batches")
"""What a run takes from the published code."""
WINDOW = 50
"""Steps whose mean loss the published code logs."""


class Start(NamedTuple):
    """What the published code has when it begins to train."""

    weights: dict[str, Tensor]
    """of its model, by its own names"""
    orders: list[NDArray[np.int64]]
    """of the samples, one for each epoch"""


def draw_orders(corpus: Corpus, training: Mapping[str, Any]) -> list[NDArray[np.int64]]:
    """The order of the training samples in each epoch, drawn from ``random`` as the published code draws it."""
    lengths = {theirs: len(corpus.splits[ours].numbers["labels"]) for theirs, ours in published_control.SPLITS.items()}
    data: Any = SimpleNamespace(labels={split: range(length) for split, length in lengths.items()})
    samples = {split: published_control.Samples(data, split, split != "test") for split in lengths}
    train, size = samples["train"], int(training["batch_size"])
    orders = [train.shuffled]
    for step in range(1, int(training["num_train_steps"]) + 1):
        train.take(size)
        if train.shuffled is not orders[-1]:
            orders.append(train.shuffled)
        if step % int(training["eval_frequency"]) == 0:
            # A validation shuffles, too, whenever it comes to the end of its samples.
            for _ in range(int(training["num_eval_steps"])):
                samples["dev"].take(size)
    return [order.astype(np.int64) for order in orders]


def begin(checkout: Path, corpus: Corpus, heads: int, dropout: float, seed: int) -> Start:
    """Make the published model, and draw its batches, as ``published_control.py`` does under this seed."""
    sys.path.insert(0, str(checkout / "LRA" / "code"))
    wrapper, config = (importlib.import_module(each) for each in ("model_wrapper", "lra_config"))
    own = config.config[published_control.TASK]
    settings = published_control.configure(own, heads, dropout)
    random.seed(seed)
    torch.manual_seed(seed)
    model = wrapper.ModelForSC({**settings, "mixed_precision": True})
    return Start(model.state_dict(), draw_orders(corpus, own["training"]))


def convert(weights: Mapping[str, Tensor], heads: int, length: int) -> dict[str, Tensor]:
    """The weights by our names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "start.pt")
        torch.save({"model_state_dict": dict(weights)}, path)
        return import_checkpoint(path, num_attention_heads=heads, length=length).state_dict()


def taken_together(trainer: Trainer) -> int:
    """How many samples a batch has."""
    size = trainer.config.training.batch_size
    assert size is not None
    return size


@contextlib.contextmanager
def in_order(trainer: Trainer, orders: Sequence[NDArray[np.int64]]) -> Iterator[None]:
    """Let the trainer take its samples in these orders."""
    taken: Any = type(trainer.batches)
    made = taken._make_order
    if len(orders[0]) != len(trainer.batches) * taken_together(trainer):
        # Otherwise an epoch would end elsewhere than in the published code, which goes on within a batch.
        raise SystemExit(f"an epoch must be a whole number of batches, got {len(orders[0])} samples")

    def take(batches: Any, epoch: int) -> NDArray[np.int64]:
        # Samples of a validation are not shuffled.
        return orders[epoch] if batches.shuffle else made(batches, epoch)

    with mock.patch.object(taken, "_make_order", take):
        yield


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The curve of a run of ours, in the form of a control's; empty if the run was stopped before its first line."""
    if not (folder / METRICS).is_file():
        return []
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [
        {key: line[key] for key in ("kind", "step", "loss", "accuracy") if key in line}
        for line in lines
        if line["kind"] in ("train", "valid")
    ]


def digest(start: Start) -> str:
    """A checksum of weights and orders, by which two machines can tell that they began alike."""
    content = hashlib.sha256()
    for name in sorted(start.weights):
        content.update(name.encode() + start.weights[name].numpy().tobytes())
    for order in start.orders:
        content.update(order.tobytes())
    return content.hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of mlpen/Nystromformer")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0, choices=tuple(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", help="one run for each of these, all at once")
    parser.add_argument("--only", choices=PARTS, help="take only this from the published code")
    parser.add_argument("--steps", type=int, help="stop there; the schedule stays that of a whole run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the recipe")
    parser.add_argument("--data", type=Path, help="folder of the prepared corpus, by default where mgk keeps it")
    parser.add_argument("--to", type=Path, help="folder of runs, where they can go on; by default a temporary one")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="has the controls, and gets what is new")
    parser.add_argument("--every", action="store_true", help="one run for every control in results, all at once")
    parser.add_argument(
        "--time", type=float, default=math.inf, help="with --every or --seeds: stop and save after so many seconds"
    )
    return parser.parse_args()


def wanted(arguments: argparse.Namespace) -> list[tuple[int, float, int]]:
    """Heads, dropout and seed of each of several runs."""
    if arguments.seeds is not None:
        return [(arguments.heads, arguments.dropout, seed) for seed in arguments.seeds]
    controls = [each for each in read_controls(arguments.results) if each.name == published_control.CONTROL]
    return [(each.heads, each.dropout, each.seed) for each in controls]


def run_at_once(arguments: argparse.Namespace) -> int:
    """Run several at once, each in its own process group, and return the worst exit status."""
    passed_on = [f"--results={arguments.results}"]
    passed_on += [
        f"--{name}={value}" for name in ("steps", "data", "to", "only") if (value := vars(arguments)[name]) is not None
    ]
    passed_on += ["--set", *arguments.set]
    with MultiProcessService(lambda text: print(text, file=sys.stderr)) as service:
        environment = {**os.environ, **service.environment}
        commands = [
            [sys.executable, __file__, str(arguments.checkout), f"--heads={heads}", f"--dropout={dropout:g}",
             f"--seed={seed}", *passed_on]
            for heads, dropout, seed in wanted(arguments)
        ]  # fmt: skip
        running = [subprocess.Popen(command, env=environment, start_new_session=True) for command in commands]

        def stop(*_: object) -> None:
            for each in running:
                # A run saves, writes what it has, and ends.
                each.terminate()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGALRM, stop)
        if math.isfinite(arguments.time):
            signal.setitimer(signal.ITIMER_REAL, arguments.time)
        return max((abs(each.wait()) for each in running), default=0)


def main() -> None:
    arguments = parse()
    if arguments.every or arguments.seeds is not None:
        sys.exit(run_at_once(arguments))
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Train, and write the result."""
    begun = time.monotonic()
    warnings.filterwarnings("ignore", category=FutureWarning)
    heads, dropout, seed = arguments.heads, arguments.dropout, arguments.seed
    takes = PARTS if arguments.only is None else (arguments.only,)
    checkout = arguments.checkout.resolve()
    recipe = mgk.recipes.load(RECIPES[dropout])
    config = recipe.config(f"softmax-{heads}", [f"training.log_every={WINDOW}", *arguments.set], seed=seed)
    corpus = open_corpus("listops", arguments.data)
    start = begin(checkout, corpus, heads, dropout, seed)
    length = start.weights["model.embeddings.position_embeddings.weight"].shape[0]
    steps = config.training.steps if arguments.steps is None else arguments.steps
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fabric = Fabric(accelerator=device.type, devices=1)
    fabric.launch()
    with contextlib.ExitStack() as stack:
        own = f"{heads}-dropout-{dropout:g}-seed-{seed}" + (f"-only-{arguments.only}" if arguments.only else "")
        folder = (arguments.to or Path(stack.enter_context(tempfile.TemporaryDirectory()))) / own
        stop = stack.enter_context(GracefulStop())
        display = stack.enter_context(Display())
        trainer = Trainer(config, folder, corpus, fabric, display=display, stop=stop)
        if "batches" in takes:
            stack.enter_context(in_order(trainer, start.orders))
        if "weights" in takes and trainer.state.step == 0:
            trainer.model.load_state_dict(convert(start.weights, heads, length))
        metrics: dict[str, float] = {}
        try:
            for step in trainer.steps():
                if step == steps < config.training.steps:
                    trainer.save(must=True)
                    break
        except Interrupted:
            print(f"stopped at step {trainer.state.step} and saved", file=sys.stderr)
        trainer.wait()
        is_complete = trainer.state.step == config.training.steps
        if is_complete:
            best = trainer.load_best()
            metrics = {"best_step": best.step, "valid_accuracy": best.manifest["metrics"]["accuracy"]}
            metrics |= {f"test_{name}": value for name, value in trainer.evaluate("test").items()}
        curve, share = read_curve(folder), trainer.share
    name = f"{NAME}-{own}-{device.type}-{share.precision_name}"
    output = arguments.results / CONTROLS / f"{name}.json"
    result = {
        "control": NAME,
        "commit": published_control.commit_of(checkout),
        "heads": heads,
        "dropout": dropout,
        "seed": seed,
        "takes": list(takes),
        "steps": trainer.state.step,
        "complete": is_complete,
        "metrics": metrics,
        "curve": curve,
        "start": digest(start),
        "config": to_mapping(config),
        "precision": share.precision_name,
        "packed": share.packs(config),
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "device": device_name(device),
        "seconds": time.monotonic() - begun,
        "versions": {
            "mgk": mgk.__version__, "torch": torch.__version__, "cuda": torch.version.cuda or "none",
            "numpy": np.__version__, "python": platform.python_version(),
        },
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write(output, result)
    print(f"{name}: {trainer.state.step} steps in {result['seconds']:.0f} s, {output}", flush=True)


if __name__ == "__main__":
    main()
