"""A run that was interrupted is, to the last bit, the run that was not."""

import math
import random
import time

import numpy as np
import pytest
import torch
from training_cases import (
    Lines,
    contents,
    different,
    exit_code,
    files_of,
    hear,
    make_config,
    make_trainer,
    make_values,
    process,
    run_in_process,
    take_steps,
    train,
    updates_of,
)

import mgk.data
from mgk.training import CheckpointError, CheckpointWriteError, checkpoint, result, snapshot
from mgk.training.configuration import merge
from mgk.training.distributed import random_state, seed_everything, set_random_state
from mgk.training.loop import CHECKPOINTS, Trainer
from mgk.training.run import finish
from mgk.training.tracking import METRICS, read_curves

NOT_COMPARED = {"seconds", "tokens_per_second", "validation_seconds"}


def curves_of(folder):
    """All lines but their times."""
    return [
        {key: repr(value) for key, value in line.items() if key not in NOT_COMPARED}
        for line in read_curves(folder / METRICS)
    ]


CASES = {
    "plain": ("classification", {}),
    "no threads": ("classification", {"data": {"workers": 0}}),
    "two threads": ("classification", {"data": {"workers": 2}}),
    "two micro-batches": ("classification", {"training": {"accumulate": 2, "batch_size": 16, "clip_norm": 0.1}}),
    "EM prior": ("classification", {"model": {"attention": "smgk-em"}}),
    "EM prior, two micro-batches": (
        "classification",
        {"model": {"attention": "mgk-em"}, "training": {"accumulate": 2}},
    ),
    "hard": ("classification", {"model": {"attention": "mgk-hard"}}),
    "softmax": ("classification", {"model": {"attention": "softmax", "attention_dropout": 0.2}}),
    "bf16": ("classification", {"training": {"precision": "bf16"}}),
    "fp16": ("classification", {"training": {"precision": "fp16"}}),
    "pairs": ("pairs", {}),
    "language": ("language", {"schedule": {"kind": "cosine"}, "training": {"clip_norm": 0.25}}),
    "adaptive softmax": (
        "language",
        {
            "model": {"architecture": "wikitext103-small", "adaptive_cutoffs": [100, 200]},
            "training": {"accumulate": 2},
            "data": {"multiple_of": 8},
        },
    ),
    "translation": ("translation", {}),
    "translation, EM prior": ("translation", {"model": {"attention": "smgk-em"}, "schedule": {"kind": "constant"}}),
}


SLOW = {"hard", "softmax", "no threads", "translation, EM prior"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_going_on_is_bit_exact(corpora, tmp_path, case):
    """52 updates after a checkpoint in the middle of an epoch: losses, learning rates, and all that there is."""
    task, changes = CASES[case]
    corpus, config = corpora(task), make_config(task, **merge({"training": {"steps": 65}}, changes))
    whole = make_trainer(config, tmp_path / "whole", corpus)
    take_steps(whole, 65)
    expected = contents(whole)

    first = make_trainer(config, tmp_path / "parts", corpus)
    take_steps(first, 13)
    first.save(must=True)
    # What a process does between now and its death counts for nothing.
    torch.rand(3), random.random()
    second = make_trainer(config, tmp_path / "parts", corpus, resume=13)
    assert second.state.step == 13
    take_steps(second, 65)

    assert second.records.keys() == set(range(14, 66))
    assert {**first.records, **second.records} == whole.records
    assert different(contents(second), expected) == []
    assert curves_of(tmp_path / "parts") == curves_of(tmp_path / "whole")
    ignored = {"seconds": 0.0, "losses": []}
    assert {**vars(second.state), **ignored} == {**vars(whole.state), **ignored}
    assert second.state.losses == whole.state.losses


def test_the_data_is_that_of_the_next_step(corpus, tmp_path):
    """Over the end of an epoch, of 12 batches, in the middle of one, and with an update that lies in both."""
    config = make_config(training={"accumulate": 5, "batch_size": 40})
    trainer = make_trainer(config, tmp_path, corpus)
    assert len(trainer.batches) == 12
    for step in (0, 2, 5, 12, 13):
        trainer.state.step = step
        stream = trainer._stream()
        for number in range(step * 5, step * 5 + 5):
            expected = trainer.batches.batch(*divmod(number, 12))
            assert next(stream)["input_ids"].equal(expected["input_ids"])
        stream.close()


def test_a_checkpoint_before_the_first_update(corpus, tmp_path):
    """There are no moments yet."""
    config = make_config()
    whole = make_trainer(config, tmp_path / "whole", corpus)
    take_steps(whole, 5)
    expected = contents(whole)
    make_trainer(config, tmp_path / "parts", corpus).save(must=True)
    parts = make_trainer(config, tmp_path / "parts", corpus, resume=0)
    take_steps(parts, 5)
    assert parts.records == whole.records
    assert different(contents(parts), expected) == []


def test_a_finished_run_only_tests_again(corpus, tmp_path):
    config = make_config(training={"steps": 8}, validation={"every": 4})
    first = make_trainer(config, tmp_path, corpus)
    take_steps(first, 8)
    second = make_trainer(config, tmp_path, corpus)
    assert list(second.steps()) == []
    before, after = finish(first), finish(second)
    ignored = {"seconds": 0, "written": ""}
    assert {**before, **ignored} == {**after, **ignored}
    assert result.read(tmp_path / "result.json")["metrics"] == after["metrics"]


def test_generators_come_back(tmp_path):
    cpu = torch.device("cpu")
    seed_everything(3)
    random.gauss(0, 1)
    states = random_state(cpu)

    def draw():
        return (
            [random.random() for _ in range(5)], random.gauss(0, 1), np.random.rand(700).tolist(),  # noqa: NPY002
            np.random.randn(3).tolist(), torch.randn(700).tolist(),  # noqa: NPY002
        )  # fmt: skip

    expected = draw()
    draw()
    set_random_state(states, cpu)
    assert draw() == expected
    # Of several ranks, each its own.
    both = {name: torch.stack([torch.zeros_like(state), state]) for name, state in states.items()}
    set_random_state({name: state[1] for name, state in both.items()}, cpu)
    assert draw() == expected


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """A run of 60 steps in a process of its own."""
    folder = tmp_path_factory.mktemp("undisturbed")
    values = make_values(training={"steps": 60, "checkpoint_every": 5}, validation={"every": 20})
    assert run_in_process(folder, corpus.folder, values) == 0
    return folder, values


@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 0), *(pytest.param(4, seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_killed_again_and_again(undisturbed, corpus, tmp_path, kills, seed):
    whole, values = undisturbed
    generator = random.Random(seed)
    # Where in the run each one dies.
    for last in sorted(generator.sample(range(3, 60), kills)):
        with process(train, tmp_path, corpus.folder, values, "steps") as (child, pipe):
            while hear(pipe) < last:
                pass
            time.sleep(generator.uniform(0, 0.02))
            child.kill()
            assert exit_code(child) == -9
    assert run_in_process(tmp_path, corpus.folder, values) == 0
    assert updates_of(tmp_path) == updates_of(whole)
    assert len(updates_of(tmp_path)) == 60
    for name in ("step-00000060", "step-00000055"):
        assert files_of(tmp_path / CHECKPOINTS / name) == files_of(whole / CHECKPOINTS / name)
    assert curves_of(tmp_path) == curves_of(whole)
    one, other = (result.read(folder / "result.json") for folder in (tmp_path, whole))
    assert all(one[key] == other[key] for key in one if key not in ("seconds", "written"))


def changed_run(tmp_path, corpus, **changes):
    """Go on with a run that was another one."""
    take_steps(make_trainer(make_config(training={"checkpoint_every": 1}), tmp_path, corpus), 2)
    return make_trainer(make_config(**changes), tmp_path, corpus)


def test_what_may_change_between_two_processes(corpus, tmp_path):
    """Nothing that decides a number."""
    free = {"name": "other", "row": "smgk-2", "data": {"workers": 3, "timeout": 9.0}}
    looks = {"log_every": 1, "checkpoint_every": 3, "keep_checkpoints": 1, "max_skipped": 0}
    assert changed_run(tmp_path, corpus, **free, training=looks).state.step == 1


def test_another_architecture_is_refused_with_all_that_differs(corpus, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        changed_run(
            tmp_path, corpus, model={"hidden_size": 24, "attention": "mgk"}, optimizer={"lr": 1e-2}, seed=4
        )  # fmt: skip
    text = str(caught.value)
    assert "step-00000001 must come from this configuration, got another: " in text
    for each in (
        "model.attention was 'smgk', is 'mgk'", "model.hidden_size was 16, is 24", "optimizer.lr was 0.001, is 0.01",
        "seed was 0, is 4",
    ):  # fmt: skip
        assert each in text
    assert "checkpoint_every" not in text
    assert text.endswith("a different run needs a folder of its own")


def test_weights_of_another_shape_are_refused_by_name(corpora, tmp_path):
    """Where the configuration is the same: the vocabulary of a language model comes from its corpus."""
    for name, changes in (("a", {}), ("b", {"hidden_size": 24}), ("c", {"attention": "mgk-em"})):
        trainer = make_trainer(make_config(model=changes), tmp_path / name, corpora("classification"), Trainer)
        take_steps(trainer, 1)
        trainer.save(must=True)
    found = {name: checkpoint.newest(tmp_path / name / CHECKPOINTS, "step", pytest.fail) for name in "abc"}
    expected = r"must hold the weights of this model, got \S+: \[16, 24\] in the checkpoint, \[16, 16\] in the model; "
    other = make_trainer(make_config(), tmp_path / "x", corpora("classification"), Trainer)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=expected):
        snapshot.restore_weights(found["b"], other.model)
    with pytest.raises(CheckpointError, match=r"log_prior: \[2, 2\] in the checkpoint, None in the model"):
        snapshot.restore_weights(found["c"], other.model)
    # A model that was refused is as it was.
    assert all(tensor.equal(before[name]) for name, tensor in other.model.state_dict().items())
    snapshot.restore_weights(found["a"], other.model)
    assert not all(tensor.equal(before[name]) for name, tensor in other.model.state_dict().items())


def test_another_corpus_is_refused(corpus, tmp_path):
    options = {"train": 100, "valid": 24, "test": 24, "minimum": 5, "maximum": 24, "seed": 1}
    other = mgk.data.prepare("listops", folder=tmp_path / "other", **options)
    take_steps(make_trainer(make_config(training={"checkpoint_every": 1}), tmp_path, corpus), 2)
    expected = (
        f"must come from this corpus, whose fingerprint is {other.fingerprint[:12]}..., got {corpus.fingerprint[:12]}"
    )
    with pytest.raises(CheckpointError, match=expected):
        make_trainer(make_config(), tmp_path, other)


def test_another_number_of_ranks_is_refused(corpus, tmp_path):
    take_steps(make_trainer(make_config(training={"checkpoint_every": 1}), tmp_path, corpus), 2)
    trainer = make_trainer(make_config(), tmp_path, corpus)
    found = checkpoint.newest(tmp_path / CHECKPOINTS, "step", pytest.fail)
    with pytest.raises(
        CheckpointError, match="must come from as many ranks, 4, got 1: go on with --devices and --nodes"
    ):
        snapshot.check_same_run(found, {**trainer._identity(), "ranks": 4})
    snapshot.check_same_run(found, trainer._identity())


@pytest.mark.parametrize(
    ("key", "here", "hint"),
    [("precision", "bfloat16", r"training\.precision"), ("multiple_of", 64, r"data\.multiple_of")],
)
def test_what_another_machine_would_choose_is_refused(corpus, tmp_path, key, here, hint):
    """bf16 on a GPU and fp32 on a CPU are not one run, nor are batches of other widths, which draw other dropout."""
    take_steps(make_trainer(make_config(training={"checkpoint_every": 1}), tmp_path, corpus), 2)
    trainer = make_trainer(make_config(), tmp_path, corpus)
    found = checkpoint.newest(tmp_path / CHECKPOINTS, "step", pytest.fail)
    with pytest.raises(CheckpointError, match=rf"must come from {key} {here}, as chosen here, got .*: set {hint}"):
        snapshot.check_same_run(found, {**trainer._identity(), key: here})


def test_auto_without_a_checkpoint_starts_and_says_so(corpus, tmp_path):
    lines = Lines()
    assert make_trainer(make_config(), tmp_path, corpus, display=lines.display).state.step == 0
    assert lines.said == [f"no checkpoint in {tmp_path / CHECKPOINTS}: starting at step 0"]


def test_a_step_that_is_not_there_is_an_error(corpus, tmp_path):
    with pytest.raises(CheckpointError, match=r"--resume must be the step of a checkpoint in .* \(none\), got 40"):
        make_trainer(make_config(), tmp_path, corpus, resume=40)
    trainer = make_trainer(make_config(training={"checkpoint_every": 1}), tmp_path, corpus)
    take_steps(trainer, 3)
    assert make_trainer(make_config(), tmp_path, corpus, resume=1).state.step == 1
    with pytest.raises(CheckpointError, match=r"--resume must be the step of a checkpoint in .* \(1\), got 3"):
        make_trainer(make_config(), tmp_path, corpus, resume=3)
    with pytest.raises(CheckpointError, match=r"must be empty with --resume never, got checkpoints"):
        make_trainer(make_config(), tmp_path, corpus, resume="never")


def test_going_back_to_a_step_removes_what_came_after(corpus, tmp_path, monkeypatch):
    config = make_config(training={"checkpoint_every": 2, "keep_checkpoints": 9})
    take_steps(make_trainer(config, tmp_path, corpus), 7)
    assert [path.name[-1] for path in checkpoint.candidates(tmp_path / CHECKPOINTS, "step")] == ["6", "4", "2"]
    # A process that torchrun or SLURM has started again goes on from the newest, whatever the command said at first.
    for name, value in (("TORCHELASTIC_RESTART_COUNT", "1"), ("SLURM_RESTART_COUNT", "1")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert make_trainer(config, tmp_path, corpus, resume=2).state.step == 6
    lines = Lines()
    assert make_trainer(config, tmp_path, corpus, resume=2, display=lines.display).state.step == 2
    assert [path.name[-1] for path in checkpoint.candidates(tmp_path / CHECKPOINTS, "step")] == ["2"]
    assert sum("removed step-0000000" in line for line in lines.said) == 2


def test_never_starts_where_there_is_none(corpus, tmp_path):
    assert make_trainer(make_config(), tmp_path, corpus, resume="never").state.step == 0


def test_the_best_model_is_kept_over_a_restart(corpus, tmp_path):
    """The best so far, and when it was: a later one that is worse does not replace it."""
    config = make_config(training={"steps": 30, "checkpoint_every": 5}, validation={"every": 5})
    first = make_trainer(config, tmp_path, corpus)
    take_steps(first, 12)
    best, when = first.state.best, first.state.best_step
    assert not math.isnan(best)
    second = make_trainer(config, tmp_path, corpus)
    assert (second.state.step, second.state.best, second.state.best_step) == (10, best, when)
    assert second.load_best().step == when


def test_without_the_best_model_it_is_said_what_can_be_done(corpus, tmp_path):
    config = make_config(training={"steps": 8, "checkpoint_every": 2}, validation={"every": 4})
    trainer = make_trainer(config, tmp_path, corpus)
    take_steps(trainer, 8)
    file = checkpoint.place(trainer.checkpoints.folder, "best", trainer.state.best_step) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"must have .* bytes .*before step \d+ with --resume STEP, or remove "):
        trainer.load_best()


def test_a_best_model_that_could_not_be_written_is_not_the_best(corpus, tmp_path, monkeypatch):
    """A disk that is full for a moment costs that model, not the run."""
    config = make_config(training={"steps": 12}, validation={"every": 4})
    save, failed = checkpoint.save, []

    def full_at_first(folder, kind, step, *rest):
        if kind == "best" and not failed:
            failed.append(step)
            raise CheckpointWriteError(28, "no room")
        return save(folder, kind, step, *rest)

    monkeypatch.setattr(checkpoint, "save", full_at_first)
    trainer = make_trainer(config, tmp_path, corpus)
    take_steps(trainer, 12)
    assert failed == [4]
    assert trainer.state.best_step in (8, 12)
    assert finish(trainer)["best_step"] == trainer.state.best_step


@pytest.mark.slow
def test_every_model_of_a_process_is_compiled(corpus, tmp_path, monkeypatch):
    """The compiler counts its versions over all models, and without a word stops at the eighth."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager"))
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer = make_trainer(make_config(training={"compile": True}, seed=number), folder, corpus)
        torch._dynamo.utils.counters.clear()
        take_steps(trainer, 1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, f"model {number} was not compiled"


def test_validation_compiles_nothing(corpus, tmp_path, monkeypatch):
    """Its batches have many widths and no gradients: each would be a version of its own."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager"))
    trainer = make_trainer(make_config(training={"compile": True}), tmp_path, corpus)
    torch._dynamo.utils.counters.clear()
    trainer.validate()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    take_steps(trainer, 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
