"""The rows that have a part of the mixture of shifted keys without the others, and what is asked about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mgk.reproduction.plateau import Question

LISTOPS, ENWIK8 = "lra/listops-shifts", "enwik8-shifts"
HEADS = (4, 2)
SIZES = (0.0, 0.1, 0.3, 1.0, 2.0)
"""Standard deviations of the initial shifts."""
OTHER_STARTS = {"lra/listops-small-shifts": "0.25", "lra/listops-released-shifts": "0 and 0.5"}
"""Recipes whose shifts start in another way, and what stands for that."""
WITHOUT_SHIFT = "the same constant, as a bias of the queries, makes the dot product leave earlier"


def sized(size: float, heads: int) -> str:
    """The row of sMGK whose shifts start with this standard deviation."""
    return f"smgk-{heads}" if size == 1 else f"smgk-{heads}+shift_init_std={size:g}"


def _questions(asked: Mapping[str, tuple[str, str]], heads: Sequence[int]) -> list[Question]:
    return [
        Question(what=what, pairs=tuple((first.format(count), second.format(count)) for count in heads))
        for what, (first, second) in asked.items()
    ]


def premises(heads: Sequence[int]) -> list[Question]:
    """What the page sets out from, over several numbers of heads."""
    asked = {
        "two shifts leave earlier than the dot product": ("smgk-{}", "softmax-{}"),
        "two projected keys leave earlier than the dot product": ("mgk-{}", "softmax-{}"),
    }
    return _questions(asked, heads)


def questions(heads: Sequence[int]) -> list[Question]:
    """What each part is said to do, over several numbers of heads."""
    asked = {
        "the distance alone leaves earlier than the dot product": ("gaussian-{}", "softmax-{}"),
        "one shift, the same for all keys, makes the distance leave earlier": (
            "smgk-{}+num_components=1", "gaussian-{}",
        ),
        WITHOUT_SHIFT: (
            "softmax-{}+query_bias_init_std=1", "softmax-{}",
        ),
        "with this constant the distance leaves earlier than the dot product": (
            "smgk-{}+num_components=1", "softmax-{}+query_bias_init_std=1",
        ),
        "two shifts leave earlier than one": ("smgk-{}", "smgk-{}+num_components=1"),
        "two shifts that start at 1 leave earlier than two that start at 0": ("smgk-{}", "smgk-{}+shift_init_std=0"),
        "learned priors leave earlier than uniform ones": ("smgk-{}", "smgk-{}+prior=uniform"),
    }  # fmt: skip
    return _questions(asked, heads)
