"""Small models with a tokenizer, saved where the tests of pipelines look for them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.models import MGKConfig, MGKForCausalLM, MGKForSequenceClassification, MGKModel

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that any text has one."""
    vocabulary = [*SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **SPECIAL_TOKENS
    )


def save_tiny_models(folder: Path, presets: list[str]) -> None:
    """``folder/mgk/PRESET/CLASS`` for every class that has a pipeline, and the list that transformers reads."""
    tokenizer = byte_tokenizer()
    classes = [MGKModel, MGKForCausalLM, MGKForSequenceClassification]
    for preset in presets:
        for model_class in classes:
            config = MGKConfig(
                attention=preset, vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                is_decoder=model_class is MGKForCausalLM,
            )  # fmt: skip
            place = folder / "mgk" / preset / model_class.__name__
            model_class(config).save_pretrained(place)
            tokenizer.save_pretrained(place)
    files = {"tokenizer_classes": [type(tokenizer).__name__], "processor_classes": []}
    reports = folder / "reports"
    reports.mkdir(parents=True)
    summary = {model_class.__name__: files for model_class in classes}
    (reports / "tiny_model_summary.json").write_text(json.dumps(summary))
