"""End to end: the model with a stock kernel in place of ours, and what is refused."""

import pytest
import torch

import mgk
from mgk.benchmark.document_matcher import Matcher, MatcherStep, random_pairs
from mgk.benchmark.plan import check_presets
from mgk.benchmark.retrieval import compare, matchers
from mgk.benchmark.timing import Effort

CPU = torch.device("cpu")


def test_a_stock_kernel_changes_nothing_but_the_time():
    batch = random_pairs(2, 24, CPU)
    ours, stock = (
        MatcherStep(Matcher(attention="softmax", heads=8, kernel=kernel), batch, CPU) for kernel in (None, "math")
    )
    with ours._inference():
        expected = ours._evaluate()
    with stock._inference():
        assert torch.allclose(stock._evaluate(), expected, atol=1e-5)
    assert stock.error < 1e-5


def test_the_step_trains():
    step = MatcherStep(Matcher(attention="smgk", heads=4), random_pairs(2, 24, CPU), CPU)
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    step.train()
    assert all(
        not torch.equal(parameter, before[name])
        for name, parameter in step.model.named_parameters()
        if "embed" not in name
    )
    # What the gradient was compared with is another model.
    assert step.model.config._attn_implementation != "eager"
    assert step.model.config.attention_dropout == step.model.config.dropout == 0
    assert Matcher(attention="smgk", heads=4, drops_out=True).configurations()[1].attention_dropout == 0.1


def test_a_model_that_is_wrong_gets_no_number(monkeypatch):
    right = mgk.ops.dispatch.attend

    def wrong(problem, backend):
        out = right(problem, backend)
        return out if problem.shift is None or backend == "reference" else 1.5 * out

    monkeypatch.setattr("mgk.nn.attention.attend", wrong)
    chosen = [matcher for matcher in matchers(("smgk",), CPU) if not matcher.drops_out]
    found = compare(chosen, pairs=2, tokens=16, device=CPU, effort=Effort(rounds=2, seconds=1, fewest=2))
    assert [each["preset"] for each in found.failures] == ["smgk"]
    assert "error of the gradient must be at most 0.001, got" in found.failures[0]["reason"]
    assert not found.rows
    assert len(found.baselines) == 2


def test_linear_attention_stands_beside_its_own_baseline():
    """With all heads, without dropout, and right like all others."""
    chosen = matchers(("smlk", "mlk"), CPU)
    assert [matcher.name for matcher in chosen if matcher.kernel is None] == ["linear-8", "smlk-4", "mlk-4"]
    found = compare(chosen, pairs=2, tokens=16, device=CPU, effort=Effort(rounds=2, seconds=1, fewest=2))
    assert [(each["preset"], each["heads"]) for each in found.rows] == [("linear", 8), ("smlk", 4), ("mlk", 4)]
    assert not found.failures
    assert all(each["gradient_error"] < 1e-3 for each in found.rows)
    with pytest.raises(ValueError, match=r"--preset must be one of .*got 'linear-4'"):
        check_presets(["linear-4"], linear=True)


def test_on_a_gpu_every_fused_kernel_is_tried():
    chosen = matchers(("smgk", "mgk"), torch.device("cuda"))
    assert [matcher.name for matcher in chosen] == [
        "softmax-8 through SDPA cudnn", "softmax-8 through SDPA flash", "softmax-8 through SDPA efficient",
        "softmax-8 through triton", "smgk-4", "mgk-4",
        "softmax-8 through SDPA cudnn, dropout of the recipe", "softmax-8 through SDPA flash, dropout of the recipe",
        "softmax-8 through triton, dropout of the recipe",
        "smgk-4, dropout of the recipe", "mgk-4, dropout of the recipe",
    ]  # fmt: skip


def test_a_kernel_that_refuses_is_left_out():
    refused = Matcher(attention="softmax", heads=8, kernel="cudnn")
    found = compare([refused], pairs=1, tokens=16, device=CPU, effort=Effort(rounds=1, seconds=1, fewest=1))
    assert [each["kernel"] for each in found.skipped] == ["cudnn"]


@pytest.mark.gpu
def test_steps_on_a_gpu_are_recorded_and_counted():
    device = torch.device("cuda")
    chosen = [
        Matcher(attention="softmax", heads=8, kernel="cudnn"),
        Matcher(attention="softmax", heads=8, kernel="flash"),
        Matcher(attention="smgk", heads=4),
    ]
    found = compare(chosen, pairs=4, tokens=512, device=device, effort=Effort(rounds=3, seconds=1, fewest=3))
    assert not found.failures
    assert len(found.baselines) == 2
    assert found.rows[0]["baseline"] == "cudnn"
    assert all(record["is_recorded"] and record["peak_bytes"] > 0 for record in (*found.baselines, *found.rows))
