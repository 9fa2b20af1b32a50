"""Configurations of the paper's models, and of a modern decoder, by name."""

from __future__ import annotations

from typing import Any

from mgk.models.configuration import MGKConfig

# Long Range Arena, as in the Nystromformer code base, which the paper follows. A head is 32 wide for every number of
# heads. Dropout also follows the activation of the feed-forward network, as in its model.py and the paper's.
_LONG_RANGE_ARENA = {
    "attention": "softmax", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32,
    "intermediate_size": 128, "hidden_act": "gelu", "norm_placement": "pre", "positions": "learned", "dropout": 0.1,
    "attention_dropout": 0.1, "activation_dropout": 0.1, "classifier_size": 128, "initialization": "torch",
    "pad_token_id": 0,
}  # fmt: skip

# WikiText-103, as in the Transformer-XL code base without memory. Positions count up here: the released code counts
# down, which rules out a cache.
_WIKITEXT = {
    "attention": "softmax", "vocab_size": 267_735, "num_hidden_layers": 16, "num_attention_heads": 8,
    "intermediate_size": 2048, "hidden_act": "relu", "norm_placement": "post", "positions": "sinusoidal",
    "scale_embeddings": True, "attention_bias": False, "dropout": 0.1, "adaptive_cutoffs": [20_000, 40_000, 200_000],
    "is_decoder": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "lra-listops": {**_LONG_RANGE_ARENA, "vocab_size": 32, "max_position_embeddings": 2048, "num_labels": 10},
    "lra-text": {**_LONG_RANGE_ARENA, "vocab_size": 512, "max_position_embeddings": 4096, "num_labels": 2},
    "lra-retrieval": {**_LONG_RANGE_ARENA, "vocab_size": 512, "max_position_embeddings": 4096, "num_labels": 2},
    "wikitext103-small": {**_WIKITEXT, "hidden_size": 128, "head_dim": 16, "max_position_embeddings": 256},
    "wikitext103-medium": {**_WIKITEXT, "hidden_size": 256, "head_dim": 32, "max_position_embeddings": 384},
    # fairseq's transformer_iwslt_de_en, with its dictionaries of 8,848 German and 6,632 English entries.
    "iwslt14": {
        "attention": "softmax", "vocab_size": 6632, "source_vocab_size": 8848, "hidden_size": 512,
        "num_hidden_layers": 6, "decoder_layers": 6, "num_attention_heads": 4, "head_dim": 128,
        "intermediate_size": 1024, "hidden_act": "relu", "norm_placement": "post", "positions": "sinusoidal",
        "scale_embeddings": True, "dropout": 0.3, "initialization": "xavier", "max_position_embeddings": 1024,
        "is_encoder_decoder": True, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    # What decoders look like today: pre-norm, RMS norms without biases, rotary positions, SwiGLU.
    "modern": {
        "attention": "smgk", "vocab_size": 32_000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
        "head_dim": 64, "intermediate_size": 1408, "hidden_act": "silu", "gated_mlp": True, "norm": "rms",
        "norm_placement": "pre", "positions": "rotary", "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": 2048, "is_decoder": True,
    },
}  # fmt: skip


def architecture(name: str, **changes: Any) -> MGKConfig:
    """Return the configuration of a model of the paper, with ``changes``.

    The default is the published baseline with softmax attention. ``architecture("lra-text", attention="smgk",
    num_attention_heads=4)`` is the paper's sMGK with half the heads.

    Args:
        name: one of :data:`ARCHITECTURES`.
        changes: fields of :class:`MGKConfig` to override.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"name must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return MGKConfig(**{**ARCHITECTURES[name], **changes})
