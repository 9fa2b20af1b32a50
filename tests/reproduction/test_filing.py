"""A result belongs under the recipe that it agrees with today, whatever it was called when it ran."""

import json
from pathlib import Path

import pytest
from reproduction_cases import write_analysis, write_curve, write_evaluation, write_run

from mgk import recipes
from mgk.reproduction.collection import collect, write_result
from mgk.reproduction.filing import file_result, folder_of
from mgk.reproduction.metrics import metric
from mgk.reproduction.results import read_results
from mgk.training import result
from mgk.training.agreement import record_of

ROOT = Path(__file__).parent.parent.parent
ACCURACY = metric("test_accuracy")
VARIANT = "lra/listops-no-activation-dropout"
KEPT = sorted((ROOT / "results" / VARIANT).glob("*.json"))


def content_of(recipe, row="softmax-2", seed=0, changes=(), **facts):
    config = recipes.load(recipe).config(row, list(changes), seed)
    return {"recipe": recipe, "row": row, "seed": seed, "metrics": {}, **record_of(config), **facts}


def make_old(path):
    """Rewrite a result as one from before results held their models, when lra/listops had another pooling."""
    content = json.loads(path.read_text())
    del content["model"], content["config"]["model"]["pooling"]
    path.write_text(json.dumps(content))


def as_it_ran(path):
    """A result as its run wrote it, before results held their models."""
    content = json.loads(path.read_text())
    content["recipe"] = content["config"]["name"] = content.pop("ran_as")
    del content["model"], content["packed"]
    return content


def test_the_runs_of_before_are_a_variant_and_never_the_recipe_of_today(tmp_path):
    """The 55 runs of ListOps without dropout after the activation: as they are kept, and as they ran."""
    assert len(KEPT) == 55
    for path in KEPT:
        kept = json.loads(path.read_text())
        assert kept["model"]["activation_dropout"] == 0.0
        assert kept["packed"] is True
        assert file_result(kept).recipe == kept["recipe"] == VARIANT
        ran = as_it_ran(path)
        assert ran["format"] == 1
        filed = file_result(ran)
        assert filed.recipe == VARIANT
        assert filed.differences == {
            "model.activation_dropout": (0.0, 0.1), "model.pooling": ("mean", "mean-over-length"),
        }  # fmt: skip
        result.write(tmp_path / "lra/listops" / path.name, ran)
    for folder in (ROOT / "results", tmp_path):
        found = read_results(folder)
        assert len([key for key in found.runs if key[0] == VARIANT]) == 55
        assert found.trained(VARIANT, "smgk-4") == {0, 1, 2, 3, 4}
        if folder is tmp_path:
            assert found.rows("lra/listops") == []
            assert len(found.notes) == 55
            assert all(
                f"counts as {VARIANT}: it differs from lra/listops in model.activ" in each for each in found.notes
            )


def test_a_run_of_today_is_its_own_recipe():
    assert file_result(content_of("lra/listops")).recipe == "lra/listops"
    assert file_result(content_of(VARIANT)).recipe == VARIANT
    # Also a row that is not in the table.
    assert file_result(content_of("lra/listops", "softmax-3")).recipe == "lra/listops"


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        (["model.activation_dropout=0.0"], "lra/listops"),
        (["data.pack=true"], "lra/listops"),
        (["data.pack=false", "data.multiple_of=64"], "lra/listops"),
        (["data.pad_to=2048"], "lra/listops"),
        (["training.log_every=7"], "lra/listops"),
        (["data.by_length=true"], None),
        (["training.steps=4000"], None),
    ],
)
def test_what_was_changed_decides(changes, recipe):
    """A change of the model is another row of the same recipe; one of the layout is none."""
    config = recipes.load("lra/listops").config("softmax-2", changes)
    content = {"recipe": "lra/listops", "row": config.row, "seed": 0, **record_of(config)}
    assert file_result(content).recipe == recipe


def test_a_precision_of_its_own_is_a_recipe_of_its_own():
    facts = {"precision": "float32", "packed": False, "device": "NVIDIA H200"}
    single = content_of("lra/listops", "softmax-8", changes=["training.precision=fp32"], **facts)
    filed = file_result(single)
    assert filed.recipe == "lra/listops-fp32"
    assert filed.differences == {"training.precision": ("fp32", "auto")}
    half = content_of("lra/listops", "softmax-8", precision="bfloat16", packed=False, device="NVIDIA H200")
    assert file_result(half).recipe == "lra/listops"
    # Packed is what the bridge between the two must not be.
    bridge = content_of("lra/listops-unpacked", "softmax-8", precision="bfloat16", packed=False, device="NVIDIA H200")
    assert file_result(bridge).recipe == "lra/listops-unpacked"
    assert file_result({**bridge, "packed": True}).recipe == "lra/listops"


def test_what_lies_beside_a_run_goes_with_it(tmp_path):
    """Curves, evaluation and analysis are read under the recipe that their run belongs to."""
    row = ("lra/listops", "softmax-2", 0)
    make_old(write_run(tmp_path, *row, accuracy=0.3))
    write_curve(tmp_path, *row)
    write_analysis(tmp_path, *row)
    make_old(write_evaluation(tmp_path, *row, stride=None, accuracy=0.29))
    found = read_results(tmp_path)
    assert found.values("lra/listops", "softmax-2", ACCURACY) == {}
    assert found.curves("lra/listops", "softmax-2") == {}
    assert found.values(VARIANT, "softmax-2", ACCURACY) == {0: 30.0}
    assert list(found.curves(VARIANT, "softmax-2")) == [0]
    assert list(found.analysis(VARIANT, "softmax-2")) == [0]
    assert found.picture(VARIANT, "softmax-2", "keys.png") is not None
    assert list(found.evaluations) == [((VARIANT, "softmax-2", 0), "test")]
    # A run of today under that name takes its place, and its curves are its own.
    collect(tmp_path, tmp_path / "kept")
    write_run(tmp_path / "kept", *row, accuracy=0.37)
    write_curve(tmp_path / "kept", *row)
    found = read_results(tmp_path / "kept")
    assert found.values("lra/listops", "softmax-2", ACCURACY) == {0: 37.0}
    assert found.values(VARIANT, "softmax-2", ACCURACY) == {0: 30.0}
    assert len(found.trainings) == 2
    assert list(found.analysis(VARIANT, "softmax-2")) == [0]
    assert found.notes == ()


def test_collecting_overwrites_nothing_of_another_configuration(tmp_path):
    write_run(tmp_path / "results", "lra/listops", "softmax-2", 0, accuracy=0.37)
    odd = content_of("lra/listops", changes=["training.steps=4000"])
    assert folder_of(odd) == "other/lra/listops"
    runs = tmp_path / "runs" / "somewhere"
    result.write(runs / "result.json", odd)
    write_curve(tmp_path, "lra/listops", "softmax-2", 0).rename(runs / "metrics.jsonl")
    write_analysis(tmp_path, "lra/listops", "softmax-2", 0).parent.rename(runs / "analysis")
    collect(tmp_path / "runs", tmp_path / "results")
    assert write_result(tmp_path / "results", odd).parent == tmp_path / "results" / "other" / "lra" / "listops"
    found = read_results(tmp_path / "results")
    assert found.values("lra/listops", "softmax-2", ACCURACY) == {0: 37.0}
    assert found.trainings == {}
    assert found.analyses == {}
    (note,) = found.notes
    assert note.startswith("other/lra/listops/softmax-2-seed-0.json is of another configuration and counts nowhere")


def test_two_results_of_one_run(tmp_path):
    """The one that names its recipe counts; the other is named."""
    write_run(tmp_path, VARIANT, "softmax-2", 0, accuracy=0.3)
    make_old(write_run(tmp_path, "lra/listops", "softmax-2", 0, accuracy=0.2))
    found = read_results(tmp_path)
    assert found.values(VARIANT, "softmax-2", ACCURACY) == {0: 30.0}
    assert "lra/listops/softmax-2-seed-0.json is set aside: there is another result of" in found.notes[-1]


def test_a_recipe_that_is_not_ours_is_named(tmp_path):
    path = write_run(tmp_path, "lra/listops", "softmax-2", 0, accuracy=0.3)
    content = {**json.loads(path.read_text()), "recipe": "mine"}
    result.write(tmp_path / "mine" / path.name, content)
    path.unlink()
    found = read_results(tmp_path)
    assert found.runs == {}
    assert found.notes == ("mine/softmax-2-seed-0.json is set aside: its recipe, mine, is none of the library's",)


def test_a_curve_without_its_run_is_named(tmp_path):
    write_curve(tmp_path, "lra/listops", "softmax-2", 0)
    found = read_results(tmp_path)
    assert list(found.curves("lra/listops", "softmax-2")) == [0]
    assert found.notes == ("curves/lra-listops-softmax-2-seed-0 is of a run whose own result is not here",)


def test_a_row_that_a_recipe_has_from_another_is_kept_there(tmp_path):
    """`lra/listops-shifts` only adds rows to `lra/listops`: one of both is one run, whoever started it."""
    assert file_result(content_of("lra/listops-shifts", "smgk-4")).recipe == "lra/listops"
    assert file_result(content_of("lra/listops", "smgk-4")).recipe == "lra/listops"
    added = content_of("lra/listops-shifts", "smgk-4+num_components=1")
    assert file_result(added).recipe == "lra/listops-shifts"
    # Started as a variant of the recipe itself, it is the row of the other one all the same.
    assert folder_of(content_of("lra/listops", "smgk-4")) == "lra/listops"
    path = write_result(tmp_path, content_of("lra/listops-shifts", "smgk-4", metrics={"test": {"accuracy": 0.37}}))
    assert path == tmp_path / "lra" / "listops" / "smgk-4-seed-0.json"
    results = read_results(tmp_path)
    assert results.notes == ()
    for recipe in ("lra/listops", "lra/listops-shifts"):
        assert results.values(recipe, "smgk-4", ACCURACY) == {0: pytest.approx(37.0)}
        assert results.trained(recipe, "smgk-4") == {0}
    assert results.rows("lra/listops-shifts") == []


def test_curves_and_evaluations_are_found_under_both_recipes(tmp_path):
    write_run(tmp_path, "multi30k", "mgk-2", 1)
    write_evaluation(tmp_path, "multi30k", "mgk-2", 1, stride=None, tokenised_lowercase_bleu=40.0)
    write_curve(tmp_path, "multi30k", "mgk-2", 1)
    results = read_results(tmp_path)
    for recipe in ("multi30k", "multi30k-variances"):
        assert list(results.values(recipe, "mgk-2", metric("test_bleu")).values()) == [40.0]
        assert list(results.curves(recipe, "mgk-2")) == [1]
    assert results.curves("multi30k-variances", "mgk-2+learn_variance") == {}
