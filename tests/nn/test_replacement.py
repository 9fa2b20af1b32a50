"""Mixture attention in the place of nn.MultiheadAttention."""

import copy
import re

import pytest
import torch
from cases import relative_error
from torch import nn

import mgk
from mgk.nn import MultiheadMixtureAttention
from mgk.nn.presets import SOFTMAX_PRESETS

WIDTH, HEADS, LENGTH = 32, 4, 11


def encoder(batch_first=True, **options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=0.0, batch_first=batch_first, dtype=torch.float64, **options
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def transformer(batch_first=True) -> nn.Transformer:
    return nn.Transformer(WIDTH, HEADS, 2, 2, 48, dropout=0.0, batch_first=batch_first, dtype=torch.float64)


def inputs(batch_first=True):
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    return x if batch_first else x.transpose(0, 1)


def key_padding() -> torch.Tensor:
    """torch's convention: True = ignore."""
    return torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 3], [4]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_softmax_at_the_same_width_gives_the_same_outputs(batch_first, training, norm_first):
    model = encoder(batch_first, norm_first=norm_first).train(training)
    replaced = mgk.replace_attention(copy.deepcopy(model), "softmax")
    assert not any(isinstance(module, nn.MultiheadAttention) for module in replaced.modules())
    x, padding = inputs(batch_first), key_padding()
    keep = ~padding if batch_first else ~padding.T
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    masks = [
        {},
        {"src_key_padding_mask": padding},
        {"src_key_padding_mask": torch.zeros_like(padding, dtype=torch.float64).masked_fill(padding, -torch.inf)},
        {"mask": causal},
        {"mask": causal, "is_causal": True},
        {"mask": causal == -torch.inf, "src_key_padding_mask": padding},
    ]
    for mask in masks:
        with torch.set_grad_enabled(training):
            got, expected = replaced(x, **mask), model(x, **mask)
        assert relative_error(got[keep], expected[keep]) < 1e-12


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_and_cross_attention(batch_first):
    model = transformer(batch_first)
    replaced = mgk.replace_attention(copy.deepcopy(model), "softmax")
    source, target = inputs(batch_first), inputs(batch_first)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": key_padding()}
    assert relative_error(replaced(source, target, **masks), model(source, target, **masks)) < 1e-12


@pytest.mark.parametrize("name", SOFTMAX_PRESETS)
def test_every_preset_runs_trains_and_is_really_used(name):
    model = mgk.replace_attention(encoder(), name, num_heads=2)
    attention = model.layers[0].self_attn
    assert isinstance(attention, MultiheadMixtureAttention)
    assert (attention.num_heads, attention.attention.head_dim, attention.embed_dim) == (2, WIDTH // HEADS, WIDTH)
    x = inputs()
    model(x, src_key_padding_mask=key_padding()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    calls = []
    attention.attention.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(x, src_key_padding_mask=key_padding())
    assert calls  # torch's evaluation fast path would have read the weights and passed it by


def test_projections_of_unchanged_shape_keep_their_weights():
    model = encoder()
    old = model.layers[0].self_attn
    query, key, value = (part.clone() for part in old.in_proj_weight.chunk(3))
    out = old.out_proj.weight.clone()
    new = mgk.replace_attention(model, "mgk").layers[0].self_attn.attention
    assert torch.equal(new.q_proj.weight, query)
    assert torch.equal(new.v_proj.weight, value)
    assert torch.equal(new.out_proj.weight, out)
    assert new.k_proj.weight.shape == (2 * WIDTH, WIDTH)
    shifted = mgk.replace_attention(encoder(), "smgk", shift_init_std=0.1).layers[0].self_attn.attention
    assert shifted.k_proj.weight.shape == key.shape


def test_frozen_weights_stay_frozen():
    """Those that are kept: what is new, such as shifts and priors, learns."""
    for frozen in (True, False):
        replaced = mgk.replace_attention(encoder().requires_grad_(not frozen), "smgk")
        learning = {name.split("attention.")[-1] for name, p in replaced.named_parameters() if p.requires_grad}
        new = {name for name in learning if "shift" in name or "prior" in name}
        assert len(new) == 2
        assert (learning == new) == frozen


def test_settings_of_the_old_attention_are_kept():
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, bias=False, dtype=torch.float64)).eval()
    new = mgk.replace_attention(model, "smgk")[0]
    assert new.batch_first is False
    assert new.attention.dropout == 0.25
    assert new.attention.q_proj.bias is None
    assert new.attention.q_proj.weight.dtype == torch.float64
    assert not new.training
    assert (
        mgk.replace_attention(nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS)), "mgk", dropout=0.5)[
            0
        ].attention.dropout
        == 0.5
    )
    assert "batch_first=False" in repr(new)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_weights_and_layouts_are_those_of_torch(batch_first, average):
    old = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64)
    new = mgk.replace_attention(nn.ModuleList([copy.deepcopy(old)]), "softmax")[0]
    x, memory = inputs(batch_first), inputs(batch_first)
    per_head = torch.rand(3 * HEADS, LENGTH, LENGTH) > 0.7
    for options in ({}, {"key_padding_mask": key_padding()}, {"attn_mask": per_head}):
        for arguments in ((x, x, x), (x, memory, memory)):
            got, weight = new(*arguments, average_attn_weights=average, **options)
            expected, expected_weight = old(*arguments, average_attn_weights=average, **options)
            assert relative_error(got, expected) < 1e-12
            assert relative_error(weight, expected_weight) < 1e-12
    assert new(x, x, x, need_weights=False)[1] is None
    single = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    got, weight = new(single, single, single, key_padding_mask=key_padding()[1])
    expected, expected_weight = old(single, single, single, key_padding_mask=key_padding()[1])
    assert relative_error(got, expected) < 1e-12
    assert relative_error(weight, expected_weight) < 1e-12
    assert new(single, single, single, need_weights=False)[1] is None


def test_what_cannot_be_replaced_is_refused():
    with pytest.raises(ValueError, match=r"model must hold at least one nn.MultiheadAttention, got Linear without any"):
        mgk.replace_attention(nn.Linear(2, 2), "mgk")
    for options, message in (
        ({"kdim": 8}, "with kdim or vdim cannot be replaced"),
        ({"add_bias_kv": True}, "must not use add_bias_kv or add_zero_attn"),
        ({"add_zero_attn": True}, "must not use add_bias_kv or add_zero_attn"),
    ):
        with pytest.raises(ValueError, match=message):
            mgk.replace_attention(nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, **options)), "mgk")


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS, kdim=8))
    with pytest.raises(ValueError, match="with kdim or vdim"):
        mgk.replace_attention(model, "mgk")
    assert all(isinstance(module, nn.MultiheadAttention) for module in model)
    with pytest.raises(ValueError, match="as a child, got one itself"):
        mgk.replace_attention(nn.MultiheadAttention(WIDTH, HEADS), "mgk")
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        mgk.replace_attention(nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS)), "mgk", num_heads=0)


def test_shared_attention_stays_shared():
    shared = nn.MultiheadAttention(WIDTH, HEADS)
    model = mgk.replace_attention(nn.ModuleDict({"a": nn.ModuleList([shared, shared]), "b": shared}), "smgk")
    assert model["a"][0] is model["a"][1]
    assert model["a"][0] is model["b"]


def test_large_negative_numbers_mean_minus_infinity():
    old = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    new = mgk.replace_attention(nn.ModuleList([copy.deepcopy(old)]), "softmax")[0]
    x = inputs()
    for low in (-1e9, torch.finfo(torch.float64).min):
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(torch.rand(LENGTH, LENGTH) > 0.7, low)
        assert relative_error(new(x, x, x, attn_mask=mask)[0], old(x, x, x, attn_mask=mask)[0]) < 1e-12


def test_masks_that_mean_nothing_here_are_refused():
    new = mgk.replace_attention(nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)]), "mgk")[0]
    x = torch.randn(3, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="attn_mask must hold only 0 and -inf, got other numbers"):
        new(x, x, x, attn_mask=torch.randn(LENGTH, LENGTH))
    with pytest.raises(TypeError, match=re.escape("attn_mask must be bool or float, got torch.int64")):
        new(x, x, x, attn_mask=torch.zeros(LENGTH, LENGTH, dtype=torch.int64))
    with pytest.raises(ValueError, match="attn_mask must be given when is_causal is True"):
        new(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=re.escape("[B * H, Nq, Nk] with 4 heads, got [3, 11, 11]")):
        new(x, x, x, attn_mask=torch.zeros(3, LENGTH, LENGTH).bool())
    nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    with pytest.raises(ValueError, match="must be plain tensors with a key_padding_mask, got a nested tensor"):
        new(nested, nested, nested)
