"""Small models of every kind, shared by the tests of `mgk.models`."""

from contextlib import contextmanager

import torch
from cases import DEVICE

import mgk
from mgk.models import (
    MGKForCausalLM,
    MGKForSeq2SeqLM,
    MGKForSequenceClassification,
    MGKForSequencePairClassification,
    architecture,
)

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 48, "vocab_size": 61}

KINDS = {
    "classifier": (MGKForSequenceClassification, "lra-listops", {}),
    "matcher": (MGKForSequencePairClassification, "lra-retrieval", {}),
    "wikitext": (MGKForCausalLM, "wikitext103-small", {"num_hidden_layers": 2, "adaptive_cutoffs": [20, 40]}),
    "modern": (MGKForCausalLM, "modern", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "translation": (
        MGKForSeq2SeqLM, "iwslt14", {"source_vocab_size": 53, "num_hidden_layers": 2, "decoder_layers": 3},
    ),
}  # fmt: skip

GENERATIVE = ("wikitext", "modern", "translation")


def seeded(seed):
    return torch.Generator(device=DEVICE).manual_seed(seed)


def make_model(kind, attention="smgk", *, dtype=torch.float64, seed=0, **changes):
    """An evaluated model of this kind, without dropout. fp64 unless told, so that equal means equal to 1e-10."""
    model_class, name, small = KINDS[kind]
    torch.manual_seed(seed)
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "initializer_range": 0.3}
    config = architecture(name, attention=attention, **{**SMALL, **small, **quiet, **changes})
    return model_class(config).to(DEVICE, dtype).eval()


def make_inputs(kind, *, batch=3, tokens=9, seed=1, padding_side=None):
    """Tokens for a model of this kind; with a side, rows 1 and 2 are padded there by 2 and 4 tokens."""
    generator = seeded(seed)

    def draw(length):
        return torch.randint(3, 53, (batch, length), generator=generator, device=DEVICE)

    mask = torch.ones(batch, tokens, dtype=torch.long, device=DEVICE)
    if padding_side is not None:
        for row, length in ((1, 2), (2, 4)):
            mask[row, : length if padding_side == "left" else None] = 0 if padding_side == "left" else 1
            if padding_side == "right":
                mask[row, tokens - length :] = 0
    inputs = {"input_ids": draw(tokens).masked_fill(mask == 0, 1), "attention_mask": mask}
    if kind == "matcher":
        inputs |= {"pair_input_ids": draw(tokens - 2), "pair_attention_mask": mask[:, 2:].clone()}
    if kind == "translation":
        inputs["decoder_input_ids"] = draw(tokens - 1)
    return inputs


def make_labels(kind, inputs):
    if kind in ("classifier", "matcher"):
        return torch.arange(len(inputs["input_ids"]), device=DEVICE) % 2
    return inputs.get("decoder_input_ids", inputs["input_ids"]).clone()


@contextmanager
def values_checked():
    """On a GPU, too, values are inspected."""
    mgk.debug_checks(True)
    try:
        yield
    finally:
        mgk.debug_checks(False)
