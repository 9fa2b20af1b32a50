"""Comparison of where a run begins: with the published code's weights or our own, in its batches or in ours.

``benchmarks/same_start.py`` makes the runs that begin with something of the published code. Those that begin with
nothing of it are the runs of our recipes. All of them are our training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mgk.reproduction.claims import LEVEL, show_p
from mgk.reproduction.controls import read_controls
from mgk.reproduction.escape import run_of
from mgk.reproduction.page import Grid
from mgk.reproduction.published_code import curves_of_ours, fidelity, groups, show_escapes
from mgk.reproduction.results import Results
from mgk.reproduction.survival import LogRank, Run, log_rank_of_units

Curve = Sequence[Mapping[str, Any]]
WEIGHTS, BATCHES = "weights", "batches"


class Start(NamedTuple):
    """What a run begins with."""

    heads: int
    dropout: float
    takes: frozenset[str]
    """What it takes from the published code"""


Starts = dict[Start, dict[int, Curve]]
"""The curves of the runs, by seed."""


def starts(results: Results) -> Starts:
    """Return our runs by what they begin with; nothing if none takes only a part from the published code."""
    control = fidelity()["control"]
    found: defaultdict[Start, dict[int, Curve]] = defaultdict(dict)
    for each in read_controls(results.folder):
        if each.name == control["same_start"]["name"] and each.is_complete:
            found[Start(each.heads, each.dropout, each.takes)][each.seed] = each.curve
    if all(len(start.takes) == 2 for start in found):
        return {}
    for setting in groups()[control["same_start"]["recipes"]]:
        curves = curves_of_ours(results, setting.recipe, setting.row)
        if curves and any(start[:2] == setting[:2] for start in found):
            found[Start(setting.heads, setting.dropout, frozenset())].update(curves)
    return dict(found)


def grid(found: Starts) -> Grid:
    """Build the table, with a line for each start."""
    threshold = fidelity()["control"]["plateau"]
    lines = []
    for start in sorted(
        found, key=lambda each: (each.heads, each.dropout, -len(each.takes), WEIGHTS not in each.takes)
    ):
        origin = ["published" if part in start.takes else "ours" for part in (WEIGHTS, BATCHES)]
        seeds = dict(sorted(found[start].items()))
        lines.append((
            str(start.heads), f"{start.dropout:g}", *origin, ", ".join(map(str, seeds)),
            *show_escapes(list(seeds.values()), threshold),
        ))  # fmt: skip
    header = ("heads", "dropout", "initial weights", "batches", "seeds", "left the plateau", "at steps")
    return Grid(title=fidelity()["control"]["same_start"]["starts"], header=header, lines=tuple(lines))


def compare_weights(found: Starts) -> LogRank | None:
    """Test whether runs leave earlier with the published weights than with our own, in the same kind of batches.

    Each number of heads, dropout and origin of the batches is a stratum. Runs that share a seed share what is drawn
    from it, so the test shares out seeds and not runs.

    Returns:
        The test; ``None`` if no stratum has both.
    """
    threshold = fidelity()["control"]["plateau"]
    theirs: defaultdict[int, dict[Start, Run]] = defaultdict(dict)
    own: defaultdict[int, dict[Start, Run]] = defaultdict(dict)
    for start, curves in found.items():
        stratum = start._replace(takes=start.takes - {WEIGHTS})
        for seed, curve in curves.items():
            run = run_of(curve, threshold)
            if run is not None:
                (theirs if WEIGHTS in start.takes else own)[seed][stratum] = run
    strata = [{stratum for runs in group.values() for stratum in runs} for group in (theirs, own)]
    if not strata[0] & strata[1]:
        return None
    return log_rank_of_units(list(theirs.values()), list(own.values()))


def sentences(found: Starts) -> tuple[str, ...]:
    """Say what the test shows."""
    test = compare_weights(found)
    if test is None:
        return ()
    p = f"{'exact ' if test.is_exact else ''}p {show_p(test.p)}"
    if test.p >= LEVEL:
        decided = "There are too few seeds to say" if test.least >= LEVEL else "The runs do not show"
        said = f"{decided} whether the initial weights of the published code make a difference"
    else:
        who = "those of the published code" if test.excess > 0 else "our own"
        said = f"**Our training leaves the plateau earlier with initial weights like {who}**"
    return (
        f"Our initial weights and those of the published code are drawn from the same distributions. {said} "
        f"(log-rank test between runs of our training with the one and with the other, with a stratum for each number "
        f"of heads, dropout and origin of the batches; it shares out whole seeds; {p}).",
    )
