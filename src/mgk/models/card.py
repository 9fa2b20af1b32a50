"""The model card: the README.md of a saved model, for people and for the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from mgk.models.attention import MGKAttention
from mgk.models.configuration import MGKConfig

FILE = "README.md"

# Hash of the text above it. A card whose hash matches has not been edited since it was written here, so it may be
# overwritten.
_SIGNATURE = re.compile(r"\n<!-- Written by mgk, sha256 ([0-9a-f]{64}) -->\n\Z")

# For each class of ours, the Hub's name of its task and the class of transformers that loads it.
_USES = {
    "MGKForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "MGKForSeq2SeqLM": ("translation", "AutoModelForSeq2SeqLM"),
    "MGKForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "MGKForSequencePairClassification": ("text-classification", None),
    "MGKModel": ("feature-extraction", "AutoModel"),
    "MGKSeq2SeqModel": ("feature-extraction", "AutoModel"),
}


def metadata(model: PreTrainedModel) -> ModelCardData:
    """Return the metadata of a card, which the Hub reads."""
    use = _USES.get(type(model).__name__)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=None if use is None else use[0],
        tags=["mgk", f"attention-{model.config.attention}"],
        model_name=f"{type(model).__name__} {model.config.attention}-{model.config.num_attention_heads}",
    )


def build(model: PreTrainedModel, data: ModelCardData, sections: Sequence[tuple[str, str]] = ()) -> ModelCard:
    """Build a card.

    Args:
        model: the model that it describes.
        data: :func:`metadata`, to which the caller may have added results.
        sections: headings and texts that follow the description of the model.
    """
    parts = [
        f"# {data.model_name}",
        f"A transformer of the library mgk, whose attention is `{model.config.attention}`.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts(model))]),
        f"## Loading\n\n{_loading(model)}",
        *(f"## {heading}\n\n{text}" for heading, text in sections),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def facts(model: PreTrainedModel) -> list[tuple[str, str]]:
    """List the properties of a model as pairs of name and text."""
    config: MGKConfig = model.config
    layers = [module for module in model.modules() if isinstance(module, MGKAttention)]
    heads = f"{config.num_attention_heads}"
    if config.num_key_value_heads != config.num_attention_heads:
        heads += f", {config.num_key_value_heads} of keys and values"
    depth = f"{config.num_hidden_layers}"
    if config.is_encoder_decoder:
        depth = f"{config.num_hidden_layers} of the encoder, {config.decoder_layers} of the decoder"
    found = [
        ("attention", f"`{config.attention}`"),
        ("keys per position", f"{layers[0].num_components}"),
        ("heads", heads),
        ("width of a head", f"{config.head_dim}"),
        ("layers", depth),
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("positions", f"{config.positions}, meant for {config.max_position_embeddings:,}"),
        ("parameters", f"{model.num_parameters():,}"),
        ("dtype", str(model.dtype).removeprefix("torch.")),
    ]
    causal = [layer for layer in layers if layer.is_causal]
    if causal:
        found.append(("cache", _cache(causal, model.dtype)))
    return found


def _cache(layers: list[MGKAttention], dtype: torch.dtype) -> str:
    """Describe the size of the cache in generation."""
    first = layers[0]
    if first.feature_map is not None:
        return "a state of fixed size for each sequence, however long it is"
    size = sum(layer.bytes_per_cached_token(dtype) for layer in layers)
    return f"{size:,} bytes per token, in {str(dtype).removeprefix('torch.')}"


def _loading(model: PreTrainedModel) -> str:
    name = type(model).__name__
    call = f'model = {name}.from_pretrained("path/of/this/folder")'
    lines = ["```python", f"from mgk.models import {name}", "", call, "```"]
    automatic = _USES.get(name, (None, None))[1]
    if automatic is not None:
        lines += [
            "",
            f"Once `mgk.models` is imported, `transformers.{automatic}` loads it as well; with "
            "`trust_remote_code=True` it does the import itself. Either way `mgk` must be installed: "
            "`pip install 'mgk[models]'`.",
        ]
    return "\n".join(lines)


def licence() -> str:
    """Text about licences, for weights that have not been published."""
    return (
        "The code, mgk, is under the Apache License 2.0. For the weights nobody has stated a licence yet: the Hub "
        "looks for `license:` at the top of this file."
    )


def write(card: ModelCard, folder: str | os.PathLike[str]) -> bool:
    """Write a card into a folder, unless a person wrote or edited the one there. Return whether it was written."""
    path = Path(folder) / FILE
    if path.exists() and not is_ours(path):
        return False
    text = f"{card.content}".rstrip("\n") + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    text += f"\n<!-- Written by mgk, sha256 {digest} -->\n"
    if not path.exists() or path.read_bytes() != text.encode():
        path.write_text(text, encoding="utf-8", newline="\n")
    return True


def is_ours(path: Path) -> bool:
    """Whether :func:`write` wrote the card and nobody has edited it since."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
    signature = _SIGNATURE.search(text)
    return signature is not None and hashlib.sha256(text[: signature.start()].encode()).hexdigest() == signature[1]
