"""The conversion of a Hugging Face model."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mgk.conversion.families import family_of
from mgk.conversion.heads import POOLINGS
from mgk.conversion.installation import install
from mgk.conversion.mixture import KeyMixture
from mgk.conversion.record import Record
from mgk.conversion.saving import converted_class
from mgk.conversion.starts import STARTS, Perturbation, choose_start
from mgk.nn import PRESETS
from mgk.nn.presets import SOFTMAX_PRESETS
from mgk.nn.variance import initial_variances
from mgk.ops.dispatch import BACKENDS
from mgk.ops.validation import check_choice, check_integer


def convert(
    model: PreTrainedModel,
    attention: str,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    components: int | None = None,
    start: str = "auto",
    fade_steps: int = 1000,
    perturbation: float = 0.01,
    pooling: str = "neighbours",
    learn_variance: bool = False,
    variance_scale: float | Sequence[float] = 1.0,
    shift_init_std: float = 1.0,
    backend: str = "auto",
    seed: int = 0,
) -> PreTrainedModel:
    """Put mixture attention into a Hugging Face model, in place, and return the model.

    Every attention module keeps its projections, rotations, norms and caches. Only the computation from queries, keys
    and values is replaced by :func:`mgk.mixture_attention`, with ``1 / scaling`` of the model as the variance. The
    mixture is the submodule ``mixture`` of each attention module. The model still works with ``Trainer``, ``generate``,
    PEFT and ``save_pretrained``; :func:`load_converted` loads a saved one.

    Args:
        model: a model of a family in :data:`mgk.conversion.FAMILIES`, on any device.
        attention: a preset of :func:`mgk.build_attention`, except the linear ones.
        num_heads: number of query heads; ``None`` keeps it. If there are fewer, heads are merged: their queries, keys
            and values are averaged, and their output projections are added.
        num_kv_heads: number of key/value heads; ``None`` keeps it, or if every query head had its own, keeps one for
            each. If there are fewer, they are averaged, as in the conversion to grouped-query attention.
        components: keys per position, M; ``None`` is that of the preset. Projected keys (``mgk``, ``softmax-mgk``)
            widen the key projection, and with it the cache, to M keys per head; shifted keys (``smgk``) keep one key
            per token.
        start: how the converted model starts. With ``"exact"`` the M keys of a dot product start equal, which is the
            original attention. With ``"near"`` a bias of each key cancels ``|k|^2 / (2 variance)`` of the distance, so
            that the first step computes the original model, and fades out over ``fade_steps`` calls of
            :func:`mgk.conversion.advance_start`. With ``"immediate"`` the mixture is used at once. ``"auto"`` is the
            first of them that the preset allows.
        fade_steps: optimiser steps over which the bias of ``"near"`` fades out linearly.
        perturbation: how far equal keys are moved apart, relative to the size of their weights, because equal
            components would get equal gradients forever. It sums to zero over the components, so the output changes
            only by its square; 0 moves nothing.
        pooling: which key/value heads are merged: ``"neighbours"``, or ``"similar"`` for those with the most similar
            weights, with the query heads regrouped accordingly.
        learn_variance: whether to learn a variance per key/value head and component.
        variance_scale: variance divided by ``1 / scaling``, one number or one per component.
        shift_init_std: standard deviation of the initial shifts.
        backend: see :func:`mgk.mixture_attention`.
        seed: seed of shifts and perturbations.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    if any(isinstance(module, KeyMixture) for module in model.modules()):
        raise ValueError("model must not have been converted before, got one that was")
    if any(hasattr(module, "_hf_hook") and _is_offloaded(module) for module in model.modules()):
        raise ValueError("model must hold its weights, got one that accelerate has offloaded: convert it before that")
    check_choice("attention", attention, SOFTMAX_PRESETS)
    check_choice("start", start, STARTS)
    check_choice("pooling", pooling, POOLINGS)
    check_choice("backend", backend, BACKENDS)
    preset = PRESETS[attention]
    components = preset.num_components if components is None else check_integer("components", components)
    if components < 1:
        raise ValueError(f"components must be at least 1, got {components}")
    if preset.num_components == 1 and components != 1:
        raise ValueError(f"{attention!r} has one key a position, got components={components}")
    start = choose_start(start, attention)
    if check_integer("fade_steps", fade_steps) < 1 and start == "near":
        raise ValueError(f"fade_steps must be at least 1, got {fade_steps}")
    for name, size in (("perturbation", perturbation), ("shift_init_std", shift_init_std)):
        if not 0.0 <= size < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {size}")
    scales = initial_variances(1, components, variance_scale)
    if start != "immediate" and len(set(scales)) > 1:
        raise ValueError(f"start {start!r} needs one variance for all components, got variance_scale={variance_scale}")
    family_of(model)
    record = Record(
        attention=attention, components=components,
        num_heads=None if num_heads is None else check_integer("num_heads", num_heads),
        num_kv_heads=None if num_kv_heads is None else check_integer("num_kv_heads", num_kv_heads),
        fade_steps=int(fade_steps) if start == "near" else 0, learn_variance=bool(learn_variance),
        variance_scale=scales[0] if len(set(scales)) == 1 else scales,
        shift_init_std=float(shift_init_std), backend=backend,
    )  # fmt: skip
    # Shifts are drawn from the generator of the CPU, whose state is restored afterwards.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _own_configuration(model)
        install(model, record, pooling=pooling, noise=Perturbation(perturbation, seed))
    model.__class__ = converted_class(type(model))
    return model


def _is_offloaded(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters(recurse=False))


def _own_configuration(model: nn.Module) -> None:
    """Give a model a configuration of its own, since other models may have been, or may yet be, built from the same."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            # Modules with one configuration have one copy, which `copies` remembers.
            module.config = copy.deepcopy(module.config, copies)
