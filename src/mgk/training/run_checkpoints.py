"""The checkpoints of a run: which one it resumes from, how its ranks write one, and which ones are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric

from mgk.training import checkpoint, snapshot
from mgk.training.checkpoint import Checkpoint, Write
from mgk.training.distributed import sum_over_ranks
from mgk.training.errors import CheckpointError, CheckpointWriteError
from mgk.training.run_log import RunLog
from mgk.training.task import Task

CHECKPOINTS = "checkpoints"
STEP, BEST = "step", "best"

Resume = Literal["auto", "never"] | int
"""``auto`` resumes if there is a checkpoint, ``never`` refuses a folder with checkpoints, and a step resumes from the
checkpoint of that step."""


def after_restart(resume: Resume) -> Resume:
    """Return where a process resumes from that torchrun or SLURM may have started again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or "SLURM_RESTART_COUNT" in os.environ:
        # --resume was meant for the first start. A restart by torchrun or SLURM has newer checkpoints.
        return "auto"
    return resume


class RunCheckpoints:
    """The checkpoints of a run. All ranks read them, and the first one writes and removes them.

    Args:
        folder: folder of the checkpoints.
        task: saves its tokenizer in every checkpoint.
        fabric: launched Fabric.
        log: log of the run, which says what happens.
    """

    def __init__(self, folder: Path, task: Task, fabric: Fabric, log: RunLog) -> None:
        self.folder, self._task, self._fabric, self._log = folder, task, fabric, log

    def find(self, resume: Resume) -> Checkpoint | None:
        """Return the checkpoint to resume from, which is the same for all ranks, or ``None`` to start at step 0."""
        if isinstance(resume, int):
            steps = [checkpoint.step_of(path) for path in checkpoint.candidates(self.folder, STEP)]
            if resume not in steps:
                listed = ", ".join(map(str, sorted(steps))) or "none"
                raise CheckpointError(
                    f"--resume must be the step of a checkpoint in {self.folder} ({listed}), got {resume}"
                )
            found: Checkpoint | None = self.read(STEP, resume)
        elif resume == "never" and checkpoint.candidates(self.folder, STEP):
            raise CheckpointError(f"{self.folder} must be empty with --resume never, got checkpoints")
        else:
            found = checkpoint.newest(self.folder, STEP, self._log.say)
        snapshot.check_same_step(found, self.folder, self._fabric)
        if found is None:
            self._log.say(f"no checkpoint in {self.folder}: starting at step 0")
        return found

    def read(self, kind: str, step: int) -> Checkpoint:
        """Read and verify the checkpoint of a step."""
        return checkpoint.read(checkpoint.place(self.folder, kind, step))

    def write(self, kind: str, step: int, content: dict[str, Any], files: Write, *, must: bool = False) -> bool:
        """Write a checkpoint on the first rank, and return on all ranks whether that succeeded.

        Args:
            kind: :data:`STEP` or :data:`BEST`.
            step: step of the checkpoint.
            content: content of the manifest.
            files: writes the files into a folder.
            must: whether a failure is an error.
        """
        problem: CheckpointWriteError | None = None
        if self._fabric.is_global_zero:

            def write(folder: Path) -> None:
                files(folder)
                self._task.save_tokenizer(folder)

            started = time.perf_counter()
            try:
                checkpoint.save(self.folder, kind, step, content, write)
                self._log.saved(time.perf_counter() - started)
            except CheckpointWriteError as error:
                problem = error
                self._log.say(f"no checkpoint at step {step}: {error}")
        failed = torch.full((), float(problem is not None), dtype=torch.float32, device=self._fabric.device)
        failed = sum_over_ranks(self._fabric, failed)
        if must and failed > 0:
            raise problem or CheckpointWriteError("the first rank must write its checkpoint, got an error there")
        return bool(failed == 0)

    def prune(self, keep: int, best_step: int) -> None:
        """Remove all but the newest ``keep``, and all best models but those that a remaining checkpoint refers to.

        Args:
            keep: number of checkpoints of steps that remain.
            best_step: step of the best model so far.
        """
        if not self._fabric.is_global_zero:
            return
        try:
            kept = checkpoint.prune(self.folder, STEP, keep)
            needed = {best_step, *(each.manifest["state"]["best_step"] for each in kept)}
            for path in checkpoint.candidates(self.folder, BEST):
                if checkpoint.step_of(path) not in needed:
                    checkpoint.remove(path)
        except OSError as error:
            # The new checkpoint is written, and an old one that remains only costs space.
            self._log.say(f"an old checkpoint could not be removed: {error}")

    def remove_after(self, step: int) -> None:
        """Remove later checkpoints, so that after a crash the run does not resume from the abandoned ones."""
        if not self._fabric.is_global_zero:
            return
        for path in checkpoint.candidates(self.folder, STEP):
            if checkpoint.step_of(path) > step:
                self._log.say(f"removed {path.name}, which comes after step {step}")
                checkpoint.remove(path)
