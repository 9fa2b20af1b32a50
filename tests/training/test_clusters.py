"""Rows of the clusters of an adaptive softmax, as parts of a batch."""

import pytest
import torch
from training_cases import make_config, make_corpus, make_trainer, take_steps

from mgk.data.batches import Windows
from mgk.training.clusters import ClusteredBatches
from mgk.training.task import Share, build_task

CUTOFFS = [100, 200]
MODEL = {"architecture": "wikitext103-small", "adaptive_cutoffs": CUTOFFS, "dropout": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus("language", tmp_path_factory.mktemp("corpora") / "language")


def batches(corpus, device="cpu", **changes):
    config = make_config("language", model=MODEL, **changes)
    return build_task(config, corpus).training_batches(Share(device=torch.device(device)))


def test_rows_are_those_of_the_targets(corpus):
    found = batches(corpus, data={"multiple_of": 8})
    assert isinstance(found, ClusteredBatches)
    assert len(found) == len(found.batches)
    assert found.rows(0, 3).tolist() == found.batches.rows(0, 3).tolist()
    batch = found.batch(0, 3)
    targets = batch["shift_labels"].flatten()
    for number, (start, end) in enumerate([(100, 200), (200, 256)]):
        rows = batch[f"cluster_rows_{number}"]
        inside = rows[rows < len(targets)]
        assert inside.tolist() == [place for place, word in enumerate(targets.tolist()) if start <= word < end]
        assert len(rows) % 8 == 0


def test_a_gpu_sees_few_shapes(corpus):
    """On a CPU, where nothing is recorded, nothing is padded."""
    on_gpu = batches(corpus, "cuda", training={"batch_size": 8}, data={"longest": 32})
    shapes = {tuple(tuple(tensor.shape) for tensor in on_gpu.batch(0, step).values()) for step in range(len(on_gpu))}
    assert len(shapes) <= 4
    on_cpu = batches(corpus).batch(0, 0)
    counts = torch.bincount(torch.bucketize(on_cpu["shift_labels"].flatten(), torch.tensor(CUTOFFS), right=True))
    assert [len(on_cpu["cluster_rows_0"]), len(on_cpu["cluster_rows_1"])] == counts[1:].tolist()


def test_a_plain_softmax_has_no_clusters(corpus):
    config = make_config("language")
    assert isinstance(build_task(config, corpus).training_batches(Share(device=torch.device("cpu"))), Windows)


def test_padding_changes_no_loss(corpus, tmp_path):
    """Runs whose clusters are padded, whose are not, and whose rows the model looks up by itself."""
    records = []
    for name, multiple_of in (("exact", 1), ("padded", 16), ("looked up", 1)):
        config = make_config("language", model=MODEL, training={"steps": 12}, data={"multiple_of": multiple_of})
        trainer = make_trainer(config, tmp_path / name, corpus)
        if name == "looked up":
            trainer.batches = trainer.batches.batches
        take_steps(trainer, 12)
        records.append(list(trainer.records.values()))
    exact, padded, looked_up = records
    assert exact == looked_up
    losses = [[float(record.strip("[").partition(",")[0]) for record in run] for run in (exact, padded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_only_the_number_of_rows_varies(corpus):
    task = build_task(make_config("language", model=MODEL), corpus)
    batch = batches(corpus).batch(0, 0)
    assert {name: task.varying_dimension(name, tensor) for name, tensor in batch.items()} == {
        "input_ids": None, "shift_labels": None, "cluster_rows_0": 0, "cluster_rows_1": 0,
    }  # fmt: skip
