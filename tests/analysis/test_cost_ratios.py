"""Costs of whole models over their sizes, against sums of 2 m n k by hand for every preset."""

import pytest
import torch

from mgk.analysis import forward_flops, parameters
from mgk.analysis.cost_ratios import (
    LENGTHS,
    WIDTHS,
    language_model_cost,
    language_model_ratios,
    retrieval_cost,
)
from mgk.models import MGKForCausalLM, architecture
from mgk.nn import PRESETS

LAYERS, INNER, VOCABULARY, CLUSTERS = 16, 2048, 267_735, 3


def attention_by_hand(name, *, queries, heads, head_dim, width):
    """Projections and products of one self-attention over one sequence."""
    preset = PRESETS[name]
    shifted = preset.keys == "shifted"
    projected_keys = 1 if shifted else preset.num_components
    n, inner = queries, heads * head_dim
    total = 2 * n * width * inner * (2 + projected_keys) + 2 * n * inner * width
    if preset.feature_map is not None:
        # phi(k)^T [v, 1], then phi(q) times that; elu + 1 has as many features as a head is wide.
        return total + 2 * (2 * n * head_dim * (head_dim + 1)) * heads
    total += heads * (projected_keys * 2 * n * head_dim * n + 2 * n * n * head_dim)
    if shifted:
        total += heads * 2 * n * head_dim * preset.num_components
        if preset.similarity == "gaussian":
            total += heads * 2 * n * head_dim * preset.num_components
    return total


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("attention", PRESETS)
class TestSumsByHand:
    def test_language_model(self, attention, heads):
        width, n = 256, 128
        found = language_model_cost(attention, heads, width=width, length=n)
        layer = attention_by_hand(attention, queries=n, heads=heads, head_dim=32, width=width)
        layer += 2 * (2 * n * width * INNER)
        assert found.forward_flops == LAYERS * layer
        assert found.training_flops == 3 * LAYERS * layer
        assert found.output_flops == 2 * n * width * (VOCABULARY + CLUSTERS)
        assert found.other_parameters == found.parameters - VOCABULARY * width

    def test_retrieval(self, attention, heads):
        n = 64
        found = retrieval_cost(attention, heads, pairs=5, tokens=n)
        layer = attention_by_hand(attention, queries=n, heads=heads, head_dim=32, width=64) + 2 * (2 * n * 64 * 128)
        head = 2 * 256 * 128 + 2 * 128 * 2
        assert found.forward_flops == 5 * (2 * 2 * layer + head)


@pytest.mark.parametrize("attention", PRESETS)
def test_torch_counts_the_fused_op_the_same(attention):
    """The formulas that our ops register with FlopCounterMode, on the shapes they get, and the rest of the layer by
    torch's own: together what `forward_flops` says. Shifts are multiplied before the op, by ordinary products."""
    pytest.importorskip("triton")
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    import mgk.ops.triton.linear_operator
    import mgk.ops.triton.operator

    n, heads, head_dim, width = 48, 4, 16, 24
    preset = PRESETS[attention]
    layer = mgk.build_attention(attention, width, heads, head_dim=head_dim)
    x = torch.zeros(2, n, width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection(x)
        layer.out_proj(torch.zeros(2, n, heads * head_dim))
    keys = 1 if preset.keys == "shifted" else preset.num_components
    query, key, value = (2, heads, n, head_dim), (2, heads, keys, n, head_dim), (2, heads, n, head_dim)
    total = counter.get_total_flops()
    if preset.feature_map is not None:
        formula = flop_registry[torch.ops.mgk.fused_linear_attention]
        total += formula(torch.zeros(query), torch.zeros(key), torch.zeros(value))
    else:
        formula = flop_registry[torch.ops.mgk.fused_attention]
        total += formula(torch.zeros(query), torch.zeros(key), torch.zeros(value), *[None] * 11, False)
        shifts = 2 * 2 * heads * n * preset.num_components * head_dim if preset.keys == "shifted" else 0
        total += shifts * (2 if preset.similarity == "gaussian" else 1)
    assert forward_flops(layer, query=x) == total


def test_one_layer_stands_for_all():
    """And the output layer is what the whole model costs beyond its layers."""
    with torch.device("meta"):
        model = MGKForCausalLM(architecture("wikitext103-small", attention="mgk", num_attention_heads=4))
        ids = torch.zeros(1, 256, dtype=torch.long)
    found = language_model_cost("mgk", 4, width=128, length=256)
    assert found.forward_flops == forward_flops(model.model, input_ids=ids)
    assert found.forward_flops + found.output_flops == forward_flops(model, input_ids=ids)
    assert found.parameters == parameters(model)


def test_sizes_that_the_paper_states():
    """ "This model has 90M parameters": the medium one. Non-embedding numbers of the small one: facts of its code."""
    assert round(language_model_cost("softmax", 8, width=256, length=384).parameters / 1e6) == 90
    small = language_model_cost("softmax", 8, width=128, length=256)
    assert small.parameters / 1e6 == pytest.approx(44.0, abs=0.05)
    assert retrieval_cost("softmax", 8).parameters == 494_594


@pytest.mark.parametrize(("mixture", "baseline"), [("mgk", "softmax"), ("mlk", "linear")])
def test_ratios_over_width_and_length(mixture, baseline):
    """What figures 3 and 10 are said to show: below 1 everywhere, and better as the model grows."""
    ratios = language_model_ratios(mixture, baseline, widths=(256, 4096), lengths=(128, 8192))
    by_size = {(ratio.width, ratio.length): ratio for ratio in ratios}
    assert all(0.6 < ratio.flops < 1 and 0.6 < ratio.other_parameters < ratio.parameters < 1 for ratio in ratios)
    for length in (128, 8192):
        assert by_size[4096, length].other_parameters < by_size[256, length].other_parameters
        assert by_size[4096, length].parameters < by_size[256, length].parameters
    assert all(ratio.flops < ratio.flops_with_output < 1 for ratio in ratios)
    if mixture == "mgk":
        assert {ratio.cache_bytes for ratio in ratios} == {0.75}
    else:
        assert {ratio.cache_bytes for ratio in ratios} == {None}


def test_sizes_are_those_of_the_paper():
    assert WIDTHS == (256, 512, 1024, 2048, 4096)
    assert LENGTHS == (128, 256, 512, 1024, 2048, 4096, 8192)


def test_a_width_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="width must be a multiple of 8 heads, got 100"):
        language_model_cost("mgk", 4, width=100, length=8)
