"""What stands in for a corpus that cannot be had.

The pairs of Long Range Arena Retrieval (AAN) are gone from the web, and of IWSLT'14 we have too few sentences to train
on. What the paper says about them cannot be judged, and the pages say so; the same rows on another corpus are shown and
judged under the name of that corpus. Whoever has the data and has trained on it sees the paper's own table: a recipe
with results is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results

GONE = ("aan", "iwslt14")
"""Corpora that cannot be had."""
STAND_INS = {
    "lra/retrieval": "peerread", "lra/retrieval-linear": "lra/text-linear",
    "iwslt14": "multi30k", "iwslt14-variances": "multi30k-variances",
}  # fmt: skip
"""PeerRead asks the same question of the same kind of text. It has no rows of linear attention; Text, the other corpus
of bytes, has them. Multi30k is from German to English as well."""

_WHERE = {"aan": " any more", "iwslt14": " here"}


def is_gone(recipe: str, results: Results) -> bool:
    """Whether nothing of a recipe is here, nor can be made."""
    return _corpus(recipe) in GONE and not results.has_any(recipe)


def in_place_of(recipe: str, results: Results) -> str:
    """The recipe itself, or what stands in for it."""
    return STAND_INS.get(recipe, recipe) if is_gone(recipe, results) else recipe


def explain(recipes: Sequence[str], results: Results) -> tuple[str, ...]:
    """A sentence on each recipe whose corpus cannot be had."""
    return tuple(
        f"The corpus of {recipe} is not to be had{_WHERE[_corpus(recipe)]}, so nothing of ours can stand beside its "
        "numbers." + (f" {STAND_INS[recipe]} stands in for it, under its own name." if recipe in STAND_INS else "")
        for recipe in dict.fromkeys(recipes)
        if is_gone(recipe, results)
    )


def name_stand_ins(title: str, recipes: Sequence[str], results: Results) -> str:
    """A title that names Retrieval, with what stands in for it where that is so."""
    found = dict.fromkeys(in_place_of(recipe, results) for recipe in recipes if is_gone(recipe, results))
    return title.replace("Retrieval", f"{' and '.join(found)} in place of Retrieval") if found else title


def _corpus(recipe: str) -> str:
    return str(bundled(recipe).values.get("data", {}).get("corpus", ""))
