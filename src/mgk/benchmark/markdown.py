"""Formatting of results as Markdown for the docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mgk.benchmark import cells
from mgk.benchmark.contestants import FLEX
from mgk.benchmark.parts import parts as parts_of
from mgk.benchmark.shape import Shape
from mgk.benchmark.yardstick import LACKS, PREDATES, Record, fastest, is_stock

FASTEST_FIRST = ("triton", "sdpa", "chunked", "auto", "reference", "eager", FLEX)
HEADLINE_PRESETS = ("smgk", "gaussian", "mgk")
NO_FLEX = "FlexAttention, compiled, with the mixtures as its `score_mod`: not measured yet."


def tables(result: Mapping[str, Any]) -> str:
    """Return the tables of a result: all rows of the first shape, and the main rows of the others.

    The main rows are the fastest stock kernels and our own, the best backend and FlexAttention.
    """
    parts = [_circumstances(result)]
    if result["benchmark"] == "rows":
        return "\n\n".join([*parts, *_rows(result)])
    if "parts" in result:
        parts.append(_calls(result))
    if not _has_yardstick(result):
        parts.append(PREDATES + LACKS[result["benchmark"]])
    if result["benchmark"] != "attention":
        return "\n\n".join([*parts, *OTHERS[result["benchmark"]](result)])
    if not any(record["backend"] == FLEX for name in ("rows", "skipped", "failures") for record in _own(result[name])):
        parts.append(NO_FLEX)
    baselines, rows = ([record for record in result[name] if not record.get("sweep")] for name in ("baselines", "rows"))
    measured = {record["backend"] for record in rows}
    shown = {FLEX, next(backend for backend in FASTEST_FIRST if backend in measured)}
    for number, shape in enumerate(dict.fromkeys(map(cells.show_shape, baselines))):
        stock = [record for record in baselines if cells.show_shape(record) == shape]
        ours = [record for record in rows if cells.show_shape(record) == shape]
        if number > 0:
            stock, ours = _fastest(stock), [record for record in ours if record["backend"] in shown]
        parts += [f"**{shape.capitalize()}**", _table(cells.ATTENTION, cells.attention_cells(stock, ours))]
        reasons = [f"- No training of {cells.show_no_training(each)}" for each in ours if each.get("no_training")]
        reasons += [
            f"- Left out: {each['preset']} through FlexAttention: {each['reason']}"
            for each in _own(result["skipped"])
            if each["backend"] == FLEX and not each.get("sweep") and cells.show_shape(each) == shape
        ]
        parts += ["\n".join(reasons)] if reasons else []
    return "\n\n".join(parts)


def headline(result: Mapping[str, Any]) -> str:
    """Return the speedups of mixtures on our own kernels over the fastest softmax, at every shape."""
    rows = [record for record in result["rows"] if not record.get("sweep")]
    shapes = list(dict.fromkeys(map(Shape.of, rows)))
    backend = next(each for each in FASTEST_FIRST if each in {record["backend"] for record in rows})
    lines = []
    for preset in HEADLINE_PRESETS:
        own = {Shape.of(row): row for row in rows if (row["preset"], row["backend"]) == (preset, backend)}
        if own:
            lines.append([f"`{preset}`", *(_both_ratios(own.get(shape)) for shape in shapes)])
    # The titles leave out heads and batch, which are in the full tables.
    titles = [
        f"{'causal' if shape.is_causal else 'full'}, {shape.tokens:,} tokens, head_dim {shape.head_dim}"
        for shape in shapes
    ]
    return "\n\n".join([_circumstances(result), _table(["half the heads", *titles], lines)])


def _both_ratios(row: Record | None) -> str:
    """Format ``x`` as forward / training."""
    if row is None:
        return ""
    return " / ".join(cells.show_ratio(row.get(f"{each}_ratio_of_all")) or "-" for each in ("forward", "training"))


def _circumstances(result: Mapping[str, Any]) -> str:
    """Describe the device, the versions and the date."""
    versions = result["versions"]
    dtypes = ", ".join(dict.fromkeys(record["dtype"] for record in result["rows"] or result["baselines"]))
    return (
        f"{result['device']}, {dtypes}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{result['written'][:10]}."
    )


def _calls(result: Mapping[str, Any]) -> str:
    """Return a sentence about a result that was measured in several calls."""
    calls = parts_of(result)
    shapes, lengths = ([call for call in calls if call[kind]] for kind in ("shapes", "lengths"))
    if not lengths or any(call in shapes for call in lengths):
        return f"Measured in {len(calls)} calls, begun {_moments(calls)}."
    sentence = f"The shapes were measured in a call begun {_moments(shapes)}"
    if len(shapes) > 1:
        sentence = f"The shapes were measured in {len(shapes)} calls, begun {_moments(shapes)}"
    is_earlier = max(call["written"] for call in lengths) < min(call["written"] for call in shapes)
    backends = dict.fromkeys(backend for call in lengths for backend in call["config"]["backends"])
    swept = [record for record in result["baselines"] if record.get("sweep")]
    lacking = "" if any(not is_stock(record) for record in swept) else ", without softmax through our own kernel"
    return (
        f"{sentence}; the sweep over lengths is of {'an earlier' if is_earlier else 'another'} run, begun "
        f"{_moments(lengths)}, through {', '.join(backends)}{lacking}."
    )


def _moments(calls: Iterable[Mapping[str, Any]]) -> str:
    """Format the day and minute at which each call began, in the time zone of ``written``."""
    return " and ".join(f"{call['written'][:16].replace('T', ' ')} UTC" for call in calls)


def _has_yardstick(result: Mapping[str, Any]) -> bool:
    """Whether the rows have ratios to the fastest softmax of all. Those of generation always had them."""
    rows = [record for record in result["rows"] if "prompt" not in record]
    ends = ("_ratio_of_all", "_over_softmax_of_all")
    return not rows or any(name.endswith(ends) for record in rows for name in record)


def _own(records: Iterable[Record]) -> list[Record]:
    """Return the records of backends, without those of stock kernels."""
    return [record for record in records if not is_stock(record)]


def _retrieval(result: Mapping[str, Any]) -> list[str]:
    return [_table(cells.RETRIEVAL, cells.retrieval_cells(result["baselines"], result["rows"]))]


def _packed(result: Mapping[str, Any]) -> list[str]:
    return [_table(cells.PACKED, cells.packed_cells([*result["baselines"], *result["rows"]]))]


def _decode(result: Mapping[str, Any]) -> list[str]:
    """Return the tables of steps at every context, then of whole models."""
    records, parts = [*result["baselines"], *result["rows"]], []
    steps = [record for record in records if "prompt" not in record]
    writing = [record for record in records if "prompt" in record]
    for show, headers, fill, some in (
        (cells.show_context, cells.DECODE, cells.decode_cells, steps),
        (cells.show_writing, cells.GENERATION, cells.generation_cells, writing),
    ):
        for title in dict.fromkeys(map(show, some)):
            own = [record for record in some if show(record) == title]
            parts += [f"**{title[0].upper()}{title[1:]}**", _table(headers, fill(own))]
    return parts


def _linear(result: Mapping[str, Any]) -> list[str]:
    records, parts = [*result["baselines"], *result["rows"]], []
    shown = [record for record in records if not record.get("sweep")]
    for title in dict.fromkeys(map(cells.show_shape, shown)):
        own = [record for record in shown if cells.show_shape(record) == title]
        parts += [f"**{title.capitalize()}**", _table(cells.LINEAR, cells.linear_cells(own))]
    lines = [f"- {cells.show_crossover(record)}" for record in result.get("crossovers", ())]
    return [*parts, "\n".join(lines)] if lines else parts


def _rows(result: Mapping[str, Any]) -> list[str]:
    """Each row once: the first is timed in every group."""
    records = [*result["baselines"][:1], *result["rows"]]
    return [f"**{result['config']['recipe']}**", _table(cells.ROWS, cells.row_cells(records))]


OTHERS = {"retrieval": _retrieval, "decode": _decode, "packed": _packed, "linear": _linear}


def _fastest(softmax: list[Record]) -> list[Record]:
    """Return the fastest stock kernels forward and in training, which may be the same, and our own."""
    stock = [record for record in softmax if is_stock(record)]
    winners = [fastest(stock, time) for time in ("forward_ms", "training_ms")]
    return [record for record in softmax if not is_stock(record) or record in winners]


def _table(headers: Iterable[str], lines: Iterable[list[str]]) -> str:
    headers = list(headers)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headers, ["---"] * len(headers), *lines))
