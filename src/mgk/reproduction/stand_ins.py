"""What stands in for a corpus that cannot be had.


The pairs of Long Range Arena Retrieval (AAN) are gone from the web. The training texts of WikiText-103 and IWSLT'14
were not available where our runs were made. What the paper says about them cannot be judged then, and the pages
say so; the same rows on another corpus are shown and judged under the name of that corpus. Whoever has the corpus and
has trained on it sees the paper's own table: a corpus with results is never replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mgk.recipes
from mgk.reproduction.recipe import bundled
from mgk.reproduction.results import Results

GONE = {
    "aan": "The corpus of {recipe} is no longer available",
    "wikitext103": "The training text of {recipe} was not available where our runs were made",
    "iwslt14": "The training text of {recipe} was not available where our runs were made",
}
"""Corpora that cannot be had, and how a sentence on it begins."""
STAND_INS = {
    "lra/retrieval": "peerread",
    "lra/retrieval-linear": "lra/text-linear",
    "wikitext103/small": "enwik8-words",
    "wikitext103/small-linear": "enwik8-words-linear",
    "wikitext103/multi-query": "enwik8-words-multi-query",
    "iwslt14": "multi30k",
    "iwslt14-variances": "multi30k-variances",
}
"""PeerRead asks the same question of the same kind of text. It has no rows of linear attention; Text, the other corpus
of bytes, has them. The articles of enwik8 are text of Wikipedia, too; nothing stands in for the larger model. Multi30k
is from German to English as well."""
_TITLES = {"aan": "Retrieval", "wikitext103": "WikiText-103", "iwslt14": "IWSLT'14"}
"""What titles call them."""


def is_gone(recipe: str, results: Results) -> bool:
    """Whether nothing of the corpus of a recipe is here, nor can be made."""
    corpus = _corpus(recipe)
    return corpus in GONE and not any(results.has_any(each) for each in _recipes_on(corpus))


def in_place_of(recipe: str, results: Results) -> str:
    """The recipe itself, or what stands in for it."""
    return STAND_INS.get(recipe, recipe) if is_gone(recipe, results) else recipe


def can_be_made(recipe: str, results: Results) -> bool:
    """Whether a recipe, or what stands in for it, has a corpus that can be had."""
    return not is_gone(in_place_of(recipe, results), results)


def explain(recipes: Sequence[str], results: Results) -> tuple[str, ...]:
    """A sentence on each recipe whose corpus cannot be had."""
    return tuple(
        f"{GONE[_corpus(recipe)].format(recipe=recipe)}, so we have no numbers to compare with the paper's."
        + (f" {STAND_INS[recipe]} stands in for it, under its own name." if recipe in STAND_INS else "")
        for recipe in dict.fromkeys(recipes)
        if is_gone(recipe, results)
    )


def name_stand_ins(title: str, recipes: Sequence[str], results: Results) -> str:
    """A title that names a corpus, with what stands in for it where that is so."""
    found: dict[str, list[str]] = {}
    for recipe in recipes:
        if is_gone(recipe, results):
            found.setdefault(_TITLES[_corpus(recipe)], []).append(in_place_of(recipe, results))
    for name, others in found.items():
        title = title.replace(name, f"{' and '.join(dict.fromkeys(others))} in place of {name}")
    return title


def _corpus(recipe: str) -> str:
    return str(bundled(recipe).values.get("data", {}).get("corpus", ""))


@functools.cache
def _recipes_on(corpus: str) -> tuple[str, ...]:
    return tuple(each for each in mgk.recipes.names() if _corpus(each) == corpus)
