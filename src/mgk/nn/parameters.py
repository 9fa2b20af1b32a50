"""Parameter groups that exempt mixture parameters from weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from mgk.nn.keys import ShiftedKeys
from mgk.nn.prior import LearnedPrior
from mgk.nn.variance import LearnedVariance


def mixture_parameters(model: nn.Module) -> Iterator[Parameter]:
    """Yield the shifts, prior logits and log-variances of ``model``."""
    for module in model.modules():
        if isinstance(module, (ShiftedKeys, LearnedPrior, LearnedVariance)):
            yield from module.parameters(recurse=False)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for an optimiser: weights with decay; biases, gains and mixture parameters without.

    Decay would pull shifts together, priors to uniform and variances to one. That would be an assumption about the
    data, not a regulariser.
    """
    mixture = set(mixture_parameters(model))
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p not in mixture]
    others = [p for p in model.parameters() if p.ndim < 2 or p in mixture]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
