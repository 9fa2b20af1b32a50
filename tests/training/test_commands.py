"""`mgk train`, `evaluate`, `sweep` and `recipes` as a user runs them, with recipes of the user's own."""

import io
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from training_cases import ENGLISH, checkpoints_of, make_values
from transformers import AutoModelForCausalLM

import mgk
import mgk.recipes
from mgk.cli import main
from mgk.commands.sweep import mean_and_error, table_of
from mgk.commands.sweep.in_turn import Sweep
from mgk.commands.training import parse_seeds, show_metric
from mgk.data import DataError, baselines
from mgk.evaluation import bleu, perplexity, unpack_items
from mgk.models import MGKForCausalLM, MGKForSeq2SeqLM
from mgk.training import open_or_prepare
from mgk.training.configuration import DataConfig, merge
from mgk.training.corpora import default_folder

LISTS = {"train": 40, "valid": 12, "test": 12, "minimum": 5, "maximum": 24}
SHORT = {
    "training": {"steps": 6, "log_every": 2, "checkpoint_every": 4}, "validation": {"every": 3},
    "schedule": {"warmup": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where corpora are kept: the same for all tests here, so that each is prepared once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def mgk_command(tmp_path, cache, monkeypatch, run_command):
    """The command in an empty folder: what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGK_CACHE", str(cache))
    return run_command


def write_recipe(path, task="classification", **changes):
    """A recipe of the user's own."""
    values = make_values(task, **merge(SHORT, changes))
    del values["name"]
    path.write_text(yaml.safe_dump({"title": "A tiny one", **values}))
    return path


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "tiny.yaml", data={"options": LISTS}, rows=["softmax-2", "smgk-1"])


def refused(printed, message):
    """One line, and no traceback."""
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def read(path):
    return json.loads(path.read_text())


def without_times(result):
    return {key: value for key, value in result.items() if key not in ("seconds", "written")}


def test_train_with_changes(mgk_command, recipe, tmp_path):
    changes = ("seed=3", "optimizer.lr=2e-4")
    train = ("train", recipe, *changes, "--attention", "smgk", "--heads", "4", "--results", tmp_path / "results")
    printed = mgk_command(*train)
    folder = tmp_path / "runs" / "tiny" / "smgk-4" / "seed-3"
    assert printed.out.splitlines()[-1] == "runs/tiny/smgk-4/seed-3"
    assert "tiny smgk-4, seed 3" in printed.out
    assert "starting at step 0" in printed.err
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == 3
    assert config["optimizer"]["lr"] == 2e-4
    assert (config["model"]["attention"], config["model"]["num_attention_heads"]) == ("smgk", 4)

    found = read(folder / "result.json")
    assert {"format", "recipe", "row", "seed", "written", "skipped", "tokens"} <= found.keys()
    assert (found["recipe"], found["row"], found["seed"]) == ("tiny", "smgk-4", 3)
    assert found["config"] == config
    corpus = open_or_prepare(DataConfig(corpus="listops", options=LISTS))
    assert found["corpus"] == {"name": "listops", "fingerprint": corpus.fingerprint}
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["mgk"] == mgk.__version__
    assert found["device"].startswith("CPU")
    assert found["precision"] == "float32"
    assert (found["steps"], found["ranks"]) == (6, 1)
    assert found["best_step"] in (3, 6)
    assert 0 < found["seconds"] < 60
    assert found["baselines"] == baselines.compute(corpus)
    assert found["metrics"].keys() == {"valid", "test"}
    for metrics in found["metrics"].values():
        assert metrics.keys() == {"accuracy", "loss", "count"}
        assert metrics["count"] == 12
        assert 12 * metrics["accuracy"] == pytest.approx(round(12 * metrics["accuracy"]))
    assert found["items"].keys() == {"test"}
    assert unpack_items(found["items"]["test"]).mean() == pytest.approx(found["metrics"]["test"]["accuracy"])
    for name, value in found["metrics"]["test"].items():
        assert f"test {name}" in printed.out
        assert show_metric(name, value) in printed.out
    assert "majority class, accuracy" in printed.out
    assert f"{found['parameters']:,}" in printed.out
    assert read(tmp_path / "results" / "tiny" / "smgk-4-seed-3.json") == found
    assert checkpoints_of(folder)[-2:] == ["step-00000004", "step-00000006"]

    # Again: there is nothing left to do, and the result is the same.
    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
    printed = mgk_command(*train)
    assert "going on from step-00000006" in printed.err
    again = read(folder / "result.json")
    assert without_times(again) == without_times(found)
    assert again["seconds"] == pytest.approx(found["seconds"], abs=0.5)
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")} == before

    # Another configuration does not go on from this one, nor does any from a checkpoint that is not there.
    refused(last_line(mgk_command(*train, "optimizer.lr=1e-4", code=1)), "optimizer.lr was 0.0002, is 0.0001")
    refused(last_line(mgk_command(*train, "--resume", "999", code=1)), "checkpoints (4, 6), got 999")
    refused(last_line(mgk_command(*train, "--resume", "never", code=1)), "must be empty with --resume never")
    assert "going on from step-00000004" in mgk_command(*train, "--resume", "4").err
    assert without_times(read(folder / "result.json")) == without_times(found)


def last_line(printed):
    """What comes after the lines of the run itself."""
    return printed._replace(err=printed.err.splitlines(keepends=True)[-1])


def test_train_in_a_process_of_its_own(recipe, tmp_path, cache):
    environment = {**os.environ, "MGK_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mgk", "train", str(recipe), "--row", "smgk-1+qk_norm", "--to", "mine"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "mine"
    found = read(tmp_path / "mine" / "result.json")
    assert found["row"] == "smgk-1+qk_norm"
    assert found["config"]["model"]["qk_norm"] is True
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr is not a key (did you mean 'lr'?)"),
        (["trainin.steps=1"], "trainin is not a key (did you mean 'training'?)"),
        (["model.hidden_sizes=8"], "must be a field of MGKConfig, got 'hidden_sizes'"),
        (["data.options.trian=8"], "listops has the options"),
        (["optimizer.lr=fast"], "optimizer.lr must be a number, got 'fast'"),
        (["seed"], "a change must look like key=value, such as optimizer.lr=2e-4, got 'seed'"),
        (["schedule.warmup=7"], "schedule.warmup must be at most training.steps=6, got 7"),
        (["data.corpus=enwik8", "data.options={}"], "enwik8 needs a folder of raw files"),
        (["data.corpus=listop"], "(did you mean 'listops'?)"),
        (["--attention", "smkg"], "(did you mean 'smgk'?)"),
        (["--row", "smkg-4"], "(did you mean 'smgk'?)"),
        (["--row", "mlk-2+learn_variance"], "learn_variance must be false with attention='mlk', got true"),
        (["--row", "smgk-1", "--heads", "2"], "--row must stand alone, got --attention or --heads as well"),
        (["--resume", "yes"], "--resume must be auto, never or a step, got 'yes'"),
        (["--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["--strategy", "dp"], "--strategy must be one of auto, ddp, fsdp2, got 'dp'"),
    ],
)  # fmt: skip
def test_what_train_refuses(mgk_command, recipe, arguments, message):
    refused(mgk_command("train", recipe, *arguments, code=1), message)


def test_a_misspelt_model_is_refused_before_the_data_is_prepared(mgk_command, tmp_path, monkeypatch):
    monkeypatch.setattr("mgk.training.corpora.open_or_prepare", lambda *_, **__: pytest.fail("prepared"))
    refused(mgk_command("train", "wmt14", "--attention", "smkg", code=1), "(did you mean 'smgk'?)")
    refused(mgk_command("train", "wmt14", "model.attention=smkg", code=1), "(did you mean 'smgk'?)")
    refused(mgk_command("train", "wmt14", "model.droput=0.2", code=1), "(did you mean 'dropout'?)")


def test_unknown_recipes_are_refused(mgk_command):
    refused(mgk_command("train", "lra/txt", code=1), "got 'lra/txt' (did you mean 'lra/text'?)")
    refused(mgk_command("recipes", "text", code=1), "(did you mean 'lra/text'?)")
    refused(mgk_command("train", "absent.yaml", code=1), "absent.yaml must be a readable text file")
    # What typer refuses has its own form, and its own code.
    assert "--heads" in mgk_command("train", "lra/text", "--heads", "0", code=2).err


def test_recipes_are_not_cut_in_a_narrow_terminal(mgk_command, monkeypatch):
    """A row that is cut cannot be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in mgk_command("recipes").out


def test_recipes(mgk_command):
    printed = mgk_command("recipes").out
    for name in mgk.recipes.names():
        assert f" {name} " in printed
    assert "softmax-8+qk_norm" in printed
    printed = mgk_command("recipes", "lra/text").out
    recipe = mgk.recipes.load("lra/text")
    assert printed.startswith(f"lra/text: {recipe.title}\n")
    for sentence in recipe.source:
        assert sentence in " ".join(printed.split())
    assert " ".join(recipe.rows) in " ".join(printed.split())
    assert yaml.safe_load(printed[printed.index("task:") :]) == recipe.values


def test_recipes_of_ones_own_are_shown_as_they_are_written(mgk_command, tmp_path):
    """Brackets are text, not colours."""
    path = write_recipe(tmp_path / "mine.yaml", rows=["mgk-2"])
    path.write_text(path.read_text() + "source: ['See [red] and [/b].']\n")
    assert "See [red] and [/b]." in mgk_command("recipes", path).out


# mgk evaluate


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache, corpora):
    """A finished run of each task, by ``mgk train``; the corpora are where the command looks for them."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_CACHE", str(cache))
        for task in ("classification", "pairs", "language", "translation"):
            corpus = corpora(task)
            data = {"corpus": corpus.name, "options": corpus.manifest["options"]}
            shutil.copytree(corpus.folder, default_folder(DataConfig(**data)))
            place = tmp_path_factory.mktemp(task)
            recipe = write_recipe(place / f"tiny-{task}.yaml", task, data=data)
            patch.setattr("sys.argv", ["mgk", "train", str(recipe), "--to", str(place / "run"), "--device", "cpu"])
            with pytest.raises(SystemExit) as stop:
                main()
            assert not stop.value.code
            found[task] = place / "run"
    return found


def test_evaluate_classification(mgk_command, runs):
    for task in ("classification", "pairs"):
        printed = mgk_command("evaluate", runs[task])
        found, trained = read(runs[task] / "evaluation-test.json"), read(runs[task] / "result.json")
        assert found["metrics"] == trained["metrics"]["test"]
        assert found["baselines"] == trained["baselines"]
        assert found["items"] == trained["items"]
        assert (found["split"], found["best_step"]) == ("test", trained["best_step"])
        assert show_metric("accuracy", found["metrics"]["accuracy"]) in printed.out
        assert "majority class, accuracy" in printed.out
    mgk_command("evaluate", runs["classification"], "--split", "valid", "--precision", "bf16")
    found = read(runs["classification"] / "evaluation-valid.json")
    assert found["precision"] == "bfloat16"
    expected = read(runs["classification"] / "result.json")["metrics"]["valid"]
    assert found["metrics"]["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert found["metrics"]["loss"] != expected["loss"]
    assert unpack_items(found["items"]["valid"]).mean() == pytest.approx(found["metrics"]["accuracy"])


def test_evaluate_refuses_another_corpus(mgk_command, runs, monkeypatch):
    monkeypatch.setattr("mgk.data.store.Corpus.fingerprint", "0123456789abcdef")
    printed = mgk_command("evaluate", runs["classification"], code=1)
    assert "must come from this corpus, whose fingerprint is 0123456789ab..., got" in printed.err


def test_evaluate_a_language_model(mgk_command, runs, corpora):
    run = runs["language"]
    trained = read(run / "result.json")["metrics"]["test"]
    best = next((run / "checkpoints").glob("best-*"))
    model = MGKForCausalLM.from_pretrained(best).eval()
    assert AutoModelForCausalLM.from_pretrained(best).config.vocab_size == 256
    tokens = corpora("language").splits["test"].sequences["text"].tokens

    printed = mgk_command("evaluate", run).out
    found = read(run / "evaluation-test.json")
    assert found["stride"] == 1
    assert {key: found["metrics"][key] for key in trained} == trained
    options = {"length": 16, "batch_size": 16, "device": "cpu"}
    expected = perplexity.sliding(model, tokens, stride=1, **options)
    assert found["metrics"]["sliding_perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert found["metrics"]["sliding_bits_per_token"] == pytest.approx(expected.bits_per_token, rel=1e-6)
    assert found["metrics"]["perplexity"] == pytest.approx(
        perplexity.disjoint(model, tokens, **options).perplexity, rel=1e-6
    )
    for name in ("perplexity", "sliding_perplexity", "3-gram, nats per token"):
        assert name in printed

    mgk_command("evaluate", run, "--stride", "5")
    other = read(run / "evaluation-test.json")
    assert other["stride"] == 5
    expected = perplexity.sliding(model, tokens, stride=5, **options)
    assert other["metrics"]["sliding_perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert other["metrics"]["sliding_perplexity"] != found["metrics"]["sliding_perplexity"]
    # Beyond a window there is no stride: that is disjoint windows.
    mgk_command("evaluate", run, "--stride", "1000")
    metrics = read(run / "evaluation-test.json")["metrics"]
    assert metrics["sliding_perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-6)
    mgk_command("evaluate", run, "--no-sliding")
    found = read(run / "evaluation-test.json")
    assert found["stride"] is None
    assert found["metrics"] == trained


def test_evaluate_translation(mgk_command, runs, corpora):
    run = runs["translation"]
    printed = mgk_command("evaluate", run, "--beams", "2").out
    found = read(run / "evaluation-test.json")
    metrics = found["metrics"]
    assert found["beams"] == 2
    assert {key: metrics[key] for key in ("loss", "perplexity", "count")} == read(run / "result.json")["metrics"][
        "test"
    ]
    model = MGKForSeq2SeqLM.from_pretrained(next((run / "checkpoints").glob("best-*"))).eval()
    said = bleu.translate(model, corpora("translation"), "test", beams=2, device="cpu")
    from sacrebleu.metrics.bleu import BLEU

    scorer = BLEU()
    assert metrics["bleu"] == scorer.corpus_score(said, [ENGLISH]).score
    assert metrics["signature"] == str(scorer.get_signature())
    assert metrics["signature"] in printed
    assert "tok:13a" in metrics["signature"]
    assert "case:lc" in metrics["tokenised_signature"]
    assert 0 <= metrics["tokenised_lowercase_bleu"] <= 100


def test_what_evaluate_refuses(mgk_command, runs, tmp_path):
    run = runs["classification"]
    (tmp_path / "empty").mkdir()
    refused(
        mgk_command("evaluate", tmp_path / "empty", code=1), "must be the folder of a run, got no config.yaml there"
    )
    refused(mgk_command("evaluate", tmp_path / "absent", code=1), "must be the folder of a run")
    refused(mgk_command("evaluate", run, "--split", "tset", code=1), "must be one of test, train, valid, got 'tset'")
    refused(
        mgk_command("evaluate", runs["pairs"], "--split", "documents", code=1),
        "--split must be one of test, train, valid, got 'documents'",
    )
    refused(
        mgk_command("evaluate", run, "--precision", "fp8", code=1),
        "--precision must be one of auto, fp32, bf16, fp16, got 'fp8'",
    )
    refused(
        mgk_command("evaluate", run, "--device", "tpu", code=1), "--device must be one of auto, cpu, cuda, got 'tpu'"
    )
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "config.yaml").write_text((run / "config.yaml").read_text().replace("hidden_size: 16", "hidden_size: 24"))
    refused(mgk_command("evaluate", copy, code=1), "must hold the weights of this model")
    shutil.copy(run / "config.yaml", copy / "config.yaml")
    best = next((copy / "checkpoints").glob("best-*"))
    with (best / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(mgk_command("evaluate", copy, code=1), f"got none (skipped the damaged checkpoint {best.name}")
    shutil.rmtree(copy / "checkpoints")
    refused(mgk_command("evaluate", copy, code=1), "must hold the best model of a run, got none: has it validated yet?")


# mgk sweep


def test_sweep(mgk_command, recipe, tmp_path):
    sweep = ("sweep", recipe, "--seeds", "0-1", "training.steps=3", "--to", "runs", "--results", "results")
    printed = mgk_command(*sweep).out
    cells = [(row, seed) for seed in (0, 1) for row in ("softmax-2", "smgk-1")]
    results = {cell: read(tmp_path / "runs" / "tiny" / cell[0] / f"seed-{cell[1]}" / "result.json") for cell in cells}
    for number, (row, seed) in enumerate(cells, start=1):
        assert f"[{number}/4] {row}, seed {seed}: runs/tiny/{row}/seed-{seed}\n" in printed
        assert results[row, seed]["row"] == row
        assert results[row, seed]["seed"] == seed
        assert results[row, seed]["steps"] == 3
        assert read(tmp_path / "results" / "tiny" / f"{row}-seed-{seed}.json") == results[row, seed]
    table = printed[printed.index("standard error") :]
    for row in ("softmax-2", "smgk-1"):
        values = [results[row, seed]["metrics"]["test"]["accuracy"] for seed in (0, 1)]
        line = next(line for line in table.splitlines() if f" {row} " in line)
        cells_of_line = [cell.strip() for cell in line.strip("│").split("│")]
        mean, error = np.mean(values), np.std(values, ddof=1) / math.sqrt(2)
        assert cells_of_line[1:4] == [show_metric("accuracy", float(mean)), show_metric("accuracy", float(error)), "2"]
        assert cells_of_line[5] == f"{results[row, 0]['parameters']:,}"

    # Again: nothing is run, and the table is the same. Copies of the results that are gone come back.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    shutil.rmtree(tmp_path / "results")
    again = mgk_command(*sweep)
    assert again.out.count(": done before\n") == 4
    assert again.out[again.out.index("standard error") :] == table
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == times
    assert read(tmp_path / "results" / "tiny" / "smgk-1-seed-1.json") == results["smgk-1", 1]

    # Something that decides numbers has changed: those results are not these.
    printed = mgk_command(*sweep, "optimizer.lr=5e-3", "--rows", "smgk-1", code=1).out
    assert "must hold a run of this configuration, got one that differs in optimizer.lr" in printed


def test_one_row_that_fails(mgk_command, recipe, tmp_path):
    rows = "softmax-2 mlk-2+learn_variance smgk-1"
    printed = mgk_command("sweep", recipe, "training.steps=2", "--rows", rows, "--results", "results", code=1)
    assert "[2/3] mlk-2+learn_variance, seed 0 failed: " in printed.out
    assert "learn_variance must be false with attention='mlk', got true" in printed.out
    assert "Traceback" not in printed.err
    done = sorted(path.parent.parent.name for path in (tmp_path / "runs").rglob("result.json"))
    assert done == ["smgk-1", "softmax-2"]
    assert sorted(path.name for path in (tmp_path / "results" / "tiny").iterdir()) == [
        "smgk-1-seed-0.json",
        "softmax-2-seed-0.json",
    ]
    table = printed.out[printed.out.index("standard error") :]
    assert "mlk-2+learn_variance, seed 0" in table
    # One seed has no standard error.
    line = next(line for line in table.splitlines() if " smgk-1 " in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][2:4] == ["", "1"]


def test_a_reason_that_many_cells_share_is_told_once():
    failed = {**{f"mgk-{heads}, seed 0": "no such file" for heads in (1, 2, 4)}, "smgk-1, seed 0": "[red]another"}
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(Sweep("tiny", "accuracy", failed=failed)))
    text = console.file.getvalue()
    assert text.count("no such file") == 1
    assert "mgk-1, seed 0 and 2 more" in text
    assert "[red]another" in text


def test_changes_are_part_of_the_names_of_rows(mgk_command, recipe):
    """The paper's number stands beside the paper's model only."""
    sweep = ("sweep", recipe, "training.steps=2", "model.dropout=0.2", "--rows", "smgk-1+qk_norm=false")
    assert "[1/1] smgk-1+dropout=0.2+qk_norm=false, seed 0: runs/tiny/smgk-1+dropout=0.2" in mgk_command(*sweep).out


def test_what_a_sweep_refuses_before_it_starts(mgk_command, recipe, tmp_path):
    for arguments, message in (
        (("--rows", "softmax-2 smkg-1"), "(did you mean 'smgk'?)"),
        (("--rows", "smgk-1 smgk-1"), "runs of a sweep must be different from each other, got smgk-1, seed 0 twice"),
        # One run twice would make its standard error too small.
        (("--seeds", "0-2,1"), "runs of a sweep must be different from each other, got softmax-2, seed 1 twice"),
        (("seed=3", "--seeds", "0-4"), "different from each other, got softmax-2, seed 3 twice"),
        (("--rows", ""), "a sweep must have rows and seeds, got none"),
        (("--seeds", "1-"), "--seeds must look like 0-4 or 0,3,7, got '1-'"),
        (("--jobs", "0"), "--jobs must be a number of at least 1, or auto, got '0'"),
        (("--jobs", "many"), "--jobs must be a number of at least 1, or auto, got 'many'"),
        (("--archive", "all.zip"), "--archive must end in .tar.xz, .tar.gz, .tgz, .tar, got all.zip"),
        (("--plan", "plan.yaml"), "or a --plan, which has its own, got both"),
        (("optimizer.lrr=1",), "optimizer.lrr is not a key (did you mean 'lr'?)"),
    ):
        refused(mgk_command("sweep", recipe, *arguments, code=1), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", [0]), ("0-4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("7,0-1", [7, 0, 1]), ("5-5", [5]), ("012", [12])],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "-1", "0-", "0--1", "0,,1", "1.5", "0 1", "0-1-2", "²", "1,"])
def test_seeds_that_are_none(text):
    with pytest.raises(ValueError, match=r"--seeds must look like 0-4 or 0,3,7, got "):
        parse_seeds(text)


def test_no_seed_at_all():
    with pytest.raises(ValueError, match="--seeds must hold at least one seed, got '4-0'"):
        parse_seeds("4-0")


def test_mean_and_error():
    drawn = np.random.default_rng(0)
    for count in (2, 3, 5, 100):
        values = (1e6 + drawn.standard_normal(count)).tolist()
        mean, error = mean_and_error(values)
        assert mean == pytest.approx(np.mean(values), rel=1e-15)
        assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(count), rel=1e-6)
    assert mean_and_error([0.25]) == (0.25, None)
    assert mean_and_error([0.5, 0.5]) == (0.5, 0.0)


# The corpus of a run


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("MGK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MGK_DATA", raising=False)
    return DataConfig(corpus="listops", options=LISTS)


def test_a_corpus_is_prepared_once(data, tmp_path):
    corpus = open_or_prepare(data)
    assert corpus.folder == default_folder(data)
    assert corpus.folder.parent == tmp_path / "cache"
    assert corpus.manifest["options"]["train"] == 40
    before = (corpus.folder / "manifest.json").stat()
    again = open_or_prepare(data)
    assert again.fingerprint == corpus.fingerprint
    assert (corpus.folder / "manifest.json").stat().st_ino == before.st_ino
    # The order in which options stand is no option.
    turned = DataConfig(corpus="listops", options=dict(reversed(LISTS.items())))
    assert open_or_prepare(turned).folder == corpus.folder


def test_other_options_have_another_folder(data, tmp_path):
    corpus = open_or_prepare(data)
    other = open_or_prepare(DataConfig(corpus="listops", options={**LISTS, "seed": 1}))
    assert other.folder != corpus.folder
    assert other.fingerprint != corpus.fingerprint
    assert open_or_prepare(data).fingerprint == corpus.fingerprint
    assert default_folder(DataConfig(corpus="listops")) == tmp_path / "cache" / "listops"
    # Options that say what is so anyway are no other options: mgk data prepare finds the same folder.
    assert default_folder(DataConfig(corpus="listops", options={"train": 96_000})) == tmp_path / "cache" / "listops"
    # In a folder that was named there is one: the one asked for last.
    named = tmp_path / "named"
    assert open_or_prepare(data, folder=named).fingerprint == corpus.fingerprint
    replaced = open_or_prepare(DataConfig(corpus="listops", options={**LISTS, "seed": 1}), folder=named)
    assert replaced.fingerprint == other.fingerprint
    with pytest.raises(ValueError, match=r"listops has the options .*, got 'trian'"):
        open_or_prepare(DataConfig(corpus="listops", options={"trian": 1}))


@pytest.mark.parametrize("damage", ["no folder", "an empty folder", "no tokens", "half the tokens", "another format"])
def test_a_damaged_corpus_is_prepared_again(data, damage):
    corpus = open_or_prepare(data)
    manifest, tokens = corpus.folder / "manifest.json", corpus.folder / "train.text.tokens.npy"
    fingerprint, content = corpus.fingerprint, tokens.read_bytes()
    if damage in ("no folder", "an empty folder"):
        shutil.rmtree(corpus.folder)
        if damage == "an empty folder":
            corpus.folder.mkdir()
    elif damage == "no tokens":
        tokens.unlink()
    elif damage == "half the tokens":
        tokens.write_bytes(content[: len(content) // 2])
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    again = open_or_prepare(data)
    assert again.fingerprint == fingerprint
    assert tokens.read_bytes() == content


def test_what_may_be_somebody_elses_stays(data):
    """Without a manifest that can be read nobody knows who put the files there."""
    folder = open_or_prepare(data).folder
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:100])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="must be a prepared listops or not there, got something else"):
        open_or_prepare(data)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_absent_source_is_named(data, tmp_path):
    with pytest.raises(ValueError, match="enwik8 needs a folder of raw files"):
        open_or_prepare(DataConfig(corpus="enwik8"))
    (tmp_path / "raw").mkdir()
    with pytest.raises(ValueError, match="must hold enwik8"):
        open_or_prepare(DataConfig(corpus="enwik8"), source=tmp_path / "raw")
