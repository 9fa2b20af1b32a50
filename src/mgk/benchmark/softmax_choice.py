"""Choice of the cases in which `auto` runs plain softmax on our kernel, from a result of ``mgk bench attention``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgk.benchmark.attention import TIMES
from mgk.benchmark.yardstick import Record, fastest, is_stock

LEAST_GAIN = 1.03
"""Least speedup over the fastest stock kernel; a smaller one does not justify results that differ in the last bits."""


def choose(result: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of ``softmax_kernel.json`` for a result with the name ``source``.

    A size is included if our kernel was faster there and at every measured size with at least as many tokens and
    queries. A result of a CPU, or without softmax on our own kernel, gives an empty table.
    """
    if result["benchmark"] != "attention":
        raise ValueError(f"the JSON must be that of mgk bench attention, got mgk bench {result['benchmark']}")
    kinds: dict[tuple[object, ...], list[Record]] = {}
    architecture = result.get("architecture")
    for own in result["baselines"] if architecture is not None else ():
        if is_stock(own):
            continue
        stock = [each for each in result["baselines"] if is_stock(each) and _size(each) == _size(own)]
        for direction, time in TIMES.items():
            rival = fastest(stock, time)
            if rival is None or own["dtype"] not in ("float16", "bfloat16"):
                continue
            measured = {
                "architecture": architecture,
                "dtype": own["dtype"],
                "head_dim": own["head_dim"],
                "causal": own["causal"],
                "direction": direction,
                "tokens": own["tokens"],
                "queries": own["batch"] * own["heads"] * own["tokens"],
                "gain": rival[time] / own[time],
            }
            kind = tuple(measured[name] for name in ("dtype", "head_dim", "causal", "direction"))
            kinds.setdefault(kind, []).append(measured)
    return {
        "source": source,
        "written": result["written"],
        "device": result["device"],
        "versions": result["versions"],
        "faster": [each for group in kinds.values() for each in _smallest_winners(group)],
    }


def _smallest_winners(group: list[Record]) -> list[Record]:
    """Return the sizes from which our kernel always won, without those that a smaller one covers."""
    winners = [
        each for each in group if all(other["gain"] >= LEAST_GAIN for other in group if _is_at_least(other, each))
    ]  # fmt: skip
    return [each for each in winners if not any(_is_at_least(each, other) for other in winners if other is not each)]


def _is_at_least(one: Record, other: Record) -> bool:
    return bool(one["tokens"] >= other["tokens"] and one["queries"] >= other["queries"])


def _size(record: Record) -> tuple[object, ...]:
    return tuple(record[name] for name in ("dtype", "batch", "heads", "tokens", "head_dim", "causal"))
