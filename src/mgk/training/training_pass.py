"""Forward and backward of the batches of a run, on its device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor
from transformers import PreTrainedModel

from mgk.models.layer import MGKLayer
from mgk.training.task import Task


class TrainingPass:
    """Forward and backward of a batch, which adds to the gradients of a model.

    Args:
        model: model to train. It is compiled in place, and wrapped for several ranks.
        task: computes the loss.
        fabric: launched Fabric.
        precision: precision of autocast; ``None`` is fp32.
        compiled: whether the model is compiled; ``None`` compiles it on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: Task,
        fabric: Fabric,
        *,
        precision: torch.dtype | None,
        compiled: bool | None,
    ) -> None:
        self.model, self.task, self.fabric, self.precision = model, task, fabric, precision
        self._is_compiled = fabric.device.type == "cuda" if compiled is None else compiled
        if self._is_compiled:
            _compile(model, fabric)
        self._wrapped = fabric.setup_module(model)

    def __call__(self, batch: dict[str, Tensor], num_targets: Tensor, scale: Tensor) -> Tensor:
        """Run forward and backward of a batch on the device, and return the loss."""
        with self.autocast():
            loss = self.task.loss(self._wrapped, batch, num_targets)
        self.fabric.backward(loss * scale)
        return loss.detach()

    def rerun(self, batch: dict[str, Tensor]) -> Any:
        """Run forward and backward of a batch from the host again, and return the outputs of the model."""
        with self.autocast():
            outputs = self.task.outputs(self._wrapped, self.on_device(batch))
        self.fabric.backward(outputs.loss)
        return outputs

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device."""
        moved = {name: tensor.to(self.fabric.device, non_blocking=True) for name, tensor in batch.items()}
        if self._is_compiled:
            # Otherwise the first width would be compiled as a constant.
            for name, tensor in moved.items():
                if (dimension := self.task.varying_dimension(name, tensor)) is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return moved

    def autocast(self) -> torch.autocast:
        """Context in which the model computes in the precision of the run."""
        return torch.autocast(self.fabric.device.type, dtype=self.precision, enabled=self.precision is not None)

    def without_sync(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Context in which ranks do not average their gradients, if ``enabled``."""
        # Fabric's context is not entered with enabled=False: under FSDP2 all later backward passes would run without
        # sync.
        if self.fabric.world_size == 1 or not enabled:
            return contextlib.nullcontext()
        return self.fabric.no_backward_sync(self._wrapped)


def _compile(model: PreTrainedModel, fabric: Fabric) -> None:
    # The compiler counts recompilations over all models of a process, and gives up at the eighth.
    torch.compiler.reset()
    # Compiled in place, so that weights keep their names. FSDP gathers layer by layer, so with it each layer is
    # compiled.
    layers = [module for module in model.modules() if isinstance(module, MGKLayer)]
    for module in layers if isinstance(fabric.strategy, ModelParallelStrategy) else [model]:
        module.compile()
