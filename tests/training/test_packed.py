"""Packed batches in the training loop: the same numbers as padded ones, and nothing that fills up counts."""

import pytest
import torch
from training_cases import contents, different, make_config, make_trainer, take_steps

from mgk.data.kind import no_progress
from mgk.training import CheckpointError, checkpoint, snapshot
from mgk.training.loop import CHECKPOINTS, STEP
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
    assert share.training_multiple_of(make_config(data={**packed, "pack": False}, model=model)) == 64


def test_packing_is_left_to_the_machine():
    """On a GPU in half precision, where the model can; elsewhere, and for other tasks, only where told."""
    gpu = Share(device=torch.device("cuda"), precision=torch.bfloat16)
    for task in ("classification", "pairs"):
        assert gpu.packs(make_config(task))
        assert gpu.training_multiple_of(make_config(task)) == 64
    assert gpu.packs(make_config(model={"attention": "mgk-hard"}))
    assert not gpu.packs(make_config(data={"pack": False}))
    assert not gpu.packs(make_config(data={"pad_to": 64}))
    assert not gpu.packs(make_config(model={"attention": "mlk"}))
    assert not gpu.packs(make_config(model={"attention": "smgk-em"}))
    for task in ("language", "translation"):
        assert not gpu.packs(make_config(task))
    assert gpu.packs(make_config("translation", data={"pack": True}))
    for share in (Share(device=torch.device("cuda")), Share(device=torch.device("cpu"), precision=torch.bfloat16)):
        assert not share.packs(make_config())
    assert Share(device=torch.device("cpu")).packs(make_config(data={"pack": True}))


def test_on_a_gpu_evaluation_is_packed_as_training_is(corpora, monkeypatch):
    """With the same score, and whatever fills up does not count. On a CPU padding is faster."""
    cpu = Share(device=torch.device("cpu"))
    for task in ("classification", "pairs"):
        scores, packs = [], []
        for data in ({}, {"pack": True, "multiple_of": 32}):
            config = make_config(task, data=data)
            assert not cpu.packs_evaluation(config)
            assert Share(device=torch.device("cuda"), precision=torch.bfloat16).packs_evaluation(config)
            monkeypatch.setattr(Share, "packs_evaluation", Share.packs)
            kind = build_task(config, corpora(task))
            torch.manual_seed(0)
            model = kind.build_model()
            model.register_forward_pre_hook(
                lambda _, args, inputs, seen=packs: seen.append("cu_seq_lens_q" in inputs), with_kwargs=True
            )
            scores.append(kind.test(model, "valid", cpu, no_progress))
            monkeypatch.undo()
        (padded, items), (packed, packed_items) = scores
        assert packed == pytest.approx(padded, rel=1e-5)
        assert packed_items == items
        assert {*packs[: len(packs) // 2]} == {False}
        assert {*packs[len(packs) // 2 :]} == {True}


def test_a_run_goes_on_as_it_began(corpora, tmp_path):
    """What the machine chose stays, bit for bit; what somebody chose has to be the same."""
    corpus, training = corpora("classification"), {"steps": 8}
    packed, open_ = (make_config(data=data, training=training) for data in ({"pack": True}, {}))
    whole = make_trainer(packed, tmp_path / "whole", corpus)
    take_steps(whole, 8)
    first = make_trainer(packed, tmp_path / "parts", corpus)
    take_steps(first, 3)
    first.save(must=True)
    second = make_trainer(open_, tmp_path / "parts", corpus)
    assert second.share.packs(open_)
    assert second.batches.pack
    take_steps(second, 8)
    assert {**first.records, **second.records} == whole.records
    assert different(contents(second), contents(whole)) == []
    with pytest.raises(CheckpointError, match=r"must come from packed False, as chosen here, got True: set data\.pack"):
        make_trainer(make_config(data={"pack": False}, training=training), tmp_path / "parts", corpus)


def test_a_checkpoint_that_does_not_say_was_packed_if_it_was_told_to_be(corpora, tmp_path):
    corpus = corpora("classification")
    for name, pack in (("padded", None), ("packed", True)):
        trainer = make_trainer(make_config(data={"pack": pack}), tmp_path / name, corpus)
        trainer.save(must=True)
        found = checkpoint.newest(tmp_path / name / CHECKPOINTS, STEP, pytest.fail)
        del found.manifest["packed"]
        share = snapshot.lay_out_as(found, Share(device=torch.device("cuda"), precision=torch.bfloat16), make_config())
        assert share.packs(make_config()) is bool(pack)
