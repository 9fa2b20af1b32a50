"""The conversion of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Model = Any


def convert(
    model: Model,
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
) -> Model:
    """Put mixture attention into a Hugging Face model, in place, and return the model.

    Every attention of the model keeps its projections, rotations, norms and caches; what is computed from queries, keys
    and values becomes :func:`mgk.mixture_attention`, with ``1 / scaling`` of the model as the variance. Its mixture is
    the submodule ``mixture`` of each attention module. The model stays what it was to ``Trainer``, ``generate``, PEFT
    and ``save_pretrained``; :func:`load_converted` loads what was saved.

    Args:
        model: a model of a family in :data:`mgk.conversion.FAMILIES`, on any device.
        attention: a preset of :func:`mgk.build_attention`, but for the linear ones.
        num_heads: query heads; ``None`` keeps them. Fewer merge: queries, keys and values are averaged over the heads
            that become one, output projections added up.
        num_kv_heads: key/value heads; ``None`` keeps them, or as many as there are query heads where there were. Fewer
            are averaged, as in the conversion to grouped-query attention.
        components: keys per position, M; ``None`` is the preset's. Projected keys (``mgk``, ``softmax-mgk``) widen the
            key projection to M keys a head, and the cache with it; shifted keys (``smgk``) keep one key a token.
        start: ``"exact"``: the M keys of a dot product start equal, which is the old attention;
            ``"near"``: a bias of each key takes ``|k|^2 / (2 variance)`` of the distance back, so that the first step
            computes the old model, and fades out over ``fade_steps`` calls of :func:`mgk.conversion.advance_start`;
            ``"immediate"``: the mixture takes over at once. ``"auto"`` is the first of them that the preset allows.
        fade_steps: optimiser steps over which the bias of ``"near"`` fades out, linearly.
        perturbation: how far equal keys are moved apart, relative to the size of their weights: equal components would
            get equal gradients forever. It sums to zero over the components, so what the model computes changes by its
            square only; 0 moves nothing.
        pooling: which key/value heads become one: ``"neighbours"``, or ``"similar"``: those whose weights are most
            alike, with the query heads regrouped to follow them.
        learn_variance: learn a variance per key/value head and component.
        variance_scale: variance over ``1 / scaling``, one number or one per component.
        shift_init_std: standard deviation of the initial shifts.
        backend: see :func:`mgk.mixture_attention`.
        seed: of shifts and perturbations.
    """
    raise NotImplementedError
