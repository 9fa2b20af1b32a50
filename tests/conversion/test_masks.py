"""What arrives at the attention: something small wherever that says enough, and always what was meant."""

import pytest
import torch
from cases import DEVICE
from conversion_cases import logits, make_inputs, make_model
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

import mgk
from mgk.conversion import mask as masks


@pytest.fixture
def arriving(monkeypatch):
    """The masks of all calls of the attention function, in order."""
    found = []

    def spy(mask, *arguments):
        found.append(mask)
        return masks.read_mask(mask, *arguments)

    monkeypatch.setattr("mgk.conversion.attention.read_mask", spy)
    return found


def converted(family="llama", preset="smgk", **options):
    return mgk.convert(make_model(family), preset, start="immediate", **options)


def shapes(found):
    """Of each mask, once: every layer gets the same."""
    return [None if mask is None else tuple(mask.shape) for mask in found[::2]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart"])
def test_masks_are_small(family, arriving):
    """Nothing where nothing is hidden, one row of keys for padding: never all pairs."""
    model = converted(family)
    inputs = make_inputs(family)
    logits(model, inputs)
    assert all(mask is None for mask in arriving)
    assert len(arriving) == {"bart": 6}.get(family, 2)
    arriving.clear()
    logits(model, make_inputs(family, padding="right"))
    assert all(mask is None or mask.shape == (3, 9) for mask in arriving)
    # Of BART the encoder and the attention to it; the decoder's own tokens are not padded.
    assert sum(mask is not None for mask in arriving) == {"bart": 4}.get(family, 2)


def test_masks_of_a_growing_cache(arriving):
    """Whatever the cache holds, causality is aligned at the end, and needs no mask."""
    model, inputs = converted(), make_inputs("llama")
    expected = logits(model, inputs)
    arriving.clear()
    cache, parts = DynamicCache(), []
    for chunk in inputs["input_ids"].split([4, 1, 3, 1], dim=1):
        parts.append(logits(model, {"input_ids": chunk}, past_key_values=cache))
    assert shapes(arriving) == [None] * 4
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", [None, "left"])
def test_masks_of_a_static_cache(padding, arriving):
    """Slots that are not yet written are hidden by a row of keys, or cut off: no pairs here either."""
    model, inputs = converted(), make_inputs("llama", padding=padding)
    keep = inputs["attention_mask"].bool()
    positions = (keep.cumsum(dim=1) - 1).clamp(min=0)
    expected = logits(model, inputs, position_ids=positions)
    arriving.clear()
    cache = StaticCache(config=model.config, max_cache_len=16)
    parts, begin = [], 0
    for length in (4, 1, 3, 1):
        end = begin + length
        chunk = {"input_ids": inputs["input_ids"][:, begin:end], "attention_mask": inputs["attention_mask"][:, :end]}
        parts.append(logits(model, chunk, past_key_values=cache, position_ids=positions[:, begin:end]))
        begin = end
    assert shapes(arriving) == [(3, 4), (3, 16), (3, 8), (3, 16)]
    torch.testing.assert_close(torch.cat(parts, dim=1)[keep], expected[keep], rtol=0, atol=1e-5)


def test_a_mask_that_passes_twice_stays():
    """Generation with a static cache makes masks ahead of the model, which makes them again of what it is given."""
    model = converted()
    for length, padding in ((4, "left"), (1, "left"), (4, None)):
        inputs = make_inputs("llama", tokens=5, padding=padding)
        cache = StaticCache(config=model.config, max_cache_len=8)
        if length == 1:
            logits(model, {"input_ids": inputs["input_ids"][:, :4]}, past_key_values=cache)
        embeds = torch.zeros(3, length, 32, device=DEVICE)
        seen = inputs["attention_mask"][:, : 5 if length == 1 else 4]
        once = create_causal_mask(model.config, embeds, seen, cache)
        assert once.ndim == 2
        assert torch.equal(create_causal_mask(model.config, embeds, once, cache), once)


def test_packed_rows_arrive_as_boundaries(arriving):
    """Several rows, each of several sequences."""
    model = converted(preset="mgk", perturbation=0.5)
    tokens = make_inputs("llama", batch=2, tokens=9)["input_ids"]
    lengths = [(4, 5), (2, 3, 4)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(DEVICE)
    packed = logits(model, {"input_ids": tokens, "position_ids": positions}, use_cache=False)
    assert shapes(arriving) == [(6,)]
    assert arriving[0].tolist() == [0, 4, 9, 11, 14, 18]
    for row, parts, out in zip(tokens, lengths, packed, strict=True):
        alone = [logits(model, {"input_ids": part[None]}, use_cache=False)[0] for part in row.split(parts)]
        torch.testing.assert_close(out, torch.cat(alone), rtol=0, atol=1e-5)


def test_packed_sequences_in_training():
    """Gradients, too, and with the bias of the start, which is one of each key."""
    tokens = make_inputs("llama", batch=1, tokens=9)["input_ids"]
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None].to(DEVICE)
    for options in ({"start": "near"}, {"start": "immediate"}):
        packed = mgk.convert(make_model("llama"), "smgk", **options)
        alone = mgk.convert(make_model("llama"), "smgk", **options)
        packed(tokens, position_ids=positions, use_cache=False).logits.square().sum().backward()
        for part in tokens.split([4, 5], dim=1):
            alone(part, use_cache=False).logits.square().sum().backward()
        for (name, one), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_boundaries_from_a_collator(arriving):
    """Where the flattening collator gives boundaries and no positions start anew, these are taken."""
    model = converted()
    tokens = make_inputs("llama", batch=1, tokens=9)["input_ids"]
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None].to(DEVICE)
    expected = logits(model, {"input_ids": tokens, "position_ids": positions}, use_cache=False)
    # With a cache transformers does not look at positions.
    given = {"input_ids": tokens, "position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    torch.testing.assert_close(logits(model, given), expected, rtol=0, atol=1e-5)
    assert arriving[-1] is bounds


def test_masks_of_pairs(arriving):
    """What a user gives with four axes is taken as it is, as bool or as float, and as nothing else."""
    model, inputs = converted(), make_inputs("llama")
    pairs = (torch.rand(3, 1, 9, 9, device=DEVICE) < 0.5).tril() | torch.eye(9, dtype=torch.bool, device=DEVICE)
    as_bool = logits(model, {**inputs, "attention_mask": pairs})
    assert arriving[-1] is pairs
    as_float = torch.zeros(3, 1, 9, 9, device=DEVICE).masked_fill(~pairs, torch.finfo(torch.float32).min)
    torch.testing.assert_close(logits(model, {**inputs, "attention_mask": as_float}), as_bool)
    assert (as_bool - logits(model, inputs)).abs().max() > 0.01
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="must hold 0 to attend and -inf not to, got"):
            logits(model, {**inputs, "attention_mask": torch.randn(3, 1, 9, 9)})


def test_patterns_that_nothing_smaller_says_are_pairs(arriving):
    """A user's own function of pairs on top of causality."""
    model, inputs = converted(), make_inputs("llama")
    embeds = model.get_input_embeddings()(inputs["input_ids"])

    def not_the_third(batch, head, query, key):
        return (key != 2) | (query == 2)

    mask = create_causal_mask(model.config, embeds, None, None, and_mask_function=not_the_third)
    pairs = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()
    pairs[3:, 2] = False
    assert torch.equal(mask, pairs.expand(3, 1, 9, 9))
    or_mask = create_causal_mask(model.config, embeds, None, None, or_mask_function=lambda b, h, q, k: k == 5)
    assert or_mask[0, 0, :, 5].all()


def test_attention_without_causality(arriving):
    """transformers lets a decoder look both ways: `is_causal=False` of the configuration or of a call."""
    model = make_model("llama")
    inputs = make_inputs("llama", padding="right")
    keep = inputs["attention_mask"].bool()
    expected = logits(model, inputs, is_causal=False, use_cache=False)[keep]
    mgk.convert(model, "softmax")
    got = logits(model, inputs, is_causal=False, use_cache=False)[keep]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got - logits(model, inputs)[keep]).abs().max() > 0.01


def test_masks_of_strange_shapes_are_refused():
    with pytest.raises(ValueError, match=r"must have 2 or 4 axes, got shape \[3, 9, 9\]"):
        masks.read_mask(torch.ones(3, 9, 9, dtype=torch.bool), True, 9, 9)
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got str"):
        masks.read_mask("causal", True, 9, 9)
    with pytest.raises(ValueError, match="no sliding windows or chunks, got one of 4 tokens"):
        masks.compact_mask(1, 9, 9, local_size=4)
