"""The costs of the paper's models at every size, which its figures 3, 4, 8, 10, 15 and 16 show."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mgk.analysis.cost import cache_bytes_per_token, embedding_parameters, forward_flops, parameters
from mgk.models import MGKForCausalLM, MGKForSequencePairClassification, architecture

WIDTHS = (256, 512, 1024, 2048, 4096)
"""Widths of the language model, as in the paper."""
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of words in a window, as in the paper."""

_TRAINING_OVER_FORWARD = 3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one model for one input shape."""

    attention: str
    """Attention preset."""
    heads: int
    parameters: int
    """Number of all parameters."""
    embedding_parameters: int
    """Number of parameters in tables of tokens and positions."""
    forward_flops: int
    """Operations of the matrix products in one forward pass, for a language model without its output layer."""
    output_flops: int
    """Operations of a language model's output layer over the whole vocabulary; 0 for others, whose head is counted
    above."""
    cache_bytes: int
    """Bytes of keys and values of one token in all layers, in bf16; 0 for linear attention, whose state does not
    grow."""

    @property
    def other_parameters(self) -> int:
        """Number of parameters outside the tables."""
        return self.parameters - self.embedding_parameters

    @property
    def training_flops(self) -> int:
        """Operations of forward and backward: each product has two in the backward pass."""
        return _TRAINING_OVER_FORWARD * self.forward_flops


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The cost of a mixture relative to attention with twice its heads, at one width and length."""

    width: int
    """Width of the model."""
    length: int
    """Number of words in the window."""
    mixture: Cost
    baseline: Cost

    @property
    def flops(self) -> float:
        """Ratio of the operations in the layers, and of those in training, which are three times as many in both."""
        return self.mixture.forward_flops / self.baseline.forward_flops

    @property
    def flops_with_output(self) -> float:
        """Ratio of the operations including the output layer over the whole vocabulary, which both models have."""
        numerator = self.mixture.forward_flops + self.mixture.output_flops
        return numerator / (self.baseline.forward_flops + self.baseline.output_flops)

    @property
    def parameters(self) -> float:
        return self.mixture.parameters / self.baseline.parameters

    @property
    def other_parameters(self) -> float:
        """Ratio of the parameters outside the tables of tokens and positions."""
        return self.mixture.other_parameters / self.baseline.other_parameters

    @property
    def cache_bytes(self) -> float | None:
        """Ratio of the cached bytes; ``None`` if neither model caches keys and values."""
        return self.mixture.cache_bytes / self.baseline.cache_bytes if self.baseline.cache_bytes else None


@functools.cache
def language_model_cost(attention: str, heads: int, *, width: int, length: int, baseline_heads: int = 8) -> Cost:
    """Cost of the paper's WikiText-103 model, widened, on one window.

    A head is ``width / baseline_heads`` wide for every value of ``heads``, and the feed-forward layer stays 2048 wide,
    as in both published sizes. Every layer costs the same, so only one is counted, on the ``meta`` device. The cost of
    the adaptive softmax depends on which words occur; here it is that of the whole vocabulary, and is kept apart.

    Args:
        attention: attention preset.
        heads: number of heads of this model.
        width: width of the model.
        length: length of the window.
        baseline_heads: number of heads of the baseline.
    """
    if width % baseline_heads:
        raise ValueError(f"width must be a multiple of {baseline_heads} heads, got {width}")
    head_dim = width // baseline_heads
    one_layer = _language_model(attention, heads, width, head_dim, layers=1)
    model = _language_model(attention, heads, width, head_dim)
    config = model.config
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    assert config.adaptive_cutoffs is not None
    # There is one logit for each word, and one for each cluster after the first, which stands for its words.
    logits = config.vocab_size + len(config.adaptive_cutoffs)
    return Cost(
        attention=attention,
        heads=heads,
        parameters=parameters(model),
        embedding_parameters=embedding_parameters(model),
        forward_flops=config.num_hidden_layers * forward_flops(one_layer.model, input_ids=ids),
        output_flops=2 * length * width * logits,
        cache_bytes=cache_bytes_per_token(config),
    )


@functools.cache
def _language_model(
    attention: str, heads: int, width: int, head_dim: int, *, layers: int | None = None
) -> MGKForCausalLM:
    """Build the language model on the ``meta`` device. Its positions are computed, so it works for every length."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = architecture(
        "wikitext103-small", attention=attention, num_attention_heads=heads, hidden_size=width, head_dim=head_dim,
        max_position_embeddings=max(LENGTHS), use_cache=False, **changes,
    )  # fmt: skip
    with torch.device("meta"):
        return MGKForCausalLM(config)


def language_model_ratios(
    mixture: str, baseline: str, *, widths: Sequence[int] = WIDTHS, lengths: Sequence[int] = LENGTHS, heads: int = 8
) -> list[Ratio]:
    """Ratios of a mixture with half the heads to ``baseline`` with all of them, at every width and length.

    Args:
        mixture: preset of the numerator: ``mgk`` (figure 3) or ``mlk`` (figure 10).
        baseline: preset of the denominator: ``softmax`` or ``linear``.
        widths: widths of the model.
        lengths: lengths of the window.
        heads: number of heads of the baseline.
    """
    return [
        Ratio(
            width=width,
            length=length,
            mixture=language_model_cost(mixture, heads // 2, width=width, length=length, baseline_heads=heads),
            baseline=language_model_cost(baseline, heads, width=width, length=length, baseline_heads=heads),
        )
        for width in widths
        for length in lengths
    ]


def retrieval_cost(attention: str, heads: int, *, pairs: int = 1, tokens: int = 4096) -> Cost:
    """Cost of the paper's Long Range Arena Retrieval model on ``pairs`` pairs of documents, counting all tokens.

    Args:
        attention: attention preset.
        heads: number of heads of this model, each 32 wide.
        pairs: number of pairs in the batch.
        tokens: tokens of each document, to which shorter ones are padded.
    """
    model = _retrieval_model(attention, heads)
    return Cost(
        attention=attention,
        heads=heads,
        parameters=parameters(model),
        embedding_parameters=embedding_parameters(model),
        forward_flops=pairs * _retrieval_flops(attention, heads, tokens),
        output_flops=0,
        cache_bytes=cache_bytes_per_token(model.config),
    )


@functools.cache
def _retrieval_model(attention: str, heads: int) -> MGKForSequencePairClassification:
    """Build the Retrieval model on the ``meta`` device."""
    with torch.device("meta"):
        return MGKForSequencePairClassification(
            architecture("lra-retrieval", attention=attention, num_attention_heads=heads)
        )


@functools.cache
def _retrieval_flops(attention: str, heads: int, tokens: int) -> int:
    """Operations of the Retrieval model for one pair."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return forward_flops(_retrieval_model(attention, heads), input_ids=ids, pair_input_ids=ids)
