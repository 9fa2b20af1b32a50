"""Leaving the plateau: which runs count, what is tested, and what the page says."""

import re

import matplotlib.image
import pytest
from reproduction_cases import load, write_curve, write_escape, write_run

from mgk import recipes
from mgk.reproduction import pages, plateau, survival_curves
from mgk.reproduction.page import markdown
from mgk.reproduction.results import read_results
from mgk.reproduction.survival import log_rank

# Steps at which our first runs on ListOps left, five seeds of each row; None: never within 5,000.
STEPS = {
    "smgk-1": (850, 1150, 1300, 1400, 1800), "smgk-2": (1300, 1400, 1450, 1650, 1800),
    "smgk-4": (950, 950, 1050, 1300, 1500), "softmax-1": (2000, 2800, 3000, 3400, 3400),
    "softmax-2": (2400, 2450, 2500, 3200, 3950), "softmax-4": (2400, 2800, 3850, None, None),
    "softmax-8": (3800, 4400, 4800, None, None), "mgk-1": (3150, 3250, 3500, 4300, 4350),
    "mgk-2": (3400, 4900, None, None, None), "mgk-4": (3300, 3500, 3700, 4100, None),
}  # fmt: skip


def write_rows(folder, recipe, steps=STEPS):
    for row, own in steps.items():
        for seed, step in enumerate(own):
            write_run(folder, recipe, row, seed, accuracy=0.18 if step is None else 0.37, count=2000.0)
            write_escape(folder, recipe, row, seed, step)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plateau")
    write_rows(folder / "results", "lra/listops")
    # Rows of another recipe, a little later each, and some that stay.
    write_rows(folder / "results", "lra/listops-linear", {"linear-2": (4000, None, None), "mlk-1": (None, None, None)})
    results = read_results(folder / "results")
    return results, pages.build("plateau", results, folder / "pages", 5)


def grid_of(page, title):
    (grid,) = [grid for grid in page.grids if grid.title == title]
    return {line[0]: line for line in grid.lines}


def test_rows(built):
    rows = grid_of(built[1], "lra/listops, by row")
    assert rows["smgk-4"] == ("smgk-4", "5", "5", "1,050", "950 or later", "950 to 1,500")
    assert rows["mgk-2"] == ("mgk-2", "5", "2", "", "3,400 or later", "3,400 to 4,900")
    assert list(rows) == [row for row in load("lra/listops").rows if row in STEPS]


def test_questions(built):
    tests = grid_of(built[1], "lra/listops, log-rank tests")
    # Complete separation: 2 of 252 ways, times three pairs.
    assert tests["smgk-1 earlier than softmax-2"][2:] == ("9.70", "0.008", "0.024", "holds")
    assert tests["mgk-4 earlier than softmax-4"][-1] == "not shown"
    whole = tests["**smgk leaves earlier than softmax with twice as many heads, all heads together**"]
    assert whole[1] == "15 of 15 against 11 of 15"
    assert whole[3:] == ("< 0.001", "< 0.001", "holds")
    assert tests["smgk leaves earlier than gaussian with as many heads"][-1] == "too few runs"


def test_one_number_of_all_heads_together(built):
    """By hand: the statistic is the sum over the heads, and p is adjusted for six questions of which this is third."""
    rows = plateau.escapes(built[0], "lra/listops")
    answers = plateau.answer(rows, plateau.questions("lra/listops"))
    (found,) = [each for each in answers if each.question.what == "mgk leaves earlier than softmax with as many heads"]
    alone = [log_rank([(rows[f"mgk-{heads}"], rows[f"softmax-{heads}"])]) for heads in (1, 2, 4)]
    assert found.together.excess == pytest.approx(sum(each.excess for each in alone))
    assert found.together.variance == pytest.approx(sum(each.variance for each in alone))
    assert found.together.excess < 0
    assert found.p == pytest.approx(4 * found.together.p)
    assert found.outcome == "not shown"


def test_the_sentence(built):
    page = built[1]
    (said,) = [text for text in page.text if text.startswith("**lra/listops**")]
    left = sum(step is not None for own in STEPS.values() for step in own)
    assert f"{left} of 50 runs left the plateau." in said
    first = "smgk leaves earlier than softmax with as many heads (p < 0.001)"
    second = "smgk leaves earlier than softmax with twice as many heads (p < 0.001)"
    assert f"The tests show that {first}, and that {second}." in said
    assert re.search(r"do not decide whether mgk leaves earlier than softmax with as many heads \(p 0\.\d+\), or", said)
    assert "There are too few runs to say whether smgk leaves earlier than gaussian with as many heads" in said
    assert "3 of 5 of mgk-2" in said
    assert "of smgk" not in said


def test_what_no_result_could_show_waits_for_runs(tmp_path):
    """Three runs against three have 20 ways, so p is 0.1 at best; over three numbers of heads they are enough."""
    steps = {f"softmax-{heads}": (3000, 3100, 3200) for heads in (1, 2, 4)}
    steps |= {f"mgk-{heads}": (1000, 1100, 1200) for heads in (1, 2, 4)}
    write_rows(tmp_path, "lra/listops", steps)
    page = pages.build("plateau", read_results(tmp_path), tmp_path / "pages", 5)
    tests = grid_of(page, "lra/listops, log-rank tests")
    assert tests["mgk-4 earlier than softmax-4"][-1] == "too few runs"
    assert tests["**mgk leaves earlier than softmax with as many heads, all heads together**"][-1] == "holds"
    one = plateau.answer({"mgk-4": [(1, True)] * 3, "softmax-4": [(2, True)] * 3}, plateau.questions("lra/listops"))
    assert {each.outcome for each in one} == {"too few runs"}


def test_what_is_slower_does_not_hold(tmp_path):
    """All runs of mgk later than those of softmax, at every number of heads."""
    steps = {f"softmax-{heads}": (1000, 1100, 1200) for heads in (1, 2, 4)}
    steps |= {f"mgk-{heads}": (3000, 3100, None) for heads in (1, 2, 4)}
    write_rows(tmp_path, "lra/listops", steps)
    results = read_results(tmp_path)
    rows = plateau.escapes(results, "lra/listops")
    said = plateau.sentence("lra/listops", rows, plateau.answer(rows, plateau.questions("lra/listops")))
    assert "The tests show that mgk leaves later than softmax with as many heads (p 0.00" in said


def test_recipes_are_never_mixed(built):
    results, page = built
    assert plateau.recipes(results) == ["lra/listops", "lra/listops-linear"]
    assert set(grid_of(page, "lra/listops-linear, by row")) == {"linear-2", "mlk-1"}
    assert grid_of(page, "lra/listops-linear, by row")["mlk-1"][1:] == ("3", "0", "", "", "")
    assert "linear-2" not in grid_of(page, "lra/listops, by row")
    # Each recipe has the questions that its table has rows for.
    questions = grid_of(page, "lra/listops-linear, log-rank tests")
    assert all("linear" in name for name in questions)
    assert "mlk leaves earlier than linear with twice as many heads" in " ".join(questions)
    text = markdown(page)
    assert "plateau-lra-listops.png" in text
    assert "plateau-lra-listops-linear.png" in text


def test_every_variant_has_a_section_of_its_own(tmp_path):
    """Whatever recipes of ListOps there are: the same row has other steps in each."""
    known = [name for name in recipes.names() if name.startswith("lra/listops") and name != "lra/listops-shifts"]
    for number, recipe in enumerate(known, start=1):
        write_rows(tmp_path / "results", recipe, {load(recipe).rows[0]: (100 * number, 100 * number + 50)})
    page = pages.build("plateau", read_results(tmp_path / "results"), tmp_path / "pages", 2)
    assert {path.name for path in page.pictures} == {f"plateau-{name.replace('/', '-')}.png" for name in known}
    for number, recipe in enumerate(known, start=1):
        (line,) = grid_of(page, f"{recipe}, by row").values()
        assert line[1:3] == ("2", "2")
        assert line[-1] == f"{100 * number:,} to {100 * number + 50:,}"


def test_a_curve_without_its_run_does_not_count(tmp_path):
    """Nobody knows what it was made with. Nor do short lists have this plateau."""
    write_escape(tmp_path, "lra/listops", "softmax-2", 0, 1000)
    write_run(tmp_path, "demo", "softmax-8", 0, accuracy=0.9)
    write_curve(tmp_path, "demo", "softmax-8", 0)
    results = read_results(tmp_path)
    assert plateau.recipes(results) == []
    page = pages.build("plateau", results, tmp_path / "pages", 5)
    assert (page.grids, page.pictures, page.state) == ((), (), "nothing yet")
    assert page.missing


def test_a_run_is_censored_at_its_last_step(tmp_path):
    write_run(tmp_path, "lra/listops", "softmax-2", 0, accuracy=0.18)
    write_escape(tmp_path, "lra/listops", "softmax-2", 0, None, last=4200)
    assert plateau.escapes(read_results(tmp_path), "lra/listops") == {"softmax-2": [(4200, False)]}


def test_the_picture(built):
    folder = built[1].pictures[0].parent
    image = matplotlib.image.imread(folder / "plateau-lra-listops.png")
    assert image.shape[1] > 1000
    assert (image[..., :3].min(axis=-1) < 0.7).any(axis=1).mean() > 0.3
    assert survival_curves.split_row("softmax-8+qk_norm") == ("softmax+qk_norm", 8)
    assert survival_curves.split_row("smgk-hard-1") == ("smgk-hard", 1)
    titles = [title for title, _ in survival_curves._panels(["softmax-8", "smgk-1", "smgk-hard-1", "softmax-1"])]
    assert titles == ["1 head", "8 heads", "other rows"]


def test_pictures_out_of_date_go(built, tmp_path):
    (tmp_path / "plateau-old-recipe.png").write_bytes(b"of a variant that is no more")
    pages.write(built[1], tmp_path)
    assert not (tmp_path / "plateau-old-recipe.png").exists()
