"""The paper's figures about cost, which are counted when the page is built and need no runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgk.analysis.cost_figures import draw_over_heads, draw_ratios, draw_variants, over_heads
from mgk.analysis.cost_ratios import Cost, Ratio, language_model_ratios, retrieval_cost
from mgk.reproduction.closed_form_tables import closed_form_over_heads, closed_form_over_sizes
from mgk.reproduction.page import Grid, Page

HEADS = (2, 4, 8, 12)
"""Numbers of heads of the baselines on Long Range Arena."""
PAIRS = 32
"""Pairs in a training iteration on Retrieval."""
VARIANTS = ("mgk", "mgk-hard", "mgk-em", "smgk", "smgk-hard", "smgk-em")

_BLIND = (
    "We count every matrix product, with 2 m n k operations each, and nothing else. The paper used fvcore, which "
    "counts a product as m n k and does not know the distances that its language models are made of."
)
_TRAINING = (
    "Training costs three times a forward pass, since each product has two in the backward pass. The paper does not "
    "define it."
)


def ratio_page(name: str, folder: Path) -> Page:
    """Build the page of figure 3 or 10."""
    mixture, baseline = {"F3": ("mgk", "softmax"), "F10": ("mlk", "linear")}[name]
    ratios = language_model_ratios(mixture, baseline)
    picture = folder / f"{name}.png"
    draw_ratios(ratios, picture)
    lengths = list(dict.fromkeys(ratio.length for ratio in ratios))
    widths = list(dict.fromkeys(ratio.width for ratio in ratios))
    flops = _over_sizes(ratios, lambda ratio: f"{ratio.flops:.3f}")
    whole = _over_sizes(ratios, lambda ratio: f"{ratio.flops_with_output:.3f}")
    header = ("D", *(f"N = {length}" for length in lengths))
    at = {(ratio.width, ratio.length): ratio for ratio in ratios}
    sizes = tuple(
        (
            str(width),
            f"{first.mixture.parameters / 1e6:.1f} M",
            f"{first.baseline.parameters / 1e6:.1f} M",
            f"{first.parameters:.3f}",
            f"{first.other_parameters:.3f}",
            "no growing cache" if first.cache_bytes is None else f"{first.cache_bytes:.2f}",
        )
        for width in widths
        for first in [at[width, lengths[0]]]
    )
    grids = [
        Grid(title="FLOPs of the layers, training and inference", header=header, lines=flops),
        Grid(title="FLOPs with the output over the whole vocabulary", header=header, lines=whole),
        Grid(
            title="Parameters, and bytes of keys and values kept for each token",
            header=("D", f"{mixture}-4", f"{baseline}-8", "ratio", "ratio without embeddings", "ratio of the cache"),
            lines=sizes,
        ),
    ]
    if name == "F3":
        grids.append(closed_form_over_sizes(widths, lengths))
    return Page(
        name=name,
        title=f"Cost of {mixture}-4 over {baseline}-8 in the WikiText-103 language model",
        text=(
            "A head is D / 8 wide in both models, and the feed-forward layer stays 2048 wide, as in both published "
            "sizes; the batch is 1. The cost of the adaptive softmax depends on the words that occur. So one table "
            "leaves the output out, and one has an output over the whole vocabulary. "
            f"{_TRAINING} So the ratio of training is that of inference, and has no panel of its own.",
            _BLIND,
        ),
        grids=tuple(grids),
        pictures=(picture,),
        statements=tuple(_ratio_statements(ratios)),
        numbers=len(ratios),
    )


def heads_page(name: str, folder: Path) -> Page:
    """Build the page of figure 4 or 15."""
    is_training = name == "F15"
    pairs = PAIRS if is_training else 1
    families = {"softmax": ("smgk", "mgk"), "linear": ("smlk", "mlk")}
    picture = folder / f"{name}.png"
    panels: list[tuple[str, Mapping[str, Sequence[tuple[int, float]]]]] = []
    grids, statements = [], []
    attribute = "training_flops" if is_training else "forward_flops"
    scale, unit = (1e-12, "TFLOPs") if is_training else (1e-9, "GFLOPs")
    label = f"{unit} of {'a training iteration' if is_training else 'a forward pass'}"
    for baseline, mixtures in families.items():
        costs = {baseline: [retrieval_cost(baseline, heads, pairs=pairs) for heads in HEADS]}
        costs |= {each: [retrieval_cost(each, heads // 2, pairs=pairs) for heads in HEADS] for each in mixtures}
        panels.append((label, _lines(costs, attribute, scale, baseline)))
        if not is_training:
            panels.append(("parameters, thousands", _lines(costs, "parameters", 1e-3, baseline)))
        grids.append(_heads_grid(costs, attribute, scale, unit, with_parameters=not is_training))
        for mixture in mixtures:
            statements += _heads_statements(costs[baseline], costs[mixture], attribute, with_parameters=not is_training)
    if name == "F4":
        grids.append(closed_form_over_heads(HEADS))
    batch = f"batch {PAIRS}" if is_training else "one pair"
    what = "FLOPs of a training iteration" if is_training else "FLOPs and parameters"
    draw_over_heads(panels, picture, title=f"Long Range Arena Retrieval, {batch}, 2 x 4096 tokens")
    return Page(
        name=name,
        title=f"{what} over the number of heads, Retrieval",
        text=(
            f"We count both documents, {batch}, of 4096 tokens each. Heads are 32 wide."
            + (f" {_TRAINING}" if is_training else ""),
            _BLIND,
        ),
        grids=tuple(grids),
        pictures=(picture,),
        statements=tuple(statements),
        numbers=1,
    )


def variants_page(name: str, folder: Path) -> Page:
    """Build the page of figure 8 or 16."""
    is_training = name == "F16"
    pairs = PAIRS if is_training else 1
    costs = [retrieval_cost("softmax", 2, pairs=pairs), *(retrieval_cost(each, 1, pairs=pairs) for each in VARIANTS)]
    attribute, scale = ("training_flops", 1e-12) if is_training else ("forward_flops", 1e-9)
    label = "TFLOPs of a training iteration" if is_training else "GFLOPs of a forward pass"
    names = [f"{cost.attention}-{cost.heads}" for cost in costs]
    flops = [scale * getattr(cost, attribute) for cost in costs]
    panels: list[tuple[str, Sequence[tuple[str, float]]]] = [(label, list(zip(names, flops, strict=True)))]
    unit = {label: "{:.2f}", "parameters, thousands": "{:.1f}"}
    if not is_training:
        sizes = [cost.parameters / 1e3 for cost in costs]
        panels.insert(0, ("parameters, thousands", list(zip(names, sizes, strict=True))))
    picture = folder / f"{name}.png"
    batch = f"batch {PAIRS}" if is_training else "one pair"
    draw_variants(panels, picture, title=f"Ways to infer and learn the mixture, Retrieval, {batch}, 1 head", unit=unit)
    what = "FLOPs of a training iteration" if is_training else "Parameters and FLOPs"
    by_name = dict(zip(names, costs, strict=True))
    spread = [getattr(by_name[f"{each}-1"], attribute) for each in VARIANTS]
    projected = [getattr(by_name[f"{each}-1"], attribute) for each in VARIANTS[:3]]
    statements = [
        (
            "MGK costs the same with a learned prior, hard assignment and EM",
            len(set(projected)) == 1,
            f"{min(projected):,} to {max(projected):,} FLOPs",
        ),
        (
            "sMGK costs about what MGK costs (within 5 %)",
            max(spread) <= 1.05 * min(spread),
            f"smgk-1 needs {spread[3] / spread[0]:.3f} of the FLOPs of mgk-1",
        ),
    ]
    if not is_training:
        least = min(cost.parameters for cost in costs[1:])
        statements.append(
            (
                "sMGK has fewer parameters than MGK",
                by_name["smgk-1"].parameters < by_name["mgk-1"].parameters,
                f"{by_name['smgk-1'].parameters:,} against {by_name['mgk-1'].parameters:,}; the least has {least:,}",
            )
        )
    lines = tuple(
        (
            row,
            f"{cost.parameters:,}",
            f"{getattr(cost, attribute):,}",
            f"{getattr(cost, attribute) / getattr(costs[0], attribute):.3f}",
        )
        for row, cost in by_name.items()
    )
    return Page(
        name=name,
        title=f"{what} by way of learning, Retrieval",
        text=(
            f"We count both documents, {batch}, of 4096 tokens each. The models have one head of 32 as in Table 5, "
            "softmax has two. Shifted keys share one product of queries and keys, which the paper's code has once for "
            "each component. The sums that EM takes over the responsibilities are no matrix products, so they are "
            "not counted."
            + (f" {_TRAINING}" if is_training else ""),
            _BLIND,
        ),
        grids=(Grid(title="", header=("row", "parameters", "FLOPs", "times softmax-2"), lines=lines),),
        pictures=(picture,),
        statements=tuple(statements),
        numbers=len(lines),
    )  # fmt: skip


PAGES: Mapping[str, Callable[[str, Path], Page]] = {
    "F3": ratio_page, "F4": heads_page, "F8": variants_page, "F10": ratio_page, "F15": heads_page, "F16": variants_page,
}  # fmt: skip


def _over_sizes(ratios: Sequence[Ratio], show: Callable[[Ratio], str]) -> tuple[tuple[str, ...], ...]:
    lines: dict[int, list[str]] = {}
    for ratio in ratios:
        lines.setdefault(ratio.width, []).append(show(ratio))
    return tuple((str(width), *cells) for width, cells in lines.items())


def _ratio_statements(ratios: Sequence[Ratio]) -> list[tuple[str, bool, str]]:
    by_length: dict[int, list[float]] = {}
    for ratio in ratios:
        by_length.setdefault(ratio.length, []).append(ratio.flops)
    sizes = list(dict.fromkeys((ratio.width, ratio.parameters) for ratio in ratios))
    flops = [ratio.flops for ratio in ratios]
    shortest = min(by_length)
    return [
        ("fewer FLOPs at every D and N", max(flops) < 1, f"{min(flops):.3f} to {max(flops):.3f}"),
        (
            "the saving in FLOPs grows with D",
            all(_falls(values) for values in by_length.values()),
            f"at N = {shortest} from {by_length[shortest][0]:.3f} to {by_length[shortest][-1]:.3f}",
        ),
        ("the saving in FLOPs grows with N: layers", *_over_length(ratios, lambda ratio: ratio.flops)),
        (
            "the saving in FLOPs grows with N: with the output over the whole vocabulary",
            *_over_length(ratios, lambda ratio: ratio.flops_with_output),
        ),
        (
            "fewer parameters, and the saving grows with D",
            _falls([value for _, value in sizes]) and sizes[0][1] < 1,
            f"{sizes[0][1]:.3f} to {sizes[-1][1]:.3f}",
        ),
    ]


def _over_length(ratios: Sequence[Ratio], number: Callable[[Ratio], float]) -> tuple[bool, str]:
    """Return whether a ratio falls with the length at every width, and the numbers."""
    by_width: dict[int, list[float]] = {}
    for ratio in ratios:
        by_width.setdefault(ratio.width, []).append(number(ratio))
    narrowest = min(by_width)
    said = f"at D = {narrowest} from {by_width[narrowest][0]:.3f} to {by_width[narrowest][-1]:.3f}"
    others = [width for width, values in by_width.items() if not _falls(values)]
    if others:
        listed = ", ".join(map(str, others))
        last = by_width[others[-1]]
        said += f"; not at D = {listed}: at {others[-1]} from {last[0]:.3f} to {last[-1]:.3f}"
    return not others, said


def _falls(values: Sequence[float]) -> bool:
    # With a tolerance of 1e-6: in linear attention every token costs the same, so its ratio does not depend on the
    # length.
    return all(after < before - 1e-6 for before, after in itertools.pairwise(values))


def _lines(
    costs: Mapping[str, Sequence[Cost]], attribute: str, scale: float, baseline: str
) -> dict[str, Sequence[tuple[int, float]]]:
    return {name: over_heads(own, attribute, scale, factor=1 if name == baseline else 2) for name, own in costs.items()}


def _heads_grid(
    costs: Mapping[str, Sequence[Cost]], attribute: str, scale: float, unit: str, *, with_parameters: bool
) -> Grid:
    lines = []
    baseline = next(iter(costs))
    for index, heads in enumerate(HEADS):
        for name, own in costs.items():
            cost, full = own[index], costs[baseline][index]
            flops = getattr(cost, attribute)
            line = [f"{name}-{cost.heads}", f"{scale * flops:.3f}", f"{flops / getattr(full, attribute):.3f}"]
            if with_parameters:
                line += [f"{cost.parameters:,}", f"{cost.parameters / full.parameters:.3f}"]
            lines.append(tuple(line))
        assert heads == costs[baseline][index].heads
    header = ["row", unit, f"times {baseline}"]
    header += ["parameters", f"times {baseline}"] if with_parameters else []
    return Grid(title=f"{baseline.capitalize()} and its mixtures", header=tuple(header), lines=tuple(lines))


def _heads_statements(
    baseline: Sequence[Cost], mixture: Sequence[Cost], attribute: str, *, with_parameters: bool
) -> list[tuple[str, bool, str]]:
    found = []
    for name, key in (("FLOPs", attribute), *((("parameters", "parameters"),) if with_parameters else ())):
        saved = [getattr(full, key) - getattr(half, key) for full, half in zip(baseline, mixture, strict=True)]
        grows = saved[0] > 0 and all(before < after for before, after in itertools.pairwise(saved))
        found.append(
            (
                f"{mixture[0].attention} saves {name}, more with more heads",
                grows,
                f"saves {saved[0]:,} at {HEADS[0]} heads, {saved[-1]:,} at {HEADS[-1]}",
            )
        )
    return found
