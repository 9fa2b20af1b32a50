"""Every family of models, converted: what it computes at first, what it learns, saves and generates."""

import copy
import re
from pathlib import Path

import pytest
import torch
from conversion_cases import (
    DECODERS,
    ENCODERS,
    GROUPED,
    HEAD_DIM,
    MODELS,
    PROJECTED,
    SEQ2SEQ,
    VISION,
    logits,
    make_inputs,
    make_model,
    train,
)
from transformers import AutoConfig, DataCollatorWithFlattening, DynamicCache

import mgk
from mgk.conversion import FAMILIES
from mgk.conversion.families import AS_HEADS

every_family = pytest.mark.parametrize("family", MODELS)
generative = pytest.mark.parametrize("family", [*DECODERS, *SEQ2SEQ])


def visible(out, inputs):
    """Logits of tokens that are no padding."""
    if "decoder_input_ids" in inputs or "attention_mask" not in inputs:
        return out
    return out[inputs["attention_mask"].bool()]


def heads_of(family):
    """Half of the heads, or of SmolLM's a third, and one of keys and values where that may be."""
    heads = {"smollm": 3}.get(family, 2)
    return {"num_heads": heads, "num_kv_heads": 1 if family in GROUPED else heads}


def test_every_family_is_tested():
    assert {make_model(family).config.model_type for family in MODELS} == set(FAMILIES)


@every_family
def test_exact_start(family):
    """M equal keys of a dot product, or shifts of one, are the attention that was there, padding and all."""
    model = make_model(family)
    inputs = make_inputs(family, padding="right")
    expected = visible(logits(model, inputs), inputs)
    assert expected.std() > 0.3
    mgk.convert(model, "softmax-mgk" if family in PROJECTED else "softmax-smgk", components=3, perturbation=0.0)
    torch.testing.assert_close(visible(logits(model, inputs), inputs), expected, rtol=0, atol=1e-5)


@every_family
@pytest.mark.parametrize("preset", ["gaussian", "smgk", "mgk"])
def test_near_start(family, preset):
    """The bias takes all of the distance back that dot products do not have."""
    if preset == "mgk" and family not in PROJECTED:
        pytest.skip("refused: test_what_a_family_cannot_is_refused")
    model = make_model(family)
    inputs = make_inputs(family, padding="right")
    expected = visible(logits(model, inputs), inputs)
    immediate = mgk.convert(copy.deepcopy(model), preset, start="immediate", perturbation=0.0)
    assert (visible(logits(immediate, inputs), inputs) - expected).abs().max() > 0.01
    mgk.convert(model, preset, start="near", perturbation=0.0)
    torch.testing.assert_close(visible(logits(model, inputs), inputs), expected, rtol=0, atol=1e-5)


@every_family
def test_equal_heads_become_one(family):
    """What is pooled is what was there, if the heads that become one were equal: fewer heads, the same logits."""
    config = make_model(family).config
    small = make_model(family)
    new = heads_of(family)
    mgk.convert(small, "softmax", **new)
    # The other way round: each head of the small model again as all those that it was made of.
    large = make_model(family)
    torch.manual_seed(0)
    state, old = small.state_dict(), large.state_dict()
    copies = {}
    for name, weight in state.items():
        wide = old[name]
        for axis, (few, many) in enumerate(zip(weight.shape, wide.shape, strict=True)):
            if few != many:
                weight = repeated(family, weight, wide, axis, config)
        copies[name] = weight
    large.load_state_dict(copies)
    inputs = make_inputs(family)
    expected = logits(large, inputs)
    mgk.convert(large, "softmax", **new)
    torch.testing.assert_close(logits(large, inputs), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits(large, inputs), logits(small, inputs), rtol=0, atol=2e-5)


def repeated(family, weight, wide, axis, config):
    """A weight of few heads as one of many, along one axis."""
    few, many = weight.shape[axis], wide.shape[axis]
    if family == "gpt2" and many == 3 * config.n_embd:
        parts = weight.split([2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=axis)
        return torch.cat([blocks(part, axis, config.n_embd // part.shape[axis]) for part in parts], dim=axis)
    if family == "gpt_neox" and many == 3 * config.hidden_size:
        return blocks(weight, axis, many // few, 3 * HEAD_DIM)
    is_input = axis == (0 if family == "gpt2" else 1) and weight.ndim == 2
    # Outputs of heads are added up: each copy gives its part.
    return blocks(weight, axis, many // few) / (many // few if is_input else 1)


def blocks(weight, axis, copies, size=HEAD_DIM):
    """Each head's block ``copies`` times in a row."""
    return weight.unflatten(axis, (-1, size)).repeat_interleave(copies, dim=axis).flatten(axis, axis + 1)


@every_family
@pytest.mark.parametrize("preset", ["smgk", "mgk"])
def test_train_save_load(family, preset, tmp_path):
    """Three steps lower the loss and move every parameter of the mixture; what is loaded computes the same."""
    if preset == "mgk" and family not in PROJECTED:
        preset = "gaussian"
    model = make_model(family)
    mgk.convert(model, preset, **heads_of(family), learn_variance=True, start="immediate")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".mixture." in name}
    assert before
    losses = train(model, family)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name
    inputs = make_inputs(family)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded, report = mgk.load_converted(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    torch.testing.assert_close(logits(loaded.eval(), inputs), expected, rtol=0, atol=0)
    # Classes that know nothing of mixtures do not load it as something else.
    with pytest.raises(ValueError, match=f"mgk-{FAMILIES and model.config.model_type}"):
        AutoConfig.from_pretrained(tmp_path)


@generative
@pytest.mark.parametrize("preset", ["smgk", "mgk"])
def test_generation_with_and_without_a_cache(family, preset):
    """Dynamic, static and none: the same tokens, from prompts of different lengths."""
    if preset == "mgk" and family not in PROJECTED:
        preset = "gaussian"
    model = make_model(family, dtype=torch.float64)
    mgk.convert(model, preset, **heads_of(family), start="immediate", perturbation=0.5)
    inputs = make_inputs(family, padding="left")
    inputs.pop("decoder_input_ids", None)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}

    def generate(**options):
        torch.manual_seed(0)
        return model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=True, temperature=1.0, **options)

    expected = generate(use_cache=False)
    assert len(set(expected[:, -8:].flatten().tolist())) > 4
    assert torch.equal(generate(), expected)
    assert torch.equal(generate(cache_implementation="static"), expected)


@pytest.mark.parametrize("family", DECODERS)
def test_what_the_cache_holds(family):
    """One key a token for shifts, however many components there are; M keys for M projections."""
    inputs = make_inputs(family)
    for preset, keys in (("smgk", 1), ("mgk", 3)):
        if preset == "mgk" and family not in PROJECTED:
            continue
        model = mgk.convert(make_model(family), preset, components=3, start="immediate")
        cache = DynamicCache()
        logits(model, inputs, past_key_values=cache)
        values = cache.layers[0].values
        assert list(cache.layers[0].keys.shape) == [3, keys * values.shape[1], 9, HEAD_DIM]
        assert list(values.shape[2:]) == [9, HEAD_DIM]


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, "bart"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_attended(family, side):
    """A padded sequence computes what it computes alone."""
    model = mgk.convert(make_model(family), "smgk", start="immediate")
    inputs = make_inputs(family, padding=side)
    keep = inputs["attention_mask"].bool()
    positions = {}
    if family in DECODERS:
        positions = {"position_ids": (keep.cumsum(dim=1) - 1).clamp(min=0)}
    elif side == "left":
        pytest.skip("positions are counted from the left, padding included")
    together = logits(model, inputs, **positions)
    for row in (1, 2):
        alone = {name: x[row : row + 1] for name, x in inputs.items() if name != "attention_mask"}
        alone["input_ids"] = alone["input_ids"][:, keep[row]]
        got = together[row : row + 1] if family == "bart" else together[row : row + 1, keep[row]]
        torch.testing.assert_close(got, logits(model, alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_packed_sequences_do_not_see_each_other(family):
    """Position ids as the flattening collator of the Trainer makes them."""
    preset = "mgk" if family in PROJECTED else "smgk"
    model = mgk.convert(make_model(family), preset, start="immediate", perturbation=0.5)
    tokens = make_inputs(family, batch=1, tokens=15)["input_ids"][0]
    parts = tokens.split([4, 6, 5])
    batch = DataCollatorWithFlattening()([{"input_ids": part.tolist()} for part in parts])
    inputs = {name: batch[name].to(tokens.device) for name in ("input_ids", "position_ids")}
    packed = logits(model, inputs, use_cache=False)  # as in the Trainer
    alone = [logits(model, {"input_ids": part[None]}) for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@every_family
def test_implementation_alone_is_softmax(family):
    """`attn_implementation="mgk"` without a conversion: the same model on the library's own attention."""
    model = make_model(family)
    inputs = make_inputs(family, padding="right")
    expected = visible(logits(model, inputs), inputs)
    model.set_attn_implementation("mgk")
    torch.testing.assert_close(visible(logits(model, inputs), inputs), expected, rtol=0, atol=1e-5)


@every_family
def test_attentions_are_those_of_the_old_model(family):
    """Every map that the model shows, with the implementation alone and at a near start, however it asks for them."""
    model, inputs = make_model(family), make_inputs(family)

    def maps(model):
        with torch.no_grad():
            out = model(**inputs, output_attentions=True)
        return {name: list(out[name]) for name in out if name.endswith("attentions") and name != "output_attentions"}

    expected = maps(model)
    assert sum(map(len, expected.values())) == (6 if family in SEQ2SEQ else 2)
    model.set_attn_implementation("mgk")
    alone = maps(model)
    mgk.convert(model, "smgk")
    torch.testing.assert_close((alone, maps(model)), (expected, expected), rtol=0, atol=1e-5)


@every_family
def test_gradient_checkpointing(family):
    """Recomputed layers have the gradients of those that were kept."""
    model = mgk.convert(make_model(family), "smgk", start="immediate")
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    kept, recomputed = train(model, family, steps=2), train(again, family, steps=2)
    assert kept == pytest.approx(recomputed, abs=1e-6)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)


FAST = ("llama",)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_compiled_is_eager(family):
    """One graph, without a break."""
    preset = "mgk" if family in PROJECTED else "smgk"
    model = mgk.convert(make_model(family), preset, start="immediate")
    inputs = make_inputs(family, padding="right")
    inputs |= {"use_cache": False} if family not in (*VISION, *ENCODERS) else {}
    expected = logits(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, inputs), expected, rtol=0, atol=1e-5)


def test_what_a_family_cannot_is_refused():
    for family in ("gpt_neox", "whisper"):
        model = make_model(family)
        with pytest.raises(ValueError, match="has no key projection that M keys a head could widen, got 2"):
            mgk.convert(model, "mgk")
        assert not hasattr(model.config, "mgk")
    for family in ("gpt_neox", "dinov2"):
        with pytest.raises(ValueError, match="num_kv_heads must be num_heads, got 2 and 4"):
            mgk.convert(make_model(family), "smgk", num_kv_heads=2)
    refused = {make_model(name).config.model_type for name in MODELS if name not in PROJECTED}
    assert refused == {name for name, family in FAMILIES.items() if family.projected is None}
    assert all(FAMILIES[name].projected == AS_HEADS for name in ("llama", "gpt2", "bert", "bart", "vit"))


def test_the_table_of_families_is_true():
    """In docs/convert.md: a "yes" where a test runs, a "no" where a sentence refuses, nothing where nothing is."""
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| ((?:(?:yes|no|-) \| ?)+)$", page, re.MULTILINE))
    assert set(written) == set(FAMILIES)
    for name, cells in written.items():
        can_generate, is_padded = name in (*DECODERS, *SEQ2SEQ), name in (*DECODERS, *ENCODERS, "bart")
        expected = [
            True, True, True, name in GROUPED, name in PROJECTED, True, can_generate or None, is_padded or None,
            (name in DECODERS) or None, True,
        ]  # fmt: skip
        words = {True: "yes", False: "no", None: "-"}
        assert cells.strip(" |").split(" | ") == [words[cell] for cell in expected], name
