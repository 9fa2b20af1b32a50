"""Parameter counts of the paper's models, every difference of ours spelled out."""

import pytest
import torch

from mgk.models import MGKForCausalLM, MGKForSeq2SeqLM, MGKForSequencePairClassification, architecture


def count(model_class, name, **changes):
    with torch.device("meta"):
        return model_class(architecture(name, **changes)).num_parameters()


@pytest.mark.parametrize(
    ("attention", "heads", "published"),
    [("softmax", 8, 494_594), ("softmax", 4, 428_290), ("mgk", 4, 444_934), ("smgk", 4, 428_806)],
)
def test_retrieval(attention, heads, published):
    """Published code keeps one pair of priors per layer, for all heads; the paper and we one per head."""
    ours = count(MGKForSequencePairClassification, "lra-retrieval", attention=attention, num_attention_heads=heads)
    priors = 0 if attention == "softmax" else 2 * (2 * heads - 2)
    assert ours == published + priors


def test_wikitext_small():
    """44.0M; the table is 267,735 x 128, and 9.48M are not embeddings (nor the softmax's own parameters)."""
    total = count(MGKForCausalLM, "wikitext103-small")
    assert total == 44_018_394
    softmax_alone = 267_735 + 3 * 128 + 3
    assert total - 267_735 * 128 - softmax_alone == 9_480_192


def test_wikitext_small_with_half_the_heads():
    """Published 43.66M has two priors per head and position (2 x 4 x 256 a layer); ours two per head."""
    ours = count(MGKForCausalLM, "wikitext103-small", attention="mgk", num_attention_heads=4)
    assert ours - 16 * 2 * 4 + 16 * 2 * 4 * 256 == 43_657_946
    assert count(MGKForCausalLM, "wikitext103-small", num_attention_heads=4) == 43_494_106
    eight = count(MGKForCausalLM, "wikitext103-small", attention="mgk", num_attention_heads=8)
    assert round((eight - 16 * 2 * 8 + 16 * 2 * 8 * 256) / 1e6, 2) == 44.35


def test_wikitext_medium():
    total = count(MGKForCausalLM, "wikitext103-medium")
    assert round(total / 1e6, 1) == 89.8
    assert round((total - 267_735 * 257 - 3 * 257) / 1e6, 1) == 21.0


@pytest.mark.parametrize(
    ("attention", "heads", "millions"), [("softmax", 4, 39.5), ("mgk", 2, 32.4), ("smgk", 2, 30.0)]
)
def test_translation(attention, heads, millions):
    """Heads keep their width of 128 when they are halved. Priors (and shifts) are too few to show."""
    ours = count(MGKForSeq2SeqLM, "iwslt14", attention=attention, num_attention_heads=heads)
    assert round(ours / 1e6, 1) == millions
    without_mixture = {"softmax": 39_469_056, "mgk": 32_381_952, "smgk": 30_018_048}[attention]
    layers = 6 + 2 * 6
    mixture = {"softmax": 0, "mgk": 2 * 2, "smgk": 2 * 2 + 2 * 2 * 128}[attention]
    assert ours == without_mixture + layers * mixture
