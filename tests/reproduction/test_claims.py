"""The claims as data, and the verdicts on them."""

import re

import numpy as np
import pytest
from reproduction_cases import load, write_benchmark, write_run

from mgk import recipes
from mgk.reproduction import claims as module
from mgk.reproduction.claims import Claim, claims, judge, pages, with_stand_ins
from mgk.reproduction.metrics import metric
from mgk.reproduction.page import by_sentence, summary, verdict_grid
from mgk.reproduction.pages import names
from mgk.reproduction.results import read_results
from mgk.reproduction.statistics import t_tail
from mgk.reproduction.tables import OURS

EVERY = [claim for page in pages() for claim in claims(page)]


def test_pages_of_claims_exist():
    assert set(pages()) <= set(names())
    # T8 is a table of what was learned, `size` one number, `fidelity` our own doubts: none claims that one is better;
    # the questions of `plateau` are its own.
    without = {"T8", "size", "fidelity", "plateau"}
    assert {name for name in names() if not name.startswith("F")} - set(pages()) == without
    assert set(OURS) <= set(pages())


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: f"{claim.page}: {claim.what}")
def test_rows_of_claims_are_rows_of_recipes(claim):
    for recipe in claim.recipes:
        assert {claim.first, claim.second} <= set(load(recipe).rows)
    assert claim.metric.higher_is_better is not None
    assert claim.kind == "better" or claim.metric.margin > 0


@pytest.mark.parametrize(
    "page", [page for page in pages() if page[0] != "F" and page not in (*OURS, "equal-cache", "shift")]
)
def test_rows_of_claims_have_published_numbers(page):
    rows = recipes.paper()["tables"][page]["recipes"]
    for claim in claims(page):
        for recipe in claim.recipes:
            assert claim.metric.name in rows[recipe][claim.first]
            assert claim.metric.name in rows[recipe][claim.second]


def test_no_claim_is_made_twice():
    assert len(set(EVERY)) == len(EVERY)


def make_claim(kind="better", name="test_accuracy", first="smgk-1", second="softmax-2", tasks=("lra/retrieval",)):
    return Claim(
        page="T1", sentence="one", where="here", kind=kind, metric=metric(name), recipes=tuple(tasks), first=first,
        second=second,
    )  # fmt: skip


def judged(folder, claim, first, second):
    for recipe in claim.recipes:
        for row, values in ((claim.first, first), (claim.second, second)):
            for seed, value in enumerate(values):
                write_run(folder, recipe, row, seed, accuracy=value / 100)
    (verdict,) = judge([claim], read_results(folder))
    return verdict


@pytest.mark.parametrize(
    ("kind", "first", "second", "outcome"),
    [
        ("better", [80.0, 80.1, 79.9], [78.0, 78.1, 77.9], "holds"),
        ("better", [78.0, 78.1, 77.9], [80.0, 80.1, 79.9], "does not hold"),
        ("better", [80.0, 81.0, 79.0], [79.9, 81.1, 79.2], "not shown"),
        # 0.2 below, within the margin of 0.5, and far from it by the spread.
        ("comparable", [79.8, 79.81, 79.79], [80.0, 80.01, 79.99], "holds"),
        ("comparable", [79.0, 79.01, 78.99], [80.0, 80.01, 79.99], "does not hold"),
        ("comparable", [80.0, 82.0, 78.0], [80.0, 82.0, 78.0], "not shown"),
    ],
)
def test_outcomes(tmp_path, kind, first, second, outcome):
    verdict = judged(tmp_path, make_claim(kind), first, second)
    assert verdict.outcome == outcome
    assert verdict.seeds == (3, 3)
    assert verdict.found == pytest.approx(sum(first) / 3 - sum(second) / 3)
    # 81.23 against 79.1 in Table 1.
    assert verdict.published == pytest.approx(2.13)


@pytest.mark.parametrize("kind", ["better", "comparable"])
def test_rows_that_do_not_vary_decide_nothing(tmp_path, kind):
    """Runs that end at the same number, such as the share of the largest class: any difference would be certain."""
    verdict = judged(tmp_path, make_claim(kind), [31.85] * 3, [31.8] * 3)
    assert verdict.outcome == "not shown"
    assert verdict.why == "+0.05, no test: the seeds of neither row differ"
    assert judged(tmp_path, make_claim(kind), [31.85] * 3, [31.85] * 3).outcome == "not shown"


def test_paired_seeds_stand_beside(tmp_path):
    """Seeds that do the same to both rows: the pairs see what the rows alone do not, and decide nothing."""
    first, second = [80.3, 75.2, 70.3, 85.1, 65.3], [80.0, 75.0, 70.0, 85.0, 65.0]
    verdict = judged(tmp_path, make_claim(), first, second)
    assert verdict.outcome == "not shown"
    # Differences 0.3, 0.2, 0.3, 0.1, 0.3: mean 0.24, error 0.04, so t = 6 with 4 degrees of freedom.
    assert verdict.paired_p == pytest.approx(2 * t_tail(6.0, 4))
    # All of 25 pairs but those of larger seeds: 15 wins.
    assert verdict.improvement.probability == pytest.approx(15 / 25)


def test_other_seeds_are_not_paired(tmp_path):
    write_run(tmp_path, "lra/retrieval", "smgk-1", 7, accuracy=0.8)
    verdict = judged(tmp_path, make_claim(), [80.0, 80.1, 79.9], [78.0, 78.1, 77.9])
    assert verdict.paired_p is None
    assert verdict.outcome == "holds"
    assert verdict.seeds == (4, 3)


def test_lower_may_be_more_probable(tmp_path, monkeypatch):
    claim = make_claim(name="test_perplexity", first="mgk-4", second="softmax-8", tasks=("wikitext2",))
    values = {"mgk-4": {0: 33.0, 1: 33.1, 2: 32.9}, "softmax-8": {0: 34.0, 1: 34.1, 2: 33.9}}
    found = read_results(tmp_path)
    monkeypatch.setattr(type(found), "values", lambda self, recipe, row, metric: values[row])
    (verdict,) = judge([claim], found)
    assert verdict.improvement.probability == 1
    assert verdict.over_items is None


def test_intervals_over_items_stand_in_the_table(tmp_path):
    verdict = judged(tmp_path, make_claim(), [80.0, 80.1, 79.9], [78.0, 78.1, 77.9])
    assert verdict.over_items is None
    draw = np.random.default_rng(0)
    for row, share in (("smgk-1", 0.8), ("softmax-2", 0.7)):
        for seed in range(3):
            write_run(tmp_path, "lra/retrieval", row, seed, right=draw.random(1000) < share)
    (verdict,) = judge([make_claim()], read_results(tmp_path))
    assert verdict.over_items.low < verdict.found < verdict.over_items.high
    grid = verdict_grid([verdict])
    assert grid.header[3:6] == ("paired p", "P(better)", "over test items")
    assert re.fullmatch(r"\[\+\d+\.\d\d, \+\d+\.\d\d\]", grid.lines[0][5])


class TestCorpusThatIsGone:
    """Retrieval cannot be judged, and says so; PeerRead is judged under its own name."""

    def test_it_is_never_a_matter_of_seeds(self, tmp_path):
        chosen = [make_claim(), make_claim(tasks=("lra/listops", "lra/text", "lra/retrieval"))]
        for verdict in judge(chosen, read_results(tmp_path)):
            assert verdict.outcome == "corpus not to be had"
        assert summary(judge(chosen, read_results(tmp_path))) == "corpus not to be had"

    @pytest.mark.parametrize("page", pages())
    def test_no_page_asks_for_its_seeds(self, tmp_path, page):
        results = read_results(tmp_path)
        for verdict in judge(with_stand_ins(claims(page), results), results):
            if any("retrieval" in recipe for recipe in verdict.claim.recipes) and page != "T7":
                assert verdict.outcome == "corpus not to be had"

    def test_times_need_no_corpus(self, tmp_path):
        assert {verdict.outcome for verdict in judge(claims("T7"), read_results(tmp_path))} == {"not yet measured"}
        assert with_stand_ins(claims("T7"), read_results(tmp_path)) == claims("T7")

    def test_the_stand_in_is_a_family_of_its_own(self, tmp_path):
        """Else what stands in would make the paper's own sentence harder to show, and be part of its verdict."""
        chosen = claims("T1")[:4]
        assert [claim.recipes for claim in chosen][2:] == [
            ("lra/retrieval",), ("lra/listops", "lra/text", "lra/retrieval"),
        ]  # fmt: skip
        for recipe, values in (("lra/listops", (0.37, 0.02)), ("lra/text", (0.65, 0.02)), ("peerread", (0.65, -0.02))):
            for seed in range(3):
                noise = 0.001 * seed
                write_run(tmp_path, recipe, "smgk-4", seed, accuracy=values[0] + values[1] + noise)
                write_run(tmp_path, recipe, "softmax-8", seed, accuracy=values[0] + 1.5 * noise)
        results = read_results(tmp_path)
        verdicts = judge(with_stand_ins(chosen, results), results)
        assert [verdict.outcome for verdict in verdicts[:4]] == ["holds"] * 2 + ["corpus not to be had"] * 2
        assert [verdict.claim.recipes for verdict in verdicts[4:]] == [
            ("peerread",), ("lra/listops", "lra/text", "peerread"),
        ]  # fmt: skip
        assert verdicts[4].outcome == "does not hold"
        assert verdicts[4].published is None
        groups = by_sentence(verdicts)
        assert [summary(own) for own in groups.values()] == ["holds where its corpus can be had", "does not hold"]

    def test_whoever_has_it_sees_the_papers_table(self, tmp_path):
        verdict = judged(tmp_path, make_claim(), [80.0, 80.1], [78.0, 78.1])
        assert verdict.outcome == "not yet enough seeds"
        results = read_results(tmp_path)
        assert with_stand_ins([make_claim()], results) == [make_claim()]


def test_two_seeds_decide_nothing(tmp_path):
    verdict = judged(tmp_path, make_claim(), [90.0, 90.1], [50.0, 50.1, 50.2])
    assert verdict.outcome == "not yet enough seeds"
    assert verdict.seeds == (2, 3)
    assert verdict.found == pytest.approx(39.95)


def test_no_seed_at_all(tmp_path):
    (verdict,) = judge([make_claim(tasks=["lra/text"])], read_results(tmp_path))
    assert (verdict.outcome, verdict.seeds, verdict.found, verdict.why) == ("not yet enough seeds", (0, 0), None, "")


def test_an_average_needs_seeds_of_every_task(tmp_path):
    tasks = ("lra/listops", "lra/text", "lra/retrieval")
    claim = make_claim(tasks=tasks)
    assert judged(tmp_path, claim, [80.0, 80.1, 79.9], [78.0, 78.1, 77.9]).outcome == "holds"
    for path in (tmp_path / "lra/text").glob("smgk-1-seed-2.json"):
        path.unlink()
    (verdict,) = judge([claim], read_results(tmp_path))
    assert (verdict.outcome, verdict.seeds) == ("not yet enough seeds", (2, 3))


def test_lower_is_better_where_it_is(tmp_path, monkeypatch):
    """The difference has the sign of the better side."""
    claim = make_claim(name="test_perplexity", first="mgk-4", second="softmax-8", tasks=("wikitext2",))
    values = {"mgk-4": {0: 33.0, 1: 33.1, 2: 32.9}, "softmax-8": {0: 34.0, 1: 34.1, 2: 33.9}}
    found = read_results(tmp_path)
    monkeypatch.setattr(type(found), "values", lambda self, recipe, row, metric: values[row])
    (verdict,) = judge([claim], found)
    assert verdict.outcome == "holds"
    assert verdict.found == pytest.approx(1.0)


def test_comparisons_of_one_sentence_are_one_family(tmp_path):
    """A difference with p = 0.03 holds alone, and not as one of two whose other one shows nothing."""
    first, second = [80.0, 80.4, 80.8], [79.0, 79.4, 79.8]
    claim = make_claim()
    alone = judged(tmp_path, claim, first, second)
    assert alone.outcome == "holds"
    other = make_claim(first="mgk-1", second="softmax-1")
    for row in (other.first, other.second):
        for seed, value in enumerate(first):
            write_run(tmp_path, "lra/retrieval", row, seed, accuracy=value / 100)
    both = judge([claim, other], read_results(tmp_path))
    assert [verdict.outcome for verdict in both] == ["not shown", "not shown"]
    # One that has no runs yet counts, too: its runs must not take a verdict back.
    early = judge([claim, make_claim(first="mgk-2", second="softmax-4")], read_results(tmp_path))
    assert [verdict.outcome for verdict in early] == ["not shown", "not yet enough seeds"]


class TestMeasurements:
    """Times and memory come from one run: no seeds, but noise."""

    def outcomes(self, folder, rows):
        write_benchmark(folder, rows)
        found = judge([claim for claim in claims("T7") if claim.first == "smgk-4"], read_results(folder))
        return [verdict.outcome for verdict in found]

    def test_less_of_both(self, tmp_path):
        assert self.outcomes(tmp_path, {"softmax-8": (10.0, 2e9), "smgk-4": (5.0, 1e9)}) == ["holds", "holds"]

    def test_more_memory(self, tmp_path):
        assert self.outcomes(tmp_path, {"softmax-8": (10.0, 2e9), "smgk-4": (5.0, 3e9)}) == ["does not hold", "holds"]

    def test_within_the_noise(self, tmp_path):
        """0.1 % of noise in each, so up to 0.6 % is none."""
        rows = {"softmax-8": (10.0, 2e9), "smgk-4": (9.95, 1e9)}
        assert self.outcomes(tmp_path, rows) == ["holds", "not shown"]

    def test_not_measured(self, tmp_path):
        assert self.outcomes(tmp_path, {"softmax-8": (10.0, 2e9)}) == ["not yet measured"] * 2


@pytest.mark.parametrize(("key", "value"), [("kind", "bigger"), ("average", "sometimes")])
def test_a_claim_that_nobody_understands(monkeypatch, key, value):
    entry = {
        "sentence": "s", "where": "w", "kind": "better", "metrics": ["test_accuracy"], "recipes": ["lra/text"],
        "pairs": [["smgk-1", "softmax-2"]], key: value,
    }  # fmt: skip
    monkeypatch.setattr(module, "_read", lambda: {"T1": [entry]})
    with pytest.raises(ValueError, match=rf"{key} of a claim must be .*got '{value}' in T1"):
        claims("T1")


def test_a_metric_that_nobody_knows():
    with pytest.raises(ValueError, match=r"a metric must be one of test_accuracy, .*got 'speed'"):
        metric("speed")
