"""A training step on one batch, with forward, backward and optimiser as in the training loop."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from torch import Tensor
from transformers import PreTrainedModel

from mgk.nn import parameter_groups
from mgk.training import graphs
from mgk.training.configuration import RunConfig
from mgk.training.graphs import GraphedStep
from mgk.training.task import choose_precision


class TrainingStep:
    """A training step, compiled and captured in a CUDA graph if the training loop would do so.

    Args:
        model: model on the device.
        batch: batch on the device, with ``labels``.
        num_targets: number of labels that count.
        run: configuration with precision and optimiser.
    """

    def __init__(self, model: PreTrainedModel, batch: dict[str, Tensor], num_targets: int, run: RunConfig) -> None:
        self.model, self.batch, self.device = model.train(), batch, model.device
        self.precision = choose_precision(run.training.precision, self.device)
        if self.device.type == "cuda":
            self.model.compile()
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self.model, run.optimizer.weight_decay),
            lr=run.optimizer.lr, betas=run.optimizer.betas, eps=run.optimizer.eps, fused=True,
        )  # fmt: skip
        self._targets = torch.full((), float(num_targets), device=self.device)
        self._scale = torch.ones((), device=self.device)
        self._graphs: GraphedStep | None = None

    def train(self) -> None:
        """Run one update."""
        if self._graphs is None:
            self._pass(self.batch, self._targets, self._scale)
        else:
            self._graphs(self.batch, self._targets, self._scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._graphs is None)

    def loss_and_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the flat gradient of all weights, without changing the model."""
        loss = self._pass(self.batch, self._targets, self._scale)
        gradient = torch.cat([each.grad.flatten() for each in self.model.parameters() if each.grad is not None])
        self._optimizer.zero_grad()
        return loss, gradient

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def measure_peak(self, before: int) -> int | None:
        """Return the peak memory of an update in bytes, with weights, moments and activations, beyond ``before``.

        ``before`` is the allocation before the model was built. Returns ``None`` on a CPU, where memory is not counted.
        """
        self.train()
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.train()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def record(self) -> bool:
        """Capture the update in a CUDA graph if the training loop would; the second call of a shape does so."""
        strategy = SingleDeviceStrategy(self.device)
        if graphs.unsupported(self.model, self.device, strategy, self.precision) is not None:
            return False
        self._graphs = GraphedStep(self._pass, dict, self.device)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(3):
                self.train()
        return not any("could not be recorded" in str(each.message) for each in heard)

    def _pass(self, batch: dict[str, Any], num_targets: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision is not None):
            loss = self.model(**batch, num_items_in_batch=num_targets).loss
        (loss * scale).backward()
        return loss.detach()


def allocated_bytes(device: torch.device) -> int:
    """Bytes that are allocated now; 0 on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def many_versions(device: torch.device) -> AbstractContextManager[Any]:
    """The compiler counts versions over all models of a process, and would give up at the eighth."""
    if device.type != "cuda":
        return nullcontext()
    import torch._dynamo.config

    return torch._dynamo.config.patch(recompile_limit=64)
