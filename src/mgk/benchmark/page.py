"""The parts of a page of the docs that are generated from results.

Such a part is between two comments, the first of which names its file::

    <!-- results/bench/attention-h200.json, written by mgk bench table -->
    <!-- end -->

A part that begins with ``<!-- headline of results/...`` holds only the ratios. Parts that ``benchmarks/`` writes have
comments of their own (:func:`write_between`).
"""

from __future__ import annotations

import re
from pathlib import Path

PART = re.compile(
    r"(?P<begin><!-- (?P<headline>headline of )?(?P<file>\S+\.json), written by mgk bench table -->\n)"
    r"(?P<text>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)


def parts(page: Path, *, headline: bool = False) -> dict[str, str]:
    """Return the content of each part with tables, or of each headline, by the file that it names."""
    return {match["file"]: match["text"].strip() for match in _matches(page) if bool(match["headline"]) == headline}


def rewrite(page: Path, file: Path, text: str, headline: str | None = None) -> None:
    """Replace the part of a page for a file of this name by ``text``, and its headline by ``headline``.

    The folder of the file does not matter. The page must have at least one of the two parts.
    """
    named = [Path(match["file"]).name for match in _matches(page)]
    if file.name not in named:
        raise ValueError(f"{page} must have a part for {file.name}, got parts for {', '.join(named) or 'nothing'}")

    def replaced(match: re.Match[str]) -> str:
        filling = headline if match["headline"] else text
        is_meant = Path(match["file"]).name == file.name and filling is not None
        return f"{match['begin']}\n{filling}\n\n{match['end']}" if is_meant else match[0]

    page.write_text(PART.sub(replaced, page.read_text(encoding="utf-8")), encoding="utf-8")


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands on a page between two comments, each of which must be there."""
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, second, after = rest.partition(end)
    if not (first and second):
        raise ValueError(f"{page} must have a part from {begin} to {end}, got none")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _matches(page: Path) -> list[re.Match[str]]:
    return list(PART.finditer(page.read_text(encoding="utf-8")))
