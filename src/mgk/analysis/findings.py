"""All analyses of one model on one batch: as numbers, and as one JSON file."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from mgk.analysis.attention_maps import PooledMaps, pooled_maps
from mgk.analysis.curves import LearningCurves
from mgk.analysis.density import QueryDensity, query_density
from mgk.analysis.mixture import LearnedMixture, learned_mixture
from mgk.analysis.rank import AttentionRank, attention_rank
from mgk.analysis.record import NUM_QUERIES, AttentionRecord
from mgk.analysis.redundancy import HeadRedundancy, head_redundancy
from mgk.analysis.responsibilities import TokenResponsibilities, token_responsibilities
from mgk.analysis.theorem import Approximation, approximate

T = TypeVar("T")

FORMAT = 1
NUMBERS = "analysis.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """The results of all analyses of one model on one batch.

    An analysis that does not apply to the model is ``None``, and ``left_out`` has the reason.
    """

    num_samples: int
    """Number of sequences in the batch."""
    maps: Sequence[PooledMaps]
    """Attention maps of the first sample."""
    rank: Sequence[AttentionRank]
    """Ranks of the attention matrices."""
    redundancy: Sequence[HeadRedundancy]
    """Distances and similarities between heads."""
    mixture: Sequence[LearnedMixture]
    """Learned parameters of the mixtures."""
    density: Sequence[QueryDensity] | None
    """Negative log-likelihoods of the queries."""
    responsibilities: Sequence[TokenResponsibilities] | None
    """Responsibilities of the components in the first sample."""
    curves: LearningCurves | None
    """Learning curves of the run."""
    theorem: Approximation
    """Approximation of a density by mixtures of Gaussians, which is the same for every model."""
    left_out: Mapping[str, str]
    """Reasons why analyses are left out, by their names."""


def analyze(
    record: AttentionRecord,
    *,
    curves: LearningCurves | None = None,
    num_queries: int | None = NUM_QUERIES,
    progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Run every analysis that applies to this model.

    Args:
        record: record of a model on a batch.
        curves: learning curves of its training, if known.
        num_queries: most rows of an attention matrix to analyse; ``None`` is all.
        progress: called with a message before each analysis.
    """
    left_out: dict[str, str] = {}

    def attempt(name: str, compute: Callable[[], T]) -> T | None:
        progress(name)
        try:
            return compute()
        except ValueError as error:
            left_out[name] = str(error)
            return None

    if curves is None:
        left_out["curves"] = "no measurements of a training were given"
    maps: list[PooledMaps] = []
    rank: list[AttentionRank] = []
    redundancy: list[HeadRedundancy] = []
    for call in record.calls:
        # The analyses run layer by layer, so that only the matrices of one layer exist at a time.
        progress(f"attention matrices of {call.name}")
        layer = AttentionRecord(calls=[call])
        with call.keeping_weights():
            rank += attention_rank(layer, num_queries=num_queries)
            redundancy += head_redundancy(layer, num_queries=num_queries)
            maps += pooled_maps(layer, num_queries=num_queries)
    progress("mixture")
    mixture = learned_mixture(record)
    density = attempt("density", lambda: query_density(record))
    responsibilities = attempt("responsibilities", lambda: token_responsibilities(record, num_queries=num_queries))
    progress("theorem")
    return Findings(
        num_samples=record.num_samples,
        maps=maps,
        rank=rank,
        redundancy=redundancy,
        mixture=mixture,
        density=density,
        responsibilities=responsibilities,
        curves=curves,
        theorem=_theorem(),
        left_out=left_out,
    )


@functools.cache
def _theorem() -> Approximation:
    """Return the approximation for the theorem, computed once, since it is the same for every model."""
    return approximate()


def to_mapping(findings: Findings) -> dict[str, Any]:
    """Convert the numbers to JSON, except the cells of the attention maps. Numbers that are not finite are ``null``."""
    theorem = findings.theorem
    return {
        "format": FORMAT,
        "samples": findings.num_samples,
        "left_out": dict(findings.left_out),
        "rank": [
            {
                "layer": each.layer,
                "threshold": each.threshold,
                "queries": list(each.num_queries),
                "of_queries": list(each.of_queries),
                "keys": list(each.num_keys),
                "rank": [[one.rank for one in heads] for heads in each.matrices],
                "numerical_rank": [[one.numerical_rank for one in heads] for heads in each.matrices],
                "effective_rank": [[_plain(one.effective_rank) for one in heads] for heads in each.matrices],
                "largest_singular_value": [
                    [_plain(float(one.singular_values[0])) for one in heads] for heads in each.matrices
                ],
            }
            for each in findings.rank
        ],
        "redundancy": [
            {
                "layer": each.layer,
                "queries": each.num_queries,
                "distance": _plain(each.distance),
                "cka": _plain(each.similarity),
                "mean_distance": _plain(each.mean_distance),
                "mean_cka": _plain(each.mean_similarity),
            }
            for each in findings.redundancy
        ],
        "mixture": [
            {
                "layer": each.layer,
                "tokens": each.num_tokens,
                "prior": _plain(each.prior),
                "variance": _plain(each.variance),
                "shift": _plain(each.shift),
                "component_distance": _plain(each.distance),
                "spread": _plain(each.spread),
                "projection_distance": _plain(each.projection_distance),
            }
            for each in findings.mixture
        ],
        "density": None
        if findings.density is None
        else [
            {
                "layer": each.layer,
                "queries": each.num_queries,
                "mixture": _plain(each.mixture),
                "one_gaussian": _plain(each.merged),
                "components": _plain(each.components),
                "normalized_mixture": _plain(each.normalized_mixture),
                "normalized_one_gaussian": _plain(each.normalized_merged),
            }
            for each in findings.density
        ],
        "responsibilities": None
        if findings.responsibilities is None
        else [
            {
                "layer": each.layer,
                "queries": len(each.queries),
                "mean": _plain(each.mean),
                "deviation_over_keys": _plain(each.of_keys.std(dim=1, correction=0)),
                "deviation_over_queries": _plain(each.of_queries.std(dim=1, correction=0)),
            }
            for each in findings.responsibilities
        ],
        "curves": None
        if findings.curves is None
        else {
            "name": findings.curves.name,
            "left_out": findings.curves.left_out,
            "points": {name: [list(point) for point in points] for name, points in findings.curves.points.items()},
        },
        "theorem": {
            "components": list(theorem.components),
            "fixed_deviation": theorem.fixed_deviation,
            "largest_error_fixed_variance": theorem.largest_error(theorem.fixed),
            "largest_error_free_variance": theorem.largest_error(theorem.free),
        },
    }


def write_numbers(path: Path, findings: Findings, facts: Mapping[str, Any] | None = None) -> None:
    """Write the numbers, with ``facts`` about their origin, atomically to one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    content = {**(facts or {}), **to_mapping(findings)}
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """Convert tensors to nested lists of numbers with seven digits, and numbers that are not finite to ``None``."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
