"""What every row is measured by: softmax with all the heads, computed as fast as anything computes it.

That is the fastest of the stock kernels and our own. Beside it stands the fastest of the stock kernels alone, which is
what a user without this library has. The first ratio, ``x``, says what fewer heads save; the second, ``x stock``, what
one gains by changing to them, a better kernel included. The first is never the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = dict[str, Any]

PREDATES = "This run was made before softmax with all the heads went through our own kernel, too: "
"""What the docs say of an old result, which then goes on with what it lacks."""
LACKS = {
    "attention": "it has no `x`, only `x stock`.",
    "retrieval": "it has no `x`, only `x stock`.",
    "linear": "it has no `x`, only `x stock`.",
    "decode": "its steps have no `x`, only `x stock`.",
    "packed": "it has neither `x` nor `x stock`.",
}


def is_stock(record: Record) -> bool:
    """Whether a record of softmax is that of a stock kernel: it names the kernel, others name a backend."""
    return "kernel" in record


def fastest(records: Iterable[Record], time: str) -> Record | None:
    """The record with the least of some time, of those that have it."""
    timed = [record for record in records if record.get(time) is not None]
    return min(timed, key=lambda record: float(record[time])) if timed else None


def ratios_of_all(row: Record, softmax: Sequence[Record], directions: Mapping[str, str]) -> Record:
    """What the JSON says of a row beside the fastest softmax of all.

    Args:
        row: with times.
        softmax: records with all the heads, of stock kernels and of our own.
        directions: the name of the time of each direction, ``{"forward": "forward_ms"}`` for example.
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
    """The row of the tables: the fastest of all, which may be another one in each direction; ``None`` where our own
    kernel was not measured with all the heads."""
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
    """The stock kernel, or the backend."""
    if "way" in record:
        return str(record["way"])
    return f"SDPA {record['kernel']}" if is_stock(record) else str(record["backend"])
