"""The metrics of tables and claims: their place in the results, unit, and the direction that is better."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Source = Literal["run", "evaluation", "analysis", "benchmark", "curve"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a run."""

    name: str
    """Name in ``paper.yaml`` and ``claims.yaml``."""
    title: str
    """Heading of its column."""
    source: Source
    """File that holds it: the result of a run, of ``mgk evaluate``, ``mgk analyze`` or ``mgk bench``, or the curves."""
    higher_is_better: bool | None
    """Whether higher values are better; ``None`` if neither is."""
    key: str = ""
    """Name in that file."""
    split: str = "test"
    """Split of the corpus on which it is measured."""
    scale: float = 1.0
    """Factor that converts our unit to the paper's."""
    decimals: int = 2
    """Number of decimals to show."""
    margin: float = 0.0
    """Loss that the claim "comparable" allows, in the paper's unit. The choice is ours, since the paper states none."""
    slides: bool = False
    """Whether it is measured with a sliding window, whose step is :func:`slide_of` the corpus."""
    layer: int | None = None
    """Number of the layer or component, counted from 1."""
    component: int | None = None
    """Number of the layer or component, counted from 1."""


SLIDES = {"enwik8": 64}
"""Steps of the sliding window in tokens, where a step of one takes too long. With a window of 512 the 5 million bytes
are read eight times, and each byte sees at least 448 before it."""


def slide_of(corpus: str) -> int:
    """Return the step of the sliding window in tokens: one, as in the paper, except for :data:`SLIDES`."""
    return SLIDES.get(corpus, 1)


# The paper calls losses of up to 0.38 in perplexity (Table 3) and 0.35 in BLEU (Table 4) comparable.
_FIXED = (
    Metric(
        name="test_accuracy", title="test accuracy, %", source="run", key="accuracy", higher_is_better=True,
        scale=100.0, margin=0.5,
    ),
    Metric(
        name="valid_perplexity", title="valid perplexity", source="evaluation", key="sliding_perplexity", split="valid",
        higher_is_better=False, margin=0.5, slides=True,
    ),
    Metric(
        name="test_perplexity", title="test perplexity", source="evaluation", key="sliding_perplexity",
        higher_is_better=False, margin=0.5, slides=True,
    ),
    Metric(
        name="test_bleu", title="test BLEU", source="evaluation", key="tokenised_lowercase_bleu", higher_is_better=True,
        margin=0.5,
    ),
    # Only corpora of bytes have this metric in their tables, so a token is a byte there.
    Metric(
        name="test_bits_per_token", title="test bits per byte", source="run", key="bits_per_token",
        higher_is_better=False, decimals=4, margin=0.01,
    ),
    Metric(
        name="test_disjoint_perplexity", title="test perplexity, disjoint windows", source="run", key="perplexity",
        higher_is_better=False, margin=0.5,
    ),
    Metric(
        name="valid_disjoint_perplexity", title="valid perplexity, disjoint windows", source="run", key="perplexity",
        split="valid", higher_is_better=False, margin=0.5,
    ),
    Metric(
        name="test_sliding_bits_per_token", title="test bits per byte, sliding window", source="evaluation",
        key="sliding_bits_per_token", higher_is_better=False, decimals=4, margin=0.01, slides=True,
    ),
    Metric(
        name="test_training_bleu", title="test BLEU, as in training", source="run", key="bleu", higher_is_better=True,
        margin=0.5,
    ),
    Metric(
        name="parameters", title="parameters, millions", source="run", higher_is_better=None, scale=1e-6, decimals=1
    ),
    Metric(
        name="memory", title="memory, GB", source="benchmark", key="peak_bytes", higher_is_better=False, scale=1e-9
    ),
    Metric(
        name="seconds_per_iteration", title="seconds per iteration", source="benchmark", key="evaluation_ms",
        higher_is_better=False, scale=1e-3, decimals=4,
    ),
    Metric(
        name="mean_valid_accuracy", title="validation accuracy, mean over training, %", source="curve", key="accuracy",
        split="valid", higher_is_better=True, scale=100.0,
    ),
    Metric(
        name="mean_valid_loss", title="validation loss, mean over training", source="curve", key="loss", split="valid",
        higher_is_better=False, decimals=3,
    ),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _FIXED}


def metric(name: str) -> Metric:
    """Return a metric by its name, including those of a layer, such as ``rank_layer_2`` and ``prior_1_layer_2``."""
    if name in METRICS:
        return METRICS[name]
    if match := re.fullmatch(r"query_nll_layer_([1-9]\d*)", name):
        layer = int(match[1])
        return Metric(
            name=name, title=f"query NLL, layer {layer}, nats", source="analysis", key="query_nll",
            higher_is_better=False, decimals=3, layer=layer,
        )  # fmt: skip
    if match := re.fullmatch(r"rank_layer_([1-9]\d*)", name):
        layer = int(match[1])
        return Metric(
            name=name, title=f"mean rank, layer {layer}", source="analysis", key="rank", higher_is_better=True,
            decimals=1, layer=layer,
        )  # fmt: skip
    if match := re.fullmatch(r"prior_([1-9]\d*)_layer_([1-9]\d*)", name):
        component, layer = int(match[1]), int(match[2])
        return Metric(
            name=name, title=f"prior {component}, layer {layer}", source="analysis", key="prior",
            higher_is_better=None, decimals=3, layer=layer, component=component,
        )  # fmt: skip
    raise ValueError(f"a metric must be one of {', '.join(METRICS)}, or one of a layer, got {name!r}")
