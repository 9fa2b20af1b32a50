"""What the attention layers of a model were given."""

import pytest
import torch
from analysis_cases import make_call
from model_cases import KINDS, make_inputs, make_model
from torch import nn
from transformers import BertConfig, BertModel

import mgk
from mgk.analysis import attention_maps, record, record_attention

PRESETS = ("softmax", "gaussian", "mgk", "smgk", "mgk-hard", "smgk-em", "softmax-mgk", "mlk", "smlk")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["classifier", "wikitext"])
def test_weights_are_those_of_the_model(kind, preset):
    """Head by head and query by query, what the model itself returns; padding left out."""
    model, inputs = make_model(kind, preset), make_inputs(kind, padding_side="right")
    expected = attention_maps(model, **inputs)
    record = record_attention(model, **inputs)
    assert [call.name for call in record.calls] == ["layer 1", "layer 2"]
    for call, maps in zip(record.calls, expected, strict=True):
        for sample, length in enumerate((9, 7, 5)):
            queries = torch.tensor([0, 2, length - 1])
            assert call.keys(sample).tolist() == call.queries(sample).tolist() == list(range(length))
            for head in range(4):
                weights = call.weights(sample, head, queries)
                assert weights.shape == (3, length)
                torch.testing.assert_close(
                    weights.float(), maps[sample, head, queries, :length], atol=2e-7, rtol=1e-5, msg=preset
                )


@pytest.mark.parametrize("preset", ["mgk", "smgk", "mlk"])
def test_grouped_queries_share_their_keys(preset):
    model, inputs = make_model("classifier", preset, num_key_value_heads=2), make_inputs("classifier")
    maps = attention_maps(model, **inputs)[0]
    call = record_attention(model, **inputs).calls[0]
    for head in range(4):
        assert torch.allclose(call.weights(1, head, torch.arange(9)).float(), maps[1, head], atol=2e-7)


def test_a_translation_model_has_three_kinds_of_attention():
    model, inputs = make_model("translation", "mgk"), make_inputs("translation", padding_side="right")
    record = record_attention(model, **inputs)
    names = [call.name for call in record.calls]
    assert names[:2] == ["encoder layer 1", "encoder layer 2"]
    assert names[2:4] == ["decoder layer 1", "decoder layer 1, cross"]
    assert len(names) == 2 + 2 * 3
    cross = record.calls[3]
    assert cross.weights(2, 0, torch.arange(8)).shape == (8, 5)
    assert torch.allclose(cross.weights(2, 0, torch.arange(8)).sum(-1), torch.ones(8).double())


@pytest.mark.parametrize("preset", ["mgk", "mlk"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_targets_are_no_queries_of_cross_attention(preset, side):
    model, inputs = make_model("translation", preset), make_inputs("translation")
    length = inputs["decoder_input_ids"].shape[1]
    kept = torch.tensor([[True] * length, [True] * length, [index < 3 for index in range(length)]])
    kept = kept.flip(1) if side == "left" else kept
    record = record_attention(model, **inputs, decoder_attention_mask=kept.long())
    for call in record.calls[2:]:
        assert [len(call.queries(sample)) for sample in range(3)] == [length, length, 3], call.name


def test_of_a_pair_it_is_the_first_sequence():
    record = record_attention(make_model("matcher", "mgk"), **make_inputs("matcher"))
    assert [call.query.shape[2] for call in record.calls] == [9, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_left_as_it_was(kind):
    model, inputs = make_model(kind, "smgk").train(), make_inputs(kind)
    record = record_attention(model, **inputs)
    assert model.training
    assert not any("attend" in vars(module) for module in model.modules())
    assert not any(call.query.requires_grad for call in record.calls)


def test_it_listens_no_longer_after_an_error():
    model = make_model("classifier", "smgk")
    with pytest.raises(ValueError, match="input_ids must lie in"):
        record_attention(model, input_ids=torch.full((1, 4), 1000))
    assert not any("attend" in vars(module) for module in model.modules())


def test_any_model_with_our_attention_will_do():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = mgk.replace_attention(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "smgk", num_heads=2)
    record = record_attention(model, src=torch.randn(1, 6, 16))
    assert [call.name for call in record.calls] == ["layer 1", "layer 2"]


def test_evenly_spaced_queries_without_padding():
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, :2] = False
    call = make_call(query_mask=mask, key_mask=mask)
    assert call.queries(0).tolist() == list(range(2, 12))
    assert call.queries(0, 5).tolist() == [2, 4, 6, 8, 10]
    assert call.queries(0, 100).tolist() == list(range(2, 12))


def test_masks_of_pairs_are_cut_to_the_queries():
    mask = torch.rand(1, 1, 12, 12) > 0.4
    call = make_call(attn_mask=mask, is_causal=True)
    queries = torch.tensor([3, 7, 11])
    expected = mgk.mixture_weights(
        call.query[:, 1:], call.key[:, 1:], attn_mask=mask, is_causal=True, log_prior=torch.zeros(1, 2).double()
    )
    assert torch.allclose(call.weights(0, 1, queries), expected[0, 0, queries], atol=1e-12)


@pytest.mark.parametrize("preset", ["smgk", "mlk"])
def test_weights_that_are_kept_are_those_that_are_computed(preset):
    call = make_call(preset, samples=2)
    some, others = torch.arange(0, 12, 2), torch.arange(1, 12, 2)
    expected = {each: call.weights(1, 1, queries) for each, queries in (("some", some), ("others", others))}
    with call.keeping_weights():
        kept = call.weights(1, 1, some)
        assert call.weights(1, 1, some).data_ptr() == kept.data_ptr()
        assert torch.equal(kept, expected["some"])
        assert torch.equal(call.weights(1, 1, some, torch.float32), expected["some"].float())
        assert torch.equal(call.weights(1, 1, others), expected["others"])
        assert not torch.equal(call.weights(0, 1, others), expected["others"])
    assert not call._kept
    assert call.weights(1, 1, some).data_ptr() != kept.data_ptr()


def test_only_so_many_weights_are_kept(monkeypatch):
    call = make_call("mgk", samples=3)
    monkeypatch.setattr(record, "KEPT_BYTES", 3 * 12 * 12 * 8)
    with call.keeping_weights():
        found = [call.weights(sample, head, torch.arange(12)) for sample in range(3) for head in range(2)]
        assert set(call._kept) == {(0, 0), (0, 1), (1, 0)}
        again = [call.weights(sample, head, torch.arange(12)) for sample in range(3) for head in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_models_and_inputs_that_cannot_be_recorded():
    other = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(ValueError, match=r"must hold mgk\.MixtureAttention.*got BertModel without any"):
        record_attention(other, input_ids=torch.ones(1, 4, dtype=torch.long))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="must be padded to be analysed, got packed sequences"):
        record_attention(make_model("classifier"), input_ids=torch.ones(1, 9, dtype=torch.long), cu_seq_lens_q=bounds)
