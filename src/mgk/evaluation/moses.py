"""Detokenisation of English text from Moses's tokeniser: IWSLT'14 and WMT'14 are tokenised and escaped."""

from __future__ import annotations

import re

# "&amp;" is replaced last, because "&amp;lt;" stands for the text "&lt;".
_ESCAPES = (
    ("&apos;", "'"), ("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&#91;", "["), ("&#93;", "]"), ("&#124;", "|"),
    ("&bar;", "|"), ("&amp;", "&"),
)  # fmt: skip

_CLOSES = re.compile(r"[,.?!:;\\%}\])]+")
"""Marks that attach to the word before them."""
_OPENS = re.compile(r"[$£€¥(\[{¿¡]+")
"""Marks that attach to the word after them."""
_QUOTES = re.compile(r"['\"„“”`]+")
_CONTRACTION = re.compile(r"'[^\W\d_]")
"""Endings of contractions, as in ``it 's``, ``we 're``, ``shouldn 't``."""


def detokenise(line: str) -> str:
    """Undo Moses's escapes and attach English punctuation to its words.

    ``we &apos;re &quot; here &quot; , ( all ) well @-@ known .`` becomes ``we're "here", (all) well-known.``

    The rules are those of Moses's own detokeniser for English: closing marks and contractions attach to the left,
    opening brackets and currency signs to the right, and quotation marks open and close in turn. Information that the
    tokeniser lost cannot be restored, such as whether there were spaces around a dash.
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
            # The apostrophe of a plural possessive, as in "the jones ' house", is no quotation mark.
            is_possessive = word == "'" and not is_open[kind] and place > 0 and words[place - 1].endswith("s")
            if is_possessive or is_open[kind]:
                glue_left = True
            else:
                glue_right = True
            is_open[kind] ^= not is_possessive
        text += word if glue_left else f" {word}"
        is_glued = glue_right
    return text
