"""Costs against sums by hand, against torch's own counter, and against caches that were really filled."""

import pytest
import torch
from cases import DEVICE
from model_cases import KINDS, make_inputs, make_labels, make_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mgk.nn.attention
from mgk.analysis import (
    attention_maps,
    cache_bytes_of_run,
    cache_bytes_per_token,
    embedding_parameters,
    forward_flops,
    parameters,
    training_flops,
)
from mgk.models import MGKForCausalLM, architecture
from mgk.nn import PRESETS
from mgk.recipes import load
from mgk.training.resolved_model import build_model_config

# What `make_model` builds: width 32, 4 heads of 8, feed-forward 48, vocabulary 61, 2 layers. `make_inputs`: 3 x 9.
B, N, D_MODEL, H, D, INNER, VOCAB, LAYERS = 3, 9, 32, 4, 8, 48, 61, 2


def linear(rows, inputs, outputs):
    return 2 * rows * inputs * outputs


def layer_by_hand(attention, tokens, *, gated=False):
    """One layer on B rows of so many tokens."""
    keys = 2 if attention == "mgk" else 1
    rows = B * tokens
    projections = linear(rows, D_MODEL, H * D) * (1 + keys + 1) + linear(rows, H * D, D_MODEL)
    feed_forward = (3 if gated else 2) * linear(rows, D_MODEL, INNER)
    pairs = 2 * B * H * tokens * tokens
    core = pairs * D * keys + pairs * D
    if attention == "smgk":
        core += 2 * B * H * tokens * 2 * D  # q . b_r
        core += 2 * B * H * tokens * 2 * D  # k . b_r
    return projections + feed_forward + core


@pytest.mark.parametrize("attention", ["softmax", "gaussian", "mgk", "smgk"])
class TestSumsByHand:
    def test_classifier(self, attention):
        model, inputs = make_model("classifier", attention), make_inputs("classifier")
        head = linear(B, D_MODEL, 128) + linear(B, 128, 10)
        assert forward_flops(model, **inputs) == LAYERS * layer_by_hand(attention, N) + head

    def test_matcher(self, attention):
        """Two passes, over 9 and over 7 tokens; the head sees four vectors."""
        model, inputs = make_model("matcher", attention), make_inputs("matcher")
        head = linear(B, 4 * D_MODEL, 128) + linear(B, 128, 2)
        layers = layer_by_hand(attention, 9) + layer_by_hand(attention, 7)
        assert forward_flops(model, **inputs) == LAYERS * layers + head

    def test_language_model(self, attention):
        """Causal: the full square; one table, which costs nothing at the input."""
        model, inputs = make_model("modern", attention), make_inputs("modern")
        layer = layer_by_hand(attention, N, gated=True)
        assert forward_flops(model, **inputs) == LAYERS * layer + linear(B * N, D_MODEL, VOCAB)


def test_numbers_written_down():
    """Not by formula: multiplied out once, so that no formula of the tests can be wrong in the same way."""
    inputs = make_inputs("classifier")
    counts = {name: forward_flops(make_model("classifier", name), **inputs) for name in ("softmax", "mgk", "smgk")}
    assert counts == {"softmax": 868_608, "mgk": 1_010_304, "smgk": 882_432}


def test_adaptive_softmax():
    """Without labels all 61 words and 2 clusters; with labels a cluster for its own targets only."""
    model, inputs = make_model("wikitext", "softmax"), make_inputs("wikitext")
    layers = LAYERS * layer_by_hand("softmax", N)
    assert forward_flops(model, **inputs) == layers + linear(B * N, D_MODEL, 61 + 2)
    labels = torch.full((B, N), -100, device=DEVICE)
    labels[:, 1:5] = torch.tensor([3, 25, 45, 60], device=DEVICE)
    expected = layers + linear(B * N, D_MODEL, 20 + 2) + linear(B, D_MODEL, 20) + linear(2 * B, D_MODEL, 21)
    assert forward_flops(model, **inputs, labels=labels) == expected


def by_the_identities(problem, backend):
    """The matrix products of mixture attention, and nothing that makes sense: for torch to count."""
    q, k, v, shift, group = problem.query, problem.key, problem.value, problem.shift, problem.group_size
    v = v.repeat_interleave(group, dim=1)
    if shift is not None:
        q @ shift.repeat_interleave(group, dim=0).mT.to(q)
        if problem.similarity == "gaussian":
            k[:, :, 0] @ shift.mT.to(k)
    k = k.repeat_interleave(group, dim=1)
    products = q[:, :, None] @ k.mT
    return products.sum(dim=2) @ v


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk", "smgk-hard", "softmax-smgk"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"qk_norm": True, "num_components": 3}])
def test_torch_counts_the_same(monkeypatch, kind, attention, changes):
    model, inputs = make_model(kind, attention, **changes), make_inputs(kind)
    ours = forward_flops(model, **inputs)
    monkeypatch.setattr(mgk.nn.attention, "attend", by_the_identities)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    angles = 0
    if kind == "modern":
        # The angles of rotary positions, frequency times position, are a product of matrices in some versions of
        # transformers, which torch counts.
        with FlopCounterMode(display=False) as rotary:
            model.model.rotary_emb(torch.zeros(B, N, D_MODEL), torch.arange(N).expand(B, -1))
        angles = rotary.get_total_flops()
        assert angles in (0, 2 * B * N * D // 2)
    assert ours == counter.get_total_flops() - angles


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk", "mlk"])
def test_packed_sequences_are_counted_one_by_one(attention):
    """No sequence sees another, so pairs between them are no work."""
    model, tokens = make_model("classifier", attention), make_inputs("classifier", batch=1)["input_ids"]
    bounds = torch.tensor([0, 2, 3, 9], dtype=torch.int32, device=DEVICE)
    alone = [forward_flops(model, input_ids=part) for part in tokens.split([2, 1, 6], dim=1)]
    assert forward_flops(model, input_ids=tokens, cu_seq_lens_q=bounds) == sum(alone)


def test_packed_translations_are_counted_one_by_one():
    model, inputs = make_model("translation", "smgk"), make_inputs("translation", batch=1)
    source, target = inputs["input_ids"], inputs["decoder_input_ids"]
    bounds = [torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in ([0, 4, 9], [0, 7, 8])]
    parts = zip(source.split([4, 5], dim=1), target.split([7, 1], dim=1), strict=True)
    alone = [forward_flops(model, input_ids=one, decoder_input_ids=other) for one, other in parts]
    packed = {"cu_seq_lens_q": bounds[0], "decoder_cu_seq_lens_q": bounds[1]}
    assert forward_flops(model, input_ids=source, decoder_input_ids=target, **packed) == sum(alone)


def test_cached_keys_are_counted():
    """One new token after eight: projections for one, attention over nine."""
    model, inputs = make_model("modern", "smgk"), make_inputs("modern")
    past = model(input_ids=inputs["input_ids"][:, :8]).past_key_values
    got = forward_flops(model, input_ids=inputs["input_ids"][:, 8:], past_key_values=past)
    rows = linear(B, D_MODEL, H * D) * 4 + 3 * linear(B, D_MODEL, INNER)
    core = 2 * (2 * B * H * 9 * D) + 2 * B * H * 2 * D + 2 * B * H * 9 * 2 * D
    assert got == LAYERS * (rows + core) + linear(B, D_MODEL, VOCAB)


@pytest.mark.parametrize(("attention", "keys"), [("linear", 1), ("mlk", 2), ("smlk", 1)])
@pytest.mark.parametrize("use_cache", [False, True])
def test_linear_attention_counts_states(attention, keys, use_cache):
    model, inputs = make_model("modern", attention), make_inputs("modern")
    rows = (
        linear(B * N, D_MODEL, H * D) * (2 + keys) + linear(B * N, H * D, D_MODEL) + 3 * linear(B * N, D_MODEL, INNER)
    )
    core = 2 * (2 * B * H * N) * D * (D + 1)
    got = forward_flops(model, **inputs, use_cache=use_cache)
    assert got == LAYERS * (rows + core) + linear(B * N, D_MODEL, VOCAB)
    assert cache_bytes_per_token(model.config) == 0


def test_meta_device_computes_nothing():
    model, inputs = make_model("classifier", "smgk"), make_inputs("classifier")
    expected = forward_flops(model, **inputs)
    there = {name: tensor.to("meta") for name, tensor in inputs.items()}
    assert forward_flops(model.to("meta"), **there) == expected


def test_training_is_three_times_forward():
    model, inputs = make_model("translation", "mgk"), make_inputs("translation")
    inputs["labels"] = make_labels("translation", inputs)
    assert training_flops(model, **inputs) == 3 * forward_flops(model, **inputs)


def test_counting_leaves_the_model_as_it_was():
    model, inputs = make_model("classifier", "mgk-em", attention_dropout=0.5), make_inputs("classifier")
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    first = forward_flops(model, **inputs)
    assert not any(module._forward_hooks or "attend" in vars(module) for module in model.modules())
    # Leaves hooks behind, by which transformers collects outputs; they do nothing unless asked.
    attention_maps(model, **inputs)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert forward_flops(model, **inputs) == first


def test_a_failing_forward_leaves_no_hooks():
    model = make_model("classifier", "smgk").train()
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        forward_flops(model)
    assert model.training
    assert not any(module._forward_hooks or "attend" in vars(module) for module in model.modules())


def test_parameters():
    model = make_model("wikitext", "softmax")
    assert parameters(model) == model.num_parameters()
    assert embedding_parameters(model) == VOCAB * D_MODEL
    untied = make_model("wikitext", "softmax", tie_word_embeddings=False)
    assert parameters(untied) == parameters(model) + VOCAB * D_MODEL
    assert embedding_parameters(untied) == VOCAB * D_MODEL
    assert embedding_parameters(make_model("classifier")) == (VOCAB + 2048) * D_MODEL
    assert embedding_parameters(make_model("translation")) == (VOCAB + 53) * D_MODEL
    assert embedding_parameters(make_model("translation", source_vocab_size=None)) == VOCAB * D_MODEL
    assert parameters(nn.Linear(3, 5)) == 20


def bytes_of(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def state_bytes_of(cache):
    found = [each for layer in cache.layers for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in found)


@pytest.mark.parametrize("attention", ["softmax", "gaussian", "mgk", "smgk", "smgk-hard"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2}, {"qk_norm": True}, {"qk_norm": True, "positions": "none"}, {"num_components": 3}],
)
def test_cache_is_what_generation_keeps(attention, changes):
    model, inputs = make_model("modern", attention, **changes), make_inputs("modern")
    cache = model(**inputs, use_cache=True).past_key_values
    assert cache_bytes_per_token(model.config, torch.float64) * B * N == bytes_of(cache)


@pytest.mark.parametrize("attention", PRESETS)
def test_cache_of_a_model_that_writes(attention):
    """Of every preset, after a prompt of nine tokens and two of three new ones; the last one is not read any more."""
    model, inputs = make_model("modern", attention, num_key_value_heads=2), make_inputs("modern")
    said = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    per_token = cache_bytes_per_token(model.config, torch.float64)
    if PRESETS[attention].feature_map is not None:
        # States, as large after two tokens more.
        longer = model.generate(
            **inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, return_dict_in_generate=True
        )  # fmt: skip
        assert per_token == 0
        assert state_bytes_of(said.past_key_values) == state_bytes_of(longer.past_key_values) > 0
    else:
        assert per_token * B * (N + 2) == bytes_of(said.past_key_values)


@pytest.mark.parametrize("row", load("enwik8-equal-cache").rows)
def test_cache_of_every_row_at_equal_cache(row):
    """Each keeps what its run says; all but the reference and mgk half of softmax-8's, and mgk no more."""
    recipe = load("enwik8-equal-cache")
    run = recipe.config(row)
    model = MGKForCausalLM(build_model_config(run, vocab_size=256)).eval()
    said = model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, return_dict_in_generate=True)
    kept = cache_bytes_of_run(run)
    # Weights and cache are fp32 here.
    assert 2 * kept * 4 == bytes_of(said.past_key_values)
    full = cache_bytes_of_run(recipe.config("softmax-8"))
    share = {"softmax-8+qk_norm": 1, "mgk-4+num_key_value_heads=2": 3 / 8}.get(run.row, 1 / 2)
    assert kept == share * full
    assert cache_bytes_of_run(recipe.config("mgk-3")) > full / 2


def test_cache_of_a_translation():
    """As much for a token of the target (8 of them) as for one of the source (9)."""
    model, inputs = make_model("translation", "mgk"), make_inputs("translation")
    cache = model(**inputs, use_cache=True).past_key_values
    per_token = cache_bytes_per_token(model.config, torch.float64)
    assert bytes_of(cache.self_attention_cache) == B * 8 * per_token
    assert bytes_of(cache.cross_attention_cache) == B * 9 * per_token


def test_cache_at_half_the_heads():
    """The savings that the paper's layers are about: 3/4 and 1/2 of softmax."""

    def per_token(attention, heads):
        return cache_bytes_per_token(architecture("modern", attention=attention, num_attention_heads=heads))

    full = per_token("softmax", 8)
    assert full == 8 * 8 * 2 * 64 * 2
    assert per_token("mgk", 4) / full == 0.75
    assert per_token("smgk", 4) / full == 0.5


@pytest.mark.parametrize("kind", ["classifier", "matcher", "modern"])
def test_attention_maps(kind):
    model = make_model(kind, "smgk", attention_dropout=0.5).train()
    inputs = make_inputs(kind, padding_side="right")
    maps = attention_maps(model, **inputs)
    assert [tuple(weights.shape) for weights in maps] == [(B, H, N, N)] * LAYERS
    assert all(weights.dtype == torch.float32 and weights.device.type == "cpu" for weights in maps)
    assert not any(weights.requires_grad for weights in maps)
    kept = inputs["attention_mask"].bool().cpu()
    for weights in maps:
        torch.testing.assert_close(weights.sum(dim=-1).mT[kept], torch.ones(int(kept.sum()), H))
        assert weights[1, :, :, N - 2 :].eq(0).all()
        if kind == "modern":
            assert weights.triu(1).eq(0).all()
    # Dropout would zero half of what may be seen.
    assert (maps[0][0] > 0).float().mean() > (0.5 if kind == "modern" else 0.99)


def test_attention_maps_of_a_translation():
    model, inputs = make_model("translation"), make_inputs("translation")
    with pytest.raises(ValueError, match=r"one stack of layers.*get_encoder"):
        attention_maps(model, **inputs)
    maps = attention_maps(model.get_encoder(), input_ids=inputs["input_ids"])
    assert [tuple(weights.shape) for weights in maps] == [(B, H, N, N)] * LAYERS
