"""Against figures that textbooks print, against counting by hand, and against what the definitions say."""

import itertools
import math
import random

import pytest

from mgk.reproduction.survival import kaplan_meier, log_rank, log_rank_of_units, log_rank_trend, median

# Weeks of remission of 42 children with leukaemia (Freireich 1963, printed in Gehan 1965): the example of textbooks.
TREATED = [
    (6, True), (6, True), (6, True), (6, False), (7, True), (9, False), (10, True), (10, False), (11, False),
    (13, True), (16, True), (17, False), (19, False), (20, False), (22, True), (23, True), (25, False), (32, False),
    (32, False), (34, False), (35, False),
]  # fmt: skip
CONTROLS = [
    (week, True) for week in (1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23)
]  # fmt: skip


def test_printed_survival_curve():
    """The product-limit estimate and Greenwood's errors of the treated."""
    found = kaplan_meier(TREATED)
    assert [(point.time, point.at_risk, point.events) for point in found] == [
        (6, 21, 3), (7, 17, 1), (10, 15, 1), (13, 12, 1), (16, 11, 1), (22, 7, 1), (23, 6, 1),
    ]  # fmt: skip
    printed = [0.8571, 0.8067, 0.7529, 0.6902, 0.6275, 0.5378, 0.4482]
    assert [point.survival for point in found] == pytest.approx(printed, abs=5e-5)
    errors = [0.0764, 0.0869, 0.0963, 0.1068, 0.1141, 0.1282, 0.1346]
    assert [point.error for point in found] == pytest.approx(errors, abs=5e-5)
    assert found[0].interval() == pytest.approx((0.6197, 0.9516), abs=5e-5)


def test_printed_medians():
    """With the limits of the log-log interval, as statistics packages print them."""
    treated, controls = median(TREATED), median(CONTROLS)
    assert (treated.time, treated.low, treated.high) == (23, 13, None)
    assert (controls.time, controls.low, controls.high) == (8, 4, 11)


def test_printed_log_rank():
    """9 and 21 events where 19.25 and 10.75 are expected, chi-square 16.79."""
    found = log_rank([(TREATED, CONTROLS)])
    assert found.excess == pytest.approx(9 - 19.25, abs=0.005)
    assert found.variance == pytest.approx(6.257, abs=5e-4)
    assert found.chi_square == pytest.approx(16.793, abs=5e-4)
    # 42 choose 21 ways are too many to count.
    assert not found.is_exact
    assert found.p == pytest.approx(4.17e-5, rel=1e-3)


def test_by_hand():
    """Four runs, one of which is censored: 3 of 4 stay, then 2 of 3, then none of the last."""
    runs = [(1, True), (2, True), (2, False), (5, True)]
    found = kaplan_meier(runs)
    assert [(point.time, point.survival) for point in found] == [(1, 0.75), (2, 0.5), (5, 0.0)]
    assert found[1].error == pytest.approx(0.5 * math.sqrt(1 / (4 * 3) + 1 / (3 * 2)))
    assert median(runs).time == 2
    assert found[-1].interval() == (0.0, 0.0)


@pytest.mark.parametrize("count", range(2, 41, 2))
def test_the_median_of_an_even_number_is_where_half_have_left(count):
    """The product of 23/24, 22/23, ... 12/13 is a little more than a half in floating point."""
    assert median([(step, True) for step in range(1, count + 1)]).time == count / 2


@pytest.mark.parametrize("count", [3, 5, 8])
def test_intervals_of_a_median_cover_it_or_are_not_given(count):
    """Of three runs one in eight times all are later than the true median, where the interval would begin."""
    draw = random.Random(count)
    true = 3000 * math.log(2)
    found = [median([(draw.expovariate(1 / 3000), True) for _ in range(count)]) for _ in range(1000)]
    if count < 5:
        assert {(each.low, each.high) for each in found} == {(None, None)}
    else:
        inside = [each.low <= true and (each.high is None or true <= each.high) for each in found]
        assert sum(inside) / len(inside) > 0.93


def test_the_least_p_that_so_many_runs_can_have():
    """Where both groups are equally large, each way of sharing out has a mirror image as far from 0."""
    early, late = [(1, True), (2, True), (3, True)], [(4, True), (5, True), (6, True)]
    assert log_rank([(early, late)]).p == log_rank([(early, late)]).least == pytest.approx(2 / 20)
    assert log_rank([(early, late)] * 2).least == pytest.approx(2 / 400)
    # Otherwise it is a limit, since the other end of the distribution may be as far away.
    assert log_rank([(early, late[:2])]).p >= log_rank([(early, late[:2])]).least == pytest.approx(1 / 10)
    assert log_rank([(TREATED, CONTROLS)]).least == 0
    units = [[{"a": run} for run in group] for group in (early, late)]
    assert log_rank_of_units(*units).least == pytest.approx(2 / 20)


def test_runs_that_never_leave():
    stayed = [(5000, False)] * 5
    assert kaplan_meier(stayed) == []
    assert median(stayed).time is None
    found = log_rank([(stayed, stayed)])
    assert (found.p, found.chi_square) == (1.0, 0.0)


def naive_p(strata):
    """Every way of sharing out the runs, with the statistic worked out anew for each."""

    def excess(first, second):
        total = 0.0
        for time in sorted({time for time, happened in (*first, *second) if happened}):
            own, all_of_them = (sum(each >= time for each, _ in group) for group in (first, (*first, *second)))
            events = sum(each == time and happened for each, happened in (*first, *second))
            total += sum(each == time and happened for each, happened in first) - events * own / all_of_them
        return total

    ways = []
    for first, second in strata:
        runs = [*first, *second]
        chosen = itertools.combinations(range(len(runs)), len(first))
        ways.append(
            [
                excess([runs[i] for i in own], [runs[i] for i in range(len(runs)) if i not in own])
                for own in map(set, chosen)
            ]
        )
    observed = abs(sum(excess(first, second) for first, second in strata))
    sums = [abs(sum(each)) for each in itertools.product(*ways)]
    return sum(each >= observed - 1e-7 for each in sums) / len(sums)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_p_counts_all_ways(count):
    draw = random.Random(count)
    for _ in range(5):
        strata = [
            tuple(
                [(draw.randint(1, 6), draw.random() < 0.8) for _ in range(size)]
                for size in (draw.randint(2, 3), draw.randint(2, 4))
            )
            for _ in range(count)
        ]
        found = log_rank(strata)
        assert found.is_exact
        assert found.p == pytest.approx(naive_p(strata) if found.variance else 1.0, abs=1e-12)


def test_units_are_shared_out_whole():
    """Two seeds against three, each with a run in two strata, in every one of the ten ways."""
    draw = random.Random(4)

    def excess(first, second):
        return log_rank([([unit[s] for unit in first], [unit[s] for unit in second]) for s in "ab"]).excess

    for _ in range(10):
        units = [{s: (draw.randint(1, 6), draw.random() < 0.8) for s in "ab"} for _ in range(5)]
        ways = [
            abs(excess([units[i] for i in own], [units[i] for i in range(5) if i not in own]))
            for own in itertools.combinations(range(5), 2)
        ]
        found = log_rank_of_units(units[:2], units[2:])
        assert found.excess == pytest.approx(excess(units[:2], units[2:]))
        assert found.is_exact
        assert found.p == pytest.approx(sum(way >= abs(found.excess) - 1e-7 for way in ways) / 10)
        # With one stratum a unit is a run.
        alone = [{"a": unit["a"]} for unit in units]
        runs = [unit["a"] for unit in units]
        assert log_rank_of_units(alone[:2], alone[2:]) == log_rank([(runs[:2], runs[2:])])


def test_units_may_lack_runs():
    """A stratum without runs of both groups does not count, and a unit without a run somewhere is no obstacle."""
    first = [{"a": (1, True), "b": (1, True)}, {"a": (2, True)}]
    second = [{"a": (3, True)}, {"a": (4, False), "c": (1, True)}]
    found = log_rank_of_units(first, second)
    assert found.excess == log_rank([([(1, True), (2, True)], [(3, True), (4, False)])]).excess
    with pytest.raises(ValueError, match="at least one stratum, got none"):
        log_rank_of_units([{"b": (1, True)}], [{"c": (1, True)}])


def test_units_keep_the_level_where_runs_of_a_seed_are_alike():
    """Runs of a seed that are copies of each other: counted one by one they would be taken for evidence."""
    draw = random.Random(0)

    def units():
        steps = [draw.expovariate(1 / 3000) for _ in range(4)]
        return [dict.fromkeys("abc", (min(step, 5000.0), step < 5000)) for step in steps]

    trials = 300
    pairs = [(units(), units()) for _ in range(trials)]
    hits = sum(log_rank_of_units(*pair).p < 0.05 for pair in pairs)
    eager = sum(
        log_rank([([u[s] for u in first], [u[s] for u in second]) for s in "abc"]).p < 0.05 for first, second in pairs
    )
    assert hits / trials < 0.07
    assert eager / trials > 0.15


def test_complete_separation():
    """Of five runs against five one way in 252 is as extreme on each side; of three such strata one in 252 cubed."""
    early, late = [(step, True) for step in range(1, 6)], [(step, step < 9) for step in range(6, 11)]
    assert log_rank([(early, late)]).p == pytest.approx(2 / 252)
    assert log_rank([(late, early)]).p == pytest.approx(2 / 252)
    assert log_rank([(early, late)]).excess > 0 > log_rank([(late, early)]).excess
    assert log_rank([(early, late)] * 3).p == pytest.approx(2 / 252**3)


def test_level_is_kept_where_nothing_differs():
    """Three runs against three from one distribution, censored at the same time, over two strata."""
    draw = random.Random(0)

    def runs():
        steps = [draw.expovariate(1 / 3000) for _ in range(3)]
        return [(min(step, 5000.0), step < 5000) for step in steps]

    trials = 600
    hits = sum(log_rank([(runs(), runs()), (runs(), runs())]).p < 0.05 for _ in range(trials))
    # A test that counts ways cannot exceed its level; with so few runs it stays below.
    assert 0.005 < hits / trials < 0.06


def test_bad_input():
    with pytest.raises(ValueError, match="at least one run, got none"):
        kaplan_meier([])
    with pytest.raises(ValueError, match=r"a finite time above 0, got \[0\]"):
        kaplan_meier([(0, True)])
    with pytest.raises(ValueError, match="at least one stratum, got none"):
        log_rank([])


class TestTrend:
    def test_of_two_groups_it_is_the_log_rank_test(self):
        first, second = [(3, True), (4, True), (5, True), (9, False)], [(1, True), (2, True), (6, True), (2.5, True)]
        trend, plain = log_rank_trend([[first, second]]), log_rank([(second, first)])
        assert trend.excess == pytest.approx(plain.excess)
        assert trend.z > 0
        assert plain.is_exact
        # Drawn ways against all of them.
        assert trend.p == pytest.approx(plain.p, abs=0.01)

    def test_an_order_by_hand(self):
        """Three groups of one run each, the last of which is the fastest."""
        found = log_rank_trend([[[(3, True)], [(2, True)], [(1, True)]]])
        # Scores: 1 less the hazards 1/3, 1/3 + 1/2 and 1/3 + 1/2 + 1; places 2, 1 and 0.
        assert found.excess == pytest.approx(2 * (2 / 3) + 1 / 6)
        # 1 of 6 orders is so far on this side, and its mirror image as far on the other.
        assert found.p == pytest.approx(2 / 6, abs=0.02)

    def test_strata_are_not_mixed(self):
        """What is fast in one stratum for another reason is no trend."""
        early, late = [(1, True), (2, True)], [(10, True), (11, True)]
        both = log_rank_trend([[early, early], [late, late]])
        assert both.excess == pytest.approx(0)
        assert both.p > 0.5
        assert log_rank_trend([[late, early]] * 3).p < 0.02

    def test_an_empty_group_keeps_its_place(self):
        runs = [[(3, True)], [(2, True)], [(1, True)]]
        wide = log_rank_trend([[runs[0], [], runs[1], [], runs[2]]])
        assert wide.excess == pytest.approx(2 * log_rank_trend([runs]).excess)

    def test_what_cannot_be_tested(self):
        assert log_rank_trend([[[(5, False)], [(5, False)]]]).p == 1.0
        with pytest.raises(ValueError, match="needs runs in every stratum, got none"):
            log_rank_trend([[[], []]])
