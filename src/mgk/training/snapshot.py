"""Saving and restoring the complete state of a run.

Tensors are whole here even if the ranks hold shards, so a checkpoint is the same file with one device or many.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.utils import logging

from mgk.models.card import FILE as CARD
from mgk.training.agreement import run_differences, was_packed
from mgk.training.checkpoint import Checkpoint, Write
from mgk.training.configuration import RunConfig
from mgk.training.distributed import gather, random_state, set_random_state, whole, write_into
from mgk.training.errors import CheckpointError
from mgk.training.task import Share

OPTIMIZER, RANDOM, WEIGHTS = "optimizer.safetensors", "random.safetensors", "model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def take_weights(model: PreTrainedModel) -> Write:
    """Copy the weights now, and return a function that writes them with the configuration, as transformers does."""
    weights = {name: whole(tensor) for name, tensor in _own_tensors(model).items()}

    def write(folder: Path) -> None:
        with _no_progress_bar():
            model.save_pretrained(folder, state_dict=weights)
        # Files in the manifest must not change, but the card is written at the end of the run.
        (folder / CARD).unlink(missing_ok=True)

    return write


def take_all(model: PreTrainedModel, optimizer: Optimizer, fabric: Fabric) -> Write:
    """Copy weights, optimiser moments and all ranks' random states now, and return a function that writes them."""
    write_weights = take_weights(model)
    moments = {
        f"{name}.{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    generators = gather(fabric, random_state(fabric.device))

    def write(folder: Path) -> None:
        write_weights(folder)
        save_file(moments, folder / OPTIMIZER)
        save_file({name: state.contiguous() for name, state in generators.items()}, folder / RANDOM)

    return write


def restore_weights(found: Checkpoint, model: PreTrainedModel) -> None:
    """Load the weights of a checkpoint into a model, which must have the same names and shapes."""
    weights, current = load_file(found.folder / WEIGHTS), _own_tensors(model)
    wrong = [
        f"{name}: {_shape(weights.get(name))} in the checkpoint, {_shape(current.get(name))} in the model"
        for name in sorted({*weights, *current})
        if _shape(weights.get(name)) != _shape(current.get(name))
    ]
    if wrong:
        raise CheckpointError(f"{found.folder} must hold the weights of this model, got {'; '.join(wrong[:5])}")
    for name, tensor in current.items():
        write_into(tensor, weights[name])
    # Called as loaders of weights do, because modules that cache a buffer on the host refresh it there.
    model.train(model.training)


def restore_all(found: Checkpoint, model: PreTrainedModel, optimizer: Optimizer, fabric: Fabric) -> None:
    """Restore the state that :func:`take_all` saved."""
    restore_weights(found, model)
    moments = load_file(found.folder / OPTIMIZER)
    for name, parameter in model.named_parameters():
        if f"{name}.step" not in moments:
            # Before the first update there are no moments.
            continue
        state: dict[str, Tensor] = {key: torch.zeros_like(parameter) for key in MOMENTS}
        for key in MOMENTS:
            write_into(state[key], moments[f"{name}.{key}"])
        optimizer.state[parameter] = {"step": moments[f"{name}.step"].to(parameter.device), **state}
    generators = load_file(found.folder / RANDOM)
    set_random_state({name: state[fabric.global_rank] for name, state in generators.items()}, fabric.device)


def lay_out_as(found: Checkpoint, share: Share, config: RunConfig) -> Share:
    """Return the share of a resumed run, with the packing of its beginning if that was left to the machine."""
    return dataclasses.replace(share, packs_already=was_packed(found.manifest)) if config.data.pack is None else share


def check_same_run(found: Checkpoint, now: Mapping[str, Any]) -> None:
    """Raise an error for a checkpoint of another run, because resuming from it would mix the two."""
    before = {**found.manifest, "packed": was_packed(found.manifest)}
    changed = run_differences(before, now)
    if changed:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        raise CheckpointError(
            f"{found.folder} must come from this configuration, got another: {listed}; a different run needs a folder "
            f"of its own"
        )
    if before["corpus"] != now["corpus"]:
        raise CheckpointError(
            f"{found.folder} must come from this corpus, whose fingerprint is {now['corpus'][:12]}..., "
            f"got {before['corpus'][:12]}...: was it prepared with other options?"
        )
    hints = {"precision": "training.precision", "packed": "data.pack", "multiple_of": "data.multiple_of"}
    for key, hint in hints.items():
        if before[key] != now[key]:
            raise CheckpointError(
                f"{found.folder} must come from {key} {now[key]}, as chosen here, got {before[key]}: set {hint}"
            )
    if before["ranks"] != now["ranks"]:
        raise CheckpointError(
            f"{found.folder} must come from as many ranks, {now['ranks']}, got {before['ranks']}: "
            f"go on with --devices and --nodes as they were"
        )


def check_same_step(found: Checkpoint | None, checkpoints: Path, fabric: Fabric) -> None:
    """Raise an error if the ranks found different steps, because they would wait for each other or mix states."""
    if fabric.world_size == 1:
        return
    step = torch.tensor(-1 if found is None else found.step, device=fabric.device)
    gathered = [torch.empty_like(step) for _ in range(fabric.world_size)]
    dist.all_gather(gathered, step)
    steps = [int(each) for each in gathered]
    if len(set(steps)) > 1:
        listed = ", ".join("none" if each < 0 else f"step {each}" for each in steps)
        raise CheckpointError(
            f"every rank must find the same checkpoint in {checkpoints}, got {listed}: "
            f"is it on a disk that all nodes share?"
        )


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Context without transformers' progress bars, which would be drawn through ours."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by name; shared ones appear once."""
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _shape(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
