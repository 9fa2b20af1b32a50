"""Plans: their order, what is wrong with one, and the one that comes with the results."""

from pathlib import Path

import pytest
import yaml
from sweep_cases import write_recipe

import mgk.recipes
from mgk.commands.sweep.plan import plan_cells, read_plan
from mgk.reproduction.recipe import home

PLAN = Path(__file__).parents[2] / "results" / "plans" / "long-range-arena.yaml"


def write_plan(folder, cells, **others):
    write_recipe(folder)
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"cells": cells, **others}))
    return path


def test_the_order_of_the_file(tmp_path):
    """Seed by seed in an entry. A cell that is named twice is wanted where it stands first."""
    path = write_plan(
        tmp_path,
        [
            {"recipe": "tiny.yaml", "rows": ["smgk-1"], "seeds": "0-1"},
            {"recipe": "demo", "rows": ["mgk-4"], "seeds": [3], "changes": ["training.steps=300"]},
            {"recipe": "tiny.yaml", "seeds": [2, 0]},
        ],
    )
    cells = plan_cells(path, tmp_path / "runs")
    assert [str(cell.folder.relative_to(tmp_path / "runs")) for cell in cells] == [
        "tiny/smgk-1/seed-0", "tiny/smgk-1/seed-1", "demo/mgk-4/seed-3", "tiny/softmax-2/seed-2",
        "tiny/smgk-1/seed-2", "tiny/softmax-2/seed-0",
    ]  # fmt: skip
    assert cells[2].config.training.steps == 300


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], r"cells must be a list of entries, got \[\] in .*plan\.yaml"),
        ("demo", "cells must be a list of entries, got 'demo'"),
        (["demo"], r"entry 1 of .*plan\.yaml must have recipe, rows, seeds and changes, got 'demo'"),
        ([{"rows": ["smgk-1"]}], "recipe must be the name of one, got None in entry 1"),
        ([{"recipe": "demo"}, {"recipe": "demoo"}], r"entry 2 of .*: a recipe must be one of .*did you mean 'demo'"),
        ([{"recipe": "demo", "row": ["smgk-1"]}], r"got 'row' \(did you mean 'rows'\?\) in entry 1"),
        ([{"recipe": "demo", "rows": "smgk-1"}], "rows must be a list of text, got 'smgk-1' in entry 1"),
        ([{"recipe": "demo", "rows": ["smkg-1"]}], r"entry 1 of .*did you mean 'smgk'"),
        ([{"recipe": "demo", "rows": []}], "entry 1 of .*a sweep must have rows and seeds, got none of demo"),
        ([{"recipe": "demo", "rows": ["mgk-1", "mgk-1"]}], "entry 1 .*different from each other, got mgk-1, seed 0"),
        ([{"recipe": "demo", "seeds": "1-"}], "seeds must look like 0-4 or 0,3,7, got '1-' in entry 1"),
        ([{"recipe": "demo", "seeds": [-1]}], r"seeds must be a list of numbers, .* got \[-1\] in entry 1"),
        ([{"recipe": "demo", "seeds": [True]}], r"seeds must be a list of numbers, .* got \[True\] in entry 1"),
        ([{"recipe": "demo", "changes": {"a": 1}}], r"changes must be a list of text, got \{'a': 1\} in entry 1"),
        ([{"recipe": "demo", "changes": ["optimizer.lrr=1"]}], r"entry 1 .*optimizer\.lrr is not a key"),
        (
            [{"recipe": "demo"}, {"recipe": "demo", "rows": ["mgk-4"], "changes": ["optimizer.lr=1"]}],
            r"entry 2 .*another demo mgk-4, seed 0 than an entry before it, got one that differs in optimizer\.lr",
        ),
    ],
)  # fmt: skip
def test_what_a_plan_refuses(tmp_path, cells, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plan_cells(write_plan(tmp_path, cells), tmp_path / "runs")


def test_other_keys_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a key must be one of title, cells, got 'cell' \(did you mean 'cells'\?\)"):
        read_plan(write_plan(tmp_path, [{"recipe": "demo"}], cell=[]))


@pytest.fixture(scope="module")
def wanted():
    return plan_cells(PLAN, Path("runs"))


def test_every_cell_of_the_committed_plan_can_be_run(wanted):
    """Each is a row that its recipe has, and what is not as the recipe says is in the name of the row."""
    assert len(wanted) == 11 * 3 + 24 * 5 + 17 * 5 + 18 * 3 + 3 + 4 * 9 * 2 + 6 + 3 + 6 + 12
    for cell in wanted:
        recipe = mgk.recipes.load(cell.config.name)
        assert cell.config.row.removesuffix("+normalization=length") in recipe.rows
        assert cell.config == recipe.config(cell.config.row, seed=cell.config.seed)


def test_the_committed_plan_has_the_most_wanted_first(wanted):
    recipes = list(dict.fromkeys(cell.config.name for cell in wanted))
    # Whether the paper's ListOps had dropout is decided first.
    assert recipes == [
        "lra/listops-dropout-0", "lra/listops", "lra/text", "peerread", "lra/listops-linear", "lra/text-linear",
    ]  # fmt: skip
    text = [cell.config.seed for cell in wanted if cell.config.name == "lra/text"]
    assert set(text[: 17 * 3]) == {0, 1, 2}
    assert set(text[17 * 3 :]) == {3, 4}
    # Those of the paper's Table 1 before all others.
    first = list(dict.fromkeys(cell.config.row for cell in wanted))[:11]
    published = mgk.recipes.paper()["tables"]["T1"]["recipes"]["lra/listops"]
    assert sorted(first) == sorted(row for row in published if not row.endswith("-6"))


def test_every_cell_of_the_plan_of_fidelity_can_be_run():
    """It has the recipe of today and every variant that the page `fidelity` compares it with, but for what has run."""
    wanted = plan_cells(PLAN.with_name("long-range-arena-fidelity.yaml"), Path("runs"))
    for cell in wanted:
        recipe = mgk.recipes.load(cell.config.name)
        assert cell.config.row in recipe.rows
        assert cell.config == recipe.config(cell.config.row, seed=cell.config.seed)
    variants = {name for name in mgk.recipes.names() if name.startswith("lra/listops-") and "linear" not in name}
    assert {cell.config.name for cell in wanted if "listops-" in cell.config.name} == variants - {
        "lra/listops-no-activation-dropout",
        "lra/listops-shifts",
    }


def test_the_plan_of_smollm2(tmp_path):
    """The same learning rates for every row, then two seeds of every row, with and without distillation."""
    cells = plan_cells(PLAN.with_name("smollm2.yaml"), tmp_path)
    rows = mgk.recipes.load("smollm2").rows
    assert len(rows) == 5
    rates = {}
    for cell in cells:
        if cell.config.seed == 0 and cell.config.conversion.distillation == 0:
            rates.setdefault(cell.config.row, set()).add(cell.config.optimizer.lr)
    assert rates == {row: {1e-4, 3e-4, 1e-3} for row in rows}
    for name in ("smollm2", "smollm2-distilled"):
        seeds = {(cell.config.row, cell.config.seed) for cell in cells if cell.config.name == name}
        assert seeds >= {(row, seed) for row in rows for seed in (0, 1)}
    assert len({cell.config.training.steps for cell in cells}) == 1


def test_the_plan_of_language_models():
    """Three seeds of everything that claims compare, one of what is a check, then the other two."""
    cells = plan_cells(PLAN.with_name("language-models.yaml"), Path("runs"))
    for cell in cells:
        recipe = mgk.recipes.load(cell.config.name)
        assert cell.config.row in recipe.rows
        assert cell.config == recipe.config(cell.config.row, seed=cell.config.seed)
    seeds = {}
    for cell in cells:
        seeds.setdefault(cell.row, []).append(cell.config.seed)
    for name in ("enwik8", "multi30k", "enwik8-equal-cache"):
        own = {row for row in mgk.recipes.load(name).rows if home(name, row) == name}
        assert {row for recipe, row in seeds if recipe == name} == own
        assert all(own == [0, 1, 2, 3, 4] for (recipe, _), own in seeds.items() if recipe == name)
    assert {row: own for (name, row), own in seeds.items() if name == "wikitext2"} == {
        row: [0] for row in mgk.recipes.load("wikitext2").rows
    }
    assert sum(name == "tatoeba" for name, _ in seeds) == 5
    # Rows that two recipes share are trained once.
    assert all(home(recipe, row) == recipe for recipe, row in seeds)
    for name in ("enwik8-equal-cache", "enwik8-words-linear", "enwik8-words-multi-query", "multi30k-variances"):
        assert {(home(name, row), row) for row in mgk.recipes.load(name).rows} <= seeds.keys()
    wanted = {row for row in mgk.recipes.load("enwik8-words").rows if row != "softmax-4+qk_norm"}
    assert {row for recipe, row in seeds if recipe == "enwik8-words"} == wanted
    order = list(dict.fromkeys((cell.config.name, cell.config.seed > 2) for cell in cells))
    assert order == [
        ("enwik8", False), ("enwik8-words", False), ("enwik8-words-linear", False), ("enwik8-words-multi-query", False),
        ("multi30k", False), ("multi30k-variances", False), ("enwik8-equal-cache", False), ("wikitext2", False),
        ("tatoeba", False), ("enwik8", True), ("enwik8-equal-cache", True), ("multi30k", True), ("enwik8-words", True),
    ]  # fmt: skip
