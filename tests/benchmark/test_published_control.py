"""The published code on our data: a small checkout of our own making, in the layout of theirs."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from mgk.data import prepare
from mgk.reproduction.controls import read_controls

ROOT = Path(__file__).parents[2]
NAMES = ("attention", "model", "model_wrapper", "dataset", "lra_config")
FILES = {
    "lra_config": """
config = {"listops": {
    "model": {"max_seq_len": 60, "num_head": 2, "dropout_prob": 0.1, "attention_dropout": 0.1},
    "training": {"batch_size": 4, "num_train_steps": 6, "eval_frequency": 2, "num_eval_steps": 2},
    "extra_attn_config": {"softmax": {"attention_grad_checkpointing": True}},
}}
""",
    "dataset": "class LRADataset:\n    pass\n",
    "attention": """
import torch


class SoftmaxAttention(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.drop = torch.nn.Dropout(config["attention_dropout"])

    def forward(self, Q, K, V, mask):
        scores = Q @ K.mT / SCALE + torch.where(mask == 0, -1e6, 0.0)[:, None, None]
        return self.drop(scores.softmax(-1)) @ V


class Attention(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config["attention_grad_checkpointing"] is False
        self.heads = config["num_head"]
        self.W_q, self.W_k, self.W_v = (torch.nn.Linear(8, 4 * self.heads) for _ in range(3))
        self.attn = SoftmaxAttention({**config, "head_dim": 4})
        self.ff = torch.nn.Linear(4 * self.heads, 8)

    def forward(self, X, mask):
        parts = (each(X).unflatten(-1, (self.heads, 4)).transpose(1, 2) for each in (self.W_q, self.W_k, self.W_v))
        return self.ff(self.attn(*parts, mask).transpose(1, 2).flatten(2))
""",
    "model": """
import torch
from attention import Attention


class Body(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = torch.nn.Embedding(32, 8)
        self.mha = Attention(config)

    def forward(self, ids, mask):
        X = self.words(ids)
        return (X + self.mha(X, mask)) * mask[:, :, None]
""",
    "model_wrapper": """
import torch
from model import Body


class ModelForSC(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Body(config)
        self.seq_classifer = torch.nn.Sequential(Mean(), torch.nn.Linear(8, 10))

    def forward(self, input_ids_0, mask_0, label):
        scores = self.seq_classifer(self.model(input_ids_0, mask_0))
        losses = torch.nn.functional.cross_entropy(scores, label, reduction="none")
        return {"loss": losses, "accu": (scores.argmax(-1) == label).float()}


class Mean(torch.nn.Module):
    def forward(self, X):
        return X.mean(1)
""",
    "run_tasks": """
import json, sys
import torch, torch.nn as nn
from torch.utils.data import DataLoader
from dataset import LRADataset
from model_wrapper import ModelForSC
import lra_config

assert sys.argv[1:] == ["--model", "softmax", "--task", "listops"]
own = lra_config.config["listops"]
training = own["training"]
model = nn.DataParallel(
    ModelForSC({**own["model"], **own["extra_attn_config"]["softmax"]}).cuda(),
    device_ids=list(range(torch.cuda.device_count())),
)
assert torch.cuda.device_count() == 1
samples = {
    part: LRADataset(f"../datasets/listops.{part}.pickle", part != "test") for part in ("train", "dev", "test")
}
batches = {part: iter(DataLoader(each, batch_size=4, drop_last=True)) for part, each in samples.items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
log = open("../logs/listops_softmax_output.log", "a+")


def measure(part, step, count):
    found = []
    with torch.no_grad():
        for _ in range(count):
            out = model(**{key: each.cuda() for key, each in next(batches[part]).items()})
            found.append((out["loss"].mean().item(), out["accu"].mean().item()))
    loss, accu = (sum(each) / len(found) for each in zip(*found))
    log.write(json.dumps({"component": part, "train_step_idx": step, "loss": loss, "accu": accu}) + "\\n")
    log.flush()


try:
    for step in range(training["num_train_steps"]):
        batch = next(batches["train"])
        assert batch["input_ids_0"].shape == (4, 64)
        optimizer.zero_grad()
        model(**batch)["loss"].mean().backward()
        optimizer.step()
        if (step + 1) % training["eval_frequency"] == 0:
            measure("dev", step, training["num_eval_steps"])
            torch.save(model.module.state_dict(), "../logs/listops_softmax_output.model")
except KeyboardInterrupt:
    pass
model.module.load_state_dict(torch.load("../logs/listops_softmax_output.model"))
measure("test", step, 2)
""",
}


@pytest.fixture(scope="module")
def control():
    spec = importlib.util.spec_from_file_location("published_control", ROOT / "benchmarks" / "published_control.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(control, tmp_path, monkeypatch):
    """Runs it on a checkout whose attention divides by some number, 2 if it is right; returns what it wrote."""
    prepare("listops", folder=tmp_path / "listops", train=30, valid=10, test=9, minimum=5, maximum=50)

    def run(*arguments, divisor=2):
        code = tmp_path / "checkout" / "LRA" / "code"
        code.mkdir(parents=True, exist_ok=True)
        (code.parent.parent / "COMMIT").write_text("abc\n")
        for name, text in FILES.items():
            (code / f"{name}.py").write_text(text.replace("SCALE", f"{divisor}"))
        output = tmp_path / "results" / "controls" / "one.json"
        given = [str(code.parent.parent), "--data", str(tmp_path / "listops"), "--output", str(output), *arguments]
        monkeypatch.setattr(sys, "argv", ["published_control.py", *given])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        try:
            control.main()
        finally:
            for name in NAMES:
                sys.modules.pop(name, None)
        return json.loads(output.read_text())

    return run


@pytest.mark.parametrize("attention", ["auto", "padded", "half"])
def test_a_run_of_a_small_checkout(run, tmp_path, attention):
    """`python benchmarks/published_control.py CHECKOUT`."""
    found = run("--heads", "3", "--dropout", "0.2", "--attention", attention)
    assert found["complete"] is True
    assert (found["commit"], found["steps"]) == ("abc", 6)
    assert found["attention"]["kind"] == ("packed" if attention == "auto" else attention)
    assert found["attention"]["errors"]["logits"] < (1e-2 if attention == "half" else 1e-5)
    model = found["config"]["model"]
    assert (model["num_head"], model["dropout_prob"], model["attention_dropout"]) == (3, 0.2, 0.2)
    assert [line["step"] for line in found["curve"] if line["kind"] == "valid"] == [2, 4, 6]
    best = max(line["accuracy"] for line in found["curve"])
    assert found["metrics"]["valid_accuracy"] == best
    (read,) = read_controls(tmp_path / "results")
    assert (read.heads, read.dropout, read.accuracy) == (3, 0.2, found["metrics"]["test_accuracy"])


def test_a_seed_decides_everything(run):
    first, again, other = (run("--seed", seed)["curve"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_run_that_is_stopped_is_tested_and_marked(run):
    found = run("--steps", "3")
    assert (found["complete"], found["steps"]) == (False, 2)
    assert "test_accuracy" in found["metrics"]


def test_a_run_without_a_validation_has_no_numbers(run):
    found = run("--seconds", "-1", "--steps", "2")
    assert (found["complete"], found["steps"], found["metrics"], found["curve"]) == (False, 0, {}, [])


def test_an_attention_that_is_not_theirs_is_refused(run):
    with pytest.raises(SystemExit, match="the attention must agree with that of the checkout, got packed"):
        run(divisor=3)


def test_steps_outside_of_the_schedule_are_refused(run):
    with pytest.raises(SystemExit, match=r"--steps must lie in \[1, 6\], got 7"):
        run("--steps", "7")


@pytest.mark.parametrize(("kind", "error"), [("packed", 1e-10), ("padded", 1e-10), ("half", 4e-3)])
@pytest.mark.parametrize("is_known", [False, True], ids=["lengths-asked", "lengths-known"])
def test_padding_changes_nothing(control, kind, error, is_known):
    query, key, value = torch.randn(3, 4, 2, 11, 8, dtype=torch.float64)
    lengths = torch.tensor([11, 1, 6, 9])
    mask = (torch.arange(11) < lengths[:, None]).float()
    layout = control.layout_of(mask, lengths.tolist() if is_known else None)
    out = control.ATTENTION[kind](query, key, value, layout, 0.0).double()
    for number, length in enumerate(lengths.tolist()):
        q, k, v = (each[number, :, :length] for each in (query, key, value))
        expected = (q @ k.mT / 8**0.5).softmax(-1) @ v
        torch.testing.assert_close(out[number, :, :length], expected, rtol=error, atol=error)


def test_samples_come_in_the_order_of_an_endless_list(control, tmp_path):
    corpus = prepare("listops", folder=tmp_path / "listops", train=10, valid=2, test=5, minimum=5, maximum=50)
    data = control.Data(corpus, 64, torch.device("cpu"), 100, float("inf"))
    random.seed(3)
    batches = control.Batches(data.open("../datasets/listops.train.pickle", True), batch_size=4, drop_last=True)
    found = torch.cat([next(batches)["input_ids_0"] for _ in range(6)])
    random.seed(3)
    order, expected = list(range(10)), []
    while len(expected) < 24:
        # The list that was shuffled last is shuffled again.
        random.shuffle(order)
        expected += order
    assert torch.equal(found, data.tokens["train"][expected[:24]].long())
    text = corpus.splits["train"].sequences["text"]
    first = found[0]
    assert first[: len(text[expected[0]])].tolist() == text[expected[0]].tolist()
    assert not first[len(text[expected[0]]) :].any()
    # A split smaller than a batch is gone through more than once, one that ends has whole batches only.
    assert len(next(iter(control.Batches(data.open("listops.dev.pickle", True), 7, True)))["label"]) == 7
    assert len(list(control.Batches(data.open("listops.test.pickle", False), 2, True))) == 2
