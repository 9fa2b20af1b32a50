"""Ours from the weights of published code, in its batches: a small checkout of our own making, laid out as theirs."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from mgk.data import prepare
from mgk.reproduction.controls import read_controls
from mgk.training import result

ROOT = Path(__file__).parents[2]
FILES = {
    "lra_config": """
config = {"listops": {
    "model": {"max_seq_len": 60, "num_head": 2, "dropout_prob": 0.1, "attention_dropout": 0.1},
    "training": {"batch_size": 4, "num_train_steps": 12, "eval_frequency": 2, "num_eval_steps": 3},
    "extra_attn_config": {"softmax": {"attention_grad_checkpointing": True}},
}}
""",
    "dataset": "class LRADataset:\n    pass\n",
    "attention": "class SoftmaxAttention:\n    pass\n",
    "model": "",
    "model_wrapper": """
import torch
from published_cases import ArenaClassifier, ArenaHead


class Head(ArenaHead):
    def forward(self, x):
        return self.mlpblock(x.mean(1))


class ModelForSC(ArenaClassifier):
    def __init__(self, config):
        super().__init__(["softmax"] * 2, heads=config["num_head"], length=config["max_seq_len"])
        self.model.embeddings.word_embeddings = torch.nn.Embedding(32, 12)
        self.seq_classifer = Head(12, 7)
        self.seq_classifer.mlpblock[2] = torch.nn.Linear(7, 10)
        for module in self.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = config["dropout_prob"]

    def forward(self, input_ids_0, mask_0, label):
        scores = super().forward(input_ids_0, mask_0)
        losses = torch.nn.functional.cross_entropy(scores, label, reduction="none")
        return {"loss": losses, "accu": (scores.argmax(-1) == label).float()}
""",
    "run_tasks": """
import json
import torch
from torch.utils.data import DataLoader
from dataset import LRADataset
from model_wrapper import ModelForSC
import lra_config

own = lra_config.config["listops"]
training = own["training"]
model = ModelForSC({**own["model"], "max_seq_len": 64}).cuda()
parts = {part: LRADataset(f"../datasets/listops.{part}.pickle", part != "test") for part in ("train", "dev", "test")}
batches = {part: iter(DataLoader(each, batch_size=4, drop_last=True)) for part, each in parts.items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=RATE, pct_start=4 / 12, anneal_strategy="linear", total_steps=12
)
log = open("../logs/listops_softmax_output.log", "a+")


def write(part, step, found):
    loss, accu = (sum(each) / len(found) for each in zip(*found))
    log.write(json.dumps({"component": part, "train_step_idx": step, "loss": loss, "accu": accu}) + "\\n")
    log.flush()


def measure(part, count):
    with torch.no_grad():
        outs = [model(**next(batches[part])) for _ in range(count)]
    return [(out["loss"].mean().item(), out["accu"].mean().item()) for out in outs]


seen = []
for step in range(12):
    optimizer.zero_grad()
    out = model(**next(batches["train"]))
    out["loss"].mean().backward()
    optimizer.step()
    schedule.step()
    seen.append((out["loss"].mean().item(), out["accu"].mean().item()))
    if step % 2 == 1:
        write("train", step, seen)
        seen = []
        write("dev", step, measure("dev", 3))
        torch.save(model.state_dict(), "../logs/listops_softmax_output.model")
write("test", step, measure("test", 2))
""",
}
OURS = (
    "training.steps=12", "training.batch_size=4", "training.log_every=2", "validation.every=4", "schedule.warmup=4",
    "optimizer.lr=0.02", "data.longest=60", "model.hidden_size=12", "model.head_dim=6", "model.intermediate_size=24",
    "model.classifier_size=7", "model.max_position_embeddings=64",
)  # fmt: skip
NAMES = ("attention", "model", "model_wrapper", "dataset", "lra_config")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs one of the two scripts with a checkout whose learning rate is that of ours, unless it is told another."""
    # 30 samples in batches of four would end an epoch within a batch.
    prepare("listops", folder=tmp_path / "listops", train=32, valid=10, test=9, minimum=5, maximum=50)
    code = tmp_path / "checkout" / "LRA" / "code"
    code.mkdir(parents=True)
    (code.parent.parent / "COMMIT").write_text("abc\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(script, *arguments, rate=0.02):
        for name, text in FILES.items():
            (code / f"{name}.py").write_text(text.replace("RATE", str(rate)))
        results = tmp_path / "results"
        given = [str(code.parent.parent), "--data", str(tmp_path / "listops"), *arguments]
        if script == "published_control":
            given += ["--output", str(results / "controls" / "control.json")]
        else:
            given += ["--results", str(results)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
            patch.setattr(sys, "argv", [f"{script}.py", *given])
            try:
                importlib.import_module(script).main()
            finally:
                for name in (*NAMES, script):
                    sys.modules.pop(name, None)
        newest = max((results / "controls").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return json.loads(newest.read_text())

    return run


def training_losses(found):
    return {line["step"]: line["loss"] for line in found["curve"] if line["kind"] == "train"}


def test_losses_are_those_of_the_published_code(run, tmp_path):
    """`python benchmarks/same_start.py CHECKOUT`, over one and a half epochs. The checkout is plain torch."""
    published = run("published_control", "--heads", "3", "--dropout", "0", "--seed", "5")
    ours = run("same_start", "--heads", "3", "--dropout", "0", "--seed", "5", "--set", *OURS)
    theirs, own = training_losses(published), training_losses(ours)
    assert own.keys() == theirs.keys() == {2, 4, 6, 8, 10, 12}
    assert own == pytest.approx(theirs, abs=2e-5)
    # They are those of a model that learns.
    assert theirs[12] < theirs[2] - 0.05
    assert (ours["complete"], ours["heads"], ours["seed"], ours["commit"]) == (True, 3, 5, "abc")
    assert ours["config"]["optimizer"]["lr"] == 0.02
    assert ours["metrics"]["test_accuracy"] >= 0
    assert [each.accuracy is None for each in read_controls(tmp_path / "results")] == [False, False]


def test_another_learning_rate_is_seen(run):
    """The comparison above can fail."""
    published = run("published_control", "--heads", "2", "--dropout", "0", rate=0.03)
    ours = run("same_start", "--heads", "2", "--dropout", "0", "--set", *OURS)
    theirs, own = training_losses(published), training_losses(ours)
    assert own[2] == pytest.approx(theirs[2], abs=0.05)
    assert abs(own[12] - theirs[12]) > 1e-3


def test_a_part_of_the_start(run):
    """With the weights alone the first loss is that of other batches, with the batches alone that of other weights."""
    whole, weights, batches = (
        run("same_start", "--seed", "1", *only, "--set", *OURS)
        for only in ((), ("--only", "weights"), ("--only", "batches"))
    )
    assert [found["takes"] for found in (whole, weights, batches)] == [["weights", "batches"], ["weights"], ["batches"]]
    losses = [training_losses(found)[2] for found in (whole, weights, batches)]
    assert len(set(losses)) == 3
    own = run("same_start", "--seed", "1", "--only", "weights", "--set", *OURS, "seed=2")
    assert training_losses(own) != training_losses(weights)


def test_several_seeds_at_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    with pytest.raises(SystemExit, match=r"^0$"):
        run("same_start", "--seeds", "0", "3", "--only", "weights", "--set", *OURS)
    found = read_controls(tmp_path / "results")
    assert [(each.seed, each.takes, each.is_complete) for each in found] == [
        (0, {"weights"}, True), (3, {"weights"}, True),
    ]  # fmt: skip


def test_a_run_that_is_stopped_goes_on(run, tmp_path):
    whole = run("same_start", "--heads", "2", "--set", *OURS)
    there = str(tmp_path / "run")
    stopped = run("same_start", "--heads", "2", "--to", there, "--steps", "6", "--set", *OURS)
    assert (stopped["complete"], stopped["steps"], stopped["metrics"]) == (False, 6, {})
    assert stopped["start"] == whole["start"]
    again = run("same_start", "--heads", "2", "--to", there, "--set", *OURS)
    assert again["complete"]
    assert training_losses(again) == training_losses(whole)
    assert again["metrics"] == whole["metrics"]


def test_a_run_that_is_stopped_before_its_first_line_has_an_empty_curve(run):
    stopped = run("same_start", "--steps", "1", "--set", *OURS)
    assert (stopped["complete"], stopped["steps"], stopped["curve"]) == (False, 1, [])


def test_every_control_gets_its_run(run, tmp_path, monkeypatch):
    for heads in ("2", "3"):
        control = run("published_control", "--heads", heads, "--dropout", "0", "--seed", "1")
        result.write(tmp_path / "results" / "controls" / f"{heads}.json", control)
    (tmp_path / "results" / "controls" / "control.json").unlink()
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    with pytest.raises(SystemExit, match=r"^0$"):
        run("same_start", "--every", "--time", "200", "--to", str(tmp_path / "runs"), "--set", *OURS)
    found = read_controls(tmp_path / "results")
    assert [(each.heads, each.name.split("-")[0]) for each in found] == [
        (2, "nystromformer"), (3, "nystromformer"), (2, "same"), (3, "same"),
    ]  # fmt: skip
    assert all(each.is_complete for each in found)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["2-dropout-0-seed-1", "3-dropout-0-seed-1"]


def test_epochs_that_end_within_a_batch_are_refused(run):
    with pytest.raises(SystemExit, match="an epoch must be a whole number of batches, got 32 samples"):
        run("same_start", "--set", *OURS, "training.batch_size=5")
