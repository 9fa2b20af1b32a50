"""Tests of transformers that our models cannot pass, each with the reason."""

from typing import NamedTuple


class NotApplicable(NamedTuple):
    test: str
    """Its name, or the beginning of it where the rest are parameters."""
    reason: str
    models: tuple[str, ...] = ("decoder", "encoder", "seq2seq")
    presets: tuple[str, ...] = ("softmax", "smgk", "mgk", "mlk")


NO_WEIGHTS_OF_THE_PAST = "asks for the weights of cached tokens, of which linear attention keeps a state and no keys"

NOT_APPLICABLE = (
    NotApplicable(
        "test_greedy_generate_dict_outputs_use_cache", NO_WEIGHTS_OF_THE_PAST, ("decoder", "seq2seq"), ("mlk",)
    ),
    NotApplicable(
        "test_beam_search_generate_dict_outputs_use_cache", NO_WEIGHTS_OF_THE_PAST, ("decoder", "seq2seq"), ("mlk",)
    ),
    NotApplicable("test_generate_compilation_all_outputs", NO_WEIGHTS_OF_THE_PAST, ("decoder", "seq2seq"), ("mlk",)),
    NotApplicable(
        "test_assisted_decoding",
        "tries tokens and takes them back, which a state cannot do: linear attention refuses it",
        ("decoder", "seq2seq"),
        ("mlk",),
    ),
    NotApplicable(
        "test_custom_4d_attention_mask",
        "hides single pairs, which linear attention never forms: it refuses such a mask",
        ("decoder",),
        ("mlk",),
    ),
)


def reason_for(test: str, model: str, preset: str) -> str | None:
    """Why a test cannot pass for a model with a preset; ``None``: it can."""
    for entry in NOT_APPLICABLE:
        if test.startswith(entry.test) and model in entry.models and preset in entry.presets:
            return entry.reason
    return None
