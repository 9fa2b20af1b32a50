"""The reference of every row: softmax with all heads on the fastest kernel.

That is the fastest of the stock kernels and our own. A second reference is the fastest stock kernel alone, which a user
without this library has. The first ratio, ``x``, shows the gain from fewer heads. The second, ``x stock``, shows the
gain from switching to this library, which includes a better kernel. The first is never the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = dict[str, Any]

PREDATES = "This run was made before softmax with all the heads went through our own kernel, too: "
"""Sentence in the docs about an old result, which is followed by what it lacks."""
LACKS = {
    "attention": "it has no `x`, only `x stock`.",
    "retrieval": "it has no `x`, only `x stock`.",
    "linear": "it has no `x`, only `x stock`.",
    "decode": "its steps have no `x`, only `x stock`.",
    "packed": "it has neither `x` nor `x stock`.",
}


def is_stock(record: Record) -> bool:
    """Whether a record of softmax is of a stock kernel: such a record names the kernel, others name a backend."""
    return "kernel" in record


def fastest(records: Iterable[Record], time: str) -> Record | None:
    """Return the record with the smallest value of ``time``, among those that have it."""
    timed = [record for record in records if record.get(time) is not None]
    return min(timed, key=lambda record: float(record[time])) if timed else None


def ratios_of_all(row: Record, softmax: Sequence[Record], directions: Mapping[str, str]) -> Record:
    """Return the ratios of the fastest softmax of all to a row, for the JSON.

    Args:
        row: a record with times.
        softmax: records with all heads, of stock kernels and our own.
        directions: key of the time of each direction, for example ``{"forward": "forward_ms"}``.
    """
    found: Record = {}
    for direction, time in directions.items():
        best = fastest(softmax, time)
        is_timed = best is not None and row.get(time) is not None
        found |= {
            f"{direction}_fastest_of_all": None if best is None else show_way(best),
            f"{direction}_fastest_of_all_ms": None if best is None else best[time],
            f"{direction}_ratio_of_all": best[time] / row[time] if best is not None and is_timed else None,
        }
    return found


def summary(softmax: Sequence[Record], directions: Mapping[str, str]) -> Record | None:
    """Return the row of the fastest softmax of all, which may be a different one in each direction.

    Returns ``None`` if our own kernel was not measured with all heads.
    """
    if not any(not is_stock(record) for record in softmax):
        return None
    found: Record = {**softmax[0], "peak_bytes": None}
    ways = []
    for time in directions.values():
        best = fastest(softmax, time)
        if best is not None:
            ways.append(show_way(best))
            names = (time, time.replace("_ms", "_host_ms"), time.replace("_ms", "_device_ms"))
            found |= {name: best.get(name) for name in names}
    found["way"] = "fastest of all: " + " / ".join(dict.fromkeys(ways))
    return found


def show_way(record: Record) -> str:
    """Return the name of the stock kernel or of the backend."""
    if "way" in record:
        return str(record["way"])
    return f"SDPA {record['kernel']}" if is_stock(record) else str(record["backend"])
