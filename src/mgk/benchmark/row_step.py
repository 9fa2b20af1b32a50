"""One row of a recipe to be timed: its training loop, checked first, then run one update at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from mgk.analysis.cost import cache_bytes_per_token, parameters
from mgk.benchmark.correctness import WrongResultError, relative_error
from mgk.benchmark.document_matcher import GRADIENT_CAP
from mgk.benchmark.training_step import allocated_bytes
from mgk.data.store import Corpus
from mgk.models import MGKConfig
from mgk.training.configuration import RunConfig
from mgk.training.distributed import seed_everything
from mgk.training.errors import NonFiniteError
from mgk.training.loop import Trainer
from mgk.training.task import Share, build_task, choose_precision, uncompiled

ENDLESS = 10**9
"""Updates of a run that is stopped from outside; it neither validates nor saves before."""
CHECKED = 4
"""Samples, or windows, whose gradient is compared."""
OVER_EAGER = 1.25
"""How far the error of the gradient may be above that of materialised attention in the same precision."""
WARM_UP, WARM_UP_OF_SHAPES = 4, 200
"""Updates before any is timed: the first compiles, the second of a shape is recorded. Where shapes vary, until most
have been seen twice."""
LOSS_CAP, LOSS_CAP_WITH_DROPOUT = 0.01, 0.1
"""What the first loss may be off by, as a fraction: dropout draws other units when it is compiled, and another batch
has another loss."""
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def check_gradient(run: RunConfig, corpus: Corpus, device: torch.device) -> float:
    """The relative RMS error of the gradient of all weights on a small batch without dropout.

    That of the run's precision and backend is compared with fp32 and attention as the paper writes it.

    Raises:
        WrongResultError: if it is too large, or no number.
    """
    precision = choose_precision(run.training.precision, device)
    task = build_task(_without_dropout(run), corpus)
    batches = task.training_batches(Share(device=device, precision=precision))
    batch = {name: tensor.to(device) for name, tensor in batches.batch(0, 0).items()}
    seed_everything(run.seed)
    model = task.build_model().to(device).train()
    targets = torch.tensor(float(task.count_targets(batch)), device=device)

    def gradient(chosen: torch.dtype | None) -> Tensor:
        with torch.autocast(device.type, dtype=chosen, enabled=chosen is not None):
            loss = task.loss(model, batch, targets)
        loss.backward()
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        model.zero_grad(set_to_none=True)
        return found

    ours = gradient(precision)
    model.set_attn_implementation("eager")
    exact = gradient(None).double()
    error, cap = relative_error(ours, exact), GRADIENT_CAP[precision]
    if precision is not None:
        # Where a gradient cancels, half precision alone costs as much, however attention is computed.
        cap = max(cap, OVER_EAGER * relative_error(gradient(precision), exact))
    if not error <= cap:
        reason = f"the error of the gradient must be at most {cap:g}, got {error:.2g}"
        raise WrongResultError(reason, {"gradient": error})
    return error


class RowStep:
    """One row that is about to be timed.

    Args:
        run: the configuration of the row, as the recipe trains it.
        corpus: what it reads.
        fabric: launched.
        folder: for what a run writes.
    """

    def __init__(self, run: RunConfig, corpus: Corpus, fabric: Fabric, folder: Path) -> None:
        self.row, self.device = run.row, fabric.device
        before = allocated_bytes(self.device)
        self.trainer = Trainer(_endless(run), folder, corpus, fabric, resume="never")
        self._weights = allocated_bytes(self.device) - before
        self._others = 0
        self._walk: Iterator[int] = self.trainer.steps()
        self.errors: dict[str, float] = {}
        self.peak_bytes: int | None = None
        self.seconds = 0.0
        self._counted_from = (0, 0)

    @property
    def is_compiled(self) -> bool:
        return self.trainer.model._compiled_call_impl is not None

    @property
    def tokens_per_update(self) -> float:
        """Mean over the updates after the warm-up."""
        self.trainer.wait()
        state = self.trainer.state
        step, tokens = self._counted_from
        return (state.tokens - tokens) / (state.step - step)

    def train(self) -> None:
        """One update."""
        next(self._walk)

    def warm_up(self, gradient_error: float) -> None:
        """Compile, record and measure memory.

        Args:
            gradient_error: of :func:`check_gradient`.

        Raises:
            WrongResultError: if the first update has another loss than the model has uncompiled.
        """
        self.errors = {"gradient": gradient_error, "loss": self._first_update()}
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(WARM_UP_OF_SHAPES if is_cuda and self._shapes_vary() else WARM_UP):
            self.trainer.wait()
            begun = time.perf_counter()
            self.train()
            self.trainer.wait()
            self.seconds = time.perf_counter() - begun
        if is_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._others
        self._counted_from = (self.trainer.state.step, self.trainer.state.tokens)

    def facts(self) -> dict[str, Any]:
        """Return the facts that the JSON records next to the times."""
        config = self.trainer.model.config
        return {
            "row": self.row,
            "preset": config.attention,
            "heads": config.num_attention_heads,
            "dtype": self.trainer.share.precision_name,
            "is_compiled": self.is_compiled,
            "is_recorded": self.trainer.is_recorded,
            "parameters": parameters(self.trainer.model),
            "cache_bytes": cache_bytes_per_token(config) if isinstance(config, MGKConfig) else None,
            "peak_bytes": self.peak_bytes,
            "error": self.errors,
        }

    def close(self) -> None:
        """Stop the threads that make batches."""
        self.trainer.wait()
        self._walk.close()  # type: ignore[attr-defined]

    def _shapes_vary(self) -> bool:
        """Return whether batches of this run differ in shape."""
        task, batch = self.trainer.task, self.trainer.batches.batch(0, 0)
        return any(task.varying_dimension(name, tensor) is not None for name, tensor in batch.items())

    def _first_update(self) -> float:
        """Make the first update, and return the relative difference of its loss from the uncompiled model's."""
        trainer = self.trainer
        self._others = allocated_bytes(self.device) - self._weights
        count = trainer.config.training.accumulate
        batches = [trainer.batches.batch(0, number) for number in range(count)]
        targets = torch.tensor(float(sum(map(trainer.task.count_targets, batches))), device=self.device)
        expected = sum(self._loss(batch, targets) for batch in batches)
        while not trainer.state.losses:
            # In fp16 the first ones are skipped until the loss scale fits, which leaves the weights as they are.
            try:
                self.train()
            except NonFiniteError as problem:
                raise WrongResultError("updates must have a finite loss, got too many that had none", {}) from problem
            trainer.wait()
        error = abs(trainer.state.losses[0] - expected) / abs(expected)
        is_same = trainer.state.step == 1 and not any(_dropout(trainer.model.config, name) for name in DROPOUTS)
        cap = LOSS_CAP if is_same else LOSS_CAP_WITH_DROPOUT
        if not error <= cap:
            raise WrongResultError(f"the error of the loss must be at most {cap:g}, got {error:.2g}", {"loss": error})
        return error

    def _loss(self, batch: dict[str, Tensor], targets: Tensor) -> float:
        trainer, precision = self.trainer, self.trainer.share.precision
        moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
        autocast = torch.autocast(self.device.type, dtype=precision, enabled=precision is not None)
        with torch.no_grad(), uncompiled(trainer.model), autocast:
            return float(trainer.task.loss(trainer.model, moved, targets))


def _endless(run: RunConfig) -> RunConfig:
    return dataclasses.replace(
        run,
        training=dataclasses.replace(run.training, steps=ENDLESS, checkpoint_every=ENDLESS),
        validation=dataclasses.replace(run.validation, every=ENDLESS),
    )


def _without_dropout(run: RunConfig) -> RunConfig:
    """Return the run with the same model on a few samples, without dropout."""
    changes = {**run.model.changes, **dict.fromkeys(DROPOUTS, 0.0)}
    size = run.training.batch_size
    # Rows of a stream are as long as there are few of them; sentences are short as they are.
    training = dataclasses.replace(
        run.training, accumulate=1, batch_size=None if size is None else min(CHECKED, size)
    )  # fmt: skip
    pack = False if run.task in ("classification", "pairs") else run.data.pack
    return dataclasses.replace(
        run, model=dataclasses.replace(run.model, changes=changes), training=training,
        data=dataclasses.replace(run.data, pack=pack),
    )  # fmt: skip


def _dropout(config: Any, name: str) -> float:
    return float(getattr(config, name, 0.0) or 0.0)
