"""The merging of attention heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

POOLINGS = ("neighbours", "similar")

Groups = list[list[int]]


class HeadPlan(NamedTuple):
    """Old heads of each new head, in the order of the new: ``H / Hkv`` neighbouring query heads share a key head."""

    query: Groups
    key: Groups


def check_heads(old: tuple[int, int], num_heads: int | None, num_kv_heads: int | None) -> tuple[int, int]:
    """Return the new numbers of query and key/value heads, from the old ones and the arguments of the user."""
    old_heads, old_kv_heads = old
    new_heads = old_heads if num_heads is None else num_heads
    if num_kv_heads is None:
        # The number is kept, but if every query head had its own key/value head, it keeps one of its own.
        num_kv_heads = new_heads if old_kv_heads == old_heads else old_kv_heads
    for name, new, before in (("num_heads", new_heads, old_heads), ("num_kv_heads", num_kv_heads, old_kv_heads)):
        if new < 1 or before % new != 0:
            raise ValueError(f"{name} must divide the {before} of the model, got {new}")
    if new_heads % num_kv_heads != 0:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {new_heads} and {num_kv_heads}")
    return new_heads, num_kv_heads


def plan_heads(
    old: tuple[int, int], new: tuple[int, int], query: Tensor | None = None, key_value: Tensor | None = None
) -> HeadPlan:
    """Plan the merging of neighbours or, given weights ``[heads, any]``, of the most similar heads.

    Query heads stay with their key/value head, so they are reordered with it.
    """
    (old_heads, old_kv_heads), (new_heads, new_kv_heads) = old, new
    per_key = old_heads // old_kv_heads
    key_groups = _group(list(range(old_kv_heads)), new_kv_heads, key_value)
    query_groups = []
    for group in key_groups:
        members = [head * per_key + i for head in group for i in range(per_key)]
        query_groups += _group(members, new_heads // new_kv_heads, query)
    return HeadPlan(query_groups, key_groups)


def _group(heads: list[int], number: int, weights: Tensor | None) -> Groups:
    """Divide heads into ``number`` groups of equal size."""
    size = len(heads) // number
    if weights is None or size == 1 or number == 1:
        return [heads[i : i + size] for i in range(0, len(heads), size)]
    rows = torch.nn.functional.normalize(weights.flatten(1).float(), dim=1)
    alike = (rows @ rows.T).fill_diagonal_(-2.0)
    left, groups = list(heads), []
    while left:
        # Start with the two most similar heads, then add the head that is most similar to all of the group.
        among = alike[left][:, left]
        first, second = divmod(int(among.argmax()), len(left))
        group = [left[first], left[second]]
        while len(group) < size:
            others = [head for head in left if head not in group]
            group.append(others[int(alike[group][:, others].sum(dim=0).argmax())])
        groups.append(sorted(group))
        left = [head for head in left if head not in group]
    return sorted(groups)


def pool(blocks: Tensor, groups: Groups, *, is_sum: bool = False) -> Tensor:
    """Pool ``[old heads, ...]`` to ``[new heads, ...]`` by the mean or the sum of each group."""
    if groups == [[head] for head in range(len(blocks))]:
        return blocks
    chosen = torch.stack([blocks[group] for group in groups])
    return chosen.sum(dim=1) if is_sum else chosen.mean(dim=1)
