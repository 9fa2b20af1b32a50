"""The claims of the paper, and verdicts on them from our runs.

The test is Welch's t between the seeds of two rows, two-sided, at level 0.05, with p values adjusted by Holm over the
comparisons of one sentence of the paper. A claim "comparable" is tested against the margin of its metric instead of 0.
With fewer than three seeds in a row there is no verdict. If both rows have the same seeds, the p value of the paired
test is shown as well, but does not decide: see docs/reproduction.md. A claim about a corpus that is not available is
not judged; the same comparison on a stand-in corpus is a claim of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mgk.recipes import paper
from mgk.recipes.recipe import FOLDER
from mgk.reproduction.improvement import Improvement, improvement
from mgk.reproduction.items import ACCURACY, ItemInterval, difference_interval
from mgk.reproduction.metrics import Metric, metric
from mgk.reproduction.results import Results
from mgk.reproduction.stand_ins import in_place_of, is_gone
from mgk.reproduction.statistics import Contrast, contrast, holm, mean
from mgk.training.configuration import read_yaml

Kind = Literal["better", "comparable"]
Outcome = Literal[
    "holds", "does not hold", "not shown", "not yet enough seeds", "not yet measured", "corpus not to be had"
]  # fmt: skip

LEVEL = 0.05
MINIMUM_SEEDS = 3
NO_TEST = ", no test: the seeds of neither row differ"
NOISES = 3
"""Two times differ if they are this many times their noise apart."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One comparison of two rows whose outcome the paper states."""

    page: str
    """Table or figure of the claim."""
    sentence: str
    """Sentence of the paper, whose comparisons form one family of tests."""
    where: str
    """Place of the sentence in the paper."""
    kind: Kind
    metric: Metric
    recipes: tuple[str, ...]
    """Recipes of the comparison; for several, their mean is compared."""
    first: str
    """Row that is claimed to be better."""
    second: str
    """Row that it is compared with."""

    @property
    def what(self) -> str:
        """The comparison in words."""
        relation = "better than" if self.kind == "better" else "not worse than"
        where = self.recipes[0] if len(self.recipes) == 1 else f"mean of {', '.join(self.recipes)}"
        return f"{self.first} {relation} {self.second}, {where}, {self.metric.title}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of our runs on a claim."""

    claim: Claim
    outcome: Outcome
    why: str
    """Numbers behind the verdict."""
    seeds: tuple[int, int]
    """Number of seeds of the first and the second row; for several recipes, the fewest."""
    published: float | None
    """Difference in the paper, positive if the first row is better; ``None`` if the paper prints no number."""
    found: float | None = None
    """Difference in our runs, with the same sign."""
    paired_p: float | None = None
    """Adjusted p value of the test that compares seed by seed; ``None`` if the rows have different seeds."""
    improvement: Improvement | None = None
    """Probability that a run of the first row is better than one of the second."""
    over_items: ItemInterval | None = None
    """Interval of the difference over resampled test items."""


def claims(page: str) -> list[Claim]:
    """Return the claims about one table or figure."""
    return [claim for entry in _read().get(page, []) for claim in _expand(page, entry)]


def pages() -> list[str]:
    """Return the tables and figures that have claims."""
    return list(_read())


def with_stand_ins(chosen: Sequence[Claim], results: Results) -> list[Claim]:
    """Return the claims, and for each that cannot be judged also the same comparison on a stand-in corpus."""
    known = {(claim.metric, claim.recipes, claim.first, claim.second) for claim in chosen}
    found = list(chosen)
    for claim in chosen:
        if not _is_gone(claim, results):
            continue
        recipes = tuple(dict.fromkeys(in_place_of(recipe, results) for recipe in claim.recipes))
        key = (claim.metric, recipes, claim.first, claim.second)
        if key in known or any(is_gone(recipe, results) for recipe in recipes):
            continue
        known.add(key)
        pairs = dict.fromkeys(
            f"{in_place_of(recipe, results)} in place of {recipe}"
            for recipe in claim.recipes
            if is_gone(recipe, results)
        )
        found.append(replace(claim, recipes=recipes, where=f"{claim.where}; {', '.join(pairs)}"))
    return found


def judge(chosen: Sequence[Claim], results: Results) -> list[Verdict]:
    """Return a verdict on every claim, in the same order."""
    verdicts: dict[Claim, Verdict] = {}
    families: dict[tuple[str, str, str], list[tuple[Claim, Contrast, Contrast | None]]] = {}
    untested: dict[tuple[str, str, str], int] = {}
    for claim in chosen:
        family = (claim.page, claim.sentence, claim.where)
        if claim.metric.source == "benchmark":
            verdicts[claim] = _compare_measurements(claim, results)
            continue
        if _is_gone(claim, results):
            verdicts[claim] = Verdict(
                claim=claim, outcome="corpus not to be had", why="", seeds=(0, 0), published=_published(claim)
            )
            continue
        fewest = _seeds(claim, results)
        if min(fewest) < MINIMUM_SEEDS:
            estimate = _estimate(_samples(claim, results, in_pairs=False))
            untested[family] = untested.get(family, 0) + 1
            verdicts[claim] = Verdict(
                claim=claim,
                outcome="not yet enough seeds",
                why="" if estimate is None else f"{estimate:+.{claim.metric.decimals}f}",
                seeds=fewest,
                published=_published(claim),
                found=estimate,
                over_items=_over_items(claim, results),
            )
            continue
        margin = claim.metric.margin if claim.kind == "comparable" else 0.0
        tested = contrast(_samples(claim, results, in_pairs=False), -margin)
        pairs = contrast(_samples(claim, results, in_pairs=True), -margin) if _is_paired(claim, results) else None
        families.setdefault(family, []).append((claim, tested, pairs))
    for family, members in families.items():
        # Comparisons that cannot be tested yet count in the adjustment, or a verdict could be lost when more runs
        # arrive.
        rest = [1.0] * untested.get(family, 0)
        p_values = holm([tested.p for _, tested, _ in members] + rest)
        paired = holm([1.0 if pairs is None else pairs.p for _, _, pairs in members] + rest)
        for (claim, tested, pairs), p, paired_p in zip(members, p_values, paired, strict=False):
            verdicts[claim] = _decide(claim, tested, p, None if pairs is None else paired_p, results)
    return [verdicts[claim] for claim in chosen]


def _decide(claim: Claim, tested: Contrast, p: float, paired_p: float | None, results: Results) -> Verdict:
    outcome: Outcome = "not shown"
    if p < LEVEL:
        outcome = "holds" if tested.t > 0 else "does not hold"
    low, high = tested.interval()
    digits = claim.metric.decimals
    test = f" [{low:+.{digits}f}, {high:+.{digits}f}], p {show_p(p)}" if tested.degrees else NO_TEST
    return Verdict(
        claim=claim,
        outcome=outcome,
        why=f"{tested.estimate:+.{digits}f}{test}",
        seeds=_seeds(claim, results),
        published=_published(claim),
        found=tested.estimate,
        paired_p=paired_p,
        improvement=improvement([_values(claim, recipe, results) for recipe in claim.recipes]),
        over_items=_over_items(claim, results),
    )


def show_p(p: float) -> str:
    """Format a p value; small ones as below 0.001."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _sign(claim: Claim) -> float:
    if claim.metric.higher_is_better is None:
        raise ValueError(f"a claim must be about a metric with a better side, got {claim.metric.name}")
    return 1.0 if claim.metric.higher_is_better else -1.0


def _is_gone(claim: Claim, results: Results) -> bool:
    return claim.metric.source != "benchmark" and any(is_gone(recipe, results) for recipe in claim.recipes)


def _over_items(claim: Claim, results: Results) -> ItemInterval | None:
    if claim.metric != ACCURACY:
        return None
    return difference_interval(results, claim.recipes, claim.first, claim.second)


def _pair(claim: Claim, recipe: str, results: Results) -> tuple[dict[int, float], dict[int, float]]:
    """Return the values of both rows by seed."""
    return results.values(recipe, claim.first, claim.metric), results.values(recipe, claim.second, claim.metric)


def _values(claim: Claim, recipe: str, results: Results) -> tuple[list[float], list[float]]:
    """Return the values of both rows, with the sign for which more is better."""
    first, second = _pair(claim, recipe, results)
    return [_sign(claim) * value for value in first.values()], [_sign(claim) * value for value in second.values()]


def _is_paired(claim: Claim, results: Results) -> bool:
    """Whether both rows have the same seeds everywhere."""
    return all(
        first.keys() == second.keys() for first, second in (_pair(claim, each, results) for each in claim.recipes)
    )


def _samples(claim: Claim, results: Results, *, in_pairs: bool) -> list[tuple[float, list[float]]]:
    """Return weighted samples whose weighted sum of means is positive if the first row is better.

    In pairs, a sample consists of the differences between the rows for each seed. The weighted sum is the same, but its
    error is that of the differences.
    """
    weight = _sign(claim) / len(claim.recipes)
    found: list[tuple[float, list[float]]] = []
    for recipe in claim.recipes:
        first, second = _pair(claim, recipe, results)
        if in_pairs:
            found.append((weight, [first[seed] - second[seed] for seed in sorted(first)]))
        else:
            found += [(weight, list(first.values())), (-weight, list(second.values()))]
    return found


def _estimate(samples: Sequence[tuple[float, Sequence[float]]]) -> float | None:
    if not all(values for _, values in samples):
        return None
    return math.fsum(weight * mean(values) for weight, values in samples)


def _seeds(claim: Claim, results: Results) -> tuple[int, int]:
    first, second = (
        min(len(results.values(recipe, row, claim.metric)) for recipe in claim.recipes)
        for row in (claim.first, claim.second)
    )
    return first, second


def _published(claim: Claim) -> float | None:
    table = paper()["tables"].get(claim.page, {"recipes": {}})["recipes"]
    found = []
    for recipe in claim.recipes:
        rows = table.get(recipe, {})
        pair = [rows.get(row, {}).get(claim.metric.name) for row in (claim.first, claim.second)]
        if None in pair:
            return None
        found.append(_sign(claim) * (float(pair[0]) - float(pair[1])))
    return mean(found)


def _compare_measurements(claim: Claim, results: Results) -> Verdict:
    """Judge a claim about measurements, which have no seeds, because one benchmark run took turns between the rows.

    Times differ if they are more than three times their joint noise apart; numbers of bytes are exact.
    """
    recipe = claim.recipes[0]
    pair = [results.measurement(recipe, row) for row in (claim.first, claim.second)]
    seeds = (int(pair[0] is not None), int(pair[1] is not None))
    if pair[0] is None or pair[1] is None:
        missing = " and ".join(
            row for row, found in zip((claim.first, claim.second), pair, strict=True) if found is None
        )
        return Verdict(
            claim=claim, outcome="not yet measured", why=f"no measurement of {missing}", seeds=seeds,
            published=_published(claim),
        )  # fmt: skip
    first, second = (float(found[claim.metric.key]) * claim.metric.scale for found in pair if found is not None)
    noise = NOISES * (first * float(pair[0]["noise"]) + second * float(pair[1]["noise"]))
    tolerance = noise if claim.metric.key.endswith("_ms") else 0.0
    gain = _sign(claim) * (first - second)
    outcome: Outcome = "not shown"
    if abs(gain) > tolerance:
        outcome = "holds" if gain > 0 else "does not hold"
    digits = claim.metric.decimals
    return Verdict(
        claim=claim,
        outcome=outcome,
        why=f"{first:.{digits}f} against {second:.{digits}f}, {first / second:.2f}x",
        seeds=seeds,
        published=_published(claim),
        found=gain,
    )


@functools.cache
def _read() -> Mapping[str, list[dict[str, Any]]]:
    return read_yaml(FOLDER / "claims.yaml")


def _expand(page: str, entry: Mapping[str, Any]) -> list[Claim]:
    average, kind = entry.get("average", False), entry["kind"]
    if average not in (False, True, "only"):
        raise ValueError(f"average of a claim must be true, false or only, got {average!r} in {page}")
    if kind not in get_args(Kind):
        raise ValueError(f"kind of a claim must be one of {', '.join(get_args(Kind))}, got {kind!r} in {page}")
    groups = [] if average == "only" else [(recipe,) for recipe in entry["recipes"]]
    if average:
        groups.append(tuple(entry["recipes"]))
    return [
        Claim(
            page=page, sentence=entry["sentence"], where=entry["where"], kind=kind, metric=metric(name), recipes=group,
            first=first, second=second,
        )
        for first, second in entry["pairs"]
        for name in entry["metrics"]
        for group in groups
    ]  # fmt: skip
