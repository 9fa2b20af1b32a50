"""English text as it was before Moses's tokeniser: IWSLT'14 and WMT'14 come tokenised and escaped."""

from __future__ import annotations

import re

# "&amp;" last: "&amp;lt;" stands for the text "&lt;".
_ESCAPES = (
    ("&apos;", "'"), ("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&#91;", "["), ("&#93;", "]"), ("&#124;", "|"),
    ("&bar;", "|"), ("&amp;", "&"),
)  # fmt: skip

_CLOSES = re.compile(r"[,.?!:;\\%}\])]+")
"""Stands right after the word before it."""
_OPENS = re.compile(r"[$£€¥(\[{¿¡]+")
"""Stands right before the next word."""
_QUOTES = re.compile(r"['\"„“”`]+")
_CONTRACTION = re.compile(r"'[^\W\d_]")
"""What follows an apostrophe in ``it 's``, ``we 're``, ``shouldn 't``."""


def detokenise(line: str) -> str:
    """Undo Moses's escapes and put English punctuation back to its words.

    ``we &apos;re &quot; here &quot; , ( all ) well @-@ known .`` is ``we're "here", (all) well-known.``

    By the rules of Moses's own detokeniser, without those for other languages: marks that close go to the left,
    brackets and signs of currency that open to the right, contractions to the left, and quotation marks open and close
    in turn. What the tokeniser lost does not come back, such as whether there were spaces around a dash.
    """
    for escape, character in _ESCAPES:
        line = line.replace(escape, character)
    words = line.replace(" @-@ ", "-").split()
    text, is_glued = "", True
    is_open = {"'": False, '"': False}
    for place, word in enumerate(words):
        glue_left, glue_right = is_glued, False
        if _CLOSES.fullmatch(word) or (text[-1:].isalnum() and _CONTRACTION.match(word)):
            glue_left = True
        elif _OPENS.fullmatch(word):
            glue_right = True
        elif _QUOTES.fullmatch(word):
            kind = "'" if word[0] in "'`" else '"'
            # The s of a plural: "the jones ' house" has no quotation in it.
            is_possessive = word == "'" and not is_open[kind] and place > 0 and words[place - 1].endswith("s")
            if is_possessive or is_open[kind]:
                glue_left = True
            else:
                glue_right = True
            is_open[kind] ^= not is_possessive
        text += word if glue_left else f" {word}"
        is_glued = glue_right
    return text
