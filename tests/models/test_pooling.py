"""What the head of a classifier or a matcher sees of a sequence."""

import pytest
import torch
from cases import DEVICE, relative_error
from huggingface_hub.errors import StrictDataclassError
from model_cases import make_inputs, make_labels, make_model

from mgk.models import MGKConfig, architecture

POOLINGS = {
    "mean": {},
    "mean-over-length": {"pooling": "mean-over-length"},
    "a length of its own": {"pooling": "mean-over-length", "pooling_length": 24},
}


def pack(inputs, prefix=""):
    """The tokens that are not padding, one sequence after the other."""
    mask = inputs[f"{prefix}attention_mask"].bool()
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return {f"{prefix}input_ids": inputs[f"{prefix}input_ids"][mask][None], f"{prefix}cu_seq_lens_q": bounds}


def pad(inputs, count):
    """The same rows with more padding on the right."""
    return {
        name: torch.nn.functional.pad(tensor, (0, count), value=0 if name.endswith("mask") else 1)
        for name, tensor in inputs.items()
    }


def by_formula(states, mask, divisors):
    return torch.stack([states[row, mask[row].bool()].sum(0) / divisors[row] for row in range(len(states))])


@pytest.mark.parametrize("name", POOLINGS)
def test_it_is_the_formula(name):
    """The mean over valid tokens, or their sum over the length to which the published code pads."""
    model = make_model("classifier", **POOLINGS[name])
    inputs = make_inputs("classifier", padding_side="right")
    mask = inputs["attention_mask"]
    divisors = {"mean": mask.sum(1), "mean-over-length": [2048] * 3, "a length of its own": [24] * 3}[name]
    features = by_formula(model.model(**inputs).last_hidden_state, mask, divisors)
    assert relative_error(model(**inputs).logits, model.classifier(features)) <= 1e-12


@pytest.mark.parametrize("name", POOLINGS)
def test_both_documents_of_a_pair_are_pooled(name):
    model = make_model("matcher", **POOLINGS[name])
    inputs = make_inputs("matcher", padding_side="right")
    sides = []
    for prefix in ("", "pair_"):
        mask = inputs[f"{prefix}attention_mask"]
        states = model.model(inputs[f"{prefix}input_ids"], attention_mask=mask).last_hidden_state
        length = {"mean": mask.sum(1), "mean-over-length": [4096] * 3, "a length of its own": [24] * 3}[name]
        sides.append(by_formula(states, mask, length))
    a, b = sides
    expected = model.classifier(torch.cat([a, b, a * b, a - b], dim=-1))
    assert relative_error(model(**inputs).logits, expected) <= 1e-12


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("kind", ["classifier", "matcher"])
def test_how_a_batch_lies_makes_no_difference(kind, name):
    """Packed, padded and padded by more: logits, loss and every gradient."""
    padded = make_inputs(kind, padding_side="right")
    packed = {**pack(padded), **(pack(padded, "pair_") if kind == "matcher" else {})}
    results = []
    for inputs in (padded, packed, pad(padded, 5)):
        model = make_model(kind, **POOLINGS[name])
        output = model(**inputs, labels=make_labels(kind, padded))
        output.loss.backward()
        results.append((output.logits, output.loss, *(parameter.grad for parameter in model.parameters())))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert relative_error(got, expected) <= 1e-9 or (got - expected).abs().max() <= 1e-12


def test_half_precision_is_summed_in_single():
    """2,048 ones in fp16 sum to 2,048, of which a sum in fp16 would lose the last bits from there on."""
    from mgk.models.classifier import pool

    states = torch.ones(1, 4000, 2, dtype=torch.float16, device=DEVICE)
    config = architecture("lra-text", pooling="mean-over-length")
    assert torch.equal(pool(states, None, None, config), torch.full((1, 2), 4000 / 4096, device=DEVICE).half())
    assert torch.equal(pool(states, None, None, architecture("lra-text")), torch.ones(1, 2, device=DEVICE).half())


def test_a_sequence_without_tokens_is_zero():
    from mgk.models.classifier import pool

    states = torch.ones(2, 3, 2, device=DEVICE)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]], device=DEVICE)
    for changes in POOLINGS.values():
        pooled = pool(states, mask, None, architecture("lra-text", **changes))
        assert pooled[0].all()
        assert not pooled[1].any()


def test_wrong_values_are_refused(tmp_path):
    with pytest.raises(StrictDataclassError, match="pooling"):
        MGKConfig(pooling="max")
    with pytest.raises(StrictDataclassError, match="pooling_length must be at least 1, got 0"):
        MGKConfig(pooling="mean-over-length", pooling_length=0)
    with pytest.raises(StrictDataclassError, match="pooling_length must be left out with pooling='mean', got 8"):
        MGKConfig(pooling_length=8)
    MGKConfig(pooling="mean-over-length", pooling_length=8).save_pretrained(tmp_path)
    assert MGKConfig.from_pretrained(tmp_path).pooling_length == 8
