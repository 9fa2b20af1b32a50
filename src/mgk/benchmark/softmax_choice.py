"""Choice of the cases in which `auto` runs plain softmax on our kernel, from a result of ``mgk bench attention``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgk.benchmark.attention import TIMES
from mgk.benchmark.yardstick import Record, fastest, is_stock

LEAST_GAIN = 1.03
"""Least speedup over the fastest stock kernel; a smaller one does not justify results that differ in the last bits."""


def choose(result: Mapping[str, Any], source: str, padded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of ``softmax_kernel.json`` for a result with the name ``source``.

    A size is included if our kernel was faster there and at every measured size with at least as many tokens and
    queries. A result of a CPU, or without softmax on our own kernel, gives an empty table.

    Args:
        result: JSON of ``mgk bench attention``.
        source: its name.
        padded: JSON of ``benchmarks/padded_softmax.py`` on the same kind of GPU, for calls with a mask of keys.
    """
    if result["benchmark"] != "attention":
        raise ValueError(f"the JSON must be that of mgk bench attention, got mgk bench {result['benchmark']}")
    if padded is not None and not all("ms" in row and "host_ms" in row for row in padded.get("rows", [{}])):
        raise ValueError("the JSON of padded batches must be that of benchmarks/padded_softmax.py, got another")
    if padded is not None and padded["device"] != result["device"]:
        raise ValueError(f"padded batches must be measured on {result['device']}, too, got {padded['device']}")
    kinds: dict[tuple[object, ...], list[Record]] = {}
    architecture = result.get("architecture")
    softmax = [*result["baselines"], *(_records_of_padded(padded) if padded is not None else ())]
    for own in softmax if architecture is not None else ():
        if is_stock(own):
            continue
        stock = [each for each in softmax if is_stock(each) and _size(each) == _size(own)]
        for direction, time in TIMES.items():
            rival = fastest(stock, time)
            if rival is None or own["dtype"] not in ("float16", "bfloat16"):
                continue
            measured = {
                "architecture": architecture,
                "dtype": own["dtype"],
                "head_dim": own["head_dim"],
                "causal": own["causal"],
                "padded": own.get("padded", False),
                "direction": direction,
                "tokens": own["tokens"],
                "queries": own["batch"] * own["heads"] * own["tokens"],
                "gain": rival[time] / own[time],
            }
            kind = tuple(measured[name] for name in ("dtype", "head_dim", "causal", "padded", "direction"))
            kinds.setdefault(kind, []).append(measured)
    return {
        "source": source,
        "written": result["written"],
        "device": result["device"],
        "versions": result["versions"],
        "faster": [each for group in kinds.values() for each in _smallest_winners(group)],
    }


def _records_of_padded(measured: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the records of padded batches in the form of ``mgk bench attention``."""
    for row in measured["rows"]:
        size = {name: row[name] for name in ("batch", "heads", "tokens", "head_dim")}
        for way in {name.split()[0] for name in row["ms"]}:
            times = {
                time: max(row["ms"][f"{way} {direction}"], row["host_ms"][f"{way} {direction}"])
                for direction, time in TIMES.items()
            }
            name = {"backend": "triton"} if way == "fused" else {"kernel": way}
            yield {**size, "dtype": measured["dtype"], "causal": False, "padded": True, **name, **times}


def _smallest_winners(group: list[Record]) -> list[Record]:
    """Return the sizes from which our kernel always won, without those that a smaller one covers."""
    winners = [
        each for each in group if all(other["gain"] >= LEAST_GAIN for other in group if _is_at_least(other, each))
    ]  # fmt: skip
    return [each for each in winners if not any(_is_at_least(each, other) for other in winners if other is not each)]


def _is_at_least(one: Record, other: Record) -> bool:
    return bool(one["tokens"] >= other["tokens"] and one["queries"] >= other["queries"])


def _size(record: Record) -> tuple[object, ...]:
    names = ("dtype", "batch", "heads", "tokens", "head_dim", "causal")
    return *(record[name] for name in names), record.get("padded", False)
