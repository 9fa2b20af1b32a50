"""Time and peak memory of preparing each corpus, and the time of one batch: writes results/bench/data-cpu.json.

    python benchmarks/data.py path/to/raw/files

Each corpus is prepared in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import mgk
from mgk.data import Samples, Sequences, open_corpus, prepare

CORPORA = ("listops", "imdb", "peerread", "enwik8", "wikitext2", "multi30k", "tatoeba")
OUTPUT = Path(__file__).parent.parent / "results" / "bench" / "data-cpu.json"


def measure_preparation(task: tuple[str, Path, Path]) -> dict[str, Any]:
    name, source, folder = task
    start = time.perf_counter()
    corpus = prepare(name, source, folder / name)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "corpus": name, "seconds": round(seconds, 2), "peak_MiB": round(peak),
        "splits": dict(corpus.manifest["splits"]),
        "source": dict(corpus.manifest["source"]), "fingerprint": corpus.fingerprint,
    }  # fmt: skip


def measure_batches(folder: Path) -> dict[str, float]:
    """Median milliseconds of a batch of 32 IMDb reviews: padded to 4,096, by length, packed; and if all were long."""
    split = open_corpus("imdb", folder / "imdb").splits["train"]
    reviews = split.sequences["text"]
    full = Sequences(reviews.tokens, np.arange(0, len(reviews.tokens), 5000))
    options: dict[str, dict[str, Any]] = {
        "padded to 4,096": {"width": 4096},
        "by length": {},
        "packed": {"pack": True},
        "all of 4,096 bytes": {"sequences": full, "labels": np.zeros(len(full))},
    }
    medians = {}
    for title, chosen in options.items():
        default = {"sequences": reviews, "labels": split.numbers["labels"], "batch_size": 32}
        batches = Samples(**{**default, **chosen})
        times = []
        for step in range(min(300, len(batches))):
            start = time.perf_counter()
            batches.batch(0, step)
            times.append(1e3 * (time.perf_counter() - start))
        medians[title] = round(statistics.median(times[20:]), 3)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--corpora", nargs="+", default=CORPORA)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for corpus in options.corpora:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                rows.append(process.map(measure_preparation, [(corpus, options.source, folder)])[0])
            print(f"{corpus:10} {rows[-1]['seconds']:6.1f} s  {rows[-1]['peak_MiB']:5d} MiB")
        batches = measure_batches(folder) if "imdb" in options.corpora else {}
        for title, milliseconds in batches.items():
            print(f"batch of 32 reviews, {title}: {milliseconds} ms")
    result = {
        "mgk": mgk.__version__, "python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count(),
        "preparation": rows, "batch_ms": batches,
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
