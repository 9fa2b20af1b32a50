"""How well a translation model predicts the right translation."""

from __future__ import annotations

import torch
from torch import nn

from mgk.data.batches import Batches
from mgk.data.kind import Progress, no_progress
from mgk.evaluation.inference import inference
from mgk.evaluation.perplexity import Perplexity
from mgk.evaluation.shares import check_ranks, reduce_sums, take_turns
from mgk.models.loss import IGNORED


def of_batches(
    model: nn.Module,
    batches: Batches,
    *,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> Perplexity:
    """Nats per target token, each given those before it, over the batches of one epoch. No smoothing of labels.

    Args:
        model: a translation model, not wrapped.
        batches: for one rank, with ``labels``. They are shared out here.
        device: where the model is.
        precision: autocast to this; ``None``: as the weights are.
        rank: which of the ``ranks``. Every rank calls this and gets the same result.
        ranks: how many share the work.
        progress: shows how far it is.
    """
    check_ranks(rank, ranks)
    place = torch.device(device)
    sums = torch.zeros(2, dtype=torch.float64, device=place)
    with inference(model, place, precision):
        for turn, batch in take_turns(batches, rank, ranks, place, progress, "perplexity"):
            # Divided by 1 instead of the number of labels, the loss is their sum.
            loss = model(**batch, num_items_in_batch=1).loss
            if turn.counts:
                sums[0] += loss.double()
                sums[1] += (batch["labels"] != IGNORED).sum()
    nats, count = (reduce_sums(sums) if ranks > 1 else sums).tolist()
    return Perplexity(nats_per_token=nats / count, tokens=int(count))
