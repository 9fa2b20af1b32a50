"""Packed batches in the training loop: the same numbers as padded ones, and nothing that fills up counts."""

import pytest
import torch
from training_cases import make_config, make_trainer, take_steps

from mgk.training.task import Share, build_task

STEPS = 6


def losses(task, corpus, folder, **data):
    config = make_config(
        task, data=data, model={"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
        training={"steps": STEPS, "log_every": 1, "accumulate": 2},
    )  # fmt: skip
    trainer = make_trainer(config, folder, corpus)
    take_steps(trainer, STEPS)
    return [eval(record)[0] for _, record in sorted(trainer.records.items())], trainer


@pytest.mark.parametrize("task", ["classification", "pairs", "translation"])
@pytest.mark.parametrize("multiple", [1, 16])
def test_packed_training_is_padded_training(task, multiple, corpora, tmp_path):
    expected, padded = losses(task, corpora(task), tmp_path / "padded")
    got, packed = losses(task, corpora(task), tmp_path / "packed", pack=True, multiple_of=multiple)
    assert got == pytest.approx(expected, rel=1e-4)
    for (name, one), other in zip(padded.model.named_parameters(), packed.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4), name
    assert packed.state.tokens == padded.state.tokens


def test_what_em_counts_is_not_filled_up(corpora, tmp_path):
    """The E-step counts every pair of a batch."""
    changes = {"attention": "smgk-em", "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    priors = []
    for data in ({}, {"pack": True}):
        config = make_config(data=data, model=changes, training={"steps": 4, "log_every": 1})
        trainer = make_trainer(config, tmp_path / str(len(priors)), corpora("classification"))
        take_steps(trainer, 4)
        priors.append([tensor for name, tensor in trainer.model.named_buffers() if name.endswith("log_prior")])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*priors, strict=True))
    share = Share(device=torch.device("cuda"), precision=torch.bfloat16)
    assert share.training_multiple_of(make_config(data={"pack": True}, model=changes)) == 1
    with pytest.raises(ValueError, match=r"data\.multiple_of must be left out where data\.pack is true and EM"):
        make_config(data={"pack": True, "multiple_of": 8}, model=changes)


def test_where_packing_would_not_help_it_is_refused(corpora):
    with pytest.raises(ValueError, match=r"data\.pack must be false or left out with linear attention, got true"):
        make_config(data={"pack": True}, model={"attention": "mlk"})
    task = build_task(make_config(data={"pack": True}), corpora("classification"))
    with pytest.raises(ValueError, match=r"data\.pack must be false .*training\.precision=fp32 on a GPU, got true"):
        task.training_batches(Share(device=torch.device("cuda")))


@pytest.mark.parametrize("task", ["classification", "pairs", "translation"])
def test_what_fills_up_is_not_counted(task, corpora):
    counted = []
    for data in ({}, {"pack": True}, {"pack": True, "multiple_of": 32}):
        kind = build_task(make_config(task, data=data), corpora(task))
        batch = kind.training_batches(Share(device=torch.device("cpu"))).batch(0, 0)
        counted.append((kind.count_targets(batch), kind.count_tokens(batch)))
    assert counted[0] == counted[1] == counted[2]


def test_on_a_gpu_few_shapes_are_made():
    share = Share(device=torch.device("cuda"), precision=torch.bfloat16)
    assert share.training_multiple_of(make_config(data={"pack": True, "longest": 64})) == 64
    packed = {"pack": True, "longest": 4000}
    model = {"max_position_embeddings": 4096}
    assert share.training_multiple_of(make_config(data=packed, model=model)) == 1024
    assert share.training_multiple_of(make_config(data={**packed, "multiple_of": 96}, model=model)) == 96
    assert share.training_multiple_of(make_config(data={"longest": 4000}, model=model)) == 64
