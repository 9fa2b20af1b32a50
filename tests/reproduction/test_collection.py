"""Finished runs, brought to the results."""

import json

import pytest
from reproduction_cases import write_analysis, write_curve, write_evaluation, write_run

from mgk.reproduction.collection import collect
from mgk.reproduction.metrics import metric
from mgk.reproduction.results import read_results


def make_run(folder, row, seed, *, finished=True):
    """A run folder as training leaves it."""
    place = folder / "runs" / "wikitext103/small" / row / f"seed-{seed}"
    place.mkdir(parents=True)
    scratch = folder / "scratch"
    recipe = "wikitext103/small"
    if finished:
        write_run(scratch, recipe, row, seed, perplexity=30.0).rename(place / "result.json")
    write_evaluation(scratch, recipe, row, seed, "valid", sliding_perplexity=33.0).rename(
        place / "evaluation-valid.json"
    )
    write_curve(scratch, recipe, row, seed).rename(place / "metrics.jsonl")
    write_analysis(scratch, recipe, row, seed).parent.rename(place / "analysis")
    return place


def test_everything_of_a_finished_run_is_brought(tmp_path):
    make_run(tmp_path, "mgk-4", 0)
    make_run(tmp_path, "mgk-4+variance_scale=1,3", 2)
    make_run(tmp_path, "softmax-8", 0, finished=False)
    written = collect(tmp_path / "runs", tmp_path / "results")
    # Of each run: result, evaluation, curve, the numbers of its analysis and three pictures.
    assert len(written) == 2 * 7
    found = read_results(tmp_path / "results")
    assert found.values("wikitext103/small", "mgk-4", metric("valid_perplexity")) == {0: 33.0}
    assert found.values("wikitext103/small", "mgk-4+variance_scale=1,3", metric("valid_perplexity")) == {2: 33.0}
    assert found.trained("wikitext103/small", "mgk-4") == {0}
    assert list(found.curves("wikitext103/small", "mgk-4")) == [0]
    assert found.values("wikitext103/small", "softmax-8", metric("valid_perplexity")) == {}
    assert list(found.values("wikitext103/small", "mgk-4", metric("rank_layer_1"))) == [0]
    assert found.picture("wikitext103/small", "mgk-4", "keys.png") is not None
    assert found.notes == ()


def test_it_may_be_done_again(tmp_path):
    place = make_run(tmp_path, "mgk-4", 0)
    collect(tmp_path / "runs", tmp_path / "results")
    evaluation = json.loads((place / "evaluation-valid.json").read_text())
    evaluation["metrics"]["sliding_perplexity"] = 31.0
    (place / "evaluation-valid.json").write_text(json.dumps(evaluation))
    collect(tmp_path / "runs", tmp_path / "results")
    found = read_results(tmp_path / "results")
    assert found.values("wikitext103/small", "mgk-4", metric("valid_perplexity")) == {0: 31.0}


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"--collect must be a folder of runs, or an archive .*none, where nothing is"):
        collect(tmp_path / "none", tmp_path / "results")
    place = make_run(tmp_path, "mgk-4", 0)
    (place / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json must be the JSON of a result"):
        collect(tmp_path / "runs", tmp_path / "results")
