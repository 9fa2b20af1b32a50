"""Train a byte-level language model on any text, save it, and let it write.

    python examples/tiny_language_model.py README.md docs/*.md --folder tiny-model
    mgk generate tiny-model "Attention" --temperature 0.8

Two layers with sMGK attention: two heads whose keys are mixtures of two. A minute on a laptop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.models import MGKForCausalLM, architecture, fingerprint
from mgk.nn import parameter_groups


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and one that pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the model goes")
    parser.add_argument("--attention", default="smgk", help="any preset")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)

    tokenizer = byte_tokenizer()
    text = "\n".join(path.read_text() for path in options.texts)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    config = architecture(
        "modern", attention=options.attention, num_attention_heads=options.heads, head_dim=32, hidden_size=128,
        intermediate_size=352, num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=512,
        pad_token_id=0, tokenizer_sha256=fingerprint(tokenizer),
    )  # fmt: skip
    model = MGKForCausalLM(config).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)

    losses = []
    for _ in track(range(options.steps), description=f"{model.num_parameters():,} parameters"):
        starts = torch.randint(len(tokens) - 128, (16,))
        batch = torch.stack([tokens[start : start + 128] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    print(f"nats per byte: {losses[0]:.2f} at the first step, {sum(losses[-10:]) / 10:.2f} over the last ten")
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f'now: mgk generate {options.folder} "Attention" --temperature 0.8')


if __name__ == "__main__":
    main()
