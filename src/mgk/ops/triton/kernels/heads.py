"""Which head of which sample a program works for."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Head(NamedTuple):
    """The indices of one query head of one sample, and of the key/value head that it shares with its group."""

    i_batch: tl.tensor
    i_query_head: tl.tensor
    i_kv_head: tl.tensor
    i_head: tl.tensor
    """among the query heads of all samples"""
    i_kv: tl.tensor
    """among the key/value heads of all samples"""


@triton.jit
def query_head(i_head, num_heads, group_size):
    """The head that is number ``i_head`` among the query heads of all samples."""
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    return Head(i_batch, i_query_head, i_kv_head, i_head, i_kv)
