"""The training loop: update, validate, save and resume.

A run lives in a folder::

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/  result.json

:class:`Trainer` is one run, which ``for step in trainer.steps()`` carries out. :func:`mgk.training.fit` also tests the
best model and writes the result.

An update is the work of :class:`~mgk.training.updater.Updater`, and its values come back through
:class:`~mgk.training.reports.Reports`. :class:`~mgk.training.run_checkpoints.RunCheckpoints` has the checkpoints, and
:class:`~mgk.training.run_log.RunLog` what is shown and recorded on the way.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from mgk.data.batches import iterate
from mgk.data.store import Corpus
from mgk.nn import parameter_groups
from mgk.training import skipped, snapshot
from mgk.training.checkpoint import Checkpoint
from mgk.training.configuration import RunConfig, to_mapping
from mgk.training.distributed import seed_everything
from mgk.training.errors import CheckpointError, Interrupted, NonFiniteError
from mgk.training.reports import Report, Reports
from mgk.training.run_checkpoints import BEST, CHECKPOINTS, STEP, Resume, RunCheckpoints, after_restart
from mgk.training.run_log import RunLog
from mgk.training.signals import GracefulStop
from mgk.training.skipped import SKIPPED
from mgk.training.state import State
from mgk.training.task import Share, Task, build_task, choose_precision, uncompiled
from mgk.training.tracking import Display
from mgk.training.training_pass import TrainingPass
from mgk.training.updater import Updater

__all__ = ["BEST", "CHECKPOINTS", "SKIPPED", "STEP", "Resume", "Trainer"]

T = TypeVar("T")


class Trainer:
    """One run in a folder, which resumes from the newest undamaged checkpoint there, if there is one.

    Args:
        config: everything that decides the numbers.
        folder: folder of the run.
        corpus: prepared corpus.
        fabric: launched Fabric.
        resume: ``auto`` resumes if there is a checkpoint, ``never`` refuses a folder with checkpoints, and a step
            resumes from the checkpoint of that step.
        display: shows the progress.
        stop: records signals.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        corpus: Corpus,
        fabric: Fabric,
        *,
        resume: Resume = "auto",
        display: Display | None = None,
        stop: GracefulStop | None = None,
    ) -> None:
        self.config, self.folder, self.fabric = config, folder, fabric
        self.stop = stop or GracefulStop()
        self.log = RunLog(config, folder, fabric, display or Display(quiet=True))
        self.state = State()
        self.task: Task = build_task(config, corpus)
        self.share = Share(
            device=fabric.device,
            precision=choose_precision(config.training.precision, fabric.device),
            rank=fabric.global_rank,
            ranks=fabric.world_size,
        )
        self.batches = self.task.training_batches(self.share)
        self.checkpoints = RunCheckpoints(folder / CHECKPOINTS, self.task, fabric, self.log)

        seed_everything(config.seed)
        self.model = self.task.build_model().train()
        self.training_pass = TrainingPass(
            self.model, self.task, fabric, precision=self.share.precision, compiled=config.training.compile
        )
        # A fused optimiser can skip an update on the device, without asking the host.
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.optimizer.weight_decay),
            lr=config.optimizer.lr, betas=config.optimizer.betas, eps=config.optimizer.eps, fused=True,
        )  # fmt: skip
        # Each rank needs its own dropout masks.
        seed_everything(config.seed + 1_000_003 * self.share.rank)
        self._resume(resume)

        self.updater = Updater(config, self.training_pass, self.optimizer, state=self.state, stop=self.stop)
        self._reports = Reports(self._read)
        self._told_to_stop = False
        self._clock = time.perf_counter()
        self.log.begin(self.state)

    def steps(self) -> Iterator[int]:
        """Run the updates one by one, and yield the number of updates done after each."""
        training, validation = self.config.training, self.config.validation
        stream = self._stream()
        self._clock = time.perf_counter()
        try:
            while True:
                step, is_last = self.state.step, self.state.step == training.steps
                if step > self.state.validated and (step % validation.every == 0 or is_last):
                    self.validate()
                if step > 0 and (step % training.checkpoint_every == 0 or is_last):
                    self.save(must=is_last)
                if is_last:
                    return
                if self._should_stop():
                    raise Interrupted
                self._update([next(stream) for _ in range(training.accumulate)])
                if self.state.step % training.log_every == 0:
                    self._log_updates()
                self.log.show(self.state)
                self._count_time()
                yield self.state.step
                self._clock = time.perf_counter()
        except Interrupted:
            self.save(must=True)
            raise
        finally:
            stream.close()
            self.log.close()

    def validate(self) -> dict[str, float]:
        """Evaluate the model on the validation split, and save it if it is the best so far."""
        self._settle()
        begun = time.perf_counter()
        metrics = self.evaluate("valid")
        took = time.perf_counter() - begun
        name = self.config.validation.metric
        score = -metrics[name] if name == "loss" else metrics[name]
        self.state.validated = self.state.step
        self.log.record_validation(self.state, metrics, took)
        # NaN is never the best score.
        if score == score and (self.state.best is None or score > self.state.best):
            content = {**self._identity(), "metrics": metrics}
            if self.checkpoints.write(BEST, self.state.step, content, snapshot.take_weights(self.model)):
                self.state.best, self.state.best_step = score, self.state.step
        self._clock = time.perf_counter()
        return metrics

    def evaluate(self, split: str) -> dict[str, float]:
        """Return the metrics of a split with the current weights."""
        return self.test(split)[0]

    def test(self, split: str) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the metrics of a split, and which of its items were right, if the task has such items."""
        # Compiled, it would need a second graph, without gradients and for many widths. On a GPU that takes longer to
        # compile than all validations of a short run take without it.
        with uncompiled(self.model):
            found = self.task.test(self.model, split, self.share, functools.partial(self._watched, split))
        self.log.show(self.state)
        return found

    def save(self, *, must: bool = False) -> None:
        """Write a checkpoint. A failure is reported, and is an error only if ``must`` is set."""
        self._settle()
        files = snapshot.take_all(self.model, self.optimizer, self.fabric)
        self.updater.store(self.state)
        content = {**self._identity(), "state": dataclasses.asdict(self.state)}
        self.checkpoints.write(STEP, self.state.step, content, files, must=must)
        self.checkpoints.prune(self.config.training.keep_checkpoints, self.state.best_step)
        self._clock = time.perf_counter()

    def wait(self) -> None:
        """Wait until every queued update is done and :attr:`state` has its outcome."""
        self._settle()

    @property
    def is_recorded(self) -> bool:
        """Whether updates are already replayed as CUDA graphs."""
        return self.updater.graphs is not None and self.updater.graphs.is_recorded

    def load_best(self) -> Checkpoint:
        """Load the weights of the best validation into the model."""
        if self.state.best is None:
            raise CheckpointError(f"{self.folder} must have validated at least once with a finite metric, got none")
        try:
            found = self.checkpoints.read(BEST, self.state.best_step)
        except CheckpointError as error:
            # There is no other copy of these weights.
            raise CheckpointError(
                f"{error}. Without its best model this run has no result: go on from a checkpoint before step "
                f"{self.state.best_step} with --resume STEP, or remove {self.folder} and train again"
            ) from error
        snapshot.restore_weights(found, self.model)
        return found

    def _resume(self, resume: Resume) -> None:
        """Restore the run from a checkpoint."""
        resume = after_restart(resume)
        found = self.checkpoints.find(resume)
        if found is None:
            return
        self.share = snapshot.lay_out_as(found, self.share, self.config)
        snapshot.check_same_run(found, self._identity())
        self.batches = self.task.training_batches(self.share)
        snapshot.restore_all(found, self.model, self.optimizer, self.fabric)
        if isinstance(resume, int):
            self.checkpoints.remove_after(resume)
        self.state = State(**found.manifest["state"])
        self.log.say(f"going on from {found.folder.name}")

    def _identity(self) -> dict[str, Any]:
        """Return everything that must be equal for a run to be resumed."""
        return {
            "config": to_mapping(self.config),
            "model": self.task.describe_model(self.model),
            "corpus": self.task.corpus.fingerprint,
            "ranks": self.share.ranks,
            # The choices that the configuration leaves to the machine.
            "precision": self.share.precision_name,
            "packed": self.share.packs(self.config),
            "multiple_of": self.share.training_multiple_of(self.config),
        }

    def _update(self, micro_batches: list[dict[str, Tensor]]) -> None:
        """Run one step of the optimiser. On a GPU the host only queues it, and reads the values of the previous one."""
        values = self.updater.update(self.state.step, micro_batches)
        self.state.step += 1
        self._reports.add(self.state.step, values)

    def _read(self, report: Report) -> None:
        """Take the outcome of an update into the state."""
        loss, norm, was_skipped, tokens, told = report.values.tolist()
        self.state.tokens += int(tokens)
        self._told_to_stop |= told > 0
        if was_skipped:
            self._note_skipped(report.step, loss, norm)
        else:
            self.state.skipped_in_a_row = 0
            self.state.losses.append(loss)

    def _note_skipped(self, step: int, loss: float, norm: float) -> None:
        """Log what is needed to explain a skipped update, and stop after too many in a row. All ranks agree."""
        training = self.config.training
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        self.log.say(f"skipped the update of step {step}: loss {loss:.6g}, norm of the gradient {norm:.6g}")
        numbers = range((step - 1) * training.accumulate, step * training.accumulate)
        described = [skipped.describe(self.model, self.batches, number, self.training_pass.rerun) for number in numbers]
        path = skipped.log(self.folder, self.share.rank, step, loss, norm, described)
        if self.state.skipped_in_a_row > training.max_skipped:
            raise NonFiniteError(
                f"loss and gradient must be finite and the loss must not leap, got {self.state.skipped_in_a_row} "
                f"updates in a row where they did not, up to step {step}: see {path}"
            )

    def _log_updates(self) -> None:
        """Log the updates since the last time."""
        self._settle()
        self.log.record_updates(self.state, self.optimizer.param_groups[0]["lr"])
        self.state.losses = []

    def _settle(self) -> None:
        """Wait for every update that was queued."""
        self._reports.settle()
        self._count_time()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._clock
        self._clock = now

    def _stream(self) -> Generator[dict[str, Tensor], None, None]:
        """Yield micro-batches without end, from the position of the run in the data."""
        data = self.config.data
        epoch, start = divmod(self.state.step * self.config.training.accumulate, len(self.batches))
        while True:
            yield from iterate(
                self.batches, epoch, start, pin_memory=self.share.device.type == "cuda", workers=data.workers,
                timeout=data.timeout, name=f"{data.corpus}, train",
            )  # fmt: skip
            epoch, start = epoch + 1, 0

    def _watched(self, split: str, steps: Iterable[T], _: str, total: int | None = None) -> Iterator[T]:
        """Iterate over the batches of an evaluation. A signal ends it, unless other ranks would be left waiting."""
        for number, each in enumerate(steps, start=1):
            if self.stop.signal is not None and self.share.ranks == 1:
                raise Interrupted
            self.log.show(self.state, f"{split} batch {number:,}" + ("" if total is None else f" of {total:,}"))
            yield each

    def _should_stop(self) -> bool:
        """Whether to stop. Every rank gets the same answer at the same step."""
        return self._told_to_stop if self.share.ranks > 1 else self.stop.signal is not None
