"""Attention with queries and keys of our choice, shared by the tests of `mgk.analysis`."""

import torch

from mgk import build_attention
from mgk.analysis import AttentionCall, AttentionRecord


def make_call(
    preset="mgk", *, samples=1, heads=2, queries=12, keys=None, head_dim=4, seed=0, query=None, key=None, shift=None,
    is_causal=False, key_mask=None, query_mask=None, attn_mask=None, name="layer 1", scale=1.0, **options,
):  # fmt: skip
    """One recorded layer in fp64, random where nothing is given."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    attention = build_attention(preset, heads * head_dim, heads, head_dim=head_dim, **options).double()
    keys = queries if keys is None else keys
    kv_heads, components = attention.num_kv_heads, attention.num_components

    def draw(*shape):
        return scale * torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64)

    is_shifted = attention.keys.shift is not None
    if query is None:
        query = draw(samples, heads, queries)
    if key is None:
        key = draw(samples, kv_heads, keys) if is_shifted else draw(samples, kv_heads, components, keys)
    return AttentionCall(
        name=name, path="attention", attention=attention, query=query, key=key,
        shift=attention.keys.shift if shift is None else shift, is_causal=is_causal, key_mask=key_mask,
        query_mask=query_mask, attn_mask=attn_mask,
    )  # fmt: skip


def make_record(*calls):
    return AttentionRecord(calls=list(calls))


class FixedCall:
    """Stands for a recorded layer whose attention matrices are given, ``[samples, heads, n, n]``."""

    name = "layer 1"
    is_linear = False

    def __init__(self, weights):
        self.given = weights.double()
        self.num_samples, self.num_heads = weights.shape[:2]

    def queries(self, sample, limit=None):
        count = self.given.shape[2]
        kept = count if limit is None else min(limit, count)
        return torch.arange(kept) * count // kept

    def keys(self, sample):
        return torch.arange(self.given.shape[3])

    def check_has_tokens(self, sample):
        assert self.given.shape[2] > 0

    def weights(self, sample, head, queries, dtype=torch.float64):
        return self.given[sample, head, queries].to(dtype)
