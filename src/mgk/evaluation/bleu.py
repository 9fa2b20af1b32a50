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
"""Corpora whose text comes out of Moses's tokeniser, as fairseq's scripts prepare them. The others are plain text."""


@dataclass(frozen=True, kw_only=True)
class BleuScore:
    """BLEU in [0, 100], in the two ways it is reported."""

    bleu: float
    """sacreBLEU of the text, which :attr:`signature` describes. Of a tokenised corpus both sides are detokenised first,
    and its references are then not those of the shared task: compare such numbers only with each other."""
    signature: str
    """What sacreBLEU did, in its own words."""
    tokenised_lowercase_bleu: float
    """BLEU-4 of lower-cased tokens without smoothing, as fairseq's own scorer gives for IWSLT'14 and the paper reports.
    The tokens are the corpus's own where it is tokenised, otherwise those of sacreBLEU's ``13a``."""
    tokenised_signature: str
    brevity_penalty: float
    """Of the tokenised BLEU: below 1 where translations are too short."""
    length_ratio: float
    """Tokens of the translations over those of the references."""
    sentences: int


def is_tokenised(corpus: Corpus) -> bool:
    """Whether the text of a corpus is tokenised, as :func:`score` wants to know."""
    return corpus.name in MOSES_TOKENISED


def references(corpus: Corpus, split: str) -> list[str]:
    """The target sentences of a split, as the corpus has them: lower-cased or tokenised where it is."""
    target = sentences(corpus, split, "target")
    return [decode(corpus, "target", target[index]) for index in range(len(target))]


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenised: bool, lowercase: bool = False
) -> BleuScore:
    """BLEU of translations, one reference each.

    Args:
        hypotheses: what a model said.
        references: what it should have said, in the same order.
        tokenised: whether both are text that Moses tokenised and escaped, see :func:`is_tokenised`.
        lowercase: whether sacreBLEU ignores case; its signature says so. The tokenised BLEU always does.
    """
    from sacrebleu.metrics.bleu import BLEU

    if len(hypotheses) != len(references):
        raise ValueError(f"hypotheses must be as many as the {len(references)} references, got {len(hypotheses)}")
    if not references:
        raise ValueError("references must hold at least one sentence, got none")
    text = [[detokenise(line) for line in side] if tokenised else list(side) for side in (hypotheses, references)]
    plain = BLEU(lowercase=lowercase)
    bleu = plain.corpus_score(text[0], [text[1]])
    # force: that the text is tokenised is meant, and no reason to warn.
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
