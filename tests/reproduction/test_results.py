"""What is read of a folder of results, what is set aside, and what is refused."""

import json
import sys

import pytest
from reproduction_cases import (
    config_of,
    write_analysis,
    write_benchmark,
    write_curve,
    write_evaluation,
    write_picture,
    write_run,
)

from mgk.cli import main
from mgk.reproduction.metrics import METRICS, metric
from mgk.reproduction.results import read_results, run_name
from mgk.training import result

ACCURACY = metric("test_accuracy")


def test_a_folder_that_is_not_there(tmp_path):
    found = read_results(tmp_path / "none")
    assert not found.runs
    assert found.values("lra/text", "softmax-2", ACCURACY) == {}
    assert found.notes == ()


def test_accuracies_are_percent_by_seed(tmp_path):
    for seed, accuracy in ((0, 0.65), (3, 0.64)):
        write_run(tmp_path, "lra/text", "softmax-2", seed, accuracy=accuracy)
    write_run(tmp_path, "lra/text", "softmax-2+qk_norm", 0, accuracy=0.7)
    found = read_results(tmp_path)
    assert found.values("lra/text", "softmax-2", ACCURACY) == {0: 65.0, 3: 64.0}
    assert found.rows("lra/text") == ["softmax-2+qk_norm", "softmax-2"]
    assert found.trained("lra/text", "softmax-2") == {0, 3}


def test_a_copy_under_another_seed_counts_once(tmp_path):
    """The same loss to the last digit is no other run, and two of it would make the spread between seeds too small."""
    path = write_run(tmp_path, "lra/text", "softmax-2", 0, accuracy=0.65)
    write_curve(tmp_path, "lra/text", "softmax-2", 2)
    content = json.loads(path.read_text())
    copy = {**content, "seed": 2, **config_of("lra/text", "softmax-2", 2)}
    result.write(tmp_path / "lra" / "text" / "softmax-2-seed-2.json", copy)
    write_run(tmp_path, "lra/text", "softmax-2", 1, accuracy=0.65)
    found = read_results(tmp_path)
    assert list(found.values("lra/text", "softmax-2", ACCURACY)) == [0, 1]
    assert found.curves("lra/text", "softmax-2") == {}
    assert found.notes == (
        "lra/text/softmax-2-seed-2.json is set aside: all its numbers are those of lra-text-softmax-2-seed-0",
    )


def test_a_curve_or_an_analysis_without_its_run_is_no_number(tmp_path):
    """A claim about accuracy throughout training must not count a run that has not ended, or of other settings."""
    row = ("lra/retrieval", "mgk-1")
    for seed in (0, 1):
        write_curve(tmp_path, *row, seed)
        write_analysis(tmp_path, *row, seed)
    write_run(tmp_path, *row, 1, accuracy=0.8)
    found = read_results(tmp_path)
    for name in ("mean_valid_accuracy", "rank_layer_1"):
        assert list(found.values(*row, metric(name))) == [1]


def test_an_evaluation_stands_in_for_a_run_that_is_not_here(tmp_path):
    write_evaluation(tmp_path, "lra/text", "softmax-2", 0, stride=None, accuracy=0.6)
    write_evaluation(tmp_path, "lra/text", "softmax-2", 1, stride=None, accuracy=0.6)
    write_run(tmp_path, "lra/text", "softmax-2", 1, accuracy=0.61)
    found = read_results(tmp_path)
    assert found.values("lra/text", "softmax-2", ACCURACY) == {0: 60.0, 1: 61.0}
    assert [note for note in found.notes if "softmax-2-seed-0" in note and "not here" in note]
    assert not [note for note in found.notes if "softmax-2-seed-1" in note]


def test_perplexity_is_that_of_the_sliding_window(tmp_path):
    row = ("wikitext103/small", "mgk-4")
    write_run(tmp_path, *row, 0, perplexity=30.0)
    write_evaluation(tmp_path, *row, 0, "test", sliding_perplexity=34.0, perplexity=33.0)
    write_evaluation(tmp_path, *row, 0, "valid", sliding_perplexity=32.0)
    write_evaluation(tmp_path, *row, 1, "test", stride=16, sliding_perplexity=35.0)
    found = read_results(tmp_path)
    assert found.values(*row, metric("test_perplexity")) == {0: 34.0}
    assert found.values(*row, metric("valid_perplexity")) == {0: 32.0}
    assert [note for note in found.notes if "by 16; wanted is 1" in note]


def test_a_run_that_was_changed_is_set_aside(tmp_path):
    write_run(tmp_path, "lra/text", "softmax-2", 0, accuracy=0.99, changes=["training.steps=10000"])
    write_run(tmp_path, "lra/text", "softmax-2", 1, accuracy=0.65, changes=["training.log_every=7"])
    found = read_results(tmp_path)
    assert found.values("lra/text", "softmax-2", ACCURACY) == {1: 65.0}
    (note,) = found.notes
    assert note == (
        "lra/text/softmax-2-seed-0.json is of another configuration and counts nowhere: "
        "it differs from lra/text in training.steps (10000 where the recipe has 20000)"
    )


def test_what_a_changed_run_left_elsewhere_is_set_aside_with_it(tmp_path):
    row = ("lra/retrieval", "mgk-1")
    write_run(tmp_path, *row, 0, accuracy=0.99, changes=["training.steps=10000"])
    write_run(tmp_path, *row, 1, accuracy=0.8)
    for seed in (0, 1):
        write_curve(tmp_path, *row, seed)
        write_analysis(tmp_path, *row, seed)
    found = read_results(tmp_path)
    assert list(found.values(*row, metric("mean_valid_accuracy"))) == [1]
    assert list(found.values(*row, metric("rank_layer_1"))) == [1]


def test_an_analysis_of_other_data_is_set_aside(tmp_path):
    """Without its data at hand `mgk analyze` reads random tokens, which say nothing about the paper's claims."""
    row = ("lra/retrieval", "mgk-1")
    write_run(tmp_path, *row, 0, accuracy=0.8)
    path = write_analysis(tmp_path, *row, 0)
    content = {**json.loads(path.read_text()), "batch": "1 x 8 random tokens"}
    del content["corpus"]
    path.write_text(json.dumps(content))
    found = read_results(tmp_path)
    assert found.values(*row, metric("rank_layer_1")) == {}
    assert found.picture(*row, "keys.png") is None
    assert found.notes == (
        "analysis/lra-retrieval-mgk-1-seed-0/analysis.json is set aside: its model read 1 x 8 random tokens, "
        "not the data of its recipe",
    )


def test_a_curve_with_a_hole_is_damaged(tmp_path):
    path = write_curve(tmp_path, "lra/retrieval", "mgk-1", 0)
    path.write_text(path.read_text().replace('{"step": 100', '{"step": 1', 1).replace('"loss"', '"lo', 1))
    with pytest.raises(ValueError, match=r"must have a measurement as JSON in every line, got .* in line 1"):
        read_results(tmp_path)


def test_notes_stand_with_their_own_recipe(tmp_path):
    write_run(tmp_path, "lra/retrieval-linear", "mlk-1", 0, accuracy=0.9, changes=["training.steps=10000"])
    write_evaluation(tmp_path, "lra/retrieval-linear", "mlk-1", 1, stride=None, accuracy=0.6)
    found = read_results(tmp_path)
    assert len(found.notes) == 2
    assert found.notes_about(["lra/retrieval-linear"]) == found.notes
    assert found.notes_about(["lra/retrieval"]) == ()


def test_times_of_two_machines_do_not_mix(tmp_path):
    path = write_benchmark(tmp_path, {"softmax-8": (10.0, 2e9), "smgk-4": (5.0, 1e9)})
    slow = json.loads(path.read_text())
    slow["rows"], slow["baselines"][0]["evaluation_ms"] = [], 1.0
    path.with_name("retrieval-other.json").write_text(json.dumps(slow))
    found = read_results(tmp_path)
    assert found.values("lra/retrieval", "softmax-8", METRICS["seconds_per_iteration"]) == {0: 0.010}
    assert "retrieval-none.json, not of retrieval-other.json" in found.notes[0]


def test_a_key_that_is_newer_than_the_run(tmp_path):
    """An old result does not know it; it counts as what it is by default."""
    path = write_run(tmp_path, "lra/text", "softmax-2", 0, accuracy=0.65)
    content = json.loads(path.read_text())
    del content["config"]["data"]["pack"]
    path.write_text(json.dumps(content))
    assert read_results(tmp_path).values("lra/text", "softmax-2", ACCURACY) == {0: 65.0}


def test_corpora_that_differ_are_noted(tmp_path):
    for seed in (0, 1):
        path = write_run(tmp_path, "lra/text", "softmax-2", seed, accuracy=0.65)
    path.write_text(path.read_text().replace("0" * 64, "1" * 64))
    assert read_results(tmp_path).notes == ("runs of lra/text come from 2 corpora that differ from each other",)


def test_analysis(tmp_path):
    priors = {1: [0.4, 0.6], 2: [0.1, 0.9]}
    path = write_analysis(tmp_path, "lra/retrieval", "mgk-1", 2, rank=50, nll=0.3, priors=priors)
    write_run(tmp_path, "lra/retrieval", "mgk-1", 2, accuracy=0.8)
    found = read_results(tmp_path)
    row = ("lra/retrieval", "mgk-1")
    assert found.values(*row, metric("prior_2_layer_1")) == {2: 0.6}
    assert found.values(*row, metric("query_nll_layer_2"))[2] == pytest.approx(0.3, abs=0.02)
    assert found.values(*row, metric("rank_layer_1"))[2] == pytest.approx(50, abs=3)
    assert found.values(*row, metric("rank_layer_3")) == {}
    assert found.picture(*row, "keys.png") == path.parent / "keys.png"
    assert found.picture(*row, "other.png") is None
    content = json.loads(path.read_text())
    content["density"][0]["mixture"] = [None]
    content["mixture"] = None
    path.write_text(json.dumps(content))
    found = read_results(tmp_path)
    assert found.values(*row, metric("query_nll_layer_1")) == {}
    assert found.values(*row, metric("prior_2_layer_1")) == {}


def test_measurements_are_those_of_the_papers_shape(tmp_path):
    path = write_benchmark(tmp_path, {"softmax-8": (10.0, 2_000_000_000), "smgk-4": (5.0, 1_000_000_000)})
    content = json.loads(path.read_text())
    slower, other_shape = dict(content["baselines"][0]), dict(content["baselines"][0])
    content["baselines"] += [slower | {"evaluation_ms": 30.0}, other_shape | {"evaluation_ms": 1.0, "tokens": 64}]
    path.write_text(json.dumps(content))
    found = read_results(tmp_path)
    assert found.values("lra/retrieval", "softmax-8", METRICS["seconds_per_iteration"]) == {0: 0.010}
    assert found.values("lra/retrieval", "smgk-4", METRICS["memory"]) == {0: 1.0}
    assert found.measurement("lra/retrieval", "mgk-4") is None


def test_names_of_runs_do_not_mix(tmp_path):
    write_curve(tmp_path, "lra/retrieval", "mgk-1", 0)
    write_curve(tmp_path, "lra/retrieval", "mgk-1", 10)
    write_curve(tmp_path, "lra/retrieval", "mgk-12", 0)
    write_curve(tmp_path, "lra/retrieval-linear", "mlk-1", 0)
    found = read_results(tmp_path)
    assert list(found.curves("lra/retrieval", "mgk-1")) == [0, 10]
    assert list(found.curves("lra/retrieval-linear", "mlk-1")) == [0]
    assert run_name("lra/text", "smgk-4", 3) == "lra-text-smgk-4-seed-3"


def damaged_run(folder):
    path = write_run(folder, "lra/text", "softmax-2", 0, accuracy=0.6)
    path.write_text(path.read_text()[:200])
    return path, "must be the JSON of a result"


def run_without_metrics(folder):
    path = write_run(folder, "lra/text", "softmax-2", 0, accuracy=0.6)
    path.write_text('{"recipe": "lra/text"}')
    return path, "must have recipe, row, seed and metrics"


def run_with_text_as_a_number(folder):
    path = write_run(folder, "lra/text", "softmax-2", 0, accuracy=0.6)
    path.write_text(path.read_text().replace('"seed": 0,\n', '"seed": "zero",\n'))
    return path, "must have a seed of a run, got 'zero'"


def run_that_is_not_finite(folder):
    path = write_run(folder, "lra/text", "softmax-2", 0, accuracy=float("nan"))
    return path, "must have finite numbers as metrics, got accuracy: nan"


def run_of_an_unknown_configuration(folder):
    path = write_run(folder, "lra/text", "softmax-2", 0, accuracy=0.6)
    path.write_text(path.read_text().replace('"batch_size": 32', '"batch_size": "many"'))
    return path, "must hold the configuration of a run"


def damaged_evaluation(folder):
    path = write_evaluation(folder, "lra/text", "softmax-2", 0, accuracy=0.6)
    path.write_text("[]")
    return path, "must have recipe, row, seed and metrics"


def damaged_curve(folder):
    path = write_curve(folder, "lra/retrieval", "mgk-1", 0)
    path.write_bytes(b"\x00\x01\x02 nothing\n")
    return path, "must hold the measurements of a run"


def damaged_analysis(folder):
    path = write_analysis(folder, "lra/retrieval", "mgk-1", 0)
    path.write_text(path.read_text()[:-50])
    return path, "must be JSON"


def analysis_of_another_shape(folder):
    path = write_analysis(folder, "lra/retrieval", "mgk-1", 0)
    content = json.loads(path.read_text())
    content["rank"][1]["rank"] = [1, 2, 3]
    path.write_text(json.dumps(content))
    return path, "must have rank of layer 2 in rank, numbers in 2 nested lists"


def analysis_of_another_run(folder):
    path = write_analysis(folder, "lra/retrieval", "mgk-1", 0)
    path.write_text(path.read_text().replace('"mgk-1"', '"mgk-2"'))
    return path, "must be about the run that its folder names, got lra-retrieval-mgk-2-seed-0"


def damaged_benchmark(folder):
    path = write_benchmark(folder, {"softmax-8": (10.0, 1)})
    path.write_text(path.read_text().replace("evaluation_ms", "evaluation"))
    return path, "must be a result of mgk bench retrieval, got no 'evaluation_ms'"


@pytest.mark.parametrize(
    "damage",
    [
        damaged_run, run_without_metrics, run_with_text_as_a_number, run_that_is_not_finite,
        run_of_an_unknown_configuration, damaged_evaluation, damaged_curve, damaged_analysis, analysis_of_another_shape,
        analysis_of_another_run, damaged_benchmark,
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, damage):
    path, sentence = damage(tmp_path)
    with pytest.raises(ValueError, match="must") as caught:
        read_results(tmp_path)
    said = str(caught.value)
    assert str(path) in said
    assert sentence in said
    assert "\n" not in said


def test_on_the_command_line_it_is_one_line(tmp_path, monkeypatch, capsys):
    path, _ = damaged_run(tmp_path / "results")
    words = ["mgk", "reproduce", "T1", "--results", str(tmp_path / "results"), "--to", str(tmp_path / "pages")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(path) in said
    assert said.count("\n") == 1
    assert not (tmp_path / "pages").exists()


def test_a_picture_that_is_none(tmp_path):
    from mgk.reproduction.composition import compose

    write_picture(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"bad\.png must be a picture"):
        compose({"a": tmp_path / "good.png", "b": tmp_path / "bad.png"}, tmp_path / "out.png", title="both")
    assert not (tmp_path / "out.png").exists()
