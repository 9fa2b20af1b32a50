"""Cross entropy that is also defined for batches without labels."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from mgk.ops.validation import may_inspect_values

IGNORED = -100
"""The label that is ignored, as everywhere in transformers."""


def cross_entropy(logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
    """Mean of ``-log softmax(logits)[label]`` over the labels that are not ignored, in fp32 or better.

    Args:
        logits: ``[..., C]``.
        labels: ``[...]``, in ``[0, C)`` or :data:`IGNORED`.
        num_items: divides the sum instead of the number of labels, as gradient accumulation requires.

    Returns:
        A scalar. Without a label to predict, the loss and its gradient are 0, with a warning.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must have shape {list(logits.shape[:-1])}, got {list(labels.shape)}")
    check_labels(labels, logits.shape[-1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits, targets = logits.to(dtype).flatten(0, -2), labels.flatten().long()
    return mean_loss(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), labels, num_items)


def mean_loss(total: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
    """Divide a sum of losses by the number of labels, or by ``num_items``."""
    count = (labels != IGNORED).sum()
    if may_inspect_values(count) and int(count) == 0:
        warnings.warn("all labels are ignored: the loss is 0", stacklevel=3)
    if num_items is None:
        num_items = count
    return total / (num_items.to(total.device).clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1))


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Check that labels are valid classes, which on a GPU would otherwise fail in a device assertion far from here."""
    if may_inspect_values(labels):
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= num_classes))]
        if wrong.numel() > 0:
            raise ValueError(f"labels must lie in [0, {num_classes}) or be {IGNORED}, got {int(wrong[0])}")


def shifted_labels(labels: Tensor) -> Tensor:
    """Return the label of the next position for each position, and :data:`IGNORED` for the last one."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
