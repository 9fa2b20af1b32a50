"""The log of a run: what it says, its row of the display, and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.fabric import Fabric
from rich.progress import TaskID

from mgk.training.configuration import RunConfig
from mgk.training.state import State
from mgk.training.tracking import Curves, Display


class RunLog:
    """The log of a run, which only the first rank keeps: on the others nothing happens.

    Args:
        config: configuration of the run.
        folder: folder of the run.
        fabric: launched Fabric.
        display: shows the progress.
    """

    def __init__(self, config: RunConfig, folder: Path, fabric: Fabric, display: Display) -> None:
        self._config, self._folder, self._fabric, self._display = config, folder, fabric, display
        self.loss: float | None = None
        """Mean loss of the last line of the log; ``None`` before the first one."""
        self._metric = self._speed = ""
        self._seconds, self._tokens = 0.0, 0
        self._row: TaskID | None = None
        self._curves: Curves | None = None

    def begin(self, state: State) -> None:
        """Begin the row and the curves where the run starts or resumes."""
        self._seconds, self._tokens = state.seconds, state.tokens
        if self._fabric.is_global_zero:
            name = f"{self._config.name} {self._config.row}".strip()
            self._row = self._display.add(name, self._config.training.steps, state.step)
            self._curves = Curves(self._folder, state.step, state.validated, self.say)

    def say(self, text: str) -> None:
        """Print a message."""
        if self._fabric.is_global_zero:
            self._display.say(text)

    def saved(self, seconds: float) -> None:
        """Note how long writing a checkpoint took."""
        if self._fabric.is_global_zero:
            self._display.saved(seconds)

    def record_updates(self, state: State, lr: float) -> None:
        """Record the updates since the last time.

        Args:
            state: progress, with the losses of these updates.
            lr: learning rate of the last one.
        """
        losses, seconds, tokens = state.losses, state.seconds - self._seconds, state.tokens - self._tokens
        self._seconds, self._tokens = state.seconds, state.tokens
        if self._curves is None:
            return
        values = {
            "loss": sum(losses) / len(losses) if losses else float("nan"),
            "lr": lr,
            "tokens_per_second": tokens / seconds,
            "tokens": float(state.tokens),
            "seconds": state.seconds,
        }
        self.loss = values["loss"]
        self._speed = f"{values['tokens_per_second']:,.0f} tokens/s"
        if self._fabric.device.type == "cuda":
            values["gpu_gib"] = torch.cuda.max_memory_allocated(self._fabric.device) / 2**30
            self._speed += f", {values['gpu_gib']:.1f} GiB"
        self._curves.write(state.step, "train", values)

    def record_validation(self, state: State, metrics: Mapping[str, float], seconds: float) -> None:
        """Record the metrics of a validation, and how long it took."""
        name = self._config.validation.metric
        self._metric = f"validation {name} {metrics[name]:.4f}"
        if self._curves is not None:
            self._curves.write(state.step, "valid", {**metrics, "validation_seconds": seconds})

    def show(self, state: State, also: str = "") -> None:
        """Update the row of the display."""
        if self._row is None:
            return
        # A process that resumes a finished run has seen no loss.
        loss = self.loss if self.loss is not None else next(reversed(state.losses), None)
        parts = ["" if loss is None else f"loss {loss:.4f}", self._metric, self._speed, also]
        says = ", ".join(part for part in parts if part)
        self._display.update(self._row, state.step, self._config.training.steps, says, loss=loss, best=state.best)

    def close(self) -> None:
        """Close the files of the curves."""
        if self._curves is not None:
            self._curves.close()
