"""Layers of every preset, from the default backend, under the transforms of torch.func."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

import mgk
from mgk.nn import PRESETS

every_preset = pytest.mark.parametrize("name", PRESETS)
either_causality = pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])


def build(name: str, is_causal: bool = False, **options) -> mgk.MixtureAttention:
    torch.manual_seed(0)
    layer = mgk.build_attention(name, 8, 2, is_causal=is_causal, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def make_batches(count: int = 3, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and key masks, the first axis for a transform."""
    x = torch.randn(count, 2, tokens, 8, dtype=torch.float64)
    mask = torch.rand(count, 2, tokens) > 0.3
    mask[..., 0] = True
    return x, mask


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def loss_of(layer: torch.nn.Module):
    def loss(parameters, x, mask):
        return functional_call(layer, parameters, (x,), {"key_mask": mask}).square().sum()

    return loss


def parameters_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def plain_gradients(layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {"input": x.clone(), **{name: p.clone() for name, p in parameters_of(layer).items()}}
    for leaf in leaves.values():
        leaf.requires_grad_()
    parameters = {name: leaf for name, leaf in leaves.items() if name != "input"}
    loss_of(layer)(parameters, leaves["input"], mask).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@every_preset
@either_causality
def test_grad_is_that_of_autograd(name, is_causal):
    layer = build(name, is_causal)
    x, mask = (tensor[0] for tensor in make_batches())
    by_parameter, by_input = grad(loss_of(layer), argnums=(0, 1))(parameters_of(layer), x, mask)
    for which, expected in plain_gradients(layer, x, mask).items():
        assert error(by_input if which == "input" else by_parameter[which], expected) < 1e-12, which


@every_preset
@either_causality
def test_gradients_per_sample_are_those_of_a_loop(name, is_causal):
    layer = build(name, is_causal)
    x, mask = make_batches()
    got = vmap(grad(loss_of(layer)), in_dims=(None, 0, 0))(parameters_of(layer), x, mask)
    for number in range(len(x)):
        expected = plain_gradients(layer, x[number], mask[number])
        for which, gradients in got.items():
            assert error(gradients[number], expected[which]) < 1e-12, which


@every_preset
@either_causality
def test_an_ensemble_computes_and_trains_as_its_members(name, is_causal):
    members = [build(name, is_causal) for _ in range(3)]
    for number, member in enumerate(members):
        for parameter in member.parameters():
            parameter.data.mul_(1.0 + 0.2 * number)
    x, mask = (tensor[0] for tensor in make_batches())
    parameters, buffers = stack_module_state(members)
    template = copy.deepcopy(members[0]).to("meta")

    def run(parameters, buffers):
        return functional_call(template, (parameters, buffers), (x,), {"key_mask": mask})

    out = vmap(run)(parameters, buffers)
    out.square().sum().backward()
    for number, member in enumerate(members):
        alone = member(x, key_mask=mask)
        alone.square().sum().backward()
        assert error(out[number], alone) < 1e-12
        for which, parameter in member.named_parameters():
            assert error(parameters[which].grad[number], parameter.grad) < 1e-12, which


@every_preset
@either_causality
def test_jacobians_and_hessians_agree_with_autograd(name, is_causal):
    layer = build(name, is_causal)
    parameters = parameters_of(layer)
    x, mask = (tensor[0, :1] for tensor in make_batches(tokens=3))

    def run(x):
        return functional_call(layer, parameters, (x,), {"key_mask": mask})

    expected = torch.autograd.functional.jacobian(run, x)
    assert error(jacrev(run)(x), expected) < 1e-12
    assert error(jacfwd(run)(x), expected) < 1e-12

    by_reference = build(name, is_causal, backend="reference")

    def loss(x, layer):
        return loss_of(layer)(parameters, x, mask)

    expected = torch.autograd.functional.hessian(lambda x: loss(x, by_reference), x)
    assert error(hessian(loss)(x, layer), expected) < 1e-12
    assert error(hessian(loss)(x, by_reference), expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smgk", "mgk-hard", "mlk"])
def test_transforms_compile(name):
    layer = build(name)
    x, mask = make_batches()
    torch.compiler.reset()

    def gradients(x, mask):
        return vmap(grad(lambda x, mask: layer(x, key_mask=mask).square().sum()))(x, mask)

    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    assert error(compiled(x, mask), gradients(x, mask)) < 1e-12


def test_training_with_em_is_refused_under_a_transform():
    """The responsibilities would be lost, and the prior stand still."""
    layer = build("smgk-em").train()
    x, _ = make_batches()
    for transform in (grad(lambda x: layer(x).sum()), lambda x: vmap(layer)(x[None])):
        with pytest.raises(ValueError, match=r"prior='em' in training .* call eval\(\) on the layer"):
            transform(x[0])
    with torch.no_grad():
        assert vmap(layer)(x).shape == x.shape


def test_packed_sequences_take_gradients_but_no_mapped_boundaries():
    layer = build("smgk")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)

    def loss(x, bounds=bounds):
        return layer(x, cu_seqlens=bounds).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert error(grad(loss)(x), leaf.grad) < 1e-12
    with pytest.raises(ValueError, match="vmap cannot map over the boundaries of packed sequences"):
        vmap(loss, in_dims=(None, 0))(x, torch.stack([bounds, bounds]))
