"""A sweep that runs several cells at once on one device, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mgk.commands.processes.launcher import Launcher
from mgk.commands.sweep import cell_process
from mgk.commands.sweep.capacity import Capacity
from mgk.commands.sweep.cell import Cell, finished, kept
from mgk.commands.sweep.in_turn import Sweep
from mgk.commands.sweep.live_table import LiveTable
from mgk.commands.sweep.mps import MultiProcessService
from mgk.commands.sweep.progress import Progress
from mgk.commands.sweep.scheduler import Scheduler
from mgk.commands.sweep.summary import summarize, write_summary
from mgk.data.kind import Progress as Bar
from mgk.data.kind import no_progress
from mgk.reproduction import archive as archives
from mgk.reproduction.collection import copy_run, files_of
from mgk.training import result
from mgk.training.configuration import DataConfig
from mgk.training.corpora import default_folder, open_or_prepare
from mgk.training.folder import make_folder
from mgk.training.signals import GracefulStop

STOPPED = 143
"""Exit code of a sweep whose time was up before all cells were done: that of a run that SIGTERM has stopped."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a sweep."""

    cells: Sequence[Progress]
    signal: int | None = None
    """Signal that stopped the sweep, if any."""

    @property
    def exit_code(self) -> int:
        """0 if all cells are done, 1 if some failed, 128 + signal (143 for time) if the same command can resume it."""
        if self.signal is not None:
            return 128 + self.signal
        if any(each.state in ("waiting", "stopped") for each in self.cells):
            return STOPPED
        return 1 if any(each.state == "failed" for each in self.cells) else 0

    @property
    def sweeps(self) -> list[Sweep]:
        """Results grouped by recipe, for a table of each."""
        found: dict[str, Sweep] = {}
        for each in self.cells:
            config = each.cell.config
            sweep = found.setdefault(config.name, Sweep(config.name, config.validation.metric))
            if each.result is not None:
                sweep.results.setdefault(config.row, []).append(each.result)
            elif each.state == "failed":
                sweep.failed[each.cell.title] = each.why
        return list(found.values())


def run_cells(
    cells: Sequence[Cell],
    launcher: Launcher,
    *,
    jobs: int | None,
    source: Path | None = None,
    device: str = "auto",
    results: Path | None = None,
    seconds: float | None = None,
    archive: Path | None = None,
    analyze: bool = False,
    evaluate: Sequence[str] = (),
    summary: Path | None = None,
    table: LiveTable | None = None,
    progress: Bar = no_progress,
) -> Outcome:
    """Run the cells that have no result yet, in order of priority.

    Args:
        cells: cells by descending priority.
        launcher: starts their processes.
        jobs: number of cells at once; ``None`` is as many as fit.
        source: folder of the raw files.
        device: ``cpu``, ``cuda`` or ``auto``.
        results: folder to which the results of finished cells are copied; a cell with a result there counts as done.
        seconds: time limit, counted from the start of this process, by which everything has ended.
        archive: tar file for the contents of finished cells.
        analyze: whether to analyse each cell when it has finished.
        evaluate: splits on which each language model and translator is evaluated when it has finished.
        summary: JSON file for the time that the sweep took.
        table: shows the progress of the cells.
        progress: shows the progress of preparing the data.
    """
    begun = time.monotonic() - process_seconds()
    table = table or LiveTable()
    is_on_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not is_on_gpu:
        raise ValueError("--device must be one that is there, got cuda, and torch sees no GPU")
    make_folder("--results", results)
    make_folder("the folder of --archive", None if archive is None else archive.parent)
    make_folder("the folder of --summary", None if summary is None else summary.parent)
    if archive is not None:
        archives.check(archive)
    known = [_look_up(cell, device, results, analyze, evaluate) for cell in cells]
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(GracefulStop())
        _prepare(known, source, progress)
        capacity = Capacity(jobs, is_on_gpu=is_on_gpu)
        service = MultiProcessService(table.say)
        if is_on_gpu and capacity.limit > 1:
            stack.enter_context(service)
            launcher.environment |= service.environment
        threads = capacity.threads
        has_service, to_pack = service.is_running, _ToPack()
        scheduler = Scheduler(
            known, launcher, capacity,
            argument_of=lambda cell: cell_process.argument_of(
                cell, device=device, threads=threads, analyze=analyze, results=results, evaluate=evaluate
            ),
            device=device, view=table, stop=stop, deadline=None if seconds is None else begun + seconds,
            afterwards=lambda: 0.0 if archive is None else 1.0 + to_pack.size(known) / archives.BYTES_PER_SECOND,
            is_shared=has_service,
        )  # fmt: skip
        with table:
            scheduler.run()
        left = [each for each in known if each.state in ("waiting", "stopped")]
        if left:
            begun_ones = [each.cell.folder for each in left if each.newest_step()]
            where = f" the checkpoints below {os.path.commonpath(begun_ones)}" if begun_ones else " here"
            table.say(f"{len(left)} of {len(known)} cells are not done yet: the same command goes on from{where}")
        if archive is not None:
            archives.pack(archive, {name: path for each in _on_disk(known) for name, path in files_of(each).items()})
        if summary is not None:
            took = time.monotonic() - begun
            content = summarize(
                known, seconds=took, jobs=capacity.limit, is_automatic=jobs is None, has_service=has_service
            )
            write_summary(summary, content)
    return Outcome(cells=known, signal=stop.signal)


def process_seconds() -> float:
    """Seconds since this process started, so that the time of imports is counted."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            # The start time is the 20th field after the name, which may contain anything.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return time.process_time()


def _look_up(cell: Cell, device: str, results: Path | None, analyze: bool, evaluate: Sequence[str]) -> Progress:
    """Return the progress of a cell, which is done if its folder, or the folder of results, has its result."""
    found = Progress(cell=cell)
    try:
        found.result = finished(cell.folder, cell.config, device)
        if found.result is not None:
            lacks = cell_process.not_evaluated(cell.folder, cell.config, evaluate)
            if lacks or (analyze and not cell_process.is_analysed(cell.folder)):
                found.result = None
                return found
            if results is not None:
                copy_run(cell.folder, results)
        elif results is not None:
            found.result = kept(results, cell.config, device)
        found.state = "waiting" if found.result is None else "done"
    except (ValueError, OSError) as error:
        found.state, found.why = "failed", str(error)
    return found


def _prepare(cells: Sequence[Progress], source: Path | None, progress: Bar) -> None:
    """Prepare every corpus once, before many processes need it. Cells whose corpus is not available fail."""
    problems: dict[Path, str] = {}
    for each in cells:
        data: DataConfig = each.cell.config.data
        if each.state != "waiting":
            continue
        try:
            place = default_folder(data)
            if place not in problems:
                problems[place] = ""
                open_or_prepare(data, source=source, progress=progress)
        except (ValueError, OSError, RuntimeError) as error:
            problems[place] = str(error)
        if problems[place]:
            each.state, each.why = "failed", problems[place]


def _on_disk(cells: Sequence[Progress]) -> list[Path]:
    """Folders of the cells that are done."""
    return [each.cell.folder for each in cells if each.state == "done" and (each.cell.folder / result.RESULT).is_file()]


class _ToPack:
    """Number of bytes that an archive must hold. The folder of each cell is measured once."""

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}

    def size(self, cells: Sequence[Progress]) -> int:
        for each in cells:
            folder = each.cell.folder
            if each.state == "done" and folder not in self._sizes:
                files = files_of(folder).values() if (folder / result.RESULT).is_file() else ()
                self._sizes[folder] = sum(path.stat().st_size for path in files)
        return sum(self._sizes.values())
