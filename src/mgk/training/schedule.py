"""Learning rates as functions of the step, which have no state to save or restore."""

from __future__ import annotations

import math
from typing import NamedTuple

from mgk.training.configuration import OptimizerConfig, ScheduleConfig

# Defaults of torch.optim.lr_scheduler.OneCycleLR, which the published code uses.
DIVIDE_INITIAL = 25.0
DIVIDE_FINAL = 1e4
MOMENTUM = (0.95, 0.85)


class Rates(NamedTuple):
    """Learning rate and first beta of one step."""

    lr: float
    beta1: float


def rates(step: int, steps: int, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> Rates:
    """Return the learning rate and the first beta of update ``step``, counted from 0, of ``steps``.

    - ``onecycle``: ``OneCycleLR`` with linear pieces, as in the Long Range Arena recipes of the Nystromformer code:
      from lr / 25 up to lr at the end of the warm-up, then down to lr / 250,000 at the last step. It also moves beta1
      from 0.95 to 0.85 and back, and ignores ``optimizer.betas``.
    - ``cosine``: as in Transformer-XL, linear warm-up, then ``lr / 2 (1 + cos(pi step / steps))``, in which ``step``
      counts from the beginning. (In its code the very first update has the highest rate, before the warm-up applies.)
    - ``inverse_sqrt``: as in fairseq, linear warm-up, then ``lr sqrt(warmup / step)``.
    - ``constant``: linear warm-up, then ``lr``.

    The warm-up starts at ``schedule.initial`` with step 0 and reaches ``lr`` at step ``warmup``.
    """
    peak, beta1, warmup = optimizer.lr, optimizer.betas[0], schedule.warmup
    if schedule.kind == "onecycle":
        # A piece includes both its ends: the warm-up ends at step warmup - 1, and the run at steps - 1.
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
