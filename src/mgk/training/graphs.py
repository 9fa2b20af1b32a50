"""Forward and backward as CUDA graphs: queued by the host in one call instead of hundreds.

A small model on short batches spends more time in Python than on the GPU. A graph is recorded for each shape of batch,
the second time that shape is seen; from then on it is replayed. What it computes is the same, kernel for kernel,
dropout included.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from transformers import PreTrainedModel

from mgk.models import MGKConfig
from mgk.nn import EMPrior

Step = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""Forward and backward of a batch on the device, given the number of targets and the loss scale; gives the loss."""

Move = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Shape = tuple[tuple[str, tuple[int, ...]], ...]

LIMIT = 128
"""Shapes that are recorded. Pairs and translations have more, and each recording takes memory of the driver."""


def unsupported(
    model: PreTrainedModel, device: torch.device, strategy: Strategy, precision: torch.dtype | None
) -> str | None:
    """Why the updates of a model cannot be recorded, or ``None``. ``precision`` is that of autocast, if any."""
    if device.type != "cuda":
        return "a CPU"
    if not isinstance(strategy, SingleDeviceStrategy):
        return "several ranks, which wait for each other"
    if any(isinstance(module, EMPrior) for module in model.modules()):
        return "priors set by EM, whose sums are gathered anew in every update"
    config = model.config
    if not isinstance(config, MGKConfig):
        return "a converted model, whose start the host follows"
    if config.attention_dropout > 0 and config.attention not in ("softmax", "gaussian") and precision is None:
        return "attention dropout on a mixture in fp32, whose seed the host draws"
    return None


@dataclass(frozen=True)
class Recording:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: dict[str, Tensor]
    loss: Tensor


class GraphedStep:
    """A step that is recorded. Gradients stay where they are: zero them in place.

    Args:
        step: what is recorded; the host must not need any value on the device.
        move: brings a batch to the device.
        device: where.
    """

    def __init__(self, step: Step, move: Move, device: torch.device) -> None:
        self._step, self._move, self._device = step, move, device
        self._seen: Counter[Shape] = Counter()
        self._recordings: dict[Shape, Recording] = {}
        self._pool: Any = None
        # The default stream cannot be recorded, and backward runs where forward did, the first time, too.
        self._stream = torch.cuda.Stream(device)
        self._num_targets = torch.zeros((), device=device)
        self._scale = torch.zeros((), device=device)
        self._failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether there is a graph, and none has failed."""
        return bool(self._recordings) and not self._failed

    def __call__(self, batch: dict[str, Tensor], num_targets: Tensor, scale: Tensor) -> Tensor:
        """The loss, which the next call may overwrite."""
        shape: Shape = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        self._seen[shape] += 1
        # The first time as ever, which compiles what there is to compile.
        is_new = shape not in self._recordings
        if self._failed or self._seen[shape] == 1 or (is_new and len(self._recordings) >= LIMIT):
            return self._run(batch, num_targets, scale)
        if is_new:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            before = generator.clone_state()
            try:
                self._recordings[shape] = self._record(self._move(batch))
            except RuntimeError as error:
                self._failed = True
                # It would go on as if it were being recorded.
                generator.graphsafe_set_state(before)
                warnings.warn(f"CUDA graphs could not be recorded, training goes on without: {error}", stacklevel=2)
                return self._run(batch, num_targets, scale)
        recording = self._recordings[shape]
        self._num_targets.copy_(num_targets)
        self._scale.copy_(scale)
        for name, tensor in batch.items():
            recording.batch[name].copy_(tensor, non_blocking=True)
        recording.graph.replay()
        return recording.loss

    def _run(self, batch: dict[str, Tensor], num_targets: Tensor, scale: Tensor) -> Tensor:
        with self._beside():
            return self._step(self._move(batch), num_targets, scale)

    def _record(self, inputs: dict[str, Tensor]) -> Recording:
        """Nothing runs here: kernels are only noted down."""
        graph = torch.cuda.CUDAGraph()
        # All recordings share their memory, for nothing of one is needed when the next is replayed.
        pool = {} if self._pool is None else {"pool": self._pool}
        with self._beside():
            # Only this thread's mistakes count: another one makes batches meanwhile.
            graph.capture_begin(**pool, capture_error_mode="thread_local")
            try:
                loss = self._step(inputs, self._num_targets, self._scale)
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return Recording(graph, inputs, loss)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the other stream, after all that was queued here, and before all that will be."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)
