"""Layers whose parameters accelerate keeps elsewhere, on the CPU or on disk, and brings for the length of a call."""

import accelerate
import pytest
import torch

import mgk
from mgk.nn import PRESETS

CPU = torch.device("cpu")
# Every way to hold what is no projection: a norm of queries and keys, variances in a parameter or in a buffer.
OPTIONS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "learned variance": {"learn_variance": True},
    "two variances": {"variance_scale": (1.0, 3.0)},
}


def build(name: str, **options) -> mgk.MixtureAttention:
    torch.manual_seed(0)
    layer = mgk.build_attention(name, 16, 2, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def offload(layer: torch.nn.Module, where: str, folder, **options) -> torch.nn.Module:
    if where == "disk":
        return accelerate.disk_offload(layer, str(folder), execution_device=CPU, **options)
    return accelerate.cpu_offload(layer, execution_device=CPU, **options)


def serves(name: str, options: dict) -> bool:
    several = PRESETS[name].num_components > 1
    return not (PRESETS[name].feature_map and "learn_variance" in options) and (
        several or "variance_scale" not in options
    )


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", PRESETS)
def test_an_offloaded_layer_computes_the_same(name, where, tmp_path):
    x, mask = torch.randn(2, 7, 16), torch.arange(7) < torch.tensor([[7], [4]])
    for title, options in OPTIONS.items():
        if not serves(name, options):
            continue
        layer = build(name, **options)
        with torch.no_grad():
            expected = layer(x), layer(x, key_mask=mask, is_causal=True), layer.attention_weights(x)
            offload(layer, where, tmp_path / title)
            got = layer(x), layer(x, key_mask=mask, is_causal=True), layer.attention_weights(x)
        assert all(parameter.device.type == "meta" for parameter in layer.parameters()), title
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), title


@pytest.mark.parametrize("name", ["smgk-em", "mgk"])
def test_buffers_can_be_offloaded_too(name, tmp_path):
    x = torch.randn(2, 7, 16)
    layer = build(name, variance_scale=(1.0, 3.0))
    with torch.no_grad():
        expected = layer(x)
        offload(layer, "disk", tmp_path, offload_buffers=True)
        assert all(tensor.device.type == "meta" for tensor in layer.state_dict().values())
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["smgk", "smlk"])
def test_gradients_reach_the_input_of_an_offloaded_layer(name):
    """The parameters come and go, so they are frozen; what lies before the layer still trains."""
    layer = build(name).requires_grad_(False)
    x = torch.randn(2, 7, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    offload(layer, "cpu", None)
    (got,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(got, expected)


def test_a_layer_in_the_place_of_multihead_attention_is_offloaded(tmp_path):
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = mgk.replace_attention(torch.nn.TransformerEncoder(encoder, 2), "smgk").eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        expected = encoder(x)
        offload(encoder, "disk", tmp_path)
        assert torch.equal(encoder(x), expected)
