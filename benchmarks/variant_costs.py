"""What each variant of attention costs, counted: writes the table in docs/choosing.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import mgk
from mgk.analysis import cache_bytes_per_token, forward_flops, parameters
from mgk.models import architecture

PAGE = Path(__file__).parent.parent / "docs" / "choosing.md"
BEGIN, END = "<!-- written by benchmarks/variant_costs.py -->", "<!-- end -->"

WIDTH, HEAD_DIM, TOKENS = 512, 64, 4096
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("softmax", 8, {}),
    ("gaussian", 8, {}),
    ("smgk", 8, {}),
    ("mgk", 8, {}),
    ("softmax", 4, {}),
    ("gaussian", 4, {}),
    ("smgk", 4, {}),
    ("mgk", 4, {}),
    ("smgk", 4, {"qk_norm": True}),
    ("mgk", 4, {"qk_norm": True}),
    ("smgk", 4, {"num_components": 4}),
    ("mgk", 4, {"num_components": 4}),
    ("linear", 8, {}),
    ("smlk", 4, {}),
    ("mlk", 4, {}),
)


class Cost(NamedTuple):
    """Of one layer."""

    parameters: int
    flops: int
    """Forward, one sequence."""
    cache_bytes: int
    """Keys and values of a token in bf16."""


def cost(preset: str, heads: int, **options: Any) -> Cost:
    with torch.device("meta"):
        layer = mgk.build_attention(preset, WIDTH, heads, head_dim=HEAD_DIM, **options)
        x = torch.zeros(1, TOKENS, WIDTH)
    config = architecture(
        "modern", attention=preset, num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD_DIM,
        hidden_size=WIDTH, num_hidden_layers=1, **options,
    )  # fmt: skip
    return Cost(parameters(layer), forward_flops(layer, query=x), cache_bytes_per_token(config))


def name(preset: str, heads: int, **options: Any) -> str:
    words = {"qk_norm": "qk_norm", "num_components": "M = {}"}
    return ", ".join([f"`{preset}`, {heads} heads", *(words[key].format(value) for key, value in options.items())])


def table() -> str:
    """Each number with its ratio to softmax with all the heads."""
    baseline = cost("softmax", 8)
    lines = ["| layer | parameters | | GFLOPs | | bytes cached per token | |", "|---|---|---|---|---|---|---|"]
    for preset, heads, options in ROWS:
        own = cost(preset, heads, **options)
        ratios = [f"{mine / its:.3f}" for mine, its in zip(own, baseline, strict=True)]
        cached = f"{own.cache_bytes:,} | {ratios[2]}" if own.cache_bytes else "0: a state | -"
        lines.append(
            f"| {name(preset, heads, **options)} | {own.parameters:,} | {ratios[0]} "
            f"| {own.flops / 1e9:.2f} | {ratios[1]} | {cached} |"
        )
    return "\n".join(lines)


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
    print(f"wrote the table of docs/{PAGE.name}")


if __name__ == "__main__":
    main()
