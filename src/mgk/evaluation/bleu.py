"""BLEU of translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgk.data.store import Corpus
from mgk.data.translation import decode
from mgk.evaluation.moses import detokenise
from mgk.evaluation.translation import sentences, translate

__all__ = ["MOSES_TOKENISED", "BleuScore", "is_tokenised", "references", "score", "translate"]

MOSES_TOKENISED = ("iwslt14", "wmt14")
"""Corpora whose text is tokenised by Moses, as fairseq's scripts prepare them. The others are plain text."""


@dataclass(frozen=True, kw_only=True)
class BleuScore:
    """BLEU in [0, 100], in the two ways in which it is reported."""

    bleu: float
    """sacreBLEU of the text, described by :attr:`signature`. Both sides of a tokenised corpus are detokenised first, so
    the references are not those of the shared task: compare such numbers only with each other."""
    signature: str
    """Signature of sacreBLEU."""
    tokenised_lowercase_bleu: float
    """BLEU-4 of lower-cased tokens without smoothing, as fairseq's scorer computes it for IWSLT'14 and the paper
    reports it. The tokens are those of a tokenised corpus, otherwise those of sacreBLEU's ``13a``."""
    tokenised_signature: str
    brevity_penalty: float
    """Brevity penalty of the tokenised BLEU, below 1 if translations are too short."""
    length_ratio: float
    """Number of tokens in the translations divided by that in the references."""
    sentences: int


def is_tokenised(corpus: Corpus) -> bool:
    """Whether the text of a corpus is tokenised, for the argument of :func:`score`."""
    return corpus.name in MOSES_TOKENISED


def references(corpus: Corpus, split: str) -> list[str]:
    """Return the target sentences of a split, lower-cased or tokenised if the corpus is."""
    target = sentences(corpus, split, "target")
    return [decode(corpus, "target", target[index]) for index in range(len(target))]


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenised: bool, lowercase: bool = False
) -> BleuScore:
    """Compute BLEU of translations with one reference each.

    Args:
        hypotheses: translations of a model.
        references: reference translations in the same order.
        tokenised: whether both are tokenised and escaped by Moses, see :func:`is_tokenised`.
        lowercase: whether sacreBLEU ignores case, which its signature shows. The tokenised BLEU always does.
    """
    from sacrebleu.metrics.bleu import BLEU

    if len(hypotheses) != len(references):
        raise ValueError(f"hypotheses must be as many as the {len(references)} references, got {len(hypotheses)}")
    if not references:
        raise ValueError("references must hold at least one sentence, got none")
    text = [[detokenise(line) for line in side] if tokenised else list(side) for side in (hypotheses, references)]
    plain = BLEU(lowercase=lowercase)
    bleu = plain.corpus_score(text[0], [text[1]])
    # force suppresses a warning about tokenised text, which is intended here.
    by_token = BLEU(lowercase=True, tokenize="none" if tokenised else "13a", smooth_method="none", force=True)
    tokenised_bleu = by_token.corpus_score(list(hypotheses), [list(references)])
    return BleuScore(
        bleu=bleu.score,
        signature=str(plain.get_signature()),
        tokenised_lowercase_bleu=tokenised_bleu.score,
        tokenised_signature=str(by_token.get_signature()),
        brevity_penalty=tokenised_bleu.bp,
        length_ratio=tokenised_bleu.ratio,
        sentences=len(references),
    )
