"""The work of one cell in a process of its own: training, testing and, if wanted, evaluation and analysis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

# Everything that the work needs is imported here, so that the server imports it once, before it forks.
from mgk.analysis.findings import NUMBERS
from mgk.commands.analyze import DEFAULT_FOLDER, analyze_folder, count_samples
from mgk.commands.sweep.cell import Cell
from mgk.data import registry
from mgk.data.store import Corpus
from mgk.reproduction.collection import copy_run
from mgk.reproduction.metrics import slide_of
from mgk.reproduction.missing import SAMPLES
from mgk.training import result
from mgk.training.configuration import RunConfig, from_mapping, to_mapping
from mgk.training.corpora import default_folder
from mgk.training.distributed import build_fabric
from mgk.training.errors import RunLockedError
from mgk.training.evaluate import evaluate_run
from mgk.training.run import fit
from mgk.training.status import StatusDisplay, StatusFile

LOG = "log.txt"
LOCKED_SECONDS = 75.0
"""Seconds to wait for a folder to which a process of an earlier sweep may still be saving."""


def argument_of(
    cell: Cell, *, device: str, threads: int, analyze: bool, results: Path | None, evaluate: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the argument of :func:`work`, which JSON can represent."""
    return {
        "config": to_mapping(cell.config),
        "folder": str(cell.folder.absolute()),
        "command": cell.command,
        "device": device,
        "threads": threads,
        "analyze": analyze,
        "evaluate": list(evaluate),
        "results": None if results is None else str(results.absolute()),
    }


def is_analysed(folder: Path) -> bool:
    """Whether the folder of a run has the analysis that is collected with the results."""
    return (folder / DEFAULT_FOLDER / NUMBERS).is_file()


def not_evaluated(folder: Path, config: RunConfig, splits: Sequence[str]) -> list[str]:
    """Return the splits on which a run is still to be evaluated; the result of a classifier already has everything."""
    if config.task not in ("language", "translation"):
        return []
    return [split for split in splits if not (folder / f"evaluation-{split}.json").is_file()]


def work(argument: Mapping[str, Any]) -> int:
    """Do the remaining work of a cell, and return the exit code. The status file records the progress."""
    config, folder = from_mapping(RunConfig, argument["config"]), Path(argument["folder"])
    torch.set_num_threads(argument["threads"])
    file = StatusFile(folder)
    try:
        # The sweep has prepared the corpus, because many processes must not do so at once.
        corpus = registry.open_corpus(config.data.corpus, default_folder(config.data))
        if not (folder / result.RESULT).is_file():
            _train(config, folder, corpus, argument["device"], file, argument["command"])
        for split in not_evaluated(folder, config, argument["evaluate"]):
            file.enter("evaluating")
            evaluate_run(folder, split, stride=slide_of(config.data.corpus), device=argument["device"])
        if argument["analyze"] and not is_analysed(folder):
            file.enter("analysing")
            samples = min(SAMPLES, count_samples(config, corpus, "test"))
            analyze_folder(folder, folder / DEFAULT_FOLDER, samples=samples, device=argument["device"])
        if argument["results"] is not None:
            copy_run(folder, Path(argument["results"]))
    except SystemExit:
        file.enter("stopped")
        raise
    except Exception as error:
        file.enter("failed", f"{type(error).__name__}: {error}")
        raise
    file.enter("done")
    return 0


def _train(config: RunConfig, folder: Path, corpus: Corpus, device: str, file: StatusFile, command: str) -> None:
    fabric = build_fabric(device=device)
    fabric.launch()
    file.status.device = result.device_name(fabric.device)
    display = StatusDisplay(file, console=Console(stderr=True, width=200))
    given_up = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            fit(config, folder, corpus, fabric, display=display, command=command)
            return
        except RunLockedError:
            if time.monotonic() > given_up:
                raise
            time.sleep(0.2)
