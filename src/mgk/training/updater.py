"""The update of the weights: rates, gradients, and whether to skip it, all decided on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mgk.training import graphs, skipped
from mgk.training.configuration import RunConfig
from mgk.training.distributed import sum_over_ranks, total_norm
from mgk.training.graphs import GraphedStep
from mgk.training.loss_scale import LossScale
from mgk.training.schedule import rates
from mgk.training.signals import GracefulStop
from mgk.training.state import State
from mgk.training.training_pass import TrainingPass


class Updater:
    """The updates of a run, which the host only queues on a GPU: it never waits for a value.

    Args:
        config: configuration of the run.
        training_pass: runs forward and backward of the model.
        optimizer: optimiser of the model, a fused one.
        state: progress from which the run starts or resumes.
        stop: records signals, which every update reports.
    """

    def __init__(
        self,
        config: RunConfig,
        training_pass: TrainingPass,
        optimizer: Optimizer,
        *,
        state: State,
        stop: GracefulStop,
    ) -> None:
        self._config, self._pass, self._optimizer, self._stop = config, training_pass, optimizer, stop
        self._model, self._task, self._fabric = training_pass.model, training_pass.task, training_pass.fabric
        device, is_fp16 = self._fabric.device, training_pass.precision is torch.float16
        self.running_loss = self._scalar(float("nan") if state.running_loss is None else state.running_loss)
        """Running mean of the loss: NaN before the first update."""
        self.loss_scale = (
            LossScale(device, value=state.loss_scale, since_overflow=state.since_overflow) if is_fp16 else None
        )
        """Loss scale of fp16; ``None`` in other precisions."""
        self.graphs = GraphedStep(training_pass, training_pass.on_device, device) if self._may_record else None
        """Forward and backward as CUDA graphs; ``None`` if they are not recorded."""

    def update(self, step: int, micro_batches: list[dict[str, Tensor]]) -> Tensor:
        """Run or queue one step of the optimiser, and return its values on the device as a :class:`Report` has them.

        Args:
            step: number of updates done before.
            micro_batches: batches on the host, whose gradients are summed.
        """
        config, training = self._config, self._config.training
        lr, beta1 = rates(step, training.steps, config.schedule, config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = lr, (beta1, config.optimizer.betas[1])

        scale = self._scalar(1.0) if self.loss_scale is None else self.loss_scale.value
        loss, tokens, told = self._add_gradients(micro_batches, scale)

        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = total_norm(gradients) / scale
        skip = ~(loss.isfinite() & norm.isfinite()) | skipped.is_leap(loss, self.running_loss, training.max_loss_ratio)
        if training.clip_norm is not None:
            factor = (training.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], factor)
        # These are the attributes that GradScaler sets: a fused optimiser divides gradients by grad_scale, and skips
        # the update if found_inf is 1.
        self._optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self._optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self.graphs is None)
        self._task.after_update(self._model, skip)
        self.running_loss = skipped.running_mean(loss, self.running_loss, skip)
        if self.loss_scale is not None:
            self.loss_scale.update(~norm.isfinite())
        return torch.stack([loss, norm, skip.float(), tokens, told])

    def store(self, state: State) -> None:
        """Write what the device remembers from update to update into a state that will be saved."""
        running = float(self.running_loss)
        state.running_loss = None if running != running else running
        if self.loss_scale is not None:
            state.loss_scale = float(self.loss_scale.value)
            state.since_overflow = float(self.loss_scale.since_overflow)

    def _add_gradients(self, micro_batches: list[dict[str, Tensor]], scale: Tensor) -> Tensor:
        """Add up the gradients of micro-batches. Return loss, tokens and ranks told to stop, of all ranks: ``[3]``."""
        ranks = self._fabric.world_size
        # Ranks average their gradients, so each divides its loss by the mean number of targets per rank.
        targets = sum_over_ranks(self._fabric, self._scalar(sum(map(self._task.count_targets, micro_batches))))
        loss = self._scalar(0.0)
        for number, batch in enumerate(micro_batches):
            with self._pass.without_sync(number < len(micro_batches) - 1):
                if self.graphs is not None:
                    loss += self.graphs(batch, targets, scale)
                else:
                    loss += self._pass(self._pass.on_device(batch), targets / ranks, scale)
        tokens = self._scalar(sum(map(self._task.count_tokens, micro_batches)))
        told = self._scalar(self._stop.signal is not None)
        return sum_over_ranks(self._fabric, torch.stack([loss / ranks, tokens, told]))

    @property
    def _may_record(self) -> bool:
        """Whether updates are captured in CUDA graphs."""
        wanted = self._config.training.cuda_graphs
        why_not = graphs.unsupported(self._model, self._fabric.device, self._fabric.strategy, self._pass.precision)
        if wanted and why_not is not None:
            raise ValueError(f"training.cuda_graphs must be false or left out with {why_not}, got true")
        return wanted is not False and why_not is None

    def _scalar(self, value: float) -> Tensor:
        # Filled on the device, so that nothing is copied from the host and nothing synchronises.
        return torch.full((), value, dtype=torch.float32, device=self._fabric.device)
