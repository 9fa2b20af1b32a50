"""Priors, and the EM update: what it counts, when, and how often (E1-E4)."""

import copy
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import mgk
from mgk.nn import EMPrior, LearnedPrior, UniformPrior


def em_layer(**options) -> mgk.MixtureAttention:
    return mgk.build_attention("mgk-em", 16, 2, head_dim=8, **options).double()


def responsibilities(layer: mgk.MixtureAttention, x: torch.Tensor, **masks) -> torch.Tensor:
    """Sums over pairs, by the public function."""
    query, (key, shift) = layer.project_query(x), layer.project_key(x)
    return mgk.mixture_responsibilities(
        query, key, shift=shift, log_prior=layer.prior(), variance=layer.variance(), reduction="sum", **masks
    )


def test_priors_start_uniform():
    assert UniformPrior()() is None
    for prior in (LearnedPrior(3, 4), EMPrior(3, 4)):
        assert prior().detach().exp() == pytest.approx(torch.full((3, 4), 0.25))


def test_learned_prior_is_a_distribution():
    prior = LearnedPrior(2, 3)
    with torch.no_grad():
        prior.logits.copy_(torch.tensor([[0.0, 50.0, -50.0], [1.0, 2.0, 3.0]]))
    assert prior().detach().exp().sum(-1) == pytest.approx(torch.ones(2))
    assert prior().isfinite().all()


def test_update_sets_the_mean_responsibility():
    """E1: the paper's M-step."""
    layer = em_layer()
    x = torch.randn(3, 11, 16).double()
    expected = responsibilities(layer, x)
    layer(x).sum().backward()
    assert relative_error(layer.prior.gathered(), expected) < 1e-6
    assert layer.prior().exp() == pytest.approx(torch.full((2, 2), 0.5).double())
    mgk.update_priors(layer)
    assert relative_error(layer.prior().exp(), expected / expected.sum(-1, keepdim=True)) < 1e-6
    assert (layer.prior.gathered() == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_only_valid_pairs_are_counted(is_causal):
    """E2: neither padded keys, nor padded queries, nor the future."""
    layer = em_layer(is_causal=is_causal)
    x = torch.randn(2, 11, 16).double()
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    layer(x, key_mask=mask).sum().backward()
    pairs = sum(n * (n + 1) // 2 if is_causal else n * n for n in (11, 7))
    assert layer.prior.gathered().sum(-1) == pytest.approx(torch.full((2,), float(pairs)), rel=1e-6)
    garbage = x.clone()
    garbage[1, 7:] = 1e3
    again = em_layer(is_causal=is_causal)
    again.load_state_dict(layer.state_dict())
    again(garbage, key_mask=mask).sum().backward()
    assert relative_error(again.prior.gathered(), layer.prior.gathered()) < 1e-12


def test_self_attention_however_it_is_spelled():
    """E2: layer(x, x, x) is self-attention too, and its padded queries count no more."""
    layer = em_layer()
    x = torch.randn(2, 11, 16).double()
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    layer(x, x, x, key_mask=mask).sum().backward()
    assert layer.prior.gathered().sum(-1) == pytest.approx(torch.full((2,), 11.0**2 + 7**2), rel=1e-6)


def test_the_running_prior_stays_in_fp32():
    """In bf16 a momentum near one would round every update away."""
    prior = EMPrior(1, 2, momentum=0.995).bfloat16()
    assert prior().dtype == torch.float32
    for _ in range(2000):
        prior.update(torch.tensor([[0.9, 0.1]]))
    assert prior().exp() == pytest.approx(torch.tensor([[0.9, 0.1]]), abs=1e-3)
    assert EMPrior(1, 2).double()().dtype == torch.float64


def test_cross_attention_counts_its_own_masks():
    layer = em_layer()
    x, context = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    key_mask, query_mask = torch.ones(2, 7).bool(), torch.ones(2, 5).bool()
    key_mask[0, 3:], query_mask[1, 2:] = False, False
    layer(x, context, key_mask=key_mask, query_mask=query_mask).sum().backward()
    assert layer.prior.gathered().sum(-1) == pytest.approx(torch.full((2,), 5.0 * 3 + 2 * 7))


def test_evaluation_changes_nothing():
    """E3: neither in eval mode nor without gradients, and update alone keeps the prior."""
    layer = em_layer()
    x = torch.randn(2, 11, 16).double().requires_grad_()
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    layer(x).sum().backward()
    layer.train()
    with torch.no_grad():
        layer(x)
    assert (layer.prior.gathered() == 0).all()
    mgk.update_priors(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_counts_once(use_reentrant):
    """E4"""
    layer = em_layer()
    x = torch.randn(2, 11, 16).double().requires_grad_()
    layer(x).sum().backward()
    expected = layer.prior.gathered().clone()
    layer.prior._probe.grad = None
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(layer.prior.gathered(), expected)


def test_accumulation_adds_up():
    """E4: k micro-batches give the update of the whole batch, whatever the scale of the loss."""
    layer = em_layer()
    x = torch.randn(4, 11, 16).double()
    layer(x).sum().backward()
    expected = layer.prior.gathered().clone()
    layer.prior._probe.grad = None
    for part in x.chunk(2):
        (1024.0 * layer(part).sum()).backward()
    assert relative_error(layer.prior.gathered(), expected) < 1e-6
    layer.zero_grad()
    assert relative_error(layer.prior.gathered(), expected) < 1e-6


def test_prior_stays_on_the_simplex():
    """E1: ten thousand updates, lopsided ones among them."""
    prior = EMPrior(3, 4, momentum=0.3)
    for _ in range(10_000):
        prior.update(torch.rand(3, 4) ** 30)
    assert prior().exp().sum(-1) == pytest.approx(torch.ones(3), abs=1e-5)
    prior.update(torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3))
    assert prior().isfinite().all()


def test_momentum_keeps_part_of_the_old_prior():
    prior = EMPrior(1, 2, momentum=0.75)
    prior.update(torch.tensor([[1.0, 0.0]]))
    assert prior().exp() == pytest.approx(torch.tensor([[0.625, 0.375]]), abs=1e-5)


def test_a_head_without_pairs_keeps_its_prior():
    prior = EMPrior(2, 2)
    prior.update(torch.tensor([[0.0, 0.0], [3.0, 1.0]]))
    assert prior().exp() == pytest.approx(torch.tensor([[0.5, 0.5], [0.75, 0.25]]))


def test_models_without_em_priors_are_left_alone():
    mgk.update_priors(nn.Linear(2, 2))


def test_training_with_em_under_compile_and_autocast():
    torch.compiler.reset()
    layer = em_layer().float()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 11, 16)
    layer(x).sum().backward()
    expected = layer.prior.gathered().clone()
    layer.prior._probe.grad = None
    compiled(x).sum().backward()
    assert relative_error(layer.prior.gathered(), expected) < 1e-6
    layer.prior._probe.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.float().sum().backward()
    assert relative_error(layer.prior.gathered(), expected) < 1e-2


def test_em_layers_copy_and_move():
    layer = em_layer()
    layer(torch.randn(2, 5, 16).double()).sum().backward()
    copied = copy.deepcopy(layer)
    copied(torch.randn(2, 5, 16).double()).sum().backward()
    assert "_probe" not in str(list(layer.state_dict()))
    assert layer.to("meta").prior._probe.device.type == "meta"


def test_em_finds_the_better_component():
    """Keys of component 0 sit on the queries, those of component 1 far away: its prior must vanish."""
    prior = EMPrior(1, 2)
    query = torch.randn(1, 1, 20, 4)
    key = torch.stack([query, query + 5.0], dim=2)
    for _ in range(20):
        prior.update(mgk.mixture_responsibilities(query, key, log_prior=prior(), variance=0.5, reduction="sum"))
    assert prior().exp()[0, 0] > 0.99
    assert prior().exp()[0, 1] >= EMPrior.FLOOR / 2
    assert math.isfinite(float(prior().min()))


RANKS = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import mgk

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = mgk.build_attention("mgk-em", 16, 2, head_dim=8).double()
    x = torch.randn(4, 11, 16).double()
    alone = mgk.build_attention("mgk-em", 16, 2, head_dim=8).double()
    alone.load_state_dict(layer.state_dict())
    layer(x[rank::2]).sum().backward()
    mgk.update_priors(layer)
    dist.destroy_process_group()
    alone(x).sum().backward()
    mgk.update_priors(alone)
    assert torch.allclose(layer.prior(), alone.prior(), atol=1e-6)

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_ranks_agree(tmp_path):
    """E4: two processes, half the batch each, get the prior of the whole batch."""
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    finished = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
