"""Wikipedia's markup as it was in 2006: the text that a reader sees of an article, without tables and boxes.

::

    '''Anarchism''' is [[etymology|derived from]] the [[Greek]]&nbsp;word...{{fact}}
    Anarchism is derived from the Greek word...
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import NamedTuple

FORMULA = "\ufffc"
"""Stands for a formula, as the object that Unicode keeps a place for."""


class Heading(NamedTuple):
    """The title of a section."""

    level: int
    """2 for those right below the article."""
    text: str


class Paragraph(NamedTuple):
    """Running text, or an item of a list."""

    text: str
    is_item: bool = False
    is_link: bool = False
    """Whether there is nothing in it but links."""


Block = Heading | Paragraph

_LINK_START, _PREFORMATTED, _LINK_END = "\ufff9", "\ufffa", "\ufffb"
# These mean something here, and no article's.
_RESERVED = re.compile(f"[\r{FORMULA}{_LINK_START}-{_LINK_END}]")
# A line that starts with a space is set as it stands: programs, diagrams, tables of figures.
_SPACE_IN_FRONT = re.compile(r"^ +(?=\S)", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_UNSEEN = (
    "ref",
    "references",
    "gallery",
    "timeline",
    "pre",
    "source",
    "hiero",
    "imagemap",
    "script",
    "style",
    "caption",
)
_UNSEEN_ELEMENT = re.compile(rf"<({'|'.join(_UNSEEN)})\b(?:[^<>]*/>|[^<>]*>.*?</\1\s*>)", re.DOTALL | re.IGNORECASE)
_FORMULA = re.compile(r"<math\b[^<>]*>.*?</math\s*>", re.DOTALL | re.IGNORECASE)
_BLOCK_TAG = re.compile(
    r"</?(?:br|p|div|blockquote|center|ul|ol|li|dl|dd|dt|hr|h[1-6]|tr|td|th|table)\b[^<>]*>", re.IGNORECASE
)
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,500}>")
_EXTERNAL = re.compile(
    r"(?<!\[)\[(?:(?:https?|ftp|irc|news)://|mailto:)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]", re.IGNORECASE
)
# Around the text of a link, until it is known whether a line has any other.
_LINK = re.compile(f"{_LINK_START}[^{_LINK_END}]*{_LINK_END}")
_EXTERNAL_TEXT = rf"{_LINK_START}\1{_LINK_END}"
_ENDS = re.compile(f"[{_LINK_START}-{_LINK_END}]")
_ADDRESS = re.compile(r"\b(?:https?|ftp|irc|news)://[^\s<>\[\]|\"]*", re.IGNORECASE)
_EMPHASIS = re.compile(r"'{2,}")
_SWITCH = re.compile(r"__[A-Z]+__|~{3,5}")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff]")
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:]\s*)*\)|\[\s*\]")
_AFTER_OPENING = re.compile(r"(?<=\()\s*[,;:]\s*")

_HEADING = re.compile(r"(={1,6})(.+?)={1,6}\s*")
_ITEM = re.compile(r"[*#:;]+")
_ROW = re.compile(r"[|!]|\{\||-{4}")
_NOTICE = re.compile(
    r"(?:see also|see|main articles?|main|related articles?|further information|further reading"
    r"|external links?|sources?)\s*:"
    r"|(?:main|related) articles?\b.{0,80}\Z|.{0,80}\bredirects here\b"
    r"|(?:see|for) .{0,120}\(disambiguation\)|see .{0,120}\bfor (?:an?|the|other|more|further|details|alternate)\b"
    r"|for (?:other|the|an?|alternate|more|further|details|information|uses) .{0,150}\bsee\b"
    r"|(?:this|the following) (?:article|page|entry) (?:is about|deals with|discusses)\b",
    re.IGNORECASE,
)
"""How lines begin that only say where to read on."""

# Opening and closing marks of what can stand inside itself. Those of tables stand at the start of a line.
_MARK = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|^[ \t:*\ufffa]*+\{\||^[ \t:\ufffa]*+\|\}(?!\})|<table\b[^<>]*>|</table\s*>",
    re.MULTILINE | re.IGNORECASE,
)

_SHOWN_TEMPLATES = frozenset(
    {
        "ipa", "ipa2", "polytonic", "unicode", "arabdin", "hayeren", "lang", "quotation", "cquote", "nowrap", "music",
        "semxlit", "ar", "hebrew", "script",
    }
)  # fmt: skip
"""Those that only say how their text looks, or which language it is in."""

_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?|simple|tokipona")
_HIDDEN_SPACES = frozenset({"image", "category", "media", "file"})


def blocks(source: str) -> list[Block]:
    """Headings and paragraphs of an article, in their order, as plain text in lines without line breaks."""
    text = _RESERVED.sub("", source)
    text = _COMMENT.sub("", text)
    text = _FORMULA.sub(FORMULA, text)
    text = _UNSEEN_ELEMENT.sub("", text)
    text = _SPACE_IN_FRONT.sub(_PREFORMATTED, text)
    # Twice: one may stand in the text of a picture, and a link within one's own text.
    text = _EXTERNAL.sub(_EXTERNAL_TEXT, text)
    text = _nested(text)
    text = _EXTERNAL.sub(_EXTERNAL_TEXT, text)
    text = _ADDRESS.sub("", text)
    text = _BLOCK_TAG.sub("\n\n", text)
    text = _TAG.sub("", text)
    text = _SWITCH.sub("", _EMPHASIS.sub("", text))
    return _lines(text)


def _nested(text: str) -> str:
    """Without templates and tables, and with the text of links, however deep they stand in each other."""
    # The text before the first mark, and below each open mark what came since.
    open_marks: list[str] = []
    parts: list[list[str]] = [[]]
    end = 0
    for found in _MARK.finditer(text):
        parts[-1].append(text[end : found.start()])
        end = found.end()
        mark = found[0].strip(f" \t:*{_PREFORMATTED}").lower()
        kind = _KINDS.get(mark, "table")
        if mark in ("{{", "[[", "{|") or mark.startswith("<table"):
            open_marks.append(kind)
            parts.append([])
        elif kind in open_marks:
            while True:
                last = open_marks.pop()
                content = "".join(parts.pop())
                if last == kind:
                    parts[-1].append(_SHOWN[kind](content))
                    break
                # A mark that nobody closed stands for nothing.
                parts[-1].append(content)
    parts[-1].append(text[end:])
    return "".join(piece for part in parts for piece in part)


_KINDS = {"{{": "template", "}}": "template", "[[": "link", "]]": "link"}


def _template(content: str) -> str:
    name, *values = content.split("|")
    name = name.strip().lower()
    if name == "okina":
        return "\u02bb"
    if not values or not (name in _SHOWN_TEMPLATES or name.startswith("lang-")):
        return ""
    return values[1] if name == "lang" and len(values) > 1 else values[0]


def _link(content: str) -> str:
    """``target|text`` is its text; what shows no text, or in a frame of its own, is nothing."""
    target, bar, text = content.partition("|")
    target = target.strip()
    if "\n\n" in content:
        # No link goes on for paragraphs: its end was forgotten.
        return content
    if "://" in target:
        return f"[{content}]"
    visible = target.removeprefix(":").strip()
    space = target.partition(":")[0].strip().lower() if ":" in target else ""
    if space in _HIDDEN_SPACES or (_LANGUAGE.fullmatch(space) and target.startswith(space)):
        return ""
    if not (bar and text.strip()):
        text = (visible.partition("#")[0] or visible.removeprefix("#")).replace("_", " ")
    return f"{_LINK_START}{text}{_LINK_END}"


def _table(content: str) -> str:
    return "\n\n"


_SHOWN: dict[str, Callable[[str], str]] = {"template": _template, "link": _link, "table": _table}


def _lines(text: str) -> list[Block]:
    """Lines joined to paragraphs, each list item one of its own, their markers and left-over rows of tables gone."""
    found: list[Block] = []
    running: list[str] = []

    def finish() -> None:
        if running:
            _add(found, " ".join(running), is_item=False)
            running.clear()

    for line in text.split("\n"):
        stripped = line.strip()
        heading = _HEADING.fullmatch(stripped)
        if stripped and not stripped.startswith(_PREFORMATTED) and heading is None and _ITEM.match(stripped) is None:
            if _ROW.match(stripped) is None:
                running.append(stripped)
            continue
        finish()
        if heading is not None:
            title = _plain(heading[2].strip("= "))
            if title:
                found.append(Heading(len(heading[1]), title))
        elif stripped and not stripped.startswith(_PREFORMATTED):
            _add(found, _ITEM.sub("", stripped, count=1), is_item=True)
    finish()
    return found


def _add(found: list[Block], text: str, *, is_item: bool) -> None:
    plain = _plain(text)
    if _has_words(plain) and _NOTICE.match(plain) is None:
        found.append(Paragraph(plain, is_item, is_link=_LINK_START in text and not _has_words(_LINK.sub("", text))))


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _plain(text: str) -> str:
    """Entities as their characters, those that were escaped twice too, and single spaces."""
    text = _ENDS.sub("", text)
    text = html.unescape(html.unescape(text)) if "&" in text else text
    text = _INVISIBLE.sub("", text)
    if "(" in text or "[" in text:
        # What stood in them was a template.
        text = _EMPTY_BRACKETS.sub("", _AFTER_OPENING.sub("", text))
    return " ".join(text.split())
