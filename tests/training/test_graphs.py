"""Updates recorded as CUDA graphs are the updates that they stand for."""

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from model_cases import KINDS, SMALL
from torch._dynamo.utils import counters
from training_cases import make_config, make_corpus

from mgk.data import load
from mgk.models import architecture
from mgk.training import Trainer, build_fabric
from mgk.training.graphs import unsupported


class Watched(Trainer):
    """Keeps the loss of every update."""

    def __init__(self, *args, **options):
        self.losses = []
        super().__init__(*args, **options)

    def _read(self, report):
        super()._read(report)
        self.losses.append(report.values.tolist()[0])


def make_run(tmp_path, name, task, steps, *, dropout=0.1, attention_dropout=0.0, model=None, data=None, **changes):
    rates = {"dropout": dropout, "attention_dropout": attention_dropout, "activation_dropout": dropout}
    config = make_config(task, model=rates | (model or {}), data=data or {}, training={"steps": steps, **changes})
    folder, corpus = tmp_path / name, tmp_path / f"{task}-corpus"
    folder.mkdir(exist_ok=True)
    prepared = load(corpus) if corpus.exists() else make_corpus(task, corpus)
    return Watched(config, folder, prepared, build_fabric(device="cuda"))


def train(trainer, until=None):
    for step in trainer.steps():
        if step == until:
            break
    return trainer.losses


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["classification", "language", "translation"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recorded_updates_are_the_same(tmp_path, task, precision):
    """Dropout included: the generator is at the same place in every step."""
    options = {"precision": precision, "compile": False}
    plain = train(make_run(tmp_path, "plain", task, 80, cuda_graphs=False, **options))
    trainer = make_run(tmp_path, "recorded", task, 80, **options)
    recorded = train(trainer)
    assert trainer.updater.graphs is not None
    assert not trainer.updater.graphs._failed
    assert len(trainer.updater.graphs._recordings) >= 1
    # Atomic sums in backward round differently from run to run.
    assert recorded == pytest.approx(plain, rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_adaptive_softmax_is_recorded(tmp_path, precision, compiled):
    """A recording for each size of its clusters, and none that fails; compiled, one graph serves all sizes.

    Up to the first validation, which looks the rows up.
    """
    options = {
        "precision": precision, "compile": compiled, "data": {"multiple_of": 8},
        "model": {"architecture": "wikitext103-small", "adaptive_cutoffs": [100, 200]},
    }  # fmt: skip
    plain = train(make_run(tmp_path, "plain", "language", 80, cuda_graphs=False, **options), until=39)
    counters.clear()
    trainer = make_run(tmp_path, "recorded", "language", 80, **options)
    recorded = train(trainer, until=39)
    assert not trainer.updater.graphs._failed
    assert len(trainer.updater.graphs._recordings) > 1
    assert recorded == pytest.approx(plain, rel=1e-4 if precision == "fp32" else 2e-2)
    assert not counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["classification", "language", "translation"])
def test_recorded_updates_drop_other_pairs_each_time(tmp_path, task):
    """The seed is drawn within the graph: the same batch through the same weights has another loss at each replay."""
    options = {"precision": "bf16", "compile": False, "dropout": 0.0, "attention_dropout": 0.3}
    trainer = make_run(tmp_path, "recorded", task, 80, **options)
    recorded = train(trainer)
    assert not trainer.updater.graphs._failed
    plain = train(make_run(tmp_path, "plain", task, 80, cuda_graphs=False, **options))
    assert recorded == pytest.approx(plain, rel=2e-2)
    recording = next(iter(trainer.updater.graphs._recordings.values()))
    losses = []
    for _ in range(8):
        recording.graph.replay()
        losses.append(recording.loss.item())
    assert len(set(losses)) == 8


@pytest.mark.gpu
def test_a_run_with_graphs_goes_on_where_it_stopped(tmp_path):
    options = {"precision": "fp32", "compile": False}
    whole = train(make_run(tmp_path, "whole", "classification", 60, **options))
    first = make_run(tmp_path, "parts", "classification", 60, **options)
    train(first, until=30)
    first.save()
    second = make_run(tmp_path, "parts", "classification", 60, **options)
    assert second.state.step == 30
    assert train(second) == pytest.approx(whole[30:], rel=1e-4)


@pytest.mark.gpu
def test_compiled_updates_are_recorded_too(tmp_path):
    trainer = make_run(tmp_path, "run", "classification", 60)
    train(trainer)
    assert not trainer.updater.graphs._failed
    assert trainer.updater.graphs._recordings
    assert trainer.losses[-1] < trainer.losses[0]


@pytest.mark.gpu
def test_priors_set_by_em_are_not_recorded(tmp_path):
    config = make_config("classification", model={"attention": "smgk-em"}, training={"steps": 4})
    corpus = make_corpus("classification", tmp_path / "corpus")
    assert Trainer(config, tmp_path, corpus, build_fabric(device="cuda")).updater.graphs is None


@pytest.mark.gpu
def test_a_recording_that_fails_costs_nothing_but_speed(tmp_path):
    """What the host must know cannot be recorded; random numbers are drawn as ever after that."""
    trainer = make_run(tmp_path, "run", "classification", 30, precision="fp32", compile=False)
    loss = trainer.task.loss
    trainer.task.loss = lambda *args: loss(*args) * (1.0 + 0.0 * float(args[2]))
    with pytest.warns(UserWarning, match="CUDA graphs could not be recorded"):
        found = train(trainer)
    plain = train(make_run(tmp_path, "plain", "classification", 30, precision="fp32", compile=False, cuda_graphs=False))
    assert found == pytest.approx(plain, rel=1e-4)


GPU, ONE = torch.device("cuda"), SingleDeviceStrategy(device="cpu")


def build(attention="smgk", kind="classifier", **changes):
    model_class, name, small = KINDS[kind]
    return model_class(
        architecture(name, attention=attention, **{**SMALL, **small, "attention_dropout": 0.0, **changes})
    )


@pytest.mark.parametrize("attention", ["softmax", "gaussian", "smgk", "mgk", "mgk-hard"])
def test_what_can_be_recorded(attention):
    assert unsupported(build(attention), GPU, ONE, None) is None


def test_an_adaptive_softmax_can_be_recorded():
    """What it needs of the host is in the batch: see ``tests/models/test_adaptive_softmax.py``."""
    assert unsupported(build(kind="wikitext"), GPU, ONE, None) is None


@pytest.mark.parametrize("attention", ["softmax", "gaussian"])
def test_dropout_on_one_component_can_be_recorded(attention):
    assert unsupported(build(attention, attention_dropout=0.1), GPU, ONE, None) is None


@pytest.mark.parametrize("attention", ["smgk", "mgk"])
def test_dropout_on_mixtures_can_be_recorded_in_half_precision(attention):
    """There the fused kernels draw their seed on the device."""
    assert unsupported(build(attention, attention_dropout=0.1), GPU, ONE, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("model", "device", "strategy", "why"),
    [
        ({}, torch.device("cpu"), ONE, "a CPU"),
        ({}, GPU, DDPStrategy(), "several ranks"),
        ({"attention": "smgk-em"}, GPU, ONE, "EM"),
        ({"attention_dropout": 0.1}, GPU, ONE, "the host draws"),
    ],
)
def test_what_cannot_be_recorded(model, device, strategy, why):
    assert why in unsupported(build(**model), device, strategy, None)


def test_graphs_that_are_asked_for_in_vain(tmp_path):
    config = make_config("classification", training={"cuda_graphs": True})
    corpus = make_corpus("classification", tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"training.cuda_graphs must be false or left out with a CPU, got true"):
        Trainer(config, tmp_path, corpus, build_fabric(device="cpu"))
