"""A softmax over a large vocabulary sorted by frequency: rare words hide behind a few cluster tokens."""

from __future__ import annotations

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

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Log-probabilities of all tokens, ``[..., d]`` to ``[..., V]``, in fp32 or better. With targets, the loss."""
        if target is not None:
            return self.loss(hidden, target)
        head = self._head(hidden)
        first = self.cutoffs[0]
        parts = [head[..., :first]]
        for cluster in range(len(self.cutoffs) - 1):
            parts.append(self._words(hidden, cluster) + head[..., first + cluster, None])
        return torch.cat(parts, dim=-1)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """``-log p(target)``, ``[T, d]`` and ``[T]`` to ``[T]``."""
        first = self.cutoffs[0]
        cluster = torch.bucketize(target, torch.tensor(self.cutoffs[:-1], device=target.device), right=True)
        in_head = cluster == 0
        slot = torch.where(in_head, target, first + cluster - 1)
        log_probability = self._head(hidden).gather(1, slot[:, None])[:, 0]
        for number in range(len(self.cutoffs) - 1):
            rows = (cluster == number + 1).nonzero()[:, 0]
            words = self._words(hidden[rows], number)
            within = words.gather(1, target[rows, None] - self.cutoffs[number])[:, 0]
            log_probability = log_probability.index_add(0, rows, within)
        return -log_probability

    def _head(self, hidden: Tensor) -> Tensor:
        first = self.cutoffs[0]
        weight = torch.cat([self.weight[:first], self.cluster_weight])
        bias = torch.cat([self.bias[:first], self.cluster_bias])
        return _log_softmax(F.linear(hidden, weight, bias))

    def _words(self, hidden: Tensor, cluster: int) -> Tensor:
        words = slice(self.cutoffs[cluster], self.cutoffs[cluster + 1])
        return _log_softmax(F.linear(hidden, self.weight[words], self.bias[words]))

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, cutoffs={self.cutoffs}"


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
