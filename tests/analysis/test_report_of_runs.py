"""`mgk report`: runs of every kind on one page, and what is said where something is missing or damaged."""

import dataclasses
import functools
import json
import math
import shlex
import shutil

import pytest
import torch
import yaml
from training_cases import make_config, make_corpus
from transformers import BertConfig

import mgk.recipes
from mgk.analysis import attention_maps, component_shares, cost
from mgk.analysis.report.command import reproduce
from mgk.analysis.report.comparison import compare_runs
from mgk.analysis.report.examples import find_examples
from mgk.analysis.report.run import read_run
from mgk.analysis.saved_model import load_model
from mgk.data import open_corpus
from mgk.training.configuration import RunConfig, from_mapping, merge, to_mapping
from mgk.training.corpora import default_folder
from mgk.training.distributed import build_fabric
from mgk.training.run import fit

SHORT = {
    "training": {"steps": 4, "log_every": 1, "checkpoint_every": 4}, "validation": {"every": 2},
    "schedule": {"warmup": 2}, "model": {"num_hidden_layers": 2},
}  # fmt: skip
OPTIONS = {
    "classification": {"train": 100, "valid": 24, "test": 24, "minimum": 5, "maximum": 24},
    "pairs": {},
    "language": {"size": 4000},
    "translation": {"vocabulary": 270, "clean_ratio": 9},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def train(cache, tmp_path_factory):
    """Make a tiny run: its folder."""
    root = tmp_path_factory.mktemp("runs")

    def run(task="classification", *, row="smgk-2", **changes):
        config = make_config(task, **merge(merge(SHORT, {"data": {"options": OPTIONS[task]}, "row": row}), changes))
        place = default_folder(config.data)
        corpus = open_corpus(config.data.corpus, place) if place.exists() else make_corpus(task, place)
        folder = root / f"{task}-{row}-{config.seed}-{config.optimizer.lr}"
        fit(config, folder, corpus, build_fabric(device="cpu"))
        return folder

    return run


@pytest.fixture(scope="module")
def finished(train):
    """Two seeds of one row and one of another."""
    softmax = {"attention": "softmax", "num_attention_heads": 2}
    return [train(seed=0), train(seed=1), train(row="softmax-2", model=softmax)]


@pytest.fixture
def broken(finished, tmp_path):
    """A copy of a run, to be damaged."""
    return shutil.copytree(finished[0], tmp_path / "broken")


@pytest.fixture
def mgk_report(cache, monkeypatch, run_command, tmp_path):
    """The command in an empty folder: what it printed."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(run_command, "report")


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def embedded(path):
    """What the page's script draws."""
    source = path.read_text(encoding="utf-8")
    return json.loads(source.partition('id="data">')[2].partition("</script>")[0])


def test_report_from_the_command_line(mgk_report, finished, tmp_path):
    printed = mgk_report(*finished, "--tokens", "20", "--title", "Three <runs>")
    assert printed.out == "report.html\n"
    assert "1 run of smgk-2 is left out of it" in printed.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>Three &lt;runs&gt;</title>" in page
    assert shlex.quote(f"{finished[0]}") in page
    assert "--title &#x27;Three &lt;runs&gt;&#x27; --tokens 20" in page
    data = embedded(tmp_path / "report.html")
    assert data["rows"] == ["smgk-2", "softmax-2"]
    assert [run["name"] for run in data["runs"]] == ["smgk-2, seed 0", "smgk-2, seed 1", "softmax-2"]
    assert [len(run["maps"]) for run in data["runs"]] == [2, 0, 2]
    assert [run["maps"][0]["components"] for run in data["runs"] if run["maps"]] == [2, 1]
    assert all(len(maps["tokens"]) <= 20 for run in data["runs"] for maps in run["maps"])
    assert len(page) < 200_000
    before = (tmp_path / "report.html").read_bytes()
    mgk_report(*finished, "--tokens", "20", "--title", "Three <runs>")
    assert (tmp_path / "report.html").read_bytes() == before


def test_results_are_means_over_seeds(finished):
    report = compare_runs(finished, examples=0)
    results = [result_of(folder)["metrics"] for folder in finished]
    smgk, softmax, *references = report.results.rows
    assert report.results.columns == ["seeds", "test accuracy", "test loss", "best validation accuracy"]
    for column, (split, metric) in enumerate([("test", "accuracy"), ("test", "loss"), ("valid", "accuracy")], start=1):
        one, other, alone = (found[split][metric] for found in results)
        # Of two values the standard error is half of what they differ by.
        mean, error = (one + other) / 2, abs(one - other) / 2
        expected = f"{mean:.3f} ± {error:.3f}" if metric == "loss" else f"{100 * mean:.2f} ± {100 * error:.2f} %"
        assert smgk.cells[column] == expected
        assert softmax.cells[column] == (f"{alone:.3f}" if metric == "loss" else f"{100 * alone:.2f} %")
    assert (smgk.cells[0], softmax.cells[0]) == ("2", "1")
    assert [row.name for row in references] == ["majority class", "root operator"]
    assert all(row.is_reference and row.cells[1].endswith(" %") and row.cells[2] == "" for row in references)
    assert report.metric == "validation accuracy"
    assert report.baselines.keys() == {"majority class", "root operator"}
    assert "± is the standard error of the mean over seeds." in report.results.notes
    assert "24 test samples: differences of accuracy below 20.4%" in report.notes[0]


def test_language_models_have_perplexities_first(train):
    report = compare_runs([train("language")], examples=0)
    assert report.results.columns == [
        "seeds", "test perplexity", "test bits per token", "test loss", "best validation loss",
    ]  # fmt: skip
    own, *references = report.results.rows
    assert float(own.cells[1].replace(",", "")) == pytest.approx(math.exp(float(own.cells[3])), rel=1e-2)
    assert [row.name for row in references] == ["1-gram", "2-gram", "3-gram"]
    for row in references:
        perplexity, bits, nats = (float(cell.replace(",", "")) for cell in row.cells[1:4])
        assert perplexity == pytest.approx(2**bits, rel=1e-2)
        assert perplexity == pytest.approx(math.exp(nats), rel=1e-2)
        assert row.cells[4] == ""
    # Their accuracy has no line in a chart of perplexities.
    assert report.metric is None
    assert report.baselines == {}


def test_curves_and_facts(finished):
    report = compare_runs(finished, examples=0)
    run, found = report.runs[0], result_of(finished[0])
    lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert run.curves.keys() == {"training loss", "validation accuracy", "validation loss"}
    for name, kind in (("training loss", "train"), ("validation accuracy", "valid")):
        key = name.split()[1]
        assert run.curves[name] == [(line["step"], line[key]) for line in lines if line["kind"] == kind]
    assert [step for step, _ in run.curves["training loss"]] == [1, 2, 3, 4]
    assert found["corpus"]["fingerprint"] in run.facts["data"]
    assert f"torch {torch.__version__}" in run.facts["versions"]
    assert run.facts["device"].startswith("CPU")
    assert run.configuration["model.attention"] == "smgk"
    assert run.configuration["data.options.maximum"] == 24
    assert run.command.startswith("mgk train tiny.yaml --row smgk-2 seed=0  # tiny.yaml is a recipe of your own")


def test_costs(finished):
    report = compare_runs(finished, examples=0)
    smgk, softmax = report.costs.rows
    model = load_model(read_run(finished[0]).checkpoint)
    ids = torch.zeros(1, 64, dtype=torch.long)
    assert smgk.cells[0] == f"{result_of(finished[0])['parameters']:,}"
    assert smgk.cells[1] == f"{cost.embedding_parameters(model):,}"
    assert float(smgk.cells[2]) == pytest.approx(cost.forward_flops(model, input_ids=ids) / 64 / 1e6, rel=0.005)
    # Keys and values of 2 layers, 2 heads, 8 wide, 2 bytes each.
    assert smgk.cells[3] == softmax.cells[3] == "128"
    assert "in a sequence of 64 tokens" in report.costs.notes[0]


@pytest.mark.parametrize(
    ("task", "model", "components"),
    [
        ("classification", {"attention": "mlk"}, 2),
        ("pairs", {"attention": "mgk", "num_components": 3}, 3),
        ("language", {"attention": "smgk"}, 2),
        ("language", {"attention": "smlk"}, 2),
        ("language", {"attention": "linear"}, 1),
        ("translation", {"attention": "mgk-hard"}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else value["attention"] if isinstance(value, dict) else None,
)
def test_every_kind_of_model(train, task, model, components):
    """What the explorer shows is what the trained model computes for what it names."""
    folder = train(task, row=f"{model['attention']}-2", model=model)
    report = compare_runs([folder], examples=1, tokens=12)
    assert report.missing == []
    ((maps,),) = (run.maps for run in report.runs)
    run = read_run(folder)
    corpus = open_corpus(run.config.data.corpus, default_folder(run.config.data))
    (example,) = find_examples(corpus, count=1, longest=12)
    assert maps.tokens == example.words
    assert len(example.words) == len(example.ids) <= 12
    ids, trained = torch.tensor([example.ids]), load_model(run.checkpoint)
    inputs = {"input_ids": ids}
    if task == "pairs":
        inputs["pair_input_ids"] = ids
    elif task == "language":
        inputs["use_cache"] = False
    stack = trained.get_encoder() if task == "translation" else trained
    weights = torch.stack(attention_maps(stack, **inputs))[:, 0]
    assert weights.shape == (2, 2, len(example.ids), len(example.ids))
    torch.testing.assert_close(maps.weights, weights)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    if task == "language":
        assert (weights.triu(1) == 0).all()
    if components == 1:
        assert maps.shares is None
    else:
        torch.testing.assert_close(maps.shares, torch.stack(component_shares(stack, **inputs))[:, 0])
        assert maps.shares.shape[2] == components
    what = report.runs[0].shares_are
    kinds = {"mlk": "not a density", "smlk": "not a density", "linear": "not a density", "mgk-hard": "nearest"}
    assert kinds.get(model["attention"], "responsibility") in what
    # A number for each cost, of whatever kind the model is.
    assert float(report.costs.rows[0].cells[2].replace(",", "")) > 0
    is_linear = model["attention"] in ("mlk", "smlk", "linear")
    assert (report.costs.rows[0].cells[3] == "0") == is_linear


def test_words_of_a_corpus(train):
    folder = train("translation", row="mgk-2")
    data = read_run(folder).config.data
    corpus = open_corpus(data.corpus, default_folder(data))
    examples = find_examples(corpus, count=3, longest=64)
    assert "".join(examples[0].words[:-1]) == "Ein Hund"
    assert examples[0].words[-1] == "<eos>"
    assert examples[0].title == "tatoeba, test, source sentence 1"
    assert len(examples) == 3
    # Half of a character is no text, and has its number.
    examples = find_examples(corpus, count=9, longest=64)
    umlaut = next(example for example in examples if any(word.startswith("#") for word in example.words))
    assert len([word for word in umlaut.words if word.startswith("#")]) == 2
    (cut,) = find_examples(corpus, count=1, longest=2)
    assert len(cut.ids) == 2
    assert cut.title.endswith(" tokens, which are all that the model reads here")


def test_one_recipe_with_other_settings_is_another_row(train, finished):
    other = train(seed=0, optimizer={"lr": 5e-4})
    report = compare_runs([*finished, other], examples=0)
    names = [row.name for row in report.results.rows if not row.is_reference]
    assert names == ["smgk-2 (optimizer.lr=0.001)", "softmax-2", "smgk-2 (optimizer.lr=0.0005)"]
    with pytest.raises(ValueError, match="runs of one row must have different seeds, got seed 0 in "):
        compare_runs([finished[0], finished[0]])


def test_a_run_without_a_checkpoint_is_reported_without_the_explorer(mgk_report, broken, finished, tmp_path):
    shutil.rmtree(broken / "checkpoints")
    printed = mgk_report(broken, finished[2], "--to", "a/b.html")
    assert "smgk-2 is not in the explorer: there is no checkpoint in " in printed.err
    page = (tmp_path / "a" / "b.html").read_text(encoding="utf-8")
    assert "smgk-2 is not in the explorer: there is no checkpoint in " in page
    assert [bool(run["maps"]) for run in embedded(tmp_path / "a" / "b.html")["runs"]] == [False, True]
    report = compare_runs([broken])
    assert report.costs.rows[0].cells[0] == f"{result_of(broken)['parameters']:,}"
    assert report.costs.rows[0].cells[2] == "\N{EN DASH}"


def test_a_result_alone(finished, tmp_path):
    copy = tmp_path / "smgk-2-seed-0.json"
    copy.write_bytes((finished[0] / "result.json").read_bytes())
    report = compare_runs([copy])
    assert report.missing == ["smgk-2 is not in the explorer: only its result was given."]
    assert report.results.rows[0].cells[1] == f"{100 * result_of(finished[0])['metrics']['test']['accuracy']:.2f} %"


def write_result(folder, recipe, row, **changes):
    """A result as a run of a bundled recipe leaves it."""
    config = mgk.recipes.load(recipe).config(row, ["seed=2"])
    found = {
        "recipe": recipe, "row": row, "seed": 2, "config": to_mapping(config), "seconds": 9000.0, "device": "A GPU",
        "metrics": {"test": {"accuracy": 0.375, "count": 2000.0}},
        "corpus": {"name": "listops", "fingerprint": "a" * 64},
    }  # fmt: skip
    path = folder / f"{row}.json"
    path.write_text(json.dumps({**found, **changes}))
    return path


def test_results_stand_beside_the_papers(tmp_path):
    paths = [write_result(tmp_path, "lra/listops", row) for row in ("smgk-4", "softmax-8", "gaussian-4")]
    report = compare_runs(paths)
    assert report.title == mgk.recipes.load("lra/listops").title
    assert report.results.columns == ["seeds", "test accuracy", "the paper's test accuracy"]
    assert [row.cells for row in report.results.rows] == [
        ["1", "37.50 %", "37.25 %"], ["1", "37.50 %", "37.03 %"], ["1", "37.50 %", "\N{EN DASH}"],
    ]  # fmt: skip
    assert report.costs.rows[0].cells[-1] == "2.5 h"
    assert report.runs[0].command == "mgk train lra/listops --row smgk-4 seed=2"
    assert len(report.notes) == 1


def test_what_does_not_compare_is_said(tmp_path):
    other = {"device": "a CPU", "corpus": {"name": "imdb", "fingerprint": "b" * 64}, "seconds": 600}
    paths = [
        write_result(tmp_path, "lra/listops", "smgk-4"), write_result(tmp_path, "lra/text", "softmax-8", **other)
    ]  # fmt: skip
    report = compare_runs(paths)
    assert report.title == "Runs of lra/listops, lra/text"
    assert [row.name for row in report.results.rows] == ["lra/listops smgk-4", "lra/text softmax-8"]
    assert report.notes[-1].startswith("The runs were trained on different data")
    assert report.costs.notes[-1].startswith("The times come from different machines")
    assert report.costs.rows[1].cells[-1] == "10 min"


def test_a_run_that_is_not_finished(broken):
    (broken / "result.json").unlink()
    metrics = broken / "metrics.jsonl"
    # The last line is one that a dying process cut short.
    metrics.write_text(metrics.read_text() + '{"step": 5, "ki')
    report = compare_runs([broken])
    assert report.results.rows[0].cells == ["0 of 1 done"]
    assert "No result yet, so curves only" in report.results.notes[0]
    assert len(report.runs[0].curves["training loss"]) == 4
    assert len(report.runs[0].maps) == 2


def test_a_later_evaluation_counts(broken):
    found = result_of(broken)
    evaluation = {**found, "metrics": {"accuracy": 0.5, "bleu": 31.25, "signature": "nrefs:1"}, "split": "test"}
    (broken / "evaluation-test.json").write_text(json.dumps(evaluation))
    report = compare_runs([broken], examples=0)
    cells = dict(zip(report.results.columns, report.results.rows[0].cells, strict=True))
    assert (cells["test accuracy"], cells["test bleu"]) == ("50.00 %", "31.250")
    # Of another model it says nothing.
    (broken / "evaluation-test.json").write_text(json.dumps({**evaluation, "best_step": 1}))
    assert "test bleu" not in compare_runs([broken], examples=0).results.columns


def test_long_curves_are_thinned(broken):
    lines = [{"step": step, "kind": "train", "loss": float(step)} for step in range(1, 1001)]
    lines[500]["loss"] = None
    (broken / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = compare_runs([broken], examples=0)
    points = report.runs[0].curves["training loss"]
    assert len(points) == 334
    assert points[0] == (3, 2.0)
    assert points[-1] == (1000, 1000.0)
    assert sum(math.isnan(value) for _, value in points) == 1
    assert any("means of neighbouring points" in note for note in report.notes)


def test_a_corpus_that_is_not_at_hand(train, monkeypatch, tmp_path):
    folder = train("language")
    monkeypatch.setenv("MGK_CACHE", str(tmp_path))
    monkeypatch.delenv("MGK_DATA", raising=False)
    report = compare_runs([folder])
    assert not report.runs[0].maps
    assert "smgk-2 is not in the explorer: its corpus is not at hand, enwik8 needs a folder" in report.missing[0]


def test_another_corpus_is_not_explored(broken):
    found = result_of(broken)
    found["corpus"]["fingerprint"] = "0" * 64
    (broken / "result.json").write_text(json.dumps(found))
    report = compare_runs([broken])
    assert not report.runs[0].maps
    assert "must have the checksum 000000000000... that the run was trained on, got " in report.missing[0]


def damage_result(folder):
    (folder / "result.json").write_text('{"recipe": "tiny"')


def change_result(**changes):
    def change(folder):
        (folder / "result.json").write_text(json.dumps({**result_of(folder), **changes}))

    return change


def damage_curves(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "\0\0\0", *lines[1:]]))


def text_in_curves(folder):
    line = '{"step": 1, "kind": "train", "loss": "low"}\n'
    (folder / "metrics.jsonl").write_text(line + (folder / "metrics.jsonl").read_text())


def damage_checkpoint(folder):
    path = next((folder / "checkpoints").glob("best-*")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def empty(folder):
    for path in ("result.json", "metrics.jsonl"):
        (folder / path).unlink()
    shutil.rmtree(folder / "checkpoints")


def only_a_model(folder):
    best = next((folder / "checkpoints").glob("best-*"))
    for path in (*folder.glob("*.json"), folder / "config.yaml"):
        path.unlink()
    shutil.copy(best / "config.json", folder)


def plain_hugging_face(folder):
    shutil.rmtree(folder)
    BertConfig().save_pretrained(folder)


def remove(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "must be the folder of a run, got nothing there"),
        (damage_result, "result.json must be the JSON of a result, got Expecting ',' delimiter"),
        (change_result(metrics=3), "result.json must have a mapping as metrics, got int"),
        (
            change_result(metrics={"test": 0.5}),
            "must have metrics by split, as mgk train writes them, got 0.5 for test",
        ),
        (change_result(seconds="long"), "result.json must have a number as seconds, got 'long'"),
        (change_result(baselines={"majority": None}), "result.json must have a number as majority, got None"),
        (damage_curves, r"metrics.jsonl must have a measurement as JSON in every line, got '\x00\x00\x00' in line 2"),
        (text_in_curves, 'metrics.jsonl must have a measurement as JSON in every line, got \'{"step": 1'),
        (damage_checkpoint, "must hold whole checkpoints, got a damaged one: skipped the damaged checkpoint best-"),
        (empty, "must hold a result, curves or a checkpoint, got none of them: has it begun?"),
        (only_a_model, "got no config.yaml there, but a saved model of model_type 'mgk': give the run that trained it"),
        (plain_hugging_face, "got no config.yaml there, but a saved model of model_type 'bert'"),
    ],
)
def test_what_is_refused(mgk_report, broken, finished, tmp_path, damage, message):
    damage(broken)
    printed = mgk_report(finished[2], broken, code=1)
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "must hold a model of mgk, got model_type 'bert'"),
        ({"architectures": ["MGKModel"]}, "must hold the weights of MGKModel alone, got classifier.* as well"),
        (
            {"architectures": ["MGKForCausalLM"]},
            "must hold the weights of MGKForCausalLM alone, got classifier.* as well",
        ),
        ({"num_hidden_layers": 7}, r"must hold all weights of MGKForSequenceClassification, got no model\.layers\."),
        ({"hidden_size": 96}, "must hold weights that fit its configuration, got "),
        ({"architectures": ["BertModel"]}, "must name an architecture of mgk.models, got BertModel"),
    ],
)
def test_a_model_of_another_kind(broken, changes, message):
    folder = read_run(broken).checkpoint
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be the JSON of a model, got a list"):
        load_model(folder)


def test_no_runs():
    with pytest.raises(ValueError, match="a report must have at least one run, got none"):
        compare_runs([])
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        compare_runs(["somewhere"], tokens=0)


@pytest.mark.parametrize(
    ("recipe", "row", "changes"),
    [
        ("demo", "smgk-4", []),
        ("lra/text", "softmax-2", ["seed=3", "optimizer.lr=2e-4", "training.precision=fp32"]),
        ("lra/listops", "mgk-4+qk_norm", ["training.clip_norm=null", "optimizer.betas=[0.9, 0.95]"]),
        ("wikitext2", "smgk-4+variance_scale=1,3", ["data.options={}", "training.steps=7", "schedule.warmup=2"]),
        ("tatoeba", None, ["data.workers=0", "validation.limit=5"]),
    ],
)
def test_the_command_makes_the_same_run(recipe, row, changes):
    config = mgk.recipes.load(recipe).config(row, changes)
    command = reproduce(config)
    program, name, again, *rest = shlex.split(command, comments=True)
    assert (program, name, again) == ("mgk", "train", recipe)
    assert "#" not in command
    named = rest[1] if rest[0] == "--row" else None
    assert (named is None) == (row is None)
    assert mgk.recipes.load(again).config(named, rest[2 * (named is not None) :]) == config


def test_a_recipe_that_has_changed_is_told():
    config = mgk.recipes.load("demo").config("smgk-4")
    values = to_mapping(config)
    del values["data"]["options"]["test"]
    older = from_mapping(RunConfig, yaml.safe_load(yaml.safe_dump(values)))
    assert reproduce(older).endswith("  # the recipe has changed since: data.options.test")
    assert "#" in reproduce(dataclasses.replace(config, name="mine"))
