"""Comparison of a model before and after its conversion, on the same tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mgk.conversion import convert, find_weights
from mgk.data.kind import Progress, no_progress

SENTENCES, WINDOWS, LENGTH, BATCH = 1000, 16, 512, 25


def compare_model(
    name: str, attention: str, texts: Sequence[str], *, windows: int = WINDOWS, length: int = LENGTH,
    progress: Progress = no_progress, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the metrics of a model before and after :func:`mgk.convert`.

    The metric of a causal language model is the perplexity on the first windows of the texts, which are concatenated.
    For any other model it is the cosine between the sentence embeddings before and after, each the normalised mean of
    the last hidden states.

    Args:
        name: a folder, a name below ``$MGK_WEIGHTS``, or a name on the Hub.
        attention: attention preset.
        texts: texts with at least ``windows * length + 1`` tokens for a causal model; sentences for any other.
        windows: number of windows for a causal model.
        length: tokens in a window; longer sentences are cut.
        progress: shows the progress.
        options: options of :func:`mgk.convert`.
    """
    place = find_weights(name)
    tokenizer = AutoTokenizer.from_pretrained(place)
    kind = model_class(place)
    # The eager attention of transformers defines the original model.
    before = kind.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    after = convert(kind.from_pretrained(place, dtype=torch.float32).eval(), attention, **options)
    found: dict[str, Any] = {"weights_sha256": checksum_of_weights(place), "parameters": before.num_parameters()}
    found["parameters_converted"] = after.num_parameters()
    if kind is AutoModelForCausalLM:
        tokens = _first_tokens(tokenizer, texts, windows * length + 1)
        nats = [_nats_per_token(model, tokens, length, progress) for model in (before, after)]
        found |= {
            "tokens": windows * length,
            "window": length,
            "perplexity": math.exp(nats[0]),
            "perplexity_converted": math.exp(nats[1]),
            "relative_difference": math.expm1(nats[1] - nats[0]),
        }
    else:
        vectors = [_embeddings(model, tokenizer, texts, length, progress) for model in (before, after)]
        cosines = (vectors[0] * vectors[1]).sum(-1)
        # Cosines between different sentences of one model give the scale: if they are always high, high cosines mean
        # nothing.
        others = (vectors[0] * vectors[0].roll(1, 0)).sum(-1)
        found |= {
            "sentences": len(texts),
            "lowest_cosine": float(cosines.min()),
            "mean_cosine": float(cosines.mean()),
            "mean_cosine_of_different_sentences": float(others.mean()),
        }
    return found


def model_class(place: str) -> Any:
    """Return the automatic class of transformers for a model: with a language model's head, or without a head."""
    names = AutoConfig.from_pretrained(place).architectures or []
    is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return AutoModelForCausalLM if is_causal else AutoModel


def checksum_of_weights(place: str) -> str | None:
    """SHA-256 over the safetensors of a folder, in the order of their names; ``None`` for a model on the Hub."""
    files = sorted(Path(place).glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(2**20):
                digest.update(piece)
    return digest.hexdigest()


def describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a conversion that were set, as JSON."""
    return {name: value for name, value in options.items() if value is not None}


def _first_tokens(tokenizer: Any, texts: Sequence[str], count: int) -> Tensor:
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count:
            return torch.tensor(tokens[:count])
    raise ValueError(f"texts must hold at least {count} tokens, got {len(tokens)}")


@torch.no_grad()
def _nats_per_token(model: PreTrainedModel, tokens: Tensor, length: int, progress: Progress) -> float:
    total = 0.0
    starts = range(0, len(tokens) - 1, length)
    for start in progress(starts, "perplexity", len(starts)):
        window = tokens[start : start + length + 1].to(model.device)
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += float(F.cross_entropy(logits.double(), window[1:], reduction="sum"))
    return total / (len(tokens) - 1)


@torch.no_grad()
def _embeddings(
    model: PreTrainedModel, tokenizer: Any, sentences: Sequence[str], length: int, progress: Progress
) -> Tensor:
    found = []
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    for start in progress(range(0, len(sentences), BATCH), "embeddings", -(-len(sentences) // BATCH)):
        inputs = tokenizer(
            list(sentences[start : start + BATCH]), padding=True, truncation=True, max_length=length,
            return_tensors="pt",
        ).to(model.device)  # fmt: skip
        hidden = model(**inputs).last_hidden_state.double()
        mask = inputs["attention_mask"][..., None]
        found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def versions() -> dict[str, str]:
    """Versions of the software that may affect the numbers."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
