"""Words as WikiText has them."""

import re
import tarfile

import pytest

from mgk.data.wiki_markup import FORMULA
from mgk.data.word_tokens import tokenise


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,234.5 and 0.7, then 12,", "1 @,@ 234 @.@ 5 and 0 @.@ 7 , then 12 ,"),
        ("a well-known 45-year-old U.S.-led band", "a well @-@ known 45 @-@ year @-@ old U.S. @-@ led band"),
        ("Rosemary's, the 1990's; don't", "Rosemary 's , the 1990 's ; don 't"),
        ("the Cubs' 'lead' of O'Neal", "the Cubs ' ' lead ' of O 'Neal"),
        ("It ends. Then it does not.", "It ends . Then it does not ."),
        ('He said "so." And left.', 'He said " so . " And left .'),
        ("Mr. Smith Jr. of the U.S. and St. Louis", "Mr. Smith Jr. of the U.S. and St. Louis"),
        ("by J. Smith, etc., e.g. this vs. that", "by J. Smith , etc . , e.g. this vs. that"),
        ("No. 5, pp. 3-4. No. Never", "No. 5 , pp. 3 @-@ 4 . No . Never"),
        ("wait... what.... Yes", "wait ... what .... Yes"),
        ("one--two -- three - four", "one \N{EN DASH} two \N{EN DASH} three \N{EN DASH} four"),
        (
            "“quoted” \N{LEFT SINGLE QUOTATION MARK}so\N{RIGHT SINGLE QUOTATION MARK} ``too''",
            '" quoted " \' so \' " too "',
        ),
        ("R&B, 5% of $179 (US) at 06:03 in A/B", "R & B , 5 % of $ 179 ( US ) at 06 : 03 in A / B"),
        ("-5 and C* #1 [x] {y} <z> a_b", "- 5 and C * # 1 [ x ] { y } < z > a _ b"),
        ("Musicnotes.com, 3rd 2½ km²", "Musicnotes.com , 3rd 2½ km²"),
        ("cafe\u0301 Größe Ελλάς ब्राह्मी", "café Größe Ελλάς ब्राह्मी"),
        (f"where{FORMULA}is", "where <formula> is"),
        ("", ""),
    ],
)
def test_rules(text, words):
    assert " ".join(tokenise(text)) == words


def joined(line):
    """Words of WikiText back to text, as far as that is certain."""
    line = re.sub(r" @([-,.])@ ", r"\1", line)
    line = re.sub(r" ([,;:?!)\]%])", r"\1", line)
    return re.sub(r"([(\[$£]) ", r"\1", line).replace(" 's ", "'s ").replace(" 't ", "'t ")


def test_real_wikitext_comes_back(real):
    """Its own words, put together and taken apart again, are the same, but for what the two take for abbreviations."""
    with tarfile.open(real / "wikitext.tar.xz") as archive:
        content = archive.extractfile("wikitext103.wiki.valid.tokens").read().decode()
    lines = [line.replace("<unk>", "unk").strip() for line in content.split("\n")]
    lines = [line for line in lines if line and not line.startswith("=") and "' " not in line]
    same = [" ".join(tokenise(joined(line).replace(" . ", ". ").removesuffix(" .") + ".")) == line for line in lines]
    assert len(same) > 1_000
    assert sum(same) / len(same) > 0.7
