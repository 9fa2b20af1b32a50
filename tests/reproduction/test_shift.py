"""The page about the shift: what it reads, what it tests, and what it says while there is little to read."""

import json
import math
from pathlib import Path

import matplotlib.image
import pytest
from reproduction_cases import load, write_curve, write_escape, write_run, write_shift

from mgk.commands.sweep.plan import plan_cells
from mgk.reproduction import pages, shift
from mgk.reproduction.page import markdown
from mgk.reproduction.recipe import home
from mgk.reproduction.results import read_results
from mgk.reproduction.shift_measurements import GRADIENTS, derived_spread, read_measurement
from mgk.reproduction.survival import log_rank

ROOT = Path(__file__).parent.parent.parent
# Made up: the larger the shifts, the earlier; one is enough; the dot product gains nothing; nor do priors.
STEPS = {
    "softmax-{}": 3000, "gaussian-{}": 2900, "smgk-{}+shift_init_std=0": 2800, "smgk-{}+shift_init_std=0.1": 2400,
    "smgk-{}+shift_init_std=0.3": 1900, "smgk-{}": 1000, "smgk-{}+shift_init_std=2": 600,
    "smgk-{}+num_components=1": 950, "softmax-{}+query_bias_init_std=1": 3050, "smgk-{}+prior=uniform": 1000,
    "mgk-{}": 3500,
}  # fmt: skip
SEEDS = 3


def write_listops(folder):
    for row, step in STEPS.items():
        for heads in (4, 2):
            # Where a run would be kept that was started under the recipe of the shifts, or under lra/listops itself.
            name = row.format(heads)
            recipe = "lra/listops" if name in load("lra/listops").rows else "lra/listops-shifts"
            for seed in range(SEEDS):
                write_run(folder, recipe, name, seed, accuracy=0.37)
                write_escape(folder, recipe, name, seed, step + 200 * seed + 50 * heads)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shift")
    write_listops(folder / "results")
    write_shift(folder / "results", escapes={row.format(1): step // 10 for row, step in STEPS.items()})
    bits = {"smgk-4": 1.45, "smgk-4+shift_init_std=0": 1.48, "smgk-4+shift_init_std=0.3": 1.46}
    for row, value in bits.items():
        for seed in range(SEEDS):
            recipe = "enwik8" if row == "smgk-4" else "enwik8-shifts"
            write_run(folder / "results", recipe, row, seed, bits_per_token=value + 0.001 * seed)
            write_curve(folder / "results", recipe, row, seed, steps=2500)
    results = read_results(folder / "results")
    return results, pages.build("shift", results, folder / "pages", SEEDS)


def grid_of(page, title):
    (grid,) = [grid for grid in page.grids if grid.title == title]
    return grid.lines


def test_rows_of_both_recipes_stand_together(built):
    lines = {line[:2]: line[2:] for line in grid_of(built[1], "ListOps: leaving the plateau")}
    assert lines["lra/listops", "smgk-4"] == ("1", "3", "3", "1,400", "1,200, 1,400, 1,600")
    assert lines["lra/listops-shifts", "smgk-4+shift_init_std=0"][:2] == ("0", "3")
    assert lines["lra/listops", "mgk-2"][1] == "3"
    # Rows that have not been run share a line.
    assert lines["lra/listops-released-shifts", "smgk-4, smgk-2"] == ("", "", "", "", "not run yet")


def test_what_is_said_is_what_was_tested(built):
    results, page = built
    said = next(text for text in page.text if text.startswith("**Verdict on lra/listops**"))
    assert "one shift, the same for all keys, makes the distance leave earlier (p 0.0" in said.split("do not decide")[0]
    assert "two shifts that start at 1 leave earlier than two that start at 0" in said.split("do not decide")[0]
    assert "the same constant, as a bias of the queries, makes the dot product" in said.split("do not decide")[1]
    assert "learned priors leave earlier than uniform ones" in said.split("do not decide")[1]
    assert (
        "Over shifts that start at 0, 0.1, 0.3, 1, 2, the larger the shifts start, the earlier a run leaves (z +"
        in said
    )
    assert "too few runs" not in said
    # By hand: both heads are strata of one test, its p times the questions that are not less surely decided.
    rows = shift.plateau.escapes(results, "lra/listops-shifts", load("lra/listops-shifts").rows)
    found = log_rank([(rows[f"smgk-{heads}+num_components=1"], rows[f"gaussian-{heads}"]) for heads in (4, 2)])
    (line,) = [each for each in grid_of(page, "ListOps: log-rank tests") if each[1].startswith("one shift, the same")]
    assert line[3] == "6 of 6 against 6 of 6"
    assert float(line[4]) == pytest.approx(found.chi_square, abs=0.005)
    assert found.p <= float(line[5]) <= 7 * found.p + 5e-4


def test_the_proxy_is_called_one(built):
    page = built[1]
    assert any(text.startswith("**The proxy, short lists**") for text in page.text)
    assert "The short lists are a proxy" in " ".join(page.text)
    assert grid_of(page, "A proxy: short lists, of 50 to 100 tokens, on a CPU")[0][1:4] == ("", "4", "4")
    assert any("24.8 %" in note or "25.0 %" in note for note in page.notes)


def test_enwik8_has_early_bits_and_a_verdict(built):
    results, page = built
    lines = {line[0]: line for line in grid_of(page, "enwik8: bits per byte")}
    losses = [
        line["loss"] / math.log(2)
        for lines in results.curves("enwik8", "smgk-4").values()
        for line in lines
        if line["kind"] == "valid" and line["step"] == 500
    ]
    assert lines["smgk-4"][2].startswith(f"{sum(losses) / 3:.3f} ± ")
    assert lines["smgk-4"][-1] == "1.451 ± 0.001 (3 seeds)"
    outcomes = {(verdict.claim.first, verdict.claim.second): verdict.outcome for verdict in page.verdicts}
    assert outcomes["smgk-4", "smgk-4+shift_init_std=0"] == "holds"
    assert outcomes["gaussian-4", "softmax-4"] == "not yet enough seeds"
    said = next(text for text in page.text if text.startswith("**enwik8**"))
    assert "Shifts that start at 1 are better than shifts that start at 0: holds." in said


def test_the_figure_and_the_page(built, tmp_path):
    page = built[1]
    assert page.state == "in part"
    assert matplotlib.image.imread(page.pictures[0]).shape[1] > 1200
    text = markdown(page)
    assert "(shift.png)" in text
    assert "**What this page does not show.**" in text
    assert "mgk sweep lra/listops-small-shifts --rows 'smgk-4 smgk-2'" in text
    # Runs that lra/listops has are not asked for under another name.
    assert "mgk sweep enwik8-shifts --rows 'smgk-4+num_components=1 smgk-4+prior=uniform'" in text
    assert "mgk sweep enwik8 --rows 'gaussian-4 softmax-4'" in text


def test_without_results_nothing_is_drawn_or_said(tmp_path):
    page = pages.build("shift", read_results(tmp_path / "results"), tmp_path / "pages", 3)
    assert page.state == "nothing yet"
    assert page.pictures == ()
    assert "**Verdict on lra/listops:** open." in " ".join(page.text)
    assert not any("proxy, short" in text for text in page.text)
    assert [grid.title for grid in page.grids] == ["ListOps: leaving the plateau", "ListOps: log-rank tests"]
    scripts = {f"benchmarks/shift.py {name}, on a CPU" for name in ("gradients", "short-lists")}
    assert scripts <= {each.what for each in page.missing}


def test_a_trend_the_other_way_and_none():
    """The wording follows the sign, and nothing is said where too little is known."""
    later = {shift.sized(size, 4): [(1000 + 300 * place + 10 * seed, True) for seed in range(4)]
             for place, size in enumerate(shift.SIZES)}  # fmt: skip
    assert "the larger the shifts start, the later a run leaves" in shift._verdict("Here", later, (4,))
    same = {row: [(1000 + 10 * seed, True) for seed in range(4)] for row in later}
    assert "no trend is shown" in shift._verdict("Here", same, (4,))
    del later["smgk-4+shift_init_std=2"]
    assert "too few runs for a test for trend" in shift._verdict("Here", later, (4,))


@pytest.mark.parametrize(
    ("row", "variance"),
    [
        ("softmax-4", 1 / 9), ("gaussian-4", 1 / 6), ("smgk-4", 1 / 6 + 1 / 6), ("smgk-4+num_components=1", 1 / 2),
        ("smgk-4+shift_init_std=0", 1 / 6), ("softmax-4+query_bias_init_std=1", 4 / 9),
    ],
)  # fmt: skip
def test_derived_spread(row, variance):
    assert derived_spread(row) == pytest.approx(math.sqrt(variance))
    assert derived_spread("mgk-4") is None


def test_committed_logits_are_those_that_were_derived():
    """Within a tenth: the derivation leaves out the mean of the keys, biases and what shifts do to second order."""
    found = read_measurement(ROOT / "results", GRADIENTS)
    assert len(found.rows) >= 10
    for row in found.rows:
        derived = derived_spread(row)
        if derived is not None:
            assert sum(found.values(row, 1, "logits")) / found.seeds == pytest.approx(derived, rel=0.1), row


def test_a_measurement_of_something_else_is_refused(tmp_path):
    write_shift(tmp_path)
    path = tmp_path / "shift" / "gradients.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "measurement": "something"}))
    with pytest.raises(ValueError, match=r"must be a result of benchmarks/shift.py gradients, got 'something'"):
        read_measurement(tmp_path, GRADIENTS)


def test_the_plan_trains_what_the_page_asks_for_and_nothing_twice(tmp_path):
    cells = plan_cells(ROOT / "results" / "plans" / "shift.yaml", tmp_path / "runs")
    planned = {(cell.config.name, cell.config.row) for cell in cells}
    assert len(cells) == 3 * len(planned)
    assert all(home(recipe, row) == recipe for recipe, row in planned)
    for name in ("lra/listops-shifts", "enwik8-shifts", "multi30k-variances"):
        assert {(home(name, row), row) for row in load(name).rows} <= planned
