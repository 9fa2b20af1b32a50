"""Tests of transformers that our models cannot pass, each with the reason and with how it fails."""

from typing import NamedTuple


class NotApplicable(NamedTuple):
    test: str
    """Its name, or the beginning of it where the rest are parameters."""
    reason: str
    messages: tuple[str, ...]
    """One of these is in the error that it fails with: any other error is a failure like every other."""
    models: tuple[str, ...]
    presets: tuple[str, ...]


NO_WEIGHTS = "linear attention keeps no keys to show weights of"
NO_WEIGHTS_OF_THE_PAST = "asks for the weights of cached tokens, of which linear attention keeps a state and no keys"

NOT_APPLICABLE = (
    NotApplicable(
        "test_greedy_generate_dict_outputs_use_cache", NO_WEIGHTS_OF_THE_PAST, (NO_WEIGHTS,), ("decoder", "seq2seq"),
        ("mlk",),
    ),
    NotApplicable(
        "test_beam_search_generate_dict_outputs_use_cache", NO_WEIGHTS_OF_THE_PAST, (NO_WEIGHTS,),
        ("decoder", "seq2seq"), ("mlk",),
    ),
    NotApplicable(
        "test_generate_compilation_all_outputs", NO_WEIGHTS_OF_THE_PAST, (NO_WEIGHTS,), ("decoder", "seq2seq"),
        ("mlk",),
    ),
    NotApplicable(
        "test_assisted_decoding",
        "tries tokens and takes them back, which a state cannot do: linear attention refuses it",
        ("must be able to take tokens back", NO_WEIGHTS), ("decoder", "seq2seq"), ("mlk",),
    ),
    NotApplicable(
        "test_custom_4d_attention_mask",
        "hides single pairs, which linear attention never forms: it refuses such a mask",
        ("linear attention cannot hide single pairs",), ("decoder",), ("mlk",),
    ),
)  # fmt: skip


def entry_for(test: str, model: str, preset: str) -> NotApplicable | None:
    """What is known of a test of a model with a preset; ``None``: it can pass."""
    for entry in NOT_APPLICABLE:
        if test.startswith(entry.test) and model in entry.models and preset in entry.presets:
            return entry
    return None
