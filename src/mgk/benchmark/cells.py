"""Records of a result as cells of a table, for whoever draws it."""

from __future__ import annotations

from collections.abc import Iterable

from mgk.benchmark.attention import Record

LAYOUTS = {"packed": "packed", "longest": "padded to the longest", "published": "padded to 4,096"}
"""How reviews of a batch may lie."""

ATTENTION = (
    "preset", "through", "heads", "forward", "x", "training", "x", "over a softmax head", "peak memory",
)  # fmt: skip
"""The headers of one shape. Times are in milliseconds; x is the time of the fastest stock kernel over the row's."""
RETRIEVAL = (
    "model", "through", "dropout", "training", "x", "x fastest", "evaluation", "x", "over no dropout", "peak memory",
)  # fmt: skip
"""The headers of end to end. x is the time of softmax on cuDNN over the row's, or else on the fastest kernel."""
LINEAR = ("preset", "through", "heads", "forward", "x", "training", "x", "x softmax", "peak memory")
"""The headers of linear attention. x is linear attention with all the heads over the row, *x softmax* the fastest stock
kernel with all the heads over it, forward / training."""
DECODE = ("preset", "through", "heads", "step", "x", "over reading", "cache", "x cache")
"""The headers of a step of generation. *Over reading* is the time over that of reading the cache once."""
GENERATION = ("model", "through", "tokens/s", "x", "step", "x step", "prompt", "cache", "x cache")
"""The headers of generation end to end. x is tokens per second over those of the faster softmax."""
PACKED = ("model", "reviews", "tokens", "training", "x", "loss", "peak memory")
"""The headers of a step on reviews. x is the time of the same model padded to 4,096 over the row's."""


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


def linear_cells(records: Iterable[Record]) -> list[list[str]]:
    """Linear attention at one shape, under :data:`LINEAR`."""
    found = []
    for record in records:
        over = [record[f"{direction}_over_softmax"] for direction in ("forward", "training")]
        way = record["kernel"] if "kernel" in record else record["backend"]
        way = f"SDPA {way}" if record["preset"] == "softmax" else way
        found.append(
            [
                record["preset"],
                way,
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


def show_crossover(record: Record) -> str:
    """From which length on linear attention is faster than softmax."""
    kind = "causal" if record["causal"] else "full"
    where = "at no length" if record["tokens"] is None else f"from {record['tokens']:,} tokens on"
    return f"{record['preset']}, {kind}, {record['direction']}: faster than softmax {where}"


def decode_cells(records: Iterable[Record]) -> list[list[str]]:
    """Stock kernels and presets at one context, under :data:`DECODE`."""
    return [
        [
            record["preset"],
            show_way(record),
            str(record["heads"]),
            show_time(record, "forward"),
            show_ratio(record.get("forward_ratio")),
            f"{record['over_reading']:.2f}",
            show_bytes(record["cache_bytes"]),
            show_ratio(record.get("cache_ratio")),
        ]
        for record in records
    ]


def generation_cells(records: Iterable[Record]) -> list[list[str]]:
    """Models that write, under :data:`GENERATION`."""
    return [
        [
            f"{record['preset']}-{record['heads']}",
            str(record["kernel"] if "kernel" in record else record["backend"]),
            f"{record['tokens_per_second']:,.0f}",
            show_ratio(record.get("forward_ratio")),
            show_ms(record["step_ms"]),
            show_ratio(record.get("step_ratio")),
            show_ms(record["prompt_ms"]),
            show_bytes(record["cache_bytes"]),
            show_ratio(record.get("cache_ratio")),
        ]
        for record in records
    ]


def packed_cells(records: Iterable[Record]) -> list[list[str]]:
    """Models that read, under :data:`PACKED`."""
    return [
        [
            f"{record['preset']}-{record['heads']}",
            LAYOUTS[record["layout"]],
            f"{record['computed_tokens']:,}",
            show_ms(record["training_ms"]),
            show_ratio(record.get("training_ratio")),
            f"{record['loss']:.4f}",
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


def show_context(record: Record) -> str:
    """The shape of a record of a step."""
    heads, tokens = record.get("baseline_heads", record["heads"]), record["tokens"]
    return f"batch {record['batch']}, {heads} heads, {tokens:,} tokens in the cache, head_dim {record['head_dim']}"


def show_writing(record: Record) -> str:
    """The setting of a record of generation."""
    return (
        f"batch {record['batch']}, prompts of {record['prompt']:,} tokens, {record['new_tokens']:,} new ones, "
        f"{record['layers']} layers, hidden_size {record['hidden_size']:,}, head_dim {record['head_dim']}"
    )


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
