"""What the pages of tables say above their numbers, and what our own pages do not show."""

from __future__ import annotations

from collections.abc import Mapping

TEXTS: Mapping[str, tuple[str, ...]] = {
    "T1": (
        "All ListOps numbers of the paper lie near what the outermost operator alone gives (36 %), and the 2,000 test "
        "samples alone give one run a standard error of 1.1 points.",
        "[Fidelity](fidelity.md) lists how this training differs from the published code, and what each difference "
        "does.",
    ),
    "T2": (
        "The paper's code for these rows has no denominator, and mixes keys before the feature map, which is linear "
        "attention without a mixture. Ours is the formula of the paper. Its ListOps numbers are just above "
        "the share of the largest class (17 %).",
    ),
    "T3": ("As in the paper, the perplexity is that of a window that slides by one word, at its last position.",),
    "T4": (
        "BLEU is that of tokenised text in lower case. We translate WMT'14 from German to English. The paper does not "
        "say which way it went, so those numbers do not compare.",
    ),
    "T6": ("softmax-smgk-1 is softmax-1 exactly, since the shift cancels; the paper has 79.81 and 77.90 for the two.",),
    "T7": (
        "The paper's numbers are of attention that is not fused, in evaluation, on an A100. Ours are of the library's "
        "fastest backend in bf16, and those of softmax are of the fastest stock kernel. The time is that of an "
        "evaluation; the memory is the peak of a training step beside the inputs.",
    ),
    "T8": ("The numbers are means over the heads of a layer. Which component is called the first is arbitrary.",),
    "likelihood": (
        "The likelihood leaves out the constant of the Gaussian, with which 0.18 nats could not be reached. The paper "
        "does not state the number of heads; we take 1, as in its Tables 6 and 8.",
    ),
}
"""Paragraphs by table."""

_ONE_SIZE = "How the rows compare in a larger model, or after a longer training: there is one size and one length here."
_SEEDS = "How far another test text would move a number: seeds vary the start of a training, not what it is tested on."
LIMITS: Mapping[str, tuple[str, ...]] = {
    "demo": (
        "What the lists of the Long Range Arena show: theirs are twenty to seventy times as long.",
        _ONE_SIZE,
        "How the rows compare at learning rates of their own: all have the one of the demo.",
    ),
    "enwik8-small": (
        "Where the rows end: a run sees two million bytes once, and is still learning fast when it ends.",
        _ONE_SIZE,
        "How the rows compare at learning rates of their own: all have the best one of softmax-8 and smgk-4.",
        _SEEDS,
    ),
    "enwik8": (
        _ONE_SIZE,
        "Whether half the heads are worth it at equal memory or equal time: [equal-cache](equal-cache.md) asks that.",
        _SEEDS,
    ),
    "wikitext2": (
        "What WikiText-103 would show: 2 million words are few for a model of this size, and the best checkpoint of a "
        "training that overfits is an early one.",
        _SEEDS,
    ),
    "multi30k": ("What happens with long sentences: captions have a dozen words.", _ONE_SIZE, _SEEDS),
    "tatoeba": ("What IWSLT'14 would show: its sentences are longer, and of talks.", _ONE_SIZE, _SEEDS),
}
"""What our own pages do not show."""
