"""The page about what differs from the published code."""

from pathlib import Path

import pytest
from reproduction_cases import write_curve, write_run

import mgk.recipes
from mgk.reproduction.fidelity import fidelity_page, variants
from mgk.reproduction.page import markdown
from mgk.reproduction.pages import build
from mgk.reproduction.published_code import NOT_RUN, fidelity
from mgk.reproduction.results import read_results

ROOT = Path(__file__).parent.parent.parent


def lines_of(page, start):
    (grid,) = [grid for grid in page.grids if grid.title.startswith(start)]
    return {(line[0], line[1]): line[2:] for line in grid.lines}


def test_every_variant_is_a_recipe_and_named_by_the_difference_that_it_shows():
    assert set(variants()) <= set(mgk.recipes.names())
    named = [variant for each in fidelity()["differences"] for variant in each["variants"]]
    assert sorted(named) == sorted(variants())
    for each in fidelity()["differences"]:
        assert each.keys() == {"point", "ours", "published", "where", "why", "variants"}


def test_without_results_everything_is_still_to_be_run(tmp_path):
    page = fidelity_page(read_results(tmp_path / "none"), 5)
    assert page.state == "nothing yet"
    for start in ("lra/listops and", "lra/text and", "lra/listops-learnable"):
        assert {line[0] for line in lines_of(page, start).values()} == {NOT_RUN}
    commands = [command for each in page.missing for command in each.commands]
    for name in ("lra/listops", "lra/text", "lra/listops-learnable", *variants()):
        assert any(command.startswith(f"mgk sweep {name} --rows ") for command in commands)


def test_what_a_difference_does_to_the_number_and_to_the_escape(tmp_path):
    for seed, (plain, changed) in enumerate([(0.36, 0.20), (0.38, 0.30)]):
        write_run(tmp_path, "lra/listops", "softmax-8", seed, accuracy=plain)
        write_run(tmp_path, "lra/listops-dropout-0", "softmax-8", seed, accuracy=changed)
        # An accuracy that rises past 30 %, and one that does not.
        write_curve(tmp_path, "lra/listops-dropout-0", "softmax-8", seed, best=0.37 if seed else 0.2)
    # Nobody knows whether a run without a result has ended.
    write_curve(tmp_path, "lra/listops-dropout-0", "softmax-8", 2, best=0.37)
    found = lines_of(fidelity_page(read_results(tmp_path), 5), "lra/listops and")
    assert found["lra/listops", "softmax-8"] == ("37.00 ± 1.00 (2 seeds)", "", "37.03", "no curves", "")
    accuracy, effect, paper, left, steps = found["lra/listops-dropout-0", "softmax-8"]
    assert accuracy == "25.00 ± 5.00 (2 seeds)"
    # sqrt(1 + 25) is the error of the difference.
    assert effect == "-12.00 ± 5.10"
    assert (paper, left) == ("37.03", "1 of 2")
    assert steps.replace(",", "").isdecimal()
    not_run = next(row for name, row in found if name == "lra/listops-dropout-0" and "," in row)
    assert "softmax-8" not in not_run.split(", ")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What is in the repository."""
    results = read_results(ROOT / "results")
    return results, tmp_path_factory.mktemp("pages")


def test_the_runs_without_dropout_after_the_activation_are_shown_there_and_nowhere_else(kept):
    results, folder = kept
    found = lines_of(build("fidelity", results, folder), "lra/listops and")
    name = "lra/listops-no-activation-dropout"
    assert len([row for recipe, row in found if recipe == name]) == 11
    assert found[name, "softmax-8"][0] == "27.26 ± 2.78 (5 seeds)"
    assert found[name, "softmax-8"][3:] == ("3 of 5", "3,800, 4,400, 4,800")
    assert found[name, "smgk-4"][3] == "5 of 5"
    table = build("T1", results, folder)
    assert "27.26" not in markdown(table)
    ours = {key for key in results.runs if key[0] == "lra/listops"}
    assert all(results.runs[key]["model"]["activation_dropout"] == 0.1 for key in ours)
