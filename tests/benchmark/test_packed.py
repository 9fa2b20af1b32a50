"""A step on reviews of real lengths: the same loss however they lie, and what the numbers are."""

import json

import pytest
import torch
from typer.testing import CliRunner

import mgk.data
from mgk.benchmark import markdown, packed
from mgk.benchmark.cells import packed_cells
from mgk.benchmark.timing import Effort
from mgk.cli import app

CPU = torch.device("cpu")
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Reviews of 20 to 60 bytes."""
    folder = tmp_path_factory.mktemp("imdb")
    source = folder / "source"
    source.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"text": "x" * (20 + 7 * n % 41), "label": n % 2}) for n in range(12)]
        (source / f"imdb_{split}.jsonl").write_text("\n".join(lines) + "\n")
    return mgk.data.prepare("imdb", source, folder / "prepared")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(packed, "PADDED_TO", 128)


def script(**times):
    class Script:
        def host(self, candidate):
            return None

        def sample(self, candidate, host_ms):
            return next(value for name, value in times.items() if name in candidate.name)

    return Script()


def test_layouts_change_nothing_but_the_time(corpus):
    chosen = packed.readers(["smgk"], CPU)
    assert [(each.attention, each.heads) for each in chosen[::3]] == [("softmax", 8), ("smgk", 4)]
    clock = script(packed=2.0, longest=5.0, **{"4,096": 10.0})
    found = packed.compare(chosen, corpus, count=4, device=CPU, effort=EFFORT, clock=clock)
    assert not found.failures
    assert [record["layout"] for record in found.baselines] == ["published"] * 2
    rows = {(row["preset"], row["layout"]): row for row in found.rows}
    assert rows["smgk", "packed"]["training_ratio"] == 5.0
    # On a CPU every softmax goes through stock kernels, and here all models take the same time.
    assert rows["smgk", "longest"]["training_ratio_of_all"] == rows["smgk", "longest"]["training_ratio_stock"] == 0.4
    assert rows["smgk", "longest"]["training_fastest_of_all"] == "packed, auto"
    assert "training_ratio_of_all" not in rows["softmax", "longest"]
    assert rows["softmax", "longest"]["training_ratio"] == 2.0
    for row in rows.values():
        assert row["loss"] == pytest.approx(row["baseline_loss"], rel=1e-5)
        assert row["error"]["gradient"] < 1e-4
        assert row["tokens"] < 4 * 60
    assert rows["smgk", "packed"]["computed_tokens"] == rows["smgk", "packed"]["tokens"]
    assert found.baselines[0]["computed_tokens"] == 4 * 128
    lines = packed_cells([*found.baselines, *found.rows])
    assert lines[3][:6] == ["softmax-8", "packed", "fastest of all: auto", lines[3][3], "2.00", ""]
    assert lines[4][:3] == ["smgk-4", "padded to 4,096", "auto"]
    assert lines[4][5:8] == ["0.20x", "0.20x", ""]


def test_a_model_that_is_wrong_gets_no_number(corpus, monkeypatch):
    right = packed.reviews

    def wrong(corpus, layout, *args):
        batch = right(corpus, layout, *args)
        return {**batch, "labels": 1 - batch["labels"]} if layout == "longest" else batch

    monkeypatch.setattr(packed, "reviews", wrong)
    found = packed.compare(packed.readers(["smgk"], CPU)[3:], corpus, count=4, device=CPU, effort=EFFORT)
    assert [each["layout"] for each in found.failures] == ["longest"]
    assert "the error of the loss must be at most 0.0001, got" in found.failures[0]["reason"]
    assert [row["layout"] for row in found.rows] == ["packed"]


def test_packed_from_the_command_line(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mgk.training.corpora.open_or_prepare", lambda data, source: corpus)
    arguments = ["bench", "packed", "--quick", "--reviews", "2", "--output", str(tmp_path / "packed-cpu.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "packed-cpu.json").read_text())
    assert found["config"]["corpus"] == corpus.fingerprint
    assert "| smgk-4 | packed |" in markdown.tables(found)
