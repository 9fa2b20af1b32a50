"""Learning rates as functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import NamedTuple

from mgk.training.configuration import OptimizerConfig, ScheduleConfig

# What torch.optim.lr_scheduler.OneCycleLR does unless told otherwise, and nobody told it.
DIVIDE_INITIAL = 25.0
DIVIDE_FINAL = 1e4
MOMENTUM = (0.95, 0.85)


class Rates(NamedTuple):
    """What the optimiser uses in one step."""

    lr: float
    beta1: float


def rates(step: int, steps: int, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> Rates:
    """The learning rate and first beta of update ``step``, counted from 0, of ``steps``.

    - ``onecycle``: ``OneCycleLR`` with linear pieces, as the Long Range Arena recipes of the Nystromformer code use it:
      from lr / 25 up to lr at the end of the warm-up, then down to lr / 250,000 at the last step. It also moves beta1
      from 0.95 to 0.85 and back, whatever ``optimizer.betas`` says.
    - ``cosine``: as Transformer-XL: up in a line, then ``lr / 2 (1 + cos(pi step / steps))``, whose time has been
      running since step 0. (There the very first update has the highest rate, before the warm-up takes hold.)
    - ``inverse_sqrt``: as fairseq: up in a line, then ``lr sqrt(warmup / step)``.
    - ``constant``: up in a line, then ``lr``.

    The line starts at ``schedule.initial`` with step 0 and reaches ``lr`` at step ``warmup``.
    """
    peak, beta1, warmup = optimizer.lr, optimizer.betas[0], schedule.warmup
    if schedule.kind == "onecycle":
        # Both ends of a piece are steps of it: the warm-up ends at step warmup - 1, the run at steps - 1.
        top, last = max(warmup - 1, 0), steps - 1
        initial = peak / DIVIDE_INITIAL
        if step <= top:
            share = step / top if top > 0 else 1.0
            return Rates(_between(initial, peak, share), _between(*MOMENTUM, share))
        share = (step - top) / (last - top)
        return Rates(_between(peak, initial / DIVIDE_FINAL, share), _between(MOMENTUM[1], MOMENTUM[0], share))
    if step < warmup:
        return Rates(_between(schedule.initial, peak, step / warmup), beta1)
    if schedule.kind == "cosine":
        return Rates(peak / 2 * (1 + math.cos(math.pi * step / steps)), beta1)
    if schedule.kind == "inverse_sqrt":
        return Rates(peak * math.sqrt(warmup / step), beta1)
    return Rates(peak, beta1)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share
