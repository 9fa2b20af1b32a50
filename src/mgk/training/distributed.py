"""Distributed training: building Fabric, and state that does not depend on how weights are sharded."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mgk.models.layer import MGKLayer

Strategy = Literal["auto", "ddp", "fsdp2"]
Module = TypeVar("Module", bound=nn.Module)


def build_fabric(
    *, device: str = "auto", devices: int | None = None, nodes: int = 1, strategy: Strategy = "auto"
) -> Fabric:
    """Build the Fabric of a run, whose ``launch()`` starts its processes or joins those of torchrun or SLURM.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        devices: number of processes on each node, with one device each; ``None`` is one.
        nodes: number of nodes.
        strategy: ``ddp`` keeps a whole model on each device, ``fsdp2`` a shard; ``auto`` is ``ddp`` if there are
            several devices.
    """
    if strategy not in ("auto", "ddp", "fsdp2"):
        raise ValueError(f"--strategy must be one of auto, ddp, fsdp2, got {strategy!r}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be one of auto, cpu, cuda, got {device!r}")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("--device must be one that is there, got cuda, and torch sees no GPU")
    count = 1 if devices is None else devices
    if count < 1 or nodes < 1:
        raise ValueError(f"--devices and --nodes must be at least 1, got {count} and {nodes}")
    _check_launcher(count, nodes)
    accelerator = "cuda" if has_gpu and device != "cpu" else "cpu"
    if accelerator == "cuda" and count > torch.cuda.device_count():
        raise ValueError(f"--devices must be at most the {torch.cuda.device_count()} GPUs here, got {count}")
    chosen: Any = "auto"
    if strategy == "fsdp2":
        chosen = ModelParallelStrategy(shard, data_parallel_size=count * nodes, tensor_parallel_size=1)
    elif strategy == "ddp" or count * nodes > 1:
        # Mixture parameters always get a gradient, even a zero one, so there are no unused parameters.
        chosen = DDPStrategy(find_unused_parameters=False)
    return Fabric(accelerator=accelerator, devices=count, num_nodes=nodes, strategy=chosen, precision="32-true")


def _check_launcher(devices: int, nodes: int) -> None:
    """Refuse launches by torchrun or srun that cannot work."""
    environ = os.environ
    # torchrun is checked first, because srun may have started it.
    if dist.is_torchelastic_launched():
        launcher, started = "torchrun", int(environ["WORLD_SIZE"])
        restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if restarts > 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # https://github.com/pytorch/pytorch/issues/135712: restarted processes read the addresses of the dead ones.
            raise ValueError(
                f"torchrun must have --standalone or --rdzv-backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
                f"its environment, got --max-restarts {restarts} without: what it starts again would hang"
            )
    else:
        launcher, started = "srun", int(environ.get("SLURM_STEP_NUM_TASKS", "0"))
    if started > 1 and started != devices * nodes:
        # Otherwise each process would train alone, and all of them in one folder.
        raise ValueError(
            f"--devices times --nodes must be the {started} processes that {launcher} has started, "
            f"got {devices} times {nodes}"
        )


def shard(model: Module, mesh: DeviceMesh) -> Module:
    """Apply FSDP2: shard the weights of every layer, and then the rest, over the data-parallel ranks."""
    group = mesh["data_parallel"]
    for module in model.modules():
        if isinstance(module, MGKLayer):
            fully_shard(module, mesh=group)
    fully_shard(model, mesh=group)
    return model


def on_first_rank(fabric: Fabric, action: Callable[[], object]) -> None:
    """Run ``action`` on the first rank while the others wait. An error there ends all ranks."""
    problem: Exception | None = None
    if fabric.is_global_zero:
        try:
            action()
        except Exception as error:
            problem = error
    failed = torch.full((), float(problem is not None), device=fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(failed)
    if problem is not None:
        raise problem
    if failed > 0:
        raise RuntimeError("the first rank must be ready, got an error there")


def sum_over_ranks(fabric: Fabric, value: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return it."""
    # Fabric's all-reduce is not used, because it makes the host wait for all ranks first.
    if fabric.world_size > 1:
        dist.all_reduce(value)
    return value


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from all its shards on the CPU. Every rank must call it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@torch.no_grad()
def write_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded. Every rank must call it."""
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(value.to(target.device), target.device_mesh, target.placements))
    else:
        target.copy_(value)


def seed_everything(seed: int) -> None:
    """Seed every random generator that training may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of all random generators of this process, as bytes."""
    version, numbers, gauss = random.getstate()
    assert version == 3
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    assert name == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": _bytes(
            np.array(numbers, dtype=np.uint64), np.array([0.0 if gauss is None else gauss, gauss is None])
        ),
        "numpy": _bytes(np.asarray(keys, dtype=np.uint64), np.array([position, has_gauss, cached], dtype=np.float64)),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state that :func:`random_state` returned."""
    # Cloned, because for a row of a larger tensor torch reads from the start of the storage, or beyond its end.
    torch.set_rng_state(states["torch"].clone())
    numbers, (gauss, is_none) = _arrays(states["python"], 2)
    random.setstate((3, tuple(map(int, numbers)), None if is_none else float(gauss)))
    keys, (position, has_gauss, cached) = _arrays(states["numpy"], 3)
    np.random.set_state(("MT19937", keys.astype(np.uint32), int(position), int(has_gauss), float(cached)))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def gather(fabric: Fabric, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the tensors of every rank, stacked as ``[ranks, ...]`` on the CPU."""
    if fabric.world_size == 1:
        return {name: state[None] for name, state in states.items()}
    gathered = {}
    for name, state in states.items():
        # Sent as integers, because not every backend can send bytes.
        sent = state.to(fabric.device, torch.int32)
        received = [torch.empty_like(sent) for _ in range(fabric.world_size)]
        dist.all_gather(received, sent)
        gathered[name] = torch.stack(received).to("cpu", torch.uint8)
    return gathered


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm of all gradients together, including all shards."""
    norm = torch.nn.utils.get_total_norm(list(gradients))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _bytes(integers: Any, floats: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([integers.view(np.uint8), floats.astype(np.float64).view(np.uint8)]))


def _arrays(state: Tensor, floats: int) -> tuple[Any, Any]:
    data = state.numpy()
    cut = len(data) - 8 * floats
    return data[:cut].copy().view(np.uint64), data[cut:].copy().view(np.float64)
