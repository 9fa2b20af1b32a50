"""A tiny causal model with a tokenizer of its own, in a folder as ``from_pretrained`` loads it, and text for it."""

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(40)]


def text(count, seed=0, line=7):
    """Lines of words, of which some follow each other more often than others."""
    drawn = random.Random(seed)
    lines, word = [], 0
    for _ in range(count):
        chosen = []
        for _ in range(line):
            word = (3 * word + 1) % len(WORDS) if drawn.random() < 0.7 else drawn.randrange(len(WORDS))
            chosen.append(WORDS[word])
        lines.append(" ".join(chosen))
    return "\n".join(lines) + "\n"


def make_tokenizer():
    """Byte-level BPE, as SmolLM2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([text(40)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def write_model(folder, *, heads=4, kv_heads=2, seed=0, **changes):
    """A tiny Llama with its tokenizer."""
    tokenizer = make_tokenizer()
    options = {
        "vocab_size": len(tokenizer), "hidden_size": 8 * heads, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 64,
        "initializer_range": 0.2, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**options, **changes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_encoder(folder):
    """A tiny BERT with the same tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(folder, train=120):
    """``train.txt``, ``valid.txt`` and ``test.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "valid": 12, "test": 12}.items()):
        (folder / f"{split}.txt").write_text(text(count, seed))
    return folder
