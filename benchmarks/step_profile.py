"""Where the time of an update and of a validation goes: on the host, and in which kernels of the GPU.

    python benchmarks/step_profile.py lra/listops softmax-8
    python benchmarks/step_profile.py lra/listops softmax-8 --at-once 8     # is the GPU full? under MPS, if it runs

The row of a recipe is trained by the real loop until its shapes are compiled and recorded. Then updates are timed, and
a few of them and one validation are traced. If the kernels take about as long as the update, the GPU is the limit. With
``--at-once`` so many processes train at the same time, and each says what an update took it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mgk import recipes
from mgk.training.corpora import open_or_prepare
from mgk.training.distributed import build_fabric
from mgk.training.loop import Trainer
from mgk.training.result import device_name, versions

NEVER = 10**9
LABELS = {"ms": "in all", "host_ms": "of the host", "gpu_ms": "of kernels", "first_ms": "the first time"}
WAITING = "MGK_STEP_PROFILE"
"""Environment variable with the folder where processes wait for each other."""


class Run:
    """A row that is being trained."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        changes = [f"validation.every={NEVER}", f"training.checkpoint_every={NEVER}", f"training.steps={NEVER}"]
        config = recipes.load(options.recipe).config(options.row, [*options.changes, *changes])
        corpus = open_or_prepare(config.data, source=options.data)
        self.trainer = Trainer(config, folder, corpus, build_fabric(device=options.device), resume="never")
        self.walk: Iterator[int] = self.trainer.steps()
        self.is_on_gpu = self.trainer.share.device.type == "cuda"

    def update(self, count: int) -> None:
        for _ in range(count):
            next(self.walk)
        self.trainer.wait()
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def validate(self) -> None:
        self.trainer.evaluate("valid")
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def times(self, count: int) -> dict[str, float]:
        """Milliseconds of an update: by the clock, and of the thread that queues it."""
        begun, worked = time.perf_counter(), time.thread_time()
        self.update(count)
        seconds, host = time.perf_counter() - begun, time.thread_time() - worked
        return {"ms": 1e3 * seconds / count, "host_ms": 1e3 * host / count}

    def kernels(self, call: Callable[[], None], count: int) -> dict[str, Any]:
        """What runs on the GPU in one of the ``count`` parts of a call."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            call()
        found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in trace.events():
            if event.device_type == DeviceType.CUDA:
                found[event.name][0] += 1 / count
                found[event.name][1] += event.time_range.elapsed_us() / 1e3 / count
        ordered = sorted(found.items(), key=lambda each: -each[1][1])
        return {
            "gpu_ms": sum(ms for _, (_, ms) in ordered),
            "launches": sum(number for _, (number, _) in ordered),
            "kernels": [{"name": name, "launches": number, "ms": ms} for name, (number, ms) in ordered],
        }


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    run.update(options.warmup)
    update: dict[str, Any] = run.times(options.steps)
    begun = time.perf_counter()
    run.validate()
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    run.validate()
    validation: dict[str, Any] = {"first_ms": 1e3 * first, "ms": 1e3 * (time.perf_counter() - begun)}
    if run.is_on_gpu:
        update |= run.kernels(lambda: run.update(options.traced), options.traced)
        validation |= run.kernels(run.validate, 1)
    return {"update": update, "validation": validation}


def show(found: dict[str, Any], most: int) -> None:
    for name, part in found.items():
        parts = [
            f"{key.removesuffix('_ms').replace('_', ' ')} {part[key]:.2f} ms" for key in part if key.endswith("ms")
        ]
        print(f"{name}: {', '.join(parts)}" + (f", {part['launches']:.0f} launches" if "launches" in part else ""))
        for kernel in part.get("kernels", [])[:most]:
            print(f"  {kernel['ms']:8.3f} ms {kernel['launches']:7.1f} x  {kernel['name'][:100]}")


def wait_for_others(folder: Path, name: str, count: int) -> bool:
    """Say that this process has come to a point, and return whether all have."""
    (folder / f"{name}-{os.getpid()}").touch()
    return len(list(folder.glob(f"{name}-*"))) >= count


def take_part(run: Run, options: argparse.Namespace, folder: Path) -> None:
    """As one of several processes: time updates while all of them train."""
    run.update(options.warmup)
    while not wait_for_others(folder, "ready", options.at_once):
        time.sleep(0.02)
    print(json.dumps(run.times(options.steps)), flush=True)
    # The others are still being timed.
    while not wait_for_others(folder, "done", options.at_once):
        run.update(1)


def run_at_once(options: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:]]
        environment = {**os.environ, WAITING: folder}
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
            for _ in range(options.at_once)
        ]
        printed = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise SystemExit("every process must end well, got one that did not")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("row")
    parser.add_argument("changes", nargs="*", help="of the recipe, key=value")
    parser.add_argument("--data", type=Path, help="folder with the raw files; default: $MGK_DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--warmup", type=int, default=150, help="updates that do not count")
    parser.add_argument("--steps", type=int, default=300, help="updates that are timed")
    parser.add_argument("--traced", type=int, default=50, help="updates that are traced")
    parser.add_argument("--kernels", type=int, default=15, help="how many are shown")
    parser.add_argument("--at-once", type=int, help="time updates in so many processes instead")
    parser.add_argument("--to", type=Path, help="JSON file to write, with all kernels")
    options = parser.parse_args()
    waiting = os.environ.get(WAITING)
    if options.at_once is not None and waiting is None:
        times = run_at_once(options)
        each = sum(found["ms"] for found in times) / len(times)
        print(f"{options.at_once} at once: {each:.2f} ms an update in each, {each / options.at_once:.2f} ms in effect")
        found: dict[str, Any] = {"at_once": options.at_once, "processes": times}
        device = None
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(options, Path(folder) / "run")
            if waiting is not None:
                take_part(run, options, Path(waiting))
                return
            found = measure(run, options)
            device = device_name(run.trainer.share.device)
        show(found, options.kernels)
    if options.to is not None:
        named = {"recipe": options.recipe, "row": options.row, "changes": options.changes}
        written = {**named, "device": device, "versions": versions(), **found}
        options.to.parent.mkdir(parents=True, exist_ok=True)
        options.to.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
