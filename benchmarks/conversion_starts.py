"""How the loss of a converted model moves over its first steps: writes a table and a figure for docs/convert.md.

A small Llama learns the bytes of this repository's own pages. Then it is converted in several ways, and each of them
goes on with the same batches. The loss is that of text it has not seen.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import mgk
from mgk.benchmark.page import write_between
from mgk.conversion import advance_start

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "convert.md"
FIGURE = ROOT / "docs" / "conversion_starts.png"
RESULT = ROOT / "results" / "conversions" / "starts.json"
BEGIN, END = "<!-- written by benchmarks/conversion_starts.py -->", "<!-- end -->"

BATCH, TOKENS, HELD_OUT, FADE, EVERY = 8, 128, 16, 100, 10
ROWS: dict[str, dict[str, Any] | None] = {
    "not converted": None,
    "`softmax-mgk`, exact": {"attention": "softmax-mgk"},
    "`gaussian`, near": {"attention": "gaussian", "fade_steps": FADE},
    "`gaussian`, immediate": {"attention": "gaussian", "start": "immediate"},
    "`smgk`, near": {"attention": "smgk", "fade_steps": FADE},
    "`smgk`, immediate": {"attention": "smgk", "start": "immediate"},
    "`softmax`, one key/value head": {"attention": "softmax", "num_kv_heads": 1},
    "`smgk`, near, one key/value head": {"attention": "smgk", "num_kv_heads": 1, "fade_steps": FADE},
}
SHOWN = (0, 10, 50, 100, 150, 200)


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes to learn, and bytes held out: every tenth block of the pages, but for the one that is written here."""
    pages = sorted(set(ROOT.glob("docs/*.md")) - {PAGE})
    data = torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    blocks = data[: len(data) // (TOKENS + 1) * (TOKENS + 1)].unflatten(0, (-1, TOKENS + 1))
    is_held_out = torch.arange(len(blocks)) % 10 == 0
    return blocks[~is_held_out], blocks[is_held_out][:HELD_OUT]


def loss(model: Any, blocks: Tensor) -> Tensor:
    out = model(blocks[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), blocks[:, 1:].flatten())


def learn(model: PreTrainedModel, steps: int, rate: float, seed: int) -> list[float]:
    """Steps of Adam; the loss on what is held out, before the first step and after every tenth."""
    learned, held_out = text()
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(mgk.nn.parameter_groups(model, 0.01), lr=rate)
    curve = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                curve.append(loss(model, held_out).item())
        if step < steps:
            optimizer.zero_grad()
            loss(model, learned[torch.randint(len(learned), (BATCH,), generator=draw)]).backward()
            optimizer.step()
            advance_start(model)
    return curve


def measure(pretraining: int, steps: int, width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    before = learn(model, pretraining, 2e-3, seed=0)
    curves = {}
    for name, options in ROWS.items():
        own = copy.deepcopy(model)
        if options is not None:
            mgk.convert(own, **options)
        curves[name] = learn(own, steps, 1e-3, seed=1)
        print(f"{name}: {curves[name][0]:.3f} to {curves[name][-1]:.3f}", flush=True)
    shape = {"width": width, "heads": 4, "layers": 2, "tokens": TOKENS, "batch": BATCH, "fade_steps": FADE}
    return {"model": shape, "pretraining": {"steps": pretraining, "loss": before[-1]}, "every": EVERY, "loss": curves}


def table(result: dict[str, Any] | None = None) -> str:
    """The loss at some of the steps."""
    result = json.loads(RESULT.read_text()) if result is None else result
    steps = [step for step in SHOWN if step // EVERY < len(result["loss"]["not converted"])]
    lines = [f"| step | {' | '.join(map(str, steps))} |", "|---" * (len(steps) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{curve[step // EVERY]:.3f}' for step in steps)} |"
        for name, curve in result["loss"].items()
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for name, curve in result["loss"].items():
        steps = [result["every"] * i for i in range(len(curve))]
        style = "--" if "immediate" in name else "-"
        color = "black" if name == "not converted" else None
        for pane, is_pooled in zip(panes, (False, True), strict=True):
            if name == "not converted" or ("one key" in name) == is_pooled:
                pane.plot(steps, curve, style, color=color, label=name.replace("`", ""), linewidth=1.4)
    for pane, title in zip(panes, ("All heads", "One key/value head of four"), strict=True):
        pane.set(title=title, xlabel="steps after the conversion")
        pane.axvline(result["model"]["fade_steps"], color="gray", linewidth=0.6, linestyle=":")
        pane.legend(frameon=False, fontsize=8)
    panes[0].set_ylabel("loss, nats per byte")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretraining", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--output", type=Path, help="a folder for the JSON and the figure, instead of docs and results")
    arguments = parser.parse_args()
    result = measure(arguments.pretraining, arguments.steps, arguments.width)
    written, figure = RESULT, FIGURE
    if arguments.output is not None:
        written, figure = arguments.output / RESULT.name, arguments.output / FIGURE.name
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, figure)
    if arguments.output is None:
        write_between(PAGE, BEGIN, END, f"\n{table(result)}\n")
    print(f"wrote {written.name} and {figure.name}")


if __name__ == "__main__":
    main()
