"""The layer with a feature map: MLK, sMLK and linear attention."""

import copy
import pickle

import pytest
import torch
from cases import relative_error
from linear_cases import oracle

import mgk
from mgk.nn.presets import LINEAR_PRESETS

every_preset = pytest.mark.parametrize("name", LINEAR_PRESETS)


def build(name, **options):
    torch.manual_seed(0)
    layer = mgk.build_attention(name, 24, 4, head_dim=8, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def by_hand(layer, x, context, feature_map="elu", **masks):
    """The layer from its parameters, through the oracle."""
    keys, kv = layer.k_proj(context), layer.num_kv_heads
    inputs = {
        "query": layer.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2),
        "value": layer.v_proj(context).unflatten(-1, (kv, 8)).transpose(1, 2),
        "log_prior": layer.prior(), "is_causal": layer.is_causal, "normalization": layer.normalization,
        "feature_map": feature_map, **masks,
    }  # fmt: skip
    if layer.keys.shift is None:
        inputs["key"] = keys.unflatten(-1, (kv, layer.num_components, 8)).permute(0, 2, 3, 1, 4)
    else:
        inputs["key"], inputs["shift"] = keys.unflatten(-1, (kv, 8)).transpose(1, 2), layer.keys.shift
    return layer.out_proj(oracle(inputs).transpose(1, 2).flatten(2))


@every_preset
@pytest.mark.parametrize(
    "options",
    [
        {}, {"is_causal": True}, {"num_kv_heads": 2, "num_components": 3}, {"feature_map": "dpfp"},
        {"normalization": "length", "feature_map": "relu"}, {"backend": "reference"},
    ],
    ids=str,
)  # fmt: skip
def test_the_layer_is_the_formula(name, options):
    layer = build(name, **options)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected = by_hand(layer, x, x, options.get("feature_map", "elu"), key_mask=mask)
    assert relative_error(layer(x, key_mask=mask), expected) <= 1e-12


@every_preset
def test_cross_attention_and_packed_sequences(name):
    layer = build(name)
    x, context = torch.randn(1, 9, 24, dtype=torch.float64), torch.randn(1, 6, 24, dtype=torch.float64)
    assert relative_error(layer(x, context), by_hand(layer, x, context)) <= 1e-12
    bounds, others = (torch.tensor(values, dtype=torch.int32) for values in ([0, 4, 9], [0, 5, 6]))
    packed = layer(x, context, cu_seqlens=bounds, cu_seqlens_k=others)
    alone = [layer(x[:, :4], context[:, :5]), layer(x[:, 4:], context[:, 5:])]
    assert relative_error(packed, torch.cat(alone, dim=1)) <= 1e-12


@every_preset
def test_weights_and_gradients(name):
    layer = build(name, is_causal=True, num_kv_heads=2)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    value = layer.project_value(x).repeat_interleave(2, dim=1)
    out = layer.out_proj((layer.attention_weights(x) @ value).transpose(1, 2).flatten(2))
    assert relative_error(out, layer(x)) <= 1e-12
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert set(dict(layer.named_parameters())) == set(dict(build(name).named_parameters()))


def test_pairs_cannot_be_masked():
    layer, x = build("mlk"), torch.randn(2, 5, 24, dtype=torch.float64)
    for call in (layer, layer.attention_weights):
        with pytest.raises(ValueError, match="linear attention never forms pairs that could be masked, got attn_mask"):
            call(x, attn_mask=torch.ones(5, 5) > 0)


def test_the_random_features_are_those_of_every_process():
    """They are no parameter, so a checkpoint does not hold them; they come from a seed."""
    first, second = build("mlk", feature_map="favor"), build("mlk", feature_map="favor")
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("feature_map", [None, "dpfp", "favor", torch.nn.functional.softplus])
def test_a_layer_is_pickled_with_its_feature_map(feature_map):
    """As processes exchange it, and ``torch.save`` stores it."""
    layer = build("mlk", **({} if feature_map is None else {"feature_map": feature_map}))
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
