"""The card of a finished run, beside its best model."""

import json
import shlex

import pytest
import yaml
from huggingface_hub import ModelCard
from training_cases import KINDS, make_config

import mgk.recipes
from mgk.commands.sweep import run_sweep
from mgk.commands.training import train_command
from mgk.models import card
from mgk.training import checkpoint
from mgk.training.card import evaluations
from mgk.training.configuration import RunConfig, from_mapping
from mgk.training.distributed import build_fabric
from mgk.training.run import fit

SHORT = {"training": {"steps": 2, "checkpoint_every": 2}, "validation": {"every": 2}, "schedule": {"warmup": 1}}


def run(task, folder, corpora, **options):
    """A tiny run: what its result says, and where its best model is."""
    config = make_config(task, **SHORT)
    found = fit(config, folder, corpora(task), build_fabric(device="cpu"), **options)
    return found, checkpoint.place(folder / "checkpoints", "best", found["best_step"])


@pytest.mark.parametrize("task", KINDS)
def test_a_finished_run_has_a_card(task, corpora, tmp_path):
    """What is read back stands in `result.json`: data with their fingerprint, metrics with their seed, the command."""
    command = train_command("tiny", ["seed=0", "model.dropout=0.1"])
    found, best = run(task, tmp_path, corpora, command=command)
    assert found == json.loads((tmp_path / "result.json").read_text())
    read = ModelCard.load(best / "README.md")
    assert read.data.model_name == f"tiny {found['row']}"
    assert "mgk" in read.data.tags
    told = {(each.dataset_split, each.metric_type): each for each in read.data.eval_results}
    assert told == {(each.dataset_split, each.metric_type): each for each in evaluations(found)}
    for (split, name), each in told.items():
        assert each.metric_value == found["metrics"][split][name]
        assert each.metric_args == {"seed": found["seed"]}
        assert each.dataset_revision == corpora(task).fingerprint
        assert each.dataset_type == found["corpus"]["name"]
    assert {split for split, _ in told} == {"valid", "test"}
    assert ("test", "loss") in told
    assert corpora(task).fingerprint in read.text
    assert f"```bash\n{command}\n```" in read.text
    assert f"| parameters | {found['parameters']:,} |" in read.text
    assert "## Licence" in read.text
    # The configuration is all of it: one could train from the card.
    settings = yaml.safe_load(read.text.split("```yaml\n")[1].split("```")[0])
    assert settings == found["config"]
    assert from_mapping(RunConfig, settings) == make_config(task, **SHORT)
    # The checkpoint is whole with the card beside it, and another card may take its place.
    assert card.FILE not in checkpoint.read(best).manifest["files"]
    (best / card.FILE).write_text("Mine.\n")
    run(task, tmp_path, corpora)
    assert (best / card.FILE).read_text() == "Mine.\n"
    checkpoint.read(best)


def test_a_run_from_python_names_no_command(corpora, tmp_path):
    _, best = run("classification", tmp_path, corpora)
    text = ModelCard.load(best / "README.md").text
    assert "```bash" not in text
    assert "mgk.training.fit" in text


def test_checkpoints_on_the_way_have_no_card(corpora, tmp_path):
    run("classification", tmp_path, corpora)
    folder = tmp_path / "checkpoints"
    assert [path.parent.name[:4] for path in folder.rglob(card.FILE)] == ["best"]


def test_commands_of_a_sweep_make_the_same_runs(monkeypatch, tmp_path):
    """Read as the shell and `mgk train` would read them, they lead to the configurations of the sweep."""
    made = []

    def remember(config, place, **options):
        made.append((config, options["command"]))
        return {"metrics": {"test": {"accuracy": 0.5}}, "parameters": 1}

    monkeypatch.setattr("mgk.commands.sweep.in_turn.run", remember)
    run_sweep(
        "lra/listops", rows=["smgk-4", "softmax-8+qk_norm"], seeds=[0, 3], changes=["optimizer.lr=2e-4"],
        folder=tmp_path, say=lambda text: None,
    )  # fmt: skip
    assert len(made) == 4
    for config, command in made:
        _, _, recipe, *changes, flag, row = shlex.split(command)
        assert flag == "--row"
        assert mgk.recipes.load(recipe).config(row, changes) == config
