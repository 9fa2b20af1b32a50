"""Who gives a weight: shares against the library's own sums, and against the equations."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import make_inputs, make_model

import mgk
from mgk.analysis import attention_maps, component_shares
from mgk.nn import PRESETS, MixtureAttention

SOFT = ("mgk", "smgk", "mgk-em", "softmax-mgk", "softmax-smgk")


class Watched:
    """The first call of each attention of a model: what it was given."""

    def __init__(self, model):
        self.calls = []
        for module in model.modules():
            if isinstance(module, MixtureAttention):
                self._watch(module)

    def _watch(self, module):
        attend = module.attend

        def watched(q, k, v, **options):
            if all(other is not module for other, *_ in self.calls):
                self.calls.append((module, q, k, options))
            return attend(q, k, v, **options)

        module.attend = watched


def with_priors(model):
    """Components that differ in more than their keys."""
    for module in model.modules():
        if isinstance(module, MixtureAttention) and hasattr(module.prior, "logits"):
            torch.nn.init.normal_(module.prior.logits)
        if isinstance(module, MixtureAttention) and hasattr(module.variance, "log_variance"):
            torch.nn.init.normal_(module.variance.log_variance, mean=1.0, std=0.4)
    return model


@pytest.mark.parametrize("attention", SOFT)
@pytest.mark.parametrize("changes", [{}, {"learn_variance": True, "num_components": 3, "num_key_value_heads": 2}])
def test_means_are_the_responsibilities_of_the_library(attention, changes):
    model = with_priors(make_model("classifier", attention, **changes))
    ids = make_inputs("classifier", batch=2)["input_ids"]
    shares = component_shares(model, input_ids=ids)
    watched = Watched(model)
    model(input_ids=ids)
    components = changes.get("num_components", 2)
    assert len(shares) == len(watched.calls) == 2
    for found, (module, q, k, options) in zip(shares, watched.calls, strict=True):
        assert found.shape == (2, 4, components, 9, 9)
        torch.testing.assert_close(found.sum(2), torch.ones(2, 4, 9, 9))
        expected = mgk.mixture_responsibilities(
            q, k, shift=options["shift"], log_prior=module.prior(), variance=module.variance(),
            similarity=module.similarity,
        )  # fmt: skip
        got = found.unflatten(1, (module.num_kv_heads, -1)).mean(dim=(0, 2, 4, 5))
        torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


def test_weights_are_those_of_a_plain_attention_over_all_components():
    """Equal variances: weight times share is what softmax gives each of the M N keys."""
    model = with_priors(make_model("modern", "mgk"))
    inputs = {"input_ids": make_inputs("modern", batch=1)["input_ids"], "use_cache": False}
    weights, shares = attention_maps(model, **inputs), component_shares(model, **inputs)
    watched = Watched(model)
    model(**inputs)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for weight, share, (module, q, k, _) in zip(weights, shares, watched.calls, strict=True):
        logit = module.prior()[:, :, None, None] - 0.5 * torch.cdist(q[:, :, None], k).square() / module.variance()
        logit = logit.masked_fill(~causal, -torch.inf)
        joint = logit.transpose(2, 3).flatten(3).softmax(-1).unflatten(-1, (2, 9)).transpose(2, 3)
        torch.testing.assert_close(weight[:, :, None] * share, joint.float(), atol=1e-6, rtol=1e-4)


def test_hard_assignment_has_one_answer():
    model = make_model("classifier", "mgk-hard")
    ids = make_inputs("classifier")["input_ids"]
    shares = component_shares(model, input_ids=ids)
    watched = Watched(model)
    model(input_ids=ids)
    for found, (_, q, k, _) in zip(shares, watched.calls, strict=True):
        nearest = torch.cdist(q[:, :, None], k).argmin(dim=2)
        assert found.unique().tolist() == [0.0, 1.0]
        assert torch.equal(found.argmax(dim=2), nearest)


def test_equally_near_components_share():
    model = make_model("classifier", "smgk-hard", num_components=3)
    for module in model.modules():
        if isinstance(module, MixtureAttention):
            # The third lies far from every query.
            module.keys.shift.data = torch.tensor([0.0, 0.0, 1e3]).double()[:, None].expand(4, 3, 8).contiguous()
    found = component_shares(model, input_ids=make_inputs("classifier")["input_ids"])[0]
    assert torch.equal(found, torch.tensor([0.5, 0.5, 0.0])[:, None, None].expand_as(found))


@pytest.mark.parametrize("attention", ["mlk", "smlk"])
def test_linear_attention_has_parts_of_its_sum(attention):
    model = with_priors(make_model("modern", attention))
    inputs = {"input_ids": make_inputs("modern", batch=1)["input_ids"], "use_cache": False}
    shares = component_shares(model, **inputs)
    watched = Watched(model)
    model(**inputs)
    for found, (module, q, k, options) in zip(shares, watched.calls, strict=True):
        keys = k if options["shift"] is None else k[:, :, None] + options["shift"][:, :, None]
        features = (F.elu(q[:, :, None]) + 1) @ (F.elu(keys) + 1).mT * module.prior().exp()[:, :, None, None]
        torch.testing.assert_close(found, (features / features.sum(2, keepdim=True)).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", PRESETS)
def test_every_preset(attention):
    shares = component_shares(make_model("classifier", attention), input_ids=make_inputs("classifier")["input_ids"])
    components = PRESETS[attention].num_components
    assert [tuple(layer.shape) for layer in shares] == [(3, 4, components, 9, 9)] * 2
    assert all((layer >= 0).all() and layer.dtype is torch.float32 for layer in shares)
    if components == 1:
        assert all(torch.equal(layer, torch.ones_like(layer)) for layer in shares)


def test_features_that_are_all_zero_are_shared_evenly():
    model = make_model("classifier", "mlk", feature_map="relu")
    for module in model.modules():
        if isinstance(module, MixtureAttention):
            torch.nn.init.zeros_(module.q_proj.weight)
            torch.nn.init.constant_(module.q_proj.bias, -1.0)
    assert component_shares(model, input_ids=make_inputs("classifier")["input_ids"])[0].unique().tolist() == [0.5]


def test_a_pair_is_its_first_sequence_and_the_model_stays_as_it_was():
    model = make_model("matcher", "smgk").train()
    inputs = {name: make_inputs("matcher")[name] for name in ("input_ids", "pair_input_ids")}
    shares = component_shares(model, **inputs)
    assert shares[0].shape[-2:] == (9, 9)
    assert model.training
    assert not any("attend" in vars(module) for module in model.modules())


def test_shares_of_a_decoder_belong_to_its_maps():
    """Those of self-attention, layer by layer: the maps leave out cross-attention, too."""
    model, inputs = make_model("translation", "mgk"), make_inputs("translation")
    states = model.get_encoder()(inputs["input_ids"]).last_hidden_state
    given = {"input_ids": inputs["decoder_input_ids"], "encoder_hidden_states": states}
    shares = component_shares(model.get_decoder(), **given)
    maps = attention_maps(model.get_decoder(), **given)
    assert len(shares) == len(maps) == 3
    for share, weights in zip(shares, maps, strict=True):
        assert share[:, :, 0].shape == weights.shape


def test_a_batch_without_sequences_is_refused():
    with pytest.raises(ValueError, match="inputs must hold at least one sequence, got none"):
        component_shares(make_model("classifier", "mgk"), input_ids=torch.zeros(0, 4, dtype=torch.long))


def test_a_model_without_mixtures_is_refused():
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(ValueError, match=r"must hold mgk.MixtureAttention, .* got BertModel without any"):
        component_shares(BertModel(config), input_ids=torch.zeros(1, 3, dtype=torch.long))
