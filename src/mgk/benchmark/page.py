"""The parts of a page of the docs that are written from results.

Such a part stands between two comments, the first of which names the file it comes from::

    <!-- results/bench/attention-h200.json, written by mgk bench table -->
    <!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

PART = re.compile(
    r"(?P<begin><!-- (?P<file>\S+\.json), written by mgk bench table -->\n)(?P<text>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)


def parts(page: Path) -> dict[str, str]:
    """What stands in each part, by the file that it names."""
    return {match["file"]: match["text"].strip() for match in PART.finditer(page.read_text(encoding="utf-8"))}


def rewrite(page: Path, file: Path, text: str) -> None:
    """Put ``text`` into the part of a page that names a file of this name, wherever it lies."""
    known = parts(page)
    if file.name not in (Path(name).name for name in known):
        raise ValueError(f"{page} must have a part for {file.name}, got parts for {', '.join(known) or 'nothing'}")

    def replaced(match: re.Match[str]) -> str:
        is_meant = Path(match["file"]).name == file.name
        return f"{match['begin']}\n{text}\n\n{match['end']}" if is_meant else match[0]

    page.write_text(PART.sub(replaced, page.read_text(encoding="utf-8")), encoding="utf-8")
