"""English text in words as WikiText has it: Moses's rules, and marks inside of words and numbers between ``@``.

::

    Mr. Smith's 1,234.5-mile trip (in the U.S.) didn't end.
    Mr. Smith 's 1 @,@ 234 @.@ 5 @-@ mile trip ( in the U.S. ) didn 't end .
"""

from __future__ import annotations

import re
import unicodedata

from mgk.data.wiki_markup import FORMULA

FORMULA_TOKEN = "<formula>"

# Letters, digits, and the marks that are written onto letters.
_CHARACTER = r"(?:[^\W_]|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0eff])"
_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(
    rf"""
    (?:(?<={_LETTER})'(?={_LETTER}) | (?<=\d)'(?=s\b))?       # the apostrophe of don 't and 1990 's
    {_CHARACTER}+
    (?: (?: \.?-(?={_CHARACTER}) | \.(?={_CHARACTER}) | (?<=\d),(?=\d) ) {_CHARACTER}+ )*
    (?: \.(?!\.) )?
    | \.{{2,}}
    | \S
    """,
    re.VERBOSE,
)
_INNER_HYPHEN = re.compile(r"(?<=\S)-(?=\S)")
_INNER_NUMBER_MARK = re.compile(r"(?<=\d)([.,])(?=\d)")
_DASH = re.compile(r"\s*(?<!-)-{2,3}(?!-)\s*|\s+-\s+")
# Curved, low and slanted ones, by their names in Unicode.
_QUOTES = str.maketrans(
    {
        **dict.fromkeys("\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}", '"'),
        **dict.fromkeys("\N{DOUBLE LOW-9 QUOTATION MARK}\N{DOUBLE HIGH-REVERSED-9 QUOTATION MARK}", '"'),
        **dict.fromkeys("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}", "'"),
        **dict.fromkeys("\N{SINGLE HIGH-REVERSED-9 QUOTATION MARK}\N{ACUTE ACCENT}`", "'"),
        FORMULA: f" {FORMULA} ",
    }
)
_DOUBLE_QUOTES = re.compile(r"''+")

_ABBREVIATIONS = frozenset(
    {
        "Adj", "Adm", "Adv", "Asst", "Bart", "Bldg", "Brig", "Bros", "Capt", "Cmdr", "Col", "Comdr", "Corp", "Cpl",
        "Dr", "Drs", "Ens", "Gen", "Gov", "Hon", "Hosp", "Insp", "Lt", "Maj", "Messrs", "Mlle", "Mme", "Mr", "Mrs",
        "Ms", "Msgr", "Op", "Pfc", "Ph", "Prof", "Pvt", "Rep", "Reps", "Rev", "Rt", "Sen", "Sens", "Sfc", "Sgt",
        "Sr", "St", "Supt", "Surg", "v", "vs",
    }
)  # fmt: skip
"""After these a point ends no sentence. It does after Co, Inc and Jr: so has WikiText it."""
_BEFORE_NUMBERS = frozenset({"Art", "No", "Nos", "Nr", "pp"})
"""After these it ends none where a number follows."""


def tokenise(text: str) -> list[str]:
    """The words of one line."""
    text = unicodedata.normalize("NFC", text).translate(_QUOTES)
    text = _DASH.sub(" \N{EN DASH} ", _DOUBLE_QUOTES.sub('"', text))
    chunks = text.split()
    words: list[str] = []
    for place, chunk in enumerate(chunks):
        if chunk.isalpha():
            words.append(chunk)
            continue
        pieces: list[str] = _TOKEN.findall(chunk)
        for number, piece in enumerate(pieces):
            if len(piece) == 1:
                words.append(FORMULA_TOKEN if piece == FORMULA else piece)
                continue
            point = piece[-1] == "." and piece[0] != "."
            if point:
                following = pieces[number + 1] if number + 1 < len(pieces) else "".join(chunks[place + 1 : place + 2])
                point = _ends_a_sentence(piece[:-1], following)
                piece = piece[:-1] if point else piece
            if "-" in piece:
                piece = _INNER_HYPHEN.sub(" @-@ ", piece)
            if "." in piece or "," in piece:
                piece = _INNER_NUMBER_MARK.sub(r" @\1@ ", piece)
            words += piece.split(" ")
            if point:
                words.append(".")
    return words


def _ends_a_sentence(word: str, following: str) -> bool:
    """Whether the point after a word is none of an abbreviation."""
    last = word.rpartition("-")[2]
    if (len(last) == 1 and last.isupper()) or last in _ABBREVIATIONS or following[:1].islower():
        return False
    if "." in last and any(character.isalpha() for character in last):
        return False
    return not (last in _BEFORE_NUMBERS and following[:1].isdigit())
