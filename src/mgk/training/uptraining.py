"""Uptraining: an existing model, converted and trained further on text with its own tokenizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from mgk.conversion import advance_start, convert, find_weights
from mgk.data.kind import Progress
from mgk.data.store import Corpus
from mgk.evaluation import perplexity
from mgk.evaluation.conversion import checksum_of_weights
from mgk.models.loss import IGNORED
from mgk.training.configuration import ConversionConfig, RunConfig
from mgk.training.resolved_model import CONVERTED, conversion_options
from mgk.training.task import Language, Share

# Bytes per number in the caches of generation, which are in half precision.
CACHE_ITEM_BYTES = 2


class Uptraining(Language):
    """Next-token prediction with a converted model, which may also learn from the original.

    loss = (1 - distillation) * cross-entropy + distillation * temperature^2 * KL(before || now)

    where both distributions of the divergence are softmax(logits / temperature).
    """

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        super().__init__(config, corpus)
        assert config.conversion is not None
        self.conversion: ConversionConfig = config.conversion
        self._cache_bytes: int | None = None

    @functools.cached_property
    def place(self) -> str:
        return find_weights(self.conversion.model)

    @functools.cached_property
    def weights_sha256(self) -> str | None:
        return checksum_of_weights(self.place)

    @functools.cached_property
    def teacher(self) -> PreTrainedModel:
        """The original model. It has no gradients and is not saved in checkpoints."""
        return self._load().eval().requires_grad_(False)

    def build_model(self) -> PreTrainedModel:
        model = self._load()
        vocabulary, tokens = model.config.vocab_size, self.corpus.manifest["facts"]["vocabulary"]
        if tokens > vocabulary:
            raise ValueError(
                f"data.corpus must be made with the tokenizer of {self.conversion.model}, whose model knows "
                f"{vocabulary} tokens, got one of {tokens}"
            )
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and self.config.data.longest > longest:
            raise ValueError(f"data.longest must be at most the model's {longest}, got {self.config.data.longest}")
        options = {
            CONVERTED[name]: value
            for name, value in conversion_options(self.config).items()
            if name in CONVERTED and value is not None
        }
        conversion = self.conversion
        model = convert(
            model, options.pop("attention"), start=conversion.start, fade_steps=conversion.fade_steps,
            pooling=conversion.pooling, perturbation=conversion.perturbation, seed=self.config.seed, **options,
        )  # fmt: skip
        self._cache_bytes = cache_bytes_per_token(model)
        return model

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Tensor) -> Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1).float()
        share, temperature = self.conversion.distillation, self.conversion.temperature
        total = logits.new_zeros(())
        if share < 1.0:
            total = total + (1.0 - share) * _cross_entropy(logits, batch["shift_labels"])
        if share > 0.0:
            with torch.no_grad():
                teacher = self.teacher.to(logits.device)
                before = teacher(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1).float()
            is_counted = batch["shift_labels"].flatten() != IGNORED
            divergence = F.kl_div(
                (logits / temperature).log_softmax(-1), (before / temperature).log_softmax(-1), reduction="none",
                log_target=True,
            ).sum(-1)  # fmt: skip
            total = total + share * temperature**2 * divergence[is_counted].sum()
        return total / num_targets

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> CausalLMOutput:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        total = _cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"])
        return CausalLMOutput(loss=total / self.count_targets(batch), logits=logits)

    def after_update(self, model: nn.Module, skip: Tensor) -> None:
        super().after_update(model, skip)
        advance_start(model)

    def evaluate(self, model: nn.Module, split: str, share: Share, progress: Progress) -> dict[str, float]:
        """Return nats per token of disjoint windows, and bits per byte, which can be compared between tokenizers."""
        tokens, facts = self._tokens(split), self.corpus.manifest["facts"]
        length, batch_size = self.config.data.longest, self.config.validation.batch_size
        if split == "valid" and self.config.validation.limit is not None:
            tokens = tokens[: self.config.validation.limit * length * batch_size + 1]
        found = perplexity.disjoint(
            _WithLoss(model), tokens, length=length, batch_size=batch_size, device=share.device,  # type: ignore[arg-type]
            precision=share.precision, rank=share.rank, ranks=share.ranks, progress=progress,
        )  # fmt: skip
        tokens_per_byte = facts[f"{split}: tokens"] / facts[f"{split}: bytes"]
        return {
            "loss": found.nats_per_token,
            "perplexity": found.perplexity,
            "bits_per_byte": found.nats_per_token * tokens_per_byte / math.log(2),
            "count": float(found.tokens),
        }

    def test(
        self, model: nn.Module, split: str, share: Share, progress: Progress
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        metrics = self.evaluate(model, split, share, progress)
        if split == "test" and "enwik8" in self.corpus.splits:
            other = self.evaluate(model, "enwik8", share, progress)
            metrics["enwik8_bits_per_byte"] = other["bits_per_byte"]
        return metrics, None

    def describe_model(self, model: PreTrainedModel) -> dict[str, Any]:
        return {**conversion_options(self.config), "weights_sha256": self.weights_sha256}

    def facts(self) -> dict[str, Any]:
        return {"cache_bytes_per_token": self._cache_bytes}

    def save_tokenizer(self, folder: Path) -> None:
        AutoTokenizer.from_pretrained(self.place).save_pretrained(folder)

    def _load(self) -> PreTrainedModel:
        # Weights stay in fp32; training in half precision uses autocast.
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.place, dtype=torch.float32)
        return model


class _WithLoss(nn.Module):
    """A model of transformers with the interface of ours: its labels are already shifted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, logits_to_keep: int, num_items_in_batch: int, use_cache: bool
    ) -> CausalLMOutput:
        logits = self.model(input_ids=input_ids, logits_to_keep=logits_to_keep, use_cache=use_cache).logits
        labels = shift_labels[:, -logits.shape[1] :]
        return CausalLMOutput(loss=_cross_entropy(logits.flatten(0, 1).float(), labels) / num_items_in_batch)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes per token in the cache of generation in half precision, measured with a cache of one token."""
    training = model.training
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        cache = model.eval()(input_ids=token, use_cache=True).past_key_values
    finally:
        model.train(training)
    return CACHE_ITEM_BYTES * sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
