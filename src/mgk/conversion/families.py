"""The families of models that can be converted, with their projections, and those that are refused, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

# The ways in which M projected keys per head pass through an attention module that was written for one.
AS_HEADS = "as heads"
"""The module infers the number of heads from its key projection, so the keys pass as M times as many heads."""
AS_POSITIONS = "as positions"
"""The module fixes the number of heads but not of positions, and has no cache, so the keys pass as more positions."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts of a family's attention modules that a conversion changes."""

    attentions: tuple[str, ...]
    """Classes of its attention modules."""
    query: str = "q_proj"
    """Names of the projections in such a module."""
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    """Name of the output projection; a leading ``../`` refers to the parent module."""
    fused: str | None = None
    """Order of a joint projection of queries, keys and values, ``"thirds"`` or ``"by head"``; ``None`` if there is
    none."""
    fused_name: str = ""
    norms: tuple[str, str] | None = None
    """Norms of queries and keys over the width of all heads, whose gains are pooled with the heads."""
    projected: str | None = AS_HEADS
    """How M projected keys pass through the module; ``None`` if they cannot."""
    is_grouped: bool = True
    """Whether there may be fewer key/value heads than query heads."""
    has_head_fields: bool = False
    """Whether the configuration has ``num_key_value_heads`` and ``head_dim``, which are then updated."""
    heads_attribute: str = ""
    """Attribute of the module that gives the number of heads for keys and values, if there is one."""


_LLAMA: dict[str, Any] = {"has_head_fields": True}
_BERT: dict[str, Any] = {"query": "query", "key": "key", "value": "value", "output": "../output.dense"}

FAMILIES = {
    "llama": Family(attentions=("LlamaAttention",), **_LLAMA),
    "mistral": Family(attentions=("MistralAttention",), **_LLAMA),
    "qwen2": Family(attentions=("Qwen2Attention",), **_LLAMA),
    "qwen3": Family(attentions=("Qwen3Attention",), **_LLAMA),
    "olmo2": Family(attentions=("Olmo2Attention",), norms=("q_norm", "k_norm"), **_LLAMA),
    "gpt2": Family(attentions=("GPT2Attention",), fused="thirds", fused_name="c_attn", output="c_proj"),
    "gpt_neox": Family(
        attentions=("GPTNeoXAttention",), fused="by head", fused_name="query_key_value", output="dense",
        projected=None, is_grouped=False,
    ),
    "bert": Family(attentions=("BertSelfAttention", "BertCrossAttention"), **_BERT),
    "roberta": Family(attentions=("RobertaSelfAttention", "RobertaCrossAttention"), **_BERT),
    "vit": Family(attentions=("ViTAttention",)),
    "dinov2": Family(
        attentions=("Dinov2SelfAttention",), projected=AS_POSITIONS, is_grouped=False,
        heads_attribute="num_attention_heads", **_BERT,
    ),
    "whisper": Family(
        attentions=("WhisperAttention",), output="out_proj", projected=None, heads_attribute="num_heads"
    ),
    "bart": Family(attentions=("BartAttention",), output="out_proj"),
}  # fmt: skip
"""Families by ``config.model_type``. SmolLM, for example, is a Llama."""

RENAMED = {"dinov2": Family(attentions=("Dinov2Attention",), is_grouped=False)}
"""Families whose modules have other names since transformers 5.23 at the latest. What they can do is the same."""

REFUSED = {
    "gemma2": "caps its logits (softcap)",
    "gemma3": "has sliding windows",
    "gemma3_text": "has sliding windows",
    "gpt_oss": "has attention sinks",
    "t5": "adds a position bias to its logits",
    "mt5": "adds a position bias to its logits",
    "umt5": "adds a position bias to its logits",
    "bloom": "adds a position bias (ALiBi) to its logits",
    "mpt": "adds a position bias (ALiBi) to its logits",
    "deberta": "adds a position bias to its logits",
    "deberta-v2": "adds a position bias to its logits",
    "swin": "adds a position bias to its logits",
    "beit": "adds a position bias to its logits",
}
"""Families whose attention is not a softmax of products, with the reason."""


def family_of(model: nn.Module) -> Family:
    """Return the family of a model, or raise an error with the reason why it has none."""
    config: Any = model.config
    kind = config.model_type
    if kind in REFUSED:
        raise ValueError(f"a model of family {kind!r} cannot be converted: its attention {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise ValueError(f"model must be of one of the families {', '.join(FAMILIES)}, got {kind!r}")
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if window is not None or any("sliding" in layer for layer in layer_types):
        raise ValueError(
            f"a model with sliding windows cannot be converted, got sliding_window={window} in a {kind!r}: "
            "mixture attention sees all keys"
        )
    if getattr(config, "add_cross_attention", False) and kind == "gpt2":
        raise ValueError("a 'gpt2' with cross-attention cannot be converted, got add_cross_attention=True")
    family = FAMILIES[kind]
    if kind in RENAMED and not any(type(module).__name__ in family.attentions for module in model.modules()):
        return RENAMED[kind]
    return family
