"""Tiny random models of every family that can be converted, shared by the tests of `mgk.conversion`."""

import torch
import transformers
from cases import DEVICE

import mgk

WIDTH, HEADS, VOCABULARY = 32, 4, 61
HEAD_DIM = WIDTH // HEADS

_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "attention_dropout": 0.0}
_ENCODER = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
_VISION = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2, "num_labels": 3,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "init_std": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

# The class, and what makes it tiny. Heads, biases and norms differ as they do in the real ones.
MODELS = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": HEAD_DIM}),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "smollm": ("LlamaForCausalLM", {**_GROUPED, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48,
                                    "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64,
        "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bert": ("BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, "max_position_embeddings": 66}),
    "vit": ("ViTForImageClassification", _VISION),
    "dinov2": ("Dinov2ForImageClassification", {**_VISION, "mlp_ratio": 2}),
    "whisper": ("WhisperForConditionalGeneration", {
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40,
        "begin_suppress_tokens": None, "suppress_tokens": None,
    }),
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 64, "forced_eos_token_id": None}),
}  # fmt: skip

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm", "gpt2", "gpt_neox")
SEQ2SEQ = ("whisper", "bart")
ENCODERS = ("bert", "roberta")
VISION = ("vit", "dinov2")
PROJECTED = tuple(name for name in MODELS if name not in ("gpt_neox", "whisper"))
"""Whose key projection can be widened."""
GROUPED = tuple(name for name in MODELS if name not in ("gpt_neox", "dinov2"))
"""That may have fewer key/value heads than query heads."""


def make_model(family, *, seed=0, dtype=torch.float32, **changes):
    """An evaluated model without dropout, whose attention is far from uniform."""
    name, options = MODELS[family]
    torch.manual_seed(seed)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**options, **changes})
    config._attn_implementation = "eager"
    model = model_class(config).to(DEVICE, dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # What starts at 0 or 1 could be lost unseen; and normalised keys all have one length until gains differ.
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in parameter_name:
                parameter.mul_(1.0 + 0.3 * torch.randn_like(parameter))
    return model


def make_inputs(family, *, batch=3, tokens=9, seed=1, padding=None):
    """Inputs; with a side, rows 1 and 2 are padded there by 2 and 4 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(DEVICE)

    if family in VISION:
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator).to(DEVICE)}
    if family == "whisper":
        features = torch.randn(batch, 8, 20, generator=generator).to(DEVICE)
        return {"input_features": features, "decoder_input_ids": draw(tokens)}
    mask = torch.ones(batch, tokens, dtype=torch.long)
    if padding is not None:
        for row, length in ((1, 2), (2, 4)):
            mask[row, slice(length) if padding == "left" else slice(tokens - length, None)] = 0
    mask = mask.to(DEVICE)
    inputs = {"input_ids": draw(tokens).masked_fill(mask == 0, 0), "attention_mask": mask}
    if family == "bart":
        inputs["decoder_input_ids"] = draw(tokens - 2)
    return inputs


def logits(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options).logits


def loss(model, family, inputs):
    out = model(**inputs).logits
    if family in VISION:
        return torch.nn.functional.cross_entropy(out, torch.arange(len(out), device=out.device) % 3)
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def train(model, family, *, steps=3, inputs=None):
    """The losses of a few steps of Adam on one batch."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs = make_inputs(family) if inputs is None else inputs
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, family, inputs)
        value.backward()
        optimizer.step()
        mgk.conversion.advance_start(model)
        losses.append(value.item())
    model.eval()
    return losses
