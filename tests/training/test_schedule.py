"""Learning rates against the codes that they come from."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgk.recipes import load, names
from mgk.training.configuration import OptimizerConfig, ScheduleConfig
from mgk.training.schedule import Rates, rates


def torch_rates(steps, warmup, lr):
    """What OneCycleLR gives the optimiser in each step, as the Nystromformer code makes it."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, pct_start=warmup / steps, anneal_strategy="linear", total_steps=steps
    )
    for _ in range(steps):
        group = optimizer.param_groups[0]
        yield Rates(group["lr"], group["betas"][0])
        optimizer.step()
        if schedule.last_epoch < steps - 1:
            schedule.step()


def one_cycle_recipes():
    for name in names():
        config = load(name).config()
        if config.schedule.kind == "onecycle":
            yield name, config


def test_the_long_range_arena_has_one_cycle():
    assert {"lra/listops", "lra/text", "lra/retrieval"} <= {name for name, _ in one_cycle_recipes()}


@pytest.mark.parametrize(("name", "config"), list(one_cycle_recipes()))
def test_one_cycle_is_that_of_torch_to_the_bit(name, config):
    steps = config.training.steps
    expected = torch_rates(steps, config.schedule.warmup, config.optimizer.lr)
    for step, found in enumerate(expected):
        assert rates(step, steps, config.schedule, config.optimizer) == found, f"{name}, step {step}"


@given(st.integers(3, 60), st.data())
def test_one_cycle_of_any_length(steps, data):
    warmup = data.draw(st.integers(2, steps - 1))
    schedule, optimizer = ScheduleConfig(kind="onecycle", warmup=warmup), OptimizerConfig(lr=3e-4)
    for step, expected in enumerate(torch_rates(steps, warmup, 3e-4)):
        found = rates(step, steps, schedule, optimizer)
        # torch computes warmup / steps * steps, which is not always warmup.
        assert found.lr == pytest.approx(expected.lr, rel=1e-9)
        assert found.beta1 == pytest.approx(expected.beta1, rel=1e-9)


def test_one_cycle_by_hand():
    schedule, optimizer = ScheduleConfig(kind="onecycle", warmup=5), OptimizerConfig(lr=1.0)
    found = [rates(step, 9, schedule, optimizer) for step in range(9)]
    assert found[0] == Rates(0.04, 0.95)
    assert found[4] == Rates(1.0, 0.85)
    assert found[8].lr == pytest.approx(0.04 / 1e4)
    assert found[8].beta1 == pytest.approx(0.95)
    assert found[2].lr == pytest.approx(0.52)
    assert found[6].lr == pytest.approx(0.500002)


def values(kind, steps, warmup, initial=0.0, lr=2.0):
    schedule, optimizer = ScheduleConfig(kind=kind, warmup=warmup, initial=initial), OptimizerConfig(lr=lr)
    found = [rates(step, steps, schedule, optimizer) for step in range(steps)]
    assert {each.beta1 for each in found} == {0.9}
    return [each.lr for each in found]


def test_cosine():
    """Transformer-XL: CosineAnnealingLR over all steps, under a warm-up in a line."""
    found = values("cosine", 20, 4)
    assert found[:4] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert found[4:] == pytest.approx([1 + math.cos(math.pi * step / 20) for step in range(4, 20)])


def test_inverse_square_root():
    """fairseq: the first update has the initial rate, number warmup + 1 the highest, then lr * sqrt(warmup / step)."""
    found = values("inverse_sqrt", 40, 4, initial=0.4)
    assert found[:4] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert found[4] == 2.0
    assert found[16] == pytest.approx(1.0)
    assert found[4:] == pytest.approx([2.0 * math.sqrt(4 / step) for step in range(4, 40)])


def test_constant():
    assert values("constant", 6, 3) == pytest.approx([0, 2 / 3, 4 / 3, 2, 2, 2])
    assert values("constant", 3, 0) == [2, 2, 2]


@given(
    st.sampled_from(["onecycle", "cosine", "inverse_sqrt", "constant"]), st.integers(1, 300), st.data(),
    st.floats(1e-8, 10),
)  # fmt: skip
def test_rates_are_finite_and_at_most_the_highest(kind, steps, data, lr):
    warmup = data.draw(st.integers(1 if kind == "inverse_sqrt" else 0, steps))
    initial = data.draw(st.floats(0, lr))
    schedule, optimizer = ScheduleConfig(kind=kind, warmup=warmup, initial=initial), OptimizerConfig(lr=lr)
    for step in range(steps):
        found = rates(step, steps, schedule, optimizer)
        assert 0.0 <= found.lr <= lr * (1 + 1e-12)
        assert 0.0 <= found.beta1 < 1.0
    # It gets there.
    peak = max(rates(step, steps, schedule, optimizer).lr for step in range(steps))
    if kind == "onecycle" or (kind != "cosine" and warmup < steps):
        assert peak == pytest.approx(lr)
