"""A softmax over a large vocabulary sorted by frequency: rare words hide behind a few cluster tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveSoftmax(nn.Module):
    """Tokens up to the first cutoff share one softmax with a token for each later cluster.

    ::

        p(w) = softmax(head)[w]                                        w in the head
        p(w) = softmax(head)[cluster c] * softmax(words of c)[w]       w in cluster c

    All clusters have the full width (Transformer-XL's ``div_val = 1``), so the output table ``[V, d]`` can be the table
    of the embeddings. :meth:`loss` computes the words of a cluster only for the targets inside it: of the
    ``tokens x V`` logits it forms ``tokens x (cutoff_0 + clusters)`` and little more.

    Args:
        hidden_size: d.
        vocab_size: V.
        cutoffs: ends of the head and of every cluster but the last.
    """

    def __init__(self, hidden_size: int, vocab_size: int, cutoffs: list[int]) -> None:
        super().__init__()
        self.cutoffs = [*cutoffs, vocab_size]
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), hidden_size))
        self.cluster_bias = nn.Parameter(torch.empty(len(cutoffs)))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.normal_(self.cluster_weight, std=std)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.cluster_bias)

    def forward(self, hidden: Tensor, target: Tensor | None = None, rows: Sequence[Tensor] | None = None) -> Tensor:
        """Log-probabilities of all tokens, ``[..., d]`` to ``[..., V]``, in fp32 or better. With targets, the loss."""
        if target is not None:
            return self.loss(hidden, target, rows)
        (head_weight, *weights), (head_bias, *biases) = self._parts(self.weight), self._parts(self.bias)
        head = self._head(hidden, head_weight, head_bias)
        first = self.cutoffs[0]
        parts = [head[..., :first]]
        for cluster, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            parts.append(_log_probability(hidden, weight, bias) + head[..., first + cluster, None])
        return torch.cat(parts, dim=-1)

    def loss(self, hidden: Tensor, target: Tensor, rows: Sequence[Tensor] | None = None) -> Tensor:
        """``-log p(target)``, ``[T, d]`` and ``[T]`` to ``[T]``.

        Args:
            hidden: ``[T, d]``.
            target: ``[T]``.
            rows: which targets lie in each cluster, as :func:`cluster_rows` says it. Nothing then depends on values,
                so that it can be compiled as one graph and recorded. The loss of a target in a cluster that is not
                among its rows is NaN, whichever others it is among. ``None``: they are looked up, for which the host
                waits for the device.
        """
        first, *ends = self.cutoffs
        if rows is None:
            rows = cluster_rows(target, self.cutoffs[:-1])
        if len(rows) != len(ends):
            raise ValueError(f"rows must be those of {len(ends)} clusters, got {len(rows)}")
        (head_weight, *weights), (head_bias, *biases) = self._parts(self.weight), self._parts(self.bias)
        cluster = _cluster(target, self.cutoffs[:-1])
        slot = torch.where(cluster == 0, target, first + cluster - 1)
        log_probability = self._head(hidden, head_weight, head_bias).gather(1, slot[:, None])[:, 0]
        # One place more than there are targets, for rows that stand for none.
        among_words = log_probability.new_full((len(target) + 1,), torch.nan)
        for start, row, weight, bias in zip(self.cutoffs, rows, weights, biases, strict=False):
            place = row.clamp(max=len(target) - 1)
            word = target.index_select(0, place) - start
            words = _log_probability(hidden.index_select(0, place), weight, bias)
            found = words.gather(1, word.clamp(0, len(bias) - 1)[:, None])[:, 0]
            is_inside = (word >= 0) & (word < len(bias))
            among_words = among_words.scatter(0, row, found.where(is_inside, torch.nan))
        return -torch.where(cluster == 0, log_probability, log_probability + among_words[:-1])

    def _parts(self, table: Tensor) -> tuple[Tensor, ...]:
        """What the head and each cluster have of it. Split at once: backward forms the gradient of the table once."""
        return table.split([end - start for start, end in itertools.pairwise([0, *self.cutoffs])])

    def _head(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return _log_probability(hidden, weight, bias)

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, cutoffs={self.cutoffs}"


def cluster_rows(target: Tensor, cutoffs: Sequence[int], multiple_of: int = 1) -> list[Tensor]:
    """Which of ``target [T]`` lie in each cluster: for :meth:`AdaptiveSoftmax.loss`, made on the host with the batch.

    Args:
        target: integers.
        cutoffs: where the first cluster begins, and every other.
        multiple_of: pad the rows of a cluster with T, which stands for no target, to one of a few sizes: to a multiple
            of this, and of more where there are many, four sizes from each power of two to the next. 1 pads nothing.
    """
    cluster = _cluster(target, cutoffs)
    found = [(cluster == number).nonzero()[:, 0] for number in range(1, len(cutoffs) + 1)]
    return [F.pad(row, (0, _size(len(row), multiple_of) - len(row)), value=len(target)) for row in found]


def _size(count: int, multiple_of: int) -> int:
    if multiple_of == 1:
        return count
    while count > 8 * multiple_of:
        multiple_of *= 2
    # None is no size of its own.
    return -(-max(count, 1) // multiple_of) * multiple_of


def _cluster(target: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """0 is the head. Compared with numbers that the host has: a table of them would have to be copied to the device."""
    cluster = torch.zeros_like(target)
    for start in cutoffs:
        cluster = cluster + (target >= start)
    return cluster


def _log_probability(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
