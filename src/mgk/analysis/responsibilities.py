"""Responsibilities: the posterior of each component, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk.analysis.component_shares import double_keys, shares_of_head
from mgk.analysis.record import NUM_QUERIES, AttentionCall, AttentionRecord

# Largest number of posteriors in memory at a time.
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenResponsibilities:
    """The responsibilities of one layer for the tokens of one sample, in fp64."""

    layer: str
    """Its name in the record."""
    queries: Tensor
    """``[n]``: positions of the analysed queries."""
    keys: Tensor
    """``[Nk]``: positions of all keys that are not padding."""
    of_queries: Tensor
    """``[H, n, M]``: ``sum_j weight_ij p(r | i, j)``, the share of component r in the output of query i. Sums to 1 over
    components; 0 for a query that sees no key."""
    of_keys: Tensor
    """``[H, Nk, M]``: mean of ``p(r | i, j)`` over the queries that see key j, the paper's ``N_jr / N``. Sums to 1 over
    components; 0 for a key that no query sees."""
    mean: Tensor
    """``[H, M]``: mean of ``p(r | i, j)`` over all visible pairs, to which EM would set the prior."""


def token_responsibilities(
    record: AttentionRecord, *, sample: int = 0, num_queries: int | None = NUM_QUERIES
) -> list[TokenResponsibilities]:
    """Compute the posterior of each component given a pair of tokens, summed up for each token.

    ::

        p(r | i, j) = prior_r exp(similarity(q_i, k_jr)) / sum_s prior_s exp(similarity(q_i, k_js))

    With ``assignment="hard"`` the posterior of the best component is 1; components that tie share it.

    Args:
        record: record of a model on a batch, with at least two components per key.
        sample: index of the sample in the batch.
        num_queries: number of evenly spaced queries to analyse; ``None`` is all.
    """
    if not 0 <= sample < record.num_samples:
        raise ValueError(f"sample must lie in [0, {record.num_samples}), got {sample}")
    return [_of_call(call, sample, num_queries) for call in record.calls]


def _of_call(call: AttentionCall, sample: int, num_queries: int | None) -> TokenResponsibilities:
    if call.is_linear:
        raise ValueError(f"responsibilities need a mixture of exponentials, got linear attention in {call.name}")
    if call.num_components < 2:
        raise ValueError(f"responsibilities need at least two components, got one in {call.name}")
    queries, keys = call.queries(sample, num_queries), call.keys(sample)
    heads, components = call.num_heads, call.num_components
    of_queries = torch.zeros(heads, len(queries), components, dtype=torch.float64)
    of_keys = torch.zeros(heads, len(keys), components, dtype=torch.float64)
    mean = torch.zeros(heads, components, dtype=torch.float64)
    rows = max(1, BLOCK_ELEMENTS // max(1, components * len(keys)))
    every_key = double_keys(call, sample)[:, :, keys]
    for head in range(heads):
        start, own = 0, head // (heads // call.num_kv_heads)
        for block in queries.split(rows):
            posterior = shares_of_head(call.attention, own, call.query[sample, head, block], every_key[own])
            if (seen := call.visible(sample, head, block)) is not None:
                posterior = posterior.masked_fill(~seen, 0.0)
            weight = call.weights(sample, head, block)
            of_queries[head, start : start + len(block)] = torch.einsum("ij,rij->ir", weight, posterior).cpu()
            of_keys[head] += posterior.sum(dim=1).T.cpu()
            start += len(block)
        total = of_keys[head].sum(dim=0)
        mean[head] = total / total.sum().clamp(min=1.0)
    counts = of_keys.sum(dim=-1, keepdim=True)
    return TokenResponsibilities(
        layer=call.name,
        queries=queries.cpu(),
        keys=keys.cpu(),
        of_queries=of_queries,
        of_keys=of_keys / counts.masked_fill(counts == 0, 1.0),
        mean=mean,
    )
