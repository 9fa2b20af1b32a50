"""Formatting of records as cells of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mgk.benchmark.attention import TIMES
from mgk.benchmark.yardstick import Record, fastest, show_way, summary

LAYOUTS = {"packed": "packed", "longest": "padded to the longest", "published": "padded to 4,096"}
"""Layouts of a batch of reviews."""

# Times are in milliseconds. x is the time of the fastest softmax with all heads, including our own kernel, divided by
# the row's; x stock is that of the fastest stock kernel, divided by the row's.
ATTENTION = (
    "preset", "through", "heads", "forward", "x", "x stock", "training", "x", "x stock", "over a softmax head",
    "peak memory",
)  # fmt: skip
"""Headers for one shape of attention."""
RETRIEVAL = (
    "model", "through", "dropout", "training", "x", "x stock", "evaluation", "x", "x stock", "over no dropout",
    "peak memory",
)  # fmt: skip
"""Headers for models end to end."""
LINEAR = (
    "preset", "through", "heads", "forward", "x linear", "training", "x linear", "x", "x stock", "peak memory"
)  # fmt: skip
"""Headers for linear attention. *x linear* is the time of linear attention with all heads divided by the row's; *x* and
*x stock* are forward / training."""
DECODE = ("preset", "through", "heads", "step", "x", "x stock", "over reading", "cache", "x cache")
"""Headers for a step of generation. *Over reading* is the time divided by that of reading the cache once."""
GENERATION = ("model", "through", "tokens/s", "x", "x stock", "step", "x step", "prompt", "cache", "x cache")
"""Headers for generation end to end. x is a ratio of tokens per second."""
PACKED = ("model", "reviews", "through", "tokens", "training", "x", "x stock", "x padded", "loss", "peak memory")
"""Headers for a step on reviews. *x padded* is the time of the same model padded to 4,096, divided by the row's."""

ROWS = ("row", "tokens/s", "x", "update", "tokens", "peak memory", "cache a token", "recorded", "noise")
"""The headers of how fast rows of a recipe train. x is of tokens per second, over the first row."""


def attention_cells(softmax: Sequence[Record], rows: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`ATTENTION` for one shape: softmax with all heads, its fastest, and presets."""
    found = []
    best = summary(softmax, TIMES)
    for record in (*softmax, *([] if best is None else [best]), *rows):
        over = [record.get(f"{direction}_over_softmax_head") for direction in ("forward", "training")]
        found.append(
            [
                record["preset"],
                show_way(record),
                str(record["heads"]),
                show_time(record, "forward"),
                show_ratio(record.get("forward_ratio_of_all")),
                show_ratio(record.get("forward_ratio")),
                "none" if record.get("no_training") else show_time(record, "training"),
                show_ratio(record.get("training_ratio_of_all")),
                show_ratio(record.get("training_ratio")),
                " / ".join(f"{value:.2f}" for value in over if value is not None),
                show_bytes(record["peak_bytes"]),
            ]
        )
    return found


def retrieval_cells(softmax: Sequence[Record], rows: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`RETRIEVAL` for models end to end, each after the softmax that it is compared with."""
    records = list(rows)
    ordered = []
    for dropout in dict.fromkeys(record["attention_dropout"] for record in (*softmax, *records)):
        own = [record for record in softmax if record["attention_dropout"] == dropout]
        best = summary(own, {"training": "training_ms", "evaluation": "evaluation_ms"})
        ordered += [*own, *([] if best is None else [best])]
        ordered += [record for record in records if record["attention_dropout"] == dropout]
    return [
        [
            f"{record['preset']}-{record['heads']}",
            show_way(record),
            f"{record['attention_dropout']:g}",
            show_ms(record["training_ms"]),
            show_ratio(record.get("training_ratio_of_all")),
            show_ratio(record.get("fastest_training_ratio")),
            show_ms(record["evaluation_ms"]),
            show_ratio(record.get("evaluation_ratio_of_all")),
            show_ratio(record.get("fastest_evaluation_ratio")),
            show_ratio(record.get("training_over_no_dropout")),
            show_bytes(record["peak_bytes"]),
        ]
        for record in ordered
    ]


def linear_cells(records: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`LINEAR` for one shape."""
    found = []
    records = list(records)
    softmax = [record for record in records if record["preset"] == "softmax"]
    best = summary(softmax, TIMES)
    if best is not None:
        records.insert(records.index(softmax[-1]) + 1, best)
    for record in records:
        over = [
            [record.get(f"{direction}_{name}") for direction in TIMES]
            for name in ("over_softmax_of_all", "over_softmax")
        ]
        found.append(
            [
                record["preset"],
                show_way(record) if record["preset"] != "linear" else str(record["kernel"]),
                str(record["heads"]),
                show_time(record, "forward"),
                show_ratio(record.get("forward_ratio")),
                show_time(record, "training"),
                show_ratio(record.get("training_ratio")),
                *(" / ".join(f"{value:.2f}" for value in values if value is not None) for values in over),
                show_bytes(record["peak_bytes"]),
            ]
        )
    return found


def show_crossover(record: Record) -> str:
    """Format the length from which linear attention is faster than softmax."""
    kind = "causal" if record["causal"] else "full"
    where = "at no length" if record["tokens"] is None else f"from {record['tokens']:,} tokens on"
    return f"{record['preset']}, {kind}, {record['direction']}: faster than softmax {where}"


def decode_cells(records: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`DECODE` for one context: softmax with all heads, its fastest, and presets."""
    records = list(records)
    softmax = [record for record in records if "baseline_heads" not in record]
    best = summary(softmax, {"forward": "forward_ms"})
    rows = [record for record in records if "baseline_heads" in record]
    return [
        [
            record["preset"],
            show_way(record),
            str(record["heads"]),
            show_time(record, "forward"),
            show_ratio(record.get("forward_ratio_of_all")),
            show_ratio(record.get("forward_ratio")),
            "" if "way" in record else f"{record['over_reading']:.2f}",
            show_bytes(record["cache_bytes"]),
            show_ratio(record.get("cache_ratio")),
        ]
        for record in (*softmax, *([] if best is None else [best]), *rows)
    ]


def generation_cells(records: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`GENERATION` for models that generate.

    Softmax runs on the stock kernels and on our own, and the ratios are those to the faster one.
    """
    records = list(records)
    softmax = [record for record in records if "kernel" in record]
    stock = fastest([record for record in softmax if record["kernel"] == "sdpa"], "forward_ms")
    best = fastest(softmax, "forward_ms") if len(softmax) > 1 else None
    if best is not None:
        records.insert(len(softmax), {**best, "kernel": f"fastest of all: {best['kernel']}"})
    return [
        [
            f"{record['preset']}-{record['heads']}",
            str(record["kernel"] if "kernel" in record else record["backend"]),
            f"{record['tokens_per_second']:,.0f}",
            show_ratio(record.get("forward_ratio")),
            "" if stock is None or "kernel" in record else show_ratio(stock["forward_ms"] / record["forward_ms"]),
            show_ms(record["step_ms"]),
            show_ratio(record.get("step_ratio")),
            show_ms(record["prompt_ms"]),
            show_bytes(record["cache_bytes"]),
            show_ratio(record.get("cache_ratio")),
        ]
        for record in records
    ]


def packed_cells(records: Iterable[Record]) -> list[list[str]]:
    """Rows of :data:`PACKED`: softmax, its fastest, and the other models."""
    records = list(records)
    softmax = [record for record in records if record.get("is_softmax")]
    rows = [record for record in records if not record.get("is_softmax")]
    best = fastest(softmax, "training_ms")
    if best is not None:
        softmax.append({**best, "way": f"fastest of all: {best['backend']}", "training_ratio": None})
    return [
        [
            f"{record['preset']}-{record['heads']}",
            LAYOUTS[record["layout"]],
            show_way(record),
            f"{record['computed_tokens']:,}",
            show_ms(record["training_ms"]),
            show_ratio(record.get("training_ratio_of_all")),
            show_ratio(record.get("training_ratio_stock")),
            show_ratio(record.get("training_ratio")),
            f"{record['loss']:.4f}",
            show_bytes(record["peak_bytes"]),
        ]
        for record in (*softmax, *rows)
    ]


def row_cells(records: Iterable[Record]) -> list[list[str]]:
    """Rows of a recipe, under :data:`ROWS`."""
    return [
        [
            record["row"],
            f"{record['tokens_per_second']:,.0f}",
            show_ratio(record["training_ratio"]),
            show_ms(record["training_ms"]),
            f"{record['tokens']:,.0f}",
            show_bytes(record["peak_bytes"]),
            "" if record["cache_bytes"] is None else f"{record['cache_bytes']:,} bytes",
            "yes" if record["is_recorded"] else "no",
            f"{100 * record['noise']:.1f} %",
        ]
        for record in records
    ]


def show_shape(record: Record) -> str:
    """Format the shape of a record of attention."""
    heads = record.get("baseline_heads", record["heads"])
    kind = "causal" if record["causal"] else "full"
    return f"{kind}, batch {record['batch']}, {heads} heads, {record['tokens']:,} tokens, head_dim {record['head_dim']}"


def show_context(record: Record) -> str:
    """Format the shape of a record of a step."""
    heads, tokens = record.get("baseline_heads", record["heads"]), record["tokens"]
    return f"batch {record['batch']}, {heads} heads, {tokens:,} tokens in the cache, head_dim {record['head_dim']}"


def show_writing(record: Record) -> str:
    """Format the setting of a record of generation."""
    return (
        f"batch {record['batch']}, prompts of {record['prompt']:,} tokens, {record['new_tokens']:,} new ones, "
        f"{record['layers']} layers, hidden_size {record['hidden_size']:,}, head_dim {record['head_dim']}"
    )


def show_no_training(record: Record) -> str:
    """Format the reason why a row has only a forward time."""
    return f"{record['preset']} through {show_way(record)}: {record['no_training']}"


def show_time(record: Record, direction: str) -> str:
    """Format milliseconds, with a star if the host limits the time."""
    host, device = record[f"{direction}_host_ms"], record[f"{direction}_device_ms"]
    return show_ms(record[f"{direction}_ms"]) + ("*" if host is not None and host > device else "")


def show_ms(value: float | None) -> str:
    """Format milliseconds with three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def show_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def show_bytes(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
