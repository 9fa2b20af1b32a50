"""Models on packed sequences: what they give for each is what they give for it alone."""

import numpy as np
import pytest
import torch
from cases import DEVICE, relative_error
from model_cases import make_inputs, make_labels, make_model
from transformers import DataCollatorWithFlattening

from mgk.data.batches import Samples
from mgk.data.store import Sequences

ATTENTIONS = ["softmax", "gaussian", "mgk", "smgk", "mgk-hard", "smgk-em"]
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def pack(inputs, prefix=""):
    """The tokens that are not padding, one sequence after the other."""
    mask = inputs[f"{prefix}attention_mask"].bool()
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return {f"{prefix}input_ids": inputs[f"{prefix}input_ids"][mask][None], f"{prefix}cu_seq_lens_q": bounds}


@every_attention
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_takes_packed_sequences(attention, side):
    """P14: logits, loss and every gradient, of parameters and of the prior that is counted."""
    padded = make_inputs("classifier", padding_side=side)
    labels = make_labels("classifier", padded)
    results = []
    for inputs in (padded, pack(padded)):
        model = make_model("classifier", attention).train()
        output = model(**inputs, labels=labels)
        output.loss.backward()
        counted = [module.gathered() for module in model.modules() if hasattr(module, "gathered")]
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((output.logits, output.loss, *gradients, *counted))
    for got, expected in zip(*reversed(results), strict=True):
        assert relative_error(got, expected) <= 1e-9 or (got - expected).abs().max() <= 1e-12


@every_attention
def test_a_matcher_takes_packed_documents(attention):
    padded = make_inputs("matcher", padding_side="right")
    model = make_model("matcher", attention)
    got = model(**pack(padded), **pack(padded, "pair_"))
    assert relative_error(got.logits, model(**padded).logits) <= 1e-10


@every_attention
@pytest.mark.parametrize("kind", ["wikitext", "modern"])
def test_a_language_model_takes_packed_sequences(kind, attention):
    """Positions begin anew with every sequence, and none sees another."""
    inputs = make_inputs(kind, padding_side="right")
    model = make_model(kind, attention)
    packed = pack(inputs)
    states = model.model(**packed).last_hidden_state[0]
    alone = [
        model.model(row[mask.bool()][None]).last_hidden_state[0]
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    assert relative_error(states, torch.cat(alone)) <= 1e-10
    assert model(**packed, use_cache=True).past_key_values is None


def make_translations():
    """Padded sources, padded targets, and both packed."""
    padded = make_inputs("translation", padding_side="right")
    target = torch.tensor([[5, 6, 7, 8], [9, 10, -100, -100], [11, 12, 13, -100]], device=DEVICE)
    kept = target != -100
    bounds = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    source = {name: padded[name] for name in ("input_ids", "attention_mask")}
    return source, target, {**pack(source), "labels": target[kept][None], "decoder_cu_seq_lens_q": bounds}


@every_attention
def test_a_translator_takes_packed_sentences(attention):
    """P14: encoder, decoder and the attention between them; loss and every gradient."""
    source, target, packed = make_translations()
    kept = target != -100
    results = []
    for inputs in ({**source, "labels": target}, packed):
        model = make_model("translation", attention).train()
        output = model(**inputs)
        output.loss.backward()
        logits = output.logits[kept] if len(output.logits) > 1 else output.logits[0]
        results.append((logits, output.loss, *(parameter.grad for parameter in model.parameters())))
    for got, expected in zip(*reversed(results), strict=True):
        assert relative_error(got, expected) <= 1e-9 or (got - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("attention", ["mgk-em", "smgk-em"])
def test_priors_of_a_translator_count_no_padded_target(attention):
    """With a mask of the target its padding is no query, neither of the decoder nor of the encoder's keys."""
    source, target, packed = make_translations()
    kept = target != -100
    counted = []
    for inputs in ({**source, "labels": target, "decoder_attention_mask": kept.long()}, packed):
        model = make_model("translation", attention).train()
        model(**inputs).loss.backward()
        counted.append([module.gathered() for module in model.modules() if hasattr(module, "gathered")])
    assert len(counted[0]) == 2 + 2 * 3
    for got, expected in zip(*counted, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_translator_needs_both_sides_packed():
    source = pack(make_inputs("translation", padding_side="right"))
    with pytest.raises(ValueError, match="sources and targets must both be packed, got no decoder_cu_seq_lens_q"):
        make_model("translation")(**source, labels=torch.ones(1, 4, dtype=torch.long, device=DEVICE))


@pytest.mark.parametrize("kind", ["classifier", "matcher"])
def test_batches_of_our_own(kind):
    """``Samples(pack=True)`` gives what the models take."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 12, 16)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sequences = Sequences(tokens=generator.integers(3, 53, offsets[-1]).astype(np.uint8), offsets=offsets)
    pairs = {"second": np.arange(16)[::-1].copy()} if kind == "matcher" else {}
    model = make_model(kind)
    results = []
    for pack in (False, True):
        samples = Samples(sequences=sequences, labels=np.arange(16) % 2, batch_size=8, longest=10, pack=pack, **pairs)
        results.append(model(**{name: tensor.to(DEVICE) for name, tensor in samples.batch(0, 1).items()}))
    assert relative_error(results[1].logits, results[0].logits) <= 1e-10
    assert torch.isclose(results[1].loss, results[0].loss, rtol=1e-10)


def test_the_collator_of_transformers():
    """What it flattens is what we unpack: the mean loss over all sequences."""
    model = make_model("modern", "smgk")
    sequences = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": ids, "labels": ids} for ids in sequences])
    batch = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    loss = model(**batch).loss
    total = sum(
        model(torch.tensor([ids], device=DEVICE), labels=torch.tensor([ids], device=DEVICE)).loss * (len(ids) - 1)
        for ids in sequences
    )
    assert torch.isclose(loss, total / sum(len(ids) - 1 for ids in sequences), rtol=1e-10)


def test_weights_of_packed_sequences_are_zero_between_them():
    model = make_model("classifier", "smgk")
    packed = pack(make_inputs("classifier", padding_side="right"))
    weights = model(**packed, output_attentions=True).attentions[0]
    assert (weights[0, :, :9, 9:] == 0).all()
    assert torch.allclose(weights.sum(-1), torch.ones((), device=DEVICE, dtype=weights.dtype))


def test_gradient_checkpointing():
    inputs = pack(make_inputs("classifier", padding_side="right"))
    gradients = []
    for checkpointed in (False, True):
        model = make_model("classifier").train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(**inputs, labels=torch.tensor([0, 1, 0], device=DEVICE)).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 21, device=DEVICE)},
            "have no padding, got an attention mask beside cu_seq_lens_q",
        ),
        ({"input_ids": torch.ones(2, 21, dtype=torch.long, device=DEVICE)}, "must lie in one row, got 2 rows"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 20], dtype=torch.int32, device=DEVICE)},
            "must end with the number of tokens",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 21], device=DEVICE)},
            "cu_seq_lens_q must be an int32 tensor, got torch.int64",
        ),
    ],
)
def test_bad_inputs(change, message, monkeypatch):
    # On a GPU, too, boundaries are looked at.
    monkeypatch.setattr("mgk.ops.validation._debug_checks", True)
    packed = pack(make_inputs("classifier", padding_side="right"))
    with pytest.raises((ValueError, TypeError), match=message):
        make_model("classifier")(**{**packed, **change})


def test_a_cache_is_refused():
    model = make_model("modern")
    packed = pack(make_inputs("modern"))
    cache = model(packed["input_ids"], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="packed sequences cannot be cached"):
        model(**packed, past_key_values=cache)
