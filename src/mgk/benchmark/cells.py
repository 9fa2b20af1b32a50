"""Records of a result as cells of a table, for whoever draws it."""

from __future__ import annotations

from collections.abc import Iterable

from mgk.benchmark.attention import Record

ATTENTION = (
    "preset", "through", "heads", "forward", "x", "training", "x", "over a softmax head", "peak memory",
)  # fmt: skip
"""The headers of one shape. Times are in milliseconds; x is the time of the fastest stock kernel over the row's."""
RETRIEVAL = (
    "model", "through", "dropout", "training", "x", "x fastest", "evaluation", "x", "over no dropout", "peak memory",
)  # fmt: skip
"""The headers of end to end. x is the time of softmax on cuDNN over the row's, or else on the fastest kernel."""


def attention_cells(records: Iterable[Record]) -> list[list[str]]:
    """Stock kernels and presets at one shape, under :data:`ATTENTION`."""
    found = []
    for record in records:
        over = [record.get(f"{direction}_over_softmax_head") for direction in ("forward", "training")]
        found.append(
            [
                record["preset"],
                show_way(record),
                str(record["heads"]),
                show_time(record, "forward"),
                show_ratio(record.get("forward_ratio")),
                show_time(record, "training"),
                show_ratio(record.get("training_ratio")),
                " / ".join(f"{value:.2f}" for value in over if value is not None),
                show_bytes(record["peak_bytes"]),
            ]
        )
    return found


def retrieval_cells(records: Iterable[Record]) -> list[list[str]]:
    """Models end to end, under :data:`RETRIEVAL`."""
    return [
        [
            f"{record['preset']}-{record['heads']}",
            show_way(record),
            f"{record['attention_dropout']:g}",
            show_ms(record["training_ms"]),
            show_ratio(record.get("training_ratio")),
            show_ratio(record.get("fastest_training_ratio")),
            show_ms(record["evaluation_ms"]),
            show_ratio(record.get("evaluation_ratio")),
            show_ratio(record.get("training_over_no_dropout")),
            show_bytes(record["peak_bytes"]),
        ]
        for record in records
    ]


def show_way(record: Record) -> str:
    """The stock kernel, or the backend."""
    return f"SDPA {record['kernel']}" if "kernel" in record else str(record["backend"])


def show_shape(record: Record) -> str:
    """The shape of a record of attention."""
    heads = record.get("baseline_heads", record["heads"])
    kind = "causal" if record["causal"] else "full"
    return f"{kind}, batch {record['batch']}, {heads} heads, {record['tokens']:,} tokens, head_dim {record['head_dim']}"


def show_time(record: Record, direction: str) -> str:
    """Milliseconds, with a star where it is the host that decides."""
    host, device = record[f"{direction}_host_ms"], record[f"{direction}_device_ms"]
    return show_ms(record[f"{direction}_ms"]) + ("*" if host is not None and host > device else "")


def show_ms(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def show_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def show_bytes(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
