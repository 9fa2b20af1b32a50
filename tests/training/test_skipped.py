"""Updates that must not happen: they change nothing, are explained, and the run goes on."""

import json
import math

import pytest
import torch
from training_cases import Lines, Recorded, contents, different, make_config, make_trainer, take_steps

from mgk.training import NonFiniteError
from mgk.training.loop import SKIPPED
from mgk.training.loss_scale import LossScale
from mgk.training.skipped import is_leap, running_mean

EM = {"model": {"attention": "smgk-em"}, "training": {"clip_norm": 0.5}}


class Poisoned(Recorded):
    """Something is wrong in the updates ``steps``, counted from 1."""

    steps_to_poison = ()
    poison = "loss"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        loss = self.task.loss
        factor = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "leap": 1e4}

        def poisoned(model, batch, num_targets):
            found = loss(model, batch, num_targets)
            return found * factor[self.poison] if self.is_now and self.poison in factor else found

        def hook(gradient):
            if not self.is_now or not self.poison.startswith("gradient"):
                return gradient
            bad = gradient.clone()
            bad.view(-1)[-1] = math.nan if self.poison.endswith("nan") else math.inf
            return bad

        self.task.loss = poisoned
        next(self.model.model.layers.parameters()).register_hook(hook)

    @property
    def is_now(self):
        # A batch that is run again to find out why has no part in this.
        return self.model.training and self.state.step + 1 in self.steps_to_poison


def make_poisoned(poison, steps, folder, corpus, display=None, **changes):
    kind = type("Kind", (Poisoned,), {"steps_to_poison": steps, "poison": poison})
    return make_trainer(make_config(**changes), folder, corpus, kind, display=display)


def weights_and_moments(trainer):
    return {name: value for name, value in contents(trainer).items() if not name.startswith("random")}


@pytest.mark.parametrize("poison", ["nan", "inf", "minus inf", "leap", "gradient inf", "gradient nan"])
def test_a_bad_update_changes_nothing(corpus, tmp_path, poison):
    """Neither weights, nor moments and their count of steps, nor priors of EM; random numbers go their usual way."""
    good = make_trainer(make_config(**EM), tmp_path / "good", corpus)
    take_steps(good, 4)
    after_four = contents(good)
    take_steps(good, 5)

    bad = make_poisoned(poison, {5}, tmp_path / "bad", corpus, **EM)
    take_steps(bad, 4)
    assert different(contents(bad), after_four) == []
    take_steps(bad, 5)
    assert different(weights_and_moments(bad), weights_and_moments(good)) != []
    random = {name: value for name, value in contents(bad).items() if name.startswith("random")}
    assert different(weights_and_moments(bad) | random, after_four | random) == []
    assert (bad.state.skipped, bad.state.skipped_in_a_row) == (1, 1)
    assert len(bad.state.losses) == 4
    gradients = [parameter.grad for parameter in bad.model.parameters() if parameter.grad is not None]
    assert all((gradient == 0).all() for gradient in gradients)
    assert bad.model.training
    # It goes on, and the next one is right again.
    take_steps(bad, 9)
    assert (bad.state.skipped, bad.state.skipped_in_a_row) == (1, 0)
    assert different(weights_and_moments(bad), after_four) != []
    assert all(math.isfinite(loss) for loss in bad.state.losses)


def test_random_numbers_and_data_are_not_disturbed(corpus, tmp_path):
    """To look at the batch again draws nothing, and takes no batch away."""
    seen = {}
    for name, steps in (("good", ()), ("bad", {3, 4})):
        trainer = make_poisoned("nan", steps, tmp_path / name, corpus, data={"workers": 2})
        seen[name] = []
        stream, update = trainer._stream, trainer._update

        def watched(stream=stream, name=name):
            for batch in stream():
                seen[name].append(batch["input_ids"].tolist())
                yield batch

        def noted(batches, update=update, name=name):
            update(batches)
            seen[name].append(torch.get_rng_state().tolist())

        trainer._stream, trainer._update = watched, noted
        take_steps(trainer, 8)
    assert seen["good"] == seen["bad"]
    assert len(seen["bad"]) == 16


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_runs_with_the_same_fault_are_one(corpus, tmp_path, accumulate):
    changes = {"training": {"accumulate": accumulate, "batch_size": 8 * accumulate}}
    found = []
    for name in ("a", "b"):
        trainer = make_poisoned("gradient inf", {2, 6, 7}, tmp_path / name, corpus, **changes)
        take_steps(trainer, 12)
        found.append((trainer.records, contents(trainer), (tmp_path / name / SKIPPED).read_text()))
    assert found[0] == found[1]
    # And one that was stopped between them and went on.
    trainer = make_poisoned("gradient inf", {2, 6, 7}, tmp_path / "c", corpus, **changes)
    take_steps(trainer, 6)
    trainer.save(must=True)
    again = make_poisoned("gradient inf", {2, 6, 7}, tmp_path / "c", corpus, **changes)
    assert (again.state.skipped, again.state.skipped_in_a_row) == (2, 1)
    take_steps(again, 12)
    assert {**trainer.records, **again.records} == found[0][0]
    assert different(contents(again), found[0][1]) == []
    assert (tmp_path / "c" / SKIPPED).read_text() == found[0][2]


def test_what_is_kept_of_it(corpus, tmp_path):
    lines = Lines()
    changes = {"training": {"accumulate": 2, "batch_size": 16}, "model": {"num_hidden_layers": 2}}
    trainer = make_poisoned("nan", {3}, tmp_path, corpus, display=lines.display, **changes)
    take_steps(trainer, 5)
    (line,) = map(json.loads, (tmp_path / SKIPPED).read_text().splitlines())
    assert line["step"] == 3
    assert line["rank"] == 0
    assert math.isnan(line["loss"])
    assert math.isnan(line["gradient_norm"])
    first, second = line["batches"]
    for number, batch in ((4, first), (5, second)):
        assert (batch["epoch"], batch["batch"]) == (0, number)
        assert batch["samples"] == trainer.batches.rows(0, number).tolist()
        assert len(batch["samples"]) == 8
        assert 0 < batch["largest_logit"] < 10
        assert 0 < batch["loss_now"] < 10
        norms = batch["gradient_norms"]
        assert {"model.layers.0", "model.layers.1", "model.embed_tokens", "classifier.dense"} <= norms.keys()
        assert all(0 < norm < 100 for norm in norms.values())
    assert lines.said[1:] == ["skipped the update of step 3: loss nan, norm of the gradient nan"]


@pytest.mark.parametrize("task", ["pairs", "language", "translation"])
def test_other_tasks_are_explained_as_well(corpora, tmp_path, task):
    kind = type("Kind", (Recorded,), {})
    trainer = make_trainer(make_config(task), tmp_path, corpora(task), kind)
    loss = trainer.task.loss
    trainer.task.loss = lambda *args: loss(*args) * (math.nan if trainer.state.step == 1 else 1)
    take_steps(trainer, 3)
    (line,) = map(json.loads, (tmp_path / SKIPPED).read_text().splitlines())
    (batch,) = line["batches"]
    assert batch["samples"] == trainer.batches.rows(batch["epoch"], batch["batch"]).tolist()
    assert batch["largest_logit"] > 0
    assert batch["gradient_norms"]
    assert trainer.state.skipped == 1


def test_an_explanation_that_cannot_be_written_stops_nothing(corpus, tmp_path):
    (tmp_path / SKIPPED).mkdir()
    trainer = make_poisoned("nan", {2}, tmp_path, corpus)
    take_steps(trainer, 4)
    assert trainer.state.skipped == 1


def test_too_many_in_a_row_stop_the_run(corpus, tmp_path):
    trainer = make_poisoned("inf", range(4, 100), tmp_path, corpus, training={"max_skipped": 3})
    with pytest.raises(
        NonFiniteError, match=r"must be finite .* got 4 updates in a row .* up to step 7: see .*skipped"
    ):
        take_steps(trainer, 80)
    assert trainer.state.step == 7
    assert len((tmp_path / SKIPPED).read_text().splitlines()) == 4


def test_as_many_but_not_in_a_row_do_not(corpus, tmp_path):
    trainer = make_poisoned("inf", range(2, 20, 2), tmp_path, corpus, training={"max_skipped": 1})
    take_steps(trainer, 20)
    assert trainer.state.skipped == 9


def test_the_first_one_wrong(corpus, tmp_path):
    """There are neither moments nor a mean of losses yet; a checkpoint of it can be gone on from."""
    trainer = make_poisoned("nan", {1}, tmp_path, corpus)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    take_steps(trainer, 1)
    assert all(tensor.equal(before[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(float(state["step"]) == 0 for state in trainer.optimizer.state.values())
    trainer.save(must=True)
    again = make_trainer(make_config(), tmp_path, corpus)
    take_steps(again, 3)
    assert all(float(state["step"]) == 2 for state in again.optimizer.state.values())


def test_a_checkpoint_holds_no_nan_of_the_running_mean(corpus, tmp_path):
    trainer = make_trainer(make_config(), tmp_path, corpus)
    trainer.save(must=True)
    assert trainer.state.running_loss is None
    assert math.isnan(float(make_trainer(make_config(), tmp_path, corpus).updater.running_loss))


@pytest.mark.parametrize(
    ("loss", "running", "leaps"),
    [
        (1.0, math.nan, False), (1e9, math.nan, False), (199.0, 2.0, False), (201.0, 2.0, True), (math.nan, 2.0, False),
        (9.0, 1e-6, False), (11.0, 1e-6, True), (math.inf, 2.0, True),
    ],
)  # fmt: skip
def test_leaps(loss, running, leaps):
    assert bool(is_leap(torch.tensor(loss), torch.tensor(running), 100.0)) == leaps


def test_the_running_mean_leaves_out_what_was_skipped():
    mean, yes, no = torch.tensor(math.nan), torch.tensor(True), torch.tensor(False)
    mean = running_mean(torch.tensor(math.inf), mean, yes)
    assert math.isnan(mean)
    mean = running_mean(torch.tensor(2.0), mean, no)
    assert mean == 2.0
    assert running_mean(torch.tensor(math.nan), mean, yes) == 2.0
    assert float(running_mean(torch.tensor(3.0), mean, no)) == pytest.approx(2.02)


class TestLossScale:
    def test_it_halves_at_every_overflow(self):
        scale = LossScale(torch.device("cpu"))
        for power in range(16, 6, -1):
            assert scale.value == 2.0**power
            scale.update(torch.tensor(True))

    def test_it_doubles_after_2000_updates_without(self):
        scale = LossScale(torch.device("cpu"), value=8.0)
        fine = torch.tensor(False)
        for _ in range(1999):
            scale.update(fine)
        assert scale.value == 8.0
        scale.update(fine)
        assert scale.value == 16.0
        assert scale.since_overflow == 0.0
        for _ in range(1000):
            scale.update(fine)
        scale.update(torch.tensor(True))
        assert (float(scale.value), float(scale.since_overflow)) == (8.0, 0.0)
        for _ in range(1999):
            scale.update(fine)
        assert scale.value == 8.0

    def test_it_goes_on_where_it_was(self):
        scale = LossScale(torch.device("cpu"), value=4.0, since_overflow=1999.0)
        scale.update(torch.tensor(False))
        assert scale.value == 8.0


def test_fp16_finds_its_scale_and_learns(corpus, tmp_path):
    """Overflows at the start are skipped; the scale is saved; the norm of the gradient is that without a scale."""
    precise = make_trainer(make_config(), tmp_path / "fp32", corpus)
    take_steps(precise, 1)
    trainer = make_trainer(make_config(training={"precision": "fp16"}), tmp_path / "fp16", corpus)
    trainer.updater.loss_scale.value *= 2.0**12
    take_steps(trainer, 1)
    assert trainer.state.skipped == 1
    assert trainer.updater.loss_scale.value == 2.0**27
    while trainer.state.skipped_in_a_row:
        take_steps(trainer, trainer.state.step + 1)
    scale, skipped = float(trainer.updater.loss_scale.value), trainer.state.skipped
    assert scale == 2.0 ** (28 - skipped)
    take_steps(trainer, 40)
    assert trainer.state.skipped <= skipped + 4
    norm, expected = (eval_norm(each.records[step]) for each, step in ((trainer, skipped + 1), (precise, 1)))
    assert 0.2 < norm / expected < 5
    trainer.save(must=True)
    again = make_trainer(make_config(training={"precision": "fp16"}), tmp_path / "fp16", corpus)
    assert again.updater.loss_scale.value == trainer.updater.loss_scale.value
    assert again.updater.loss_scale.since_overflow == trainer.updater.loss_scale.since_overflow > 0


def eval_norm(record):
    """The norm of the gradient in the text of a record."""
    return float(record.strip("[]").split(", ")[1])


def test_bf16_trains(corpus, tmp_path):
    trainer = make_trainer(make_config(training={"precision": "bf16"}), tmp_path, corpus)
    assert trainer.updater.loss_scale is None
    seen = set()
    trainer.model.model.layers[0].register_forward_hook(
        lambda module, args, output: seen.add(torch.is_autocast_enabled("cpu"))
    )
    take_steps(trainer, 5)
    assert seen == {True}
    assert trainer.state.skipped == 0
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
