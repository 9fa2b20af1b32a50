"""Cached generation: what is read from a cache equals what is computed anew."""

import pytest
import torch
from cases import DEVICE
from model_cases import GENERATIVE, make_inputs, make_model, seeded, values_checked
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation import GenerationConfig

from mgk.nn import PRESETS
from mgk.nn.presets import LINEAR_PRESETS

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
VARIANTS = [
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 2, "num_components": 3},
    {"qk_norm": True},
    {"learn_variance": True},
    {"variance_scale": [1.0, 3.0]},
]


def new_cache(model, implementation, slots):
    def make():
        if implementation == "dynamic":
            return DynamicCache(config=model.config)
        return StaticCache(config=model.config, max_cache_len=slots)

    if not model.config.is_encoder_decoder:
        return make()
    return EncoderDecoderCache(make(), DynamicCache(config=model.config))


def full_logits(model, inputs):
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def cached_logits(model, inputs, cache, pieces):
    """Logits of the tokens, fed in pieces of these lengths."""
    inputs = dict(inputs)
    if model.config.is_encoder_decoder:
        tokens, mask = inputs.pop("decoder_input_ids"), None
    else:
        tokens, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    logits, done = [], 0
    for piece in pieces:
        new = tokens[:, done : done + piece]
        names = ("decoder_input_ids", "decoder_attention_mask") if mask is None else ("input_ids", "attention_mask")
        step = {names[0]: new, names[1]: None if mask is None else mask[:, : done + piece]}
        with torch.no_grad():
            logits.append(model(**inputs, **step, past_key_values=cache, use_cache=True).logits)
        done += piece
    assert done == tokens.shape[1]
    return torch.cat(logits, dim=1)


def assert_equal_where_valid(got, expected, mask):
    if mask is not None:
        got, expected = got[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("kind", GENERATIVE)
@pytest.mark.parametrize("attention", PRESETS)
def test_cached_decoding_equals_the_full_forward(attention, kind, implementation):
    """P16, token by token after a prompt of three; the modern model with left padding."""
    model = make_model(kind, attention)
    inputs = make_inputs(kind, padding_side="left" if kind != "translation" else "right")
    mask = None if kind == "translation" else inputs["attention_mask"]
    total = 8 if kind == "translation" else 9
    cache = new_cache(model, implementation, 12)
    got = cached_logits(model, inputs, cache, [3] + [1] * (total - 3))
    assert_equal_where_valid(got, full_logits(model, inputs), mask)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("attention", ["mgk", "smgk"])
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 3, 2], [2, 1, 6]], ids=str)
def test_any_split_and_variant(attention, variant, implementation, pieces):
    model = make_model("modern", attention, **variant)
    inputs = make_inputs("modern", padding_side="left")
    got = cached_logits(model, inputs, new_cache(model, implementation, 16), pieces)
    assert_equal_where_valid(got, full_logits(model, inputs), inputs["attention_mask"])


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["mlk", "smlk"])
def test_a_state_does_not_grow(attention, implementation):
    """Linear attention: the same few numbers after 5 tokens and after 50, in either cache; beams may be reordered."""
    model = make_model("modern", attention, dtype=torch.float32)
    tokens = make_inputs("modern", tokens=50)["input_ids"]
    cache = new_cache(model, implementation, 64)
    sizes = []
    for first, end in ((0, 5), (5, 50)):
        model(tokens[:, first:end], past_key_values=cache, use_cache=True)
        sizes.append([layer.keys.shape for layer in cache.layers])
        assert int(cache.get_seq_length()) == end
    assert sizes[0] == sizes[1] == [(3, 4, 8, 9)] * 2
    assert all(layer.keys.dtype == torch.float32 for layer in cache.layers)
    before = cache.layers[0].keys.clone()
    cache.reorder_cache(torch.tensor([2, 0, 0], device=DEVICE))
    assert torch.equal(cache.layers[0].keys, before[[2, 0, 0]])
    cache.layers[0].crop(0)
    with pytest.raises(ValueError, match="cannot forget tokens, got 1 to remove"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="cannot forget tokens, got 3 of 50 to keep"):
        cache.layers[0].crop(3)
    with pytest.raises(TypeError, match="keeps a state, got keys and values to keep"):
        cache.update(before, before, 0)
    cache.layers[1].batch_repeat_interleave(2)
    assert len(cache.layers[1].keys) == 6
    cache.reset()
    assert int(cache.get_seq_length()) == 0


def test_what_a_state_cannot_take_the_place_of():
    linear, softmax = make_model("modern", "mlk"), make_model("modern", "softmax")
    tokens = make_inputs("modern")["input_ids"]
    past = softmax(tokens, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="must hold states of linear attention, got a DynamicLayer with keys and values"
    ):
        linear(tokens, past_key_values=past)
    past = linear(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="linear attention keeps no keys to show weights of"):
        linear(tokens, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match="linear attention cannot hide single pairs"):
        linear(tokens, attention_mask=torch.ones(3, 1, 9, 9, device=DEVICE).bool(), use_cache=False)


def test_linear_attention_without_a_denominator():
    """It can be trained and run; to cache it one would have to count."""
    model = make_model("modern", "smlk", normalization="length")
    inputs = make_inputs("modern", padding_side="right")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    with pytest.raises(ValueError, match="normalization must be 'sum' where a cache is filled, got 'length'"):
        model(**inputs, past_key_values=new_cache(model, "dynamic", 9))


def test_linear_attention_generates_in_pieces_and_compiled():
    model = make_model("modern", "mlk", dtype=torch.float32)
    tokens = make_inputs("modern", batch=1, tokens=12)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(tokens, **options)
    pieces = model.generate(
        tokens, **options, prefill_chunk_size=5, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(pieces, expected)
    positions = torch.arange(12, device=DEVICE)[None]
    compiled = torch.compile(lambda: model(tokens, position_ids=positions, use_cache=False).logits, backend="eager")
    torch.testing.assert_close(compiled(), model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["wikitext", "modern"])
def test_long_prompts(kind, implementation):
    """Longer than the blocks of the causal kernels, and than max_position_embeddings where positions allow it."""
    model = make_model(kind, "mgk", max_position_embeddings=64)
    inputs = make_inputs(kind, batch=1, tokens=600)
    got = cached_logits(model, inputs, new_cache(model, implementation, 600), [597, 1, 1, 1])
    torch.testing.assert_close(got, full_logits(model, inputs), **CLOSE)


@pytest.mark.parametrize("kind", GENERATIVE)
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk", "smgk-hard"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.9, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=["greedy", "sampling", "beam", "beam-sampling"],
)
def test_generate_is_the_same_with_and_without_a_cache(attention, kind, settings):
    model = make_model(kind, attention)
    inputs = make_inputs(kind, padding_side="left" if kind != "translation" else "right")
    inputs.pop("decoder_input_ids", None)
    results = []
    for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}):
        torch.manual_seed(5)
        results.append(
            model.generate(**inputs, **settings, **cache, max_new_tokens=7, min_new_tokens=7, pad_token_id=1)
        )
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
@pytest.mark.parametrize("kind", ["wikitext", "modern"])
def test_padding_on_either_side_changes_no_continuation(attention, kind, beams):
    """Left, right, and in the middle of a prompt."""
    model = make_model(kind, attention)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": beams, "pad_token_id": 1}
    prompts = [torch.randint(3, 60, (1, n), generator=seeded(n), device=DEVICE) for n in (4, 6)]
    alone = torch.cat([model.generate(prompt, **settings)[:, prompt.shape[1] :] for prompt in prompts])
    for kept in ([2, 3, 4, 5], [0, 1, 2, 3], [0, 3, 4, 5]):
        tokens, mask = torch.ones(2, 2, 6, dtype=torch.long, device=DEVICE)
        tokens[1], tokens[0, kept] = prompts[1], prompts[0]
        mask[0] = torch.tensor([index in kept for index in range(6)])
        out = model.generate(tokens, attention_mask=mask, **settings)
        torch.testing.assert_close(out[:, 6:], alone)
        torch.testing.assert_close(out[:, :6], tokens)
        embeds = model.get_input_embeddings()(tokens)
        torch.testing.assert_close(model.generate(inputs_embeds=embeds, attention_mask=mask, **settings), alone)


def never(*args, **kwargs):
    raise AssertionError("generation began")


@pytest.mark.parametrize("kind", ["modern", "translation"])
@pytest.mark.parametrize("attention", LINEAR_PRESETS)
def test_linear_attention_refuses_assisted_decoding_at_once(attention, kind, monkeypatch):
    """Prompt lookup and an assistant, before any token is computed; a linear assistant of another model likewise."""
    model, other = make_model(kind, attention), make_model(kind, "smgk")
    inputs = make_inputs(kind, batch=1)
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    monkeypatch.setattr(model.model, "forward", never)
    for way in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": other}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(**inputs, **settings, **way)
    with pytest.raises(ValueError, match=r"assistant .* must be able to take tokens back, got .*, a stateful model"):
        other.generate(**inputs, **settings, assistant_model=model)


def test_linear_attention_is_no_assistant_of_a_model_of_transformers():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, **shape)).to(DEVICE).eval()
    tokens = make_inputs("modern", batch=1)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    with pytest.raises(ValueError, match="must be able to take tokens back, got MGKForCausalLM, a stateful model"):
        llama.generate(tokens, **settings, assistant_model=make_model("modern", "mlk", dtype=torch.float32))
    expected = llama.generate(tokens, **settings)
    assistant = make_model("modern", "smgk", dtype=torch.float32)
    assert torch.equal(llama.generate(tokens, **settings, assistant_model=assistant), expected)


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
def test_attention_maps_of_a_static_cache_have_one_width(attention):
    """That of its slots, in the prompt and afterwards, as Llama has it; and they are those of a dynamic cache."""
    model = make_model("modern", attention)
    inputs = make_inputs("modern", padding_side="left")
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    static, dynamic = (
        model.generate(**inputs, **settings, output_attentions=True, cache_implementation=kind, disable_compile=True)
        for kind in ("static", "dynamic")
    )
    slots = static.past_key_values.get_max_length()
    for step, (got, expected) in enumerate(zip(static.attentions, dynamic.attentions, strict=True)):
        for layer, exact in zip(got, expected, strict=True):
            assert layer.shape == (3, 4, 9 if step == 0 else 1, slots)
            torch.testing.assert_close(layer[..., : exact.shape[-1]], exact, **CLOSE)
            assert (layer[..., exact.shape[-1] :] == 0).all()
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=61, **shape), attn_implementation="eager").to(DEVICE)
    theirs = llama.generate(
        **inputs, **settings, output_attentions=True, cache_implementation="static", disable_compile=True
    )
    assert [step[0].shape[2:] for step in theirs.attentions] == [step[0].shape[2:] for step in static.attentions]


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
def test_other_ways_to_generate(attention):
    """Assisted by a small model or by the prompt, in chunks, from where a cache ends: always the greedy tokens."""
    model = make_model("modern", attention)
    inputs = make_inputs("modern", batch=1)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(**inputs, **settings)
    assistant = make_model("modern", attention, seed=5)
    torch.testing.assert_close(model.generate(**inputs, **settings, assistant_model=assistant), expected)
    torch.testing.assert_close(model.generate(**inputs, **settings, prompt_lookup_num_tokens=2), expected)
    torch.testing.assert_close(model.generate(**inputs, **settings, prefill_chunk_size=4), expected)
    half = {**settings, "max_new_tokens": 3, "min_new_tokens": 3}
    begun = model.generate(**inputs, **half, return_dict_in_generate=True, output_attentions=True)
    assert begun.attentions[1][0].shape == (1, 4, 1, 10)
    mask = torch.ones_like(begun.sequences)
    rest = model.generate(begun.sequences, attention_mask=mask, past_key_values=begun.past_key_values, **half)
    torch.testing.assert_close(rest, expected)


@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
def test_beams_may_be_reordered(attention):
    """After a reorder each row continues the history it was given."""
    model = make_model("modern", attention)
    inputs = make_inputs("modern")
    order = torch.tensor([2, 0, 0], device=DEVICE)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :6], past_key_values=cache, use_cache=True)
        cache.reorder_cache(order)
        got = model(inputs["input_ids"][:, 6:], past_key_values=cache, use_cache=True).logits
    history = torch.cat([inputs["input_ids"][order, :6], inputs["input_ids"][:, 6:]], dim=1)
    torch.testing.assert_close(got, full_logits(model, {"input_ids": history})[:, 6:], **CLOSE)


def cached_bytes(attention, heads, **changes):
    model = make_model("modern", attention, num_attention_heads=heads, dtype=torch.float32, **changes)
    inputs = make_inputs("modern", batch=2, tokens=11)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / (2 * 11)


def test_bytes_per_cached_token():
    """Half the heads: shifted keys cost half of softmax, two projected keys three quarters."""
    softmax = cached_bytes("softmax", 8)
    assert softmax == 2 * 8 * (8 + 8) * 4
    assert cached_bytes("smgk", 4) / softmax == 0.50
    assert cached_bytes("mgk", 4) / softmax == 0.75
    assert cached_bytes("smgk", 4, num_key_value_heads=1) / softmax == 0.125
    assert cached_bytes("smgk", 4, num_components=5) / softmax == 0.50


@pytest.mark.parametrize("kind", ["modern", "translation"])
def test_compiled_generation_with_a_static_cache(kind):
    """What `generate` compiles on a GPU by itself, here by hand on the CPU."""
    model = make_model(kind, "smgk", dtype=torch.float32)
    inputs = make_inputs(kind, padding_side="left" if kind == "modern" else "right")
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(**inputs, **settings)
    from transformers import CompileConfig

    compiled = CompileConfig(backend="eager", fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True
    generation = GenerationConfig(cache_implementation="static", compile_config=compiled, **settings)
    if kind == "translation":
        generation.decoder_start_token_id = model.config.decoder_start_token_id
        generation.eos_token_id = model.config.eos_token_id
    torch._dynamo.reset()
    torch.testing.assert_close(model.generate(**inputs, generation_config=generation), expected)


def test_padding_is_known_by_its_token_and_positions_move_along():
    """Without a mask the padding token tells; positions that are given keep to their tokens."""
    model = make_model("modern")
    tokens = make_inputs("modern", batch=2)["input_ids"]
    tokens[0, 6:] = 0
    mask = (tokens != 0).long()
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(tokens, attention_mask=mask, **settings)
    torch.testing.assert_close(model.generate(tokens, **settings), expected)
    # A generation_config without the token takes it from the model, and one that has it overrides the model.
    torch.testing.assert_close(model.generate(tokens, generation_config=GenerationConfig(**settings)), expected)
    other = make_model("modern", pad_token_id=None)
    for arguments, options in (
        ([], {"generation_config": GenerationConfig(pad_token_id=0, **settings)}),
        ([GenerationConfig(pad_token_id=0, **settings)], {}),
    ):
        torch.testing.assert_close(other.generate(tokens, *arguments, **options), expected)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = model.generate(tokens, attention_mask=mask, position_ids=positions, **settings)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5, 6, 7]], r"prompts must be a tensor of shape \[B, N\], got list"),
        (torch.tensor([5, 6, 7]), r"prompts must be a tensor of shape \[B, N\], got shape \[3\]"),
    ],
    ids=["list", "one-axis"],
)
def test_prompts_that_are_no_batch_are_refused(prompts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_model("modern").generate(prompts, max_new_tokens=2)


def test_a_static_cache_may_have_more_slots_than_the_source():
    model = make_model("translation")
    inputs = make_inputs("translation", padding_side="right")
    cache = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=20), StaticCache(config=model.config, max_cache_len=13)
    )
    got = cached_logits(model, inputs, cache, [3, 1, 1, 1, 1, 1])
    torch.testing.assert_close(got, full_logits(model, inputs), **CLOSE)


def test_a_static_cache_may_be_used_again():
    model = make_model("modern")
    cache = new_cache(model, "static", 16)
    for seed in (1, 2):
        inputs = make_inputs("modern", seed=seed, padding_side="left")
        got = cached_logits(model, inputs, cache, [4, 1, 4])
        assert_equal_where_valid(got, full_logits(model, inputs), inputs["attention_mask"])
        cache.reset()


def test_a_mask_of_the_wrong_length_is_refused():
    model = make_model("modern")
    inputs = make_inputs("modern")
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[3, 9\], got \[3, 8\]"):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, 1:])
    with pytest.raises(ValueError, match="attention_mask must have 2 or 4 axes"):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, None])


def test_learned_positions_end_with_their_table():
    model = make_model("modern", positions="learned", max_position_embeddings=12)
    inputs = make_inputs("modern", tokens=9)
    with values_checked(), pytest.raises(ValueError, match="at most max_position_embeddings=12 tokens, got 13"):
        model.generate(**inputs, max_new_tokens=6, min_new_tokens=6)
