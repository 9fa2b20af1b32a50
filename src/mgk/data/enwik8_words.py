"""enwik8-words: the articles of enwik8 as words, cleaned and tokenised as WikiText is; our stand-in for WikiText-103.

An article is a page without a namespace that is no redirect and is, for the greater part, running text. Its boxes,
tables, references and lists of links are left out. Which split it is in depends on its title alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import multiprocessing
import re
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mgk.data import enwik8
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, no_progress
from mgk.data.sources import decode as decode_bytes
from mgk.data.store import Writer, checksum
from mgk.data.wiki_markup import Block, Heading, Paragraph, blocks
from mgk.data.wikitext import END, SPLITS, VOCABULARY_FILE
from mgk.data.wikitext import decode as decode_words
from mgk.data.word_tokens import tokenise

NAME = "enwik8-words"
UNKNOWN = "<unk>"
MINIMUM_COUNT = 3
"""A word that the training articles have less often is ``<unk>``, as in WikiText."""
MINIMUM_WORDS = 100
"""Of running text: less is a stub, or leads to other articles."""
SENTENCE = 10
"""A paragraph with fewer words than these is a label."""
SHARES = 50
"""Articles are dealt to so many shares, one of them the validation split and one the test split."""
CHUNK = 64
"""Pages that a process cleans at a time."""
OPTIONS: dict[str, Any] = {"size": enwik8.SIZE, "processes": None}

_PAGE = re.compile(rb"<page>(.*?)</page>", re.DOTALL)
_TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
_TEXT = re.compile(rb"<text[^>]*>(.*)</text>", re.DOTALL)
_NAMESPACE = re.compile(rb'<namespace key="-?\d+">([^<]+)</namespace>')
_REDIRECT = re.compile(r"\s*#\s*redirect", re.IGNORECASE)

# A section with such a title and nothing else in it lists what lies elsewhere.
_POINTERS = frozenset(
    {
        "see", "also", "external", "link", "links", "reference", "references", "reading", "bibliography", "note",
        "notes", "source", "sources", "footnote", "footnotes", "citation", "citations", "literature", "website",
        "websites", "related", "directories",
    }
)  # fmt: skip
_FILLERS = frozenset(
    {
        "and", "&", "further", "other", "web", "internet", "online", "on-line", "site", "sites", "official", "general",
        "selected", "suggested", "articles", "article", "topics", "content", "contents", "pages", "page", "works",
        "cited", "books", "primary", "secondary", "additional", "recommended", "the", "of", "in", "to",
    }
)  # fmt: skip

_SENTENCE_ENDS = frozenset(".!?")


class Page(NamedTuple):
    """An article as it was written."""

    title: str
    source: str


class Article(NamedTuple):
    """An article as words."""

    title: str
    text: str
    """Words with spaces between them, in lines."""


class Dump(NamedTuple):
    """What a dump holds."""

    pages: list[Page]
    """Without a namespace, and no redirects."""
    redirects: int
    others: int
    """Pages of other namespaces."""


def prepare(
    source: Path,
    folder: Path,
    progress: Progress = no_progress,
    *,
    size: int = enwik8.SIZE,
    processes: int | None = None,
) -> None:
    """Clean the articles, deal them to splits, and number the words by their frequency in the training articles.

    The sequences ``text`` are articles; all together they are the stream that a language model reads. ``<eos>``, which
    ends every line, is word 0. A word that the training articles have fewer than three times is ``<unk>``.

    Args:
        source: folder of the raw file.
        folder: where the corpus goes.
        progress: shows how far it is.
        size: a piece from the front, for quick runs and tests.
        processes: how many clean articles, by default this one alone; the result is the same with any number. They are
            spawned, so a script that asks for several needs the usual ``if __name__ == "__main__"``.
    """
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise ValueError(f"processes must be an integer of at least 1, got {processes!r}")
    path, content = enwik8.read(source, size)
    dump = read_dump(content, str(path))
    articles: dict[str, list[str]] = {split: [] for split in SPLITS}
    with contextlib.closing(_cleaned(dump.pages, processes or 1)) as cleaned:
        for article in progress(cleaned, "cleaning articles", total=len(dump.pages)):
            if article is not None:
                articles[split_of(article.title)].append(article.text)
    for split, texts in articles.items():
        if not texts:
            raise DataError(f"{path} must hold articles of every split, got none of {split} in {size:,} bytes")
    vocabulary = _vocabulary(articles["train"])
    numbers = {word: place for place, word in enumerate(vocabulary)}
    unknown = numbers[UNKNOWN]
    with Writer(folder, NAME, {path.name: checksum(path)}, {"size": size}) as writer:
        for split in progress(SPLITS, "words"):
            ids, lengths = _number(articles[split], numbers, unknown)
            writer.sequences(split, "text", ids, lengths)
            words = ids[ids != numbers[END]]
            writer.fact(f"{split}: words, without the ends of lines", len(words))
            writer.fact(f"{split}: share of <unk> among them", round(float(np.mean(words == unknown)), 5))
        writer.fact("vocabulary", len(vocabulary))
        writer.fact("pages that are redirects", dump.redirects)
        writer.fact("pages of other namespaces", dump.others)
        writer.fact("pages left out: lists, stubs, pointers", len(dump.pages) - sum(map(len, articles.values())))
        writer.file(VOCABULARY_FILE, "\n".join(vocabulary))


def read_dump(content: bytes, where: str) -> Dump:
    """The articles of a dump, in their order; one that is cut off at the end is left out."""
    prefixes = {name.decode() for name in _NAMESPACE.findall(content, 0, 10_000)}
    pages: list[Page] = []
    redirects = others = 0
    for found in _PAGE.finditer(content):
        title, text = _TITLE.search(found[1]), _TEXT.search(found[1])
        if title is None:
            raise DataError(f"{where} must have a title for every page, got none at offset {found.start():,}")
        name = html.unescape(decode_bytes(title[1], where))
        if name.partition(":")[0] in prefixes and ":" in name:
            others += 1
        elif text is not None:
            source = html.unescape(decode_bytes(text[1], f"{where}, page {name!r}"))
            if _REDIRECT.match(source):
                redirects += 1
            else:
                pages.append(Page(name, source))
    return Dump(pages, redirects, others)


def split_of(title: str) -> str:
    """96 % of the articles are for training, 2 % for validation, 2 % for the test: by the SHA-256 of the title."""
    share = int.from_bytes(hashlib.sha256(title.encode()).digest()[:8], "big") % SHARES
    return {0: "valid", 1: "test"}.get(share, "train")


def clean(page: Page) -> Article | None:
    """The article in words, or nothing if too little of it is running text."""
    kept = _without_pointers(blocks(page.source))
    words = [tokenise(block.text) for block in kept]
    whole = sum(len(found) for block, found in zip(kept, words, strict=True) if isinstance(block, Paragraph))
    running = sum(len(found) for block, found in zip(kept, words, strict=True) if _is_running(block, found))
    if running < max(MINIMUM_WORDS, whole / 2):
        return None
    lines = ["", _heading(1, tokenise(page.title)), ""]
    for block, found in zip(kept, words, strict=True):
        if isinstance(block, Heading):
            lines += ["", _heading(block.level, found), ""]
        else:
            lines.append(" ".join(found))
    return Article(page.title, "\n".join([*lines, ""]))


def _heading(level: int, words: Sequence[str]) -> str:
    """``= Title =``, ``= = Section = =``"""
    return " ".join([*"=" * level, *words, *"=" * level])


def _is_running(block: Block, words: Sequence[str]) -> bool:
    """Whether it is a sentence at least; bare facts in lines of their own are not."""
    return (
        isinstance(block, Paragraph)
        and not block.is_item
        and len(words) >= SENTENCE
        and not _SENTENCE_ENDS.isdisjoint(words[-2:])
    )


def _without_pointers(found: Sequence[Block]) -> list[Block]:
    """Without sections that list what lies elsewhere, without lists of nothing but links at the end of a section, and
    then without headings that have nothing below them."""
    kept: list[Block] = []
    left_out: int | None = None
    for block in found:
        # A section ends where one of its own level, or a higher one, begins.
        if isinstance(block, Heading) and (left_out is None or block.level <= left_out):
            left_out = block.level if _is_pointer(block.text) else None
        if left_out is None:
            kept.append(block)
    filled: list[Block] = []
    # From the end: whether the section has text so far, and the level of the heading that was kept last.
    has_text, below = False, 0
    for block in reversed(kept):
        if isinstance(block, Heading):
            # One without text may have a section below it.
            if not has_text and block.level >= below:
                continue
            has_text, below = False, block.level
        elif block.is_link and not has_text:
            continue
        else:
            has_text = True
        filled.append(block)
    return filled[::-1]


def _is_pointer(title: str) -> bool:
    words = re.findall(r"[\w&-]+", title.lower())
    return not _POINTERS.isdisjoint(words) and set(words) <= _POINTERS | _FILLERS


def _cleaned(pages: Sequence[Page], processes: int) -> Generator[Article | None, None, None]:
    """Every page in its order, cleaned ahead by other processes if there are to be several."""
    if processes == 1:
        yield from map(clean, pages)
        return
    # Spawned, for a fork would copy the locks of torch's threads in whatever state they are.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        ahead: deque[Future[list[Article | None]]] = deque()
        for start in range(0, len(pages), CHUNK):
            ahead.append(pool.submit(_clean_all, pages[start : start + CHUNK]))
            if len(ahead) > 2 * processes:
                yield from ahead.popleft().result()
        for future in ahead:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _clean_all(pages: Sequence[Page]) -> list[Article | None]:
    return [clean(page) for page in pages]


def _words(text: str) -> Iterator[str]:
    for line in text.split("\n")[:-1]:
        yield from line.split()
        yield END


def _vocabulary(texts: Sequence[str]) -> list[str]:
    """``<eos>``, then the words from the most frequent on, ties in the order of their first appearance."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    frequent = Counter({word: count for word, count in counts.items() if count >= MINIMUM_COUNT})
    frequent[UNKNOWN] = counts.total() - frequent.total()
    return [END, *(word for word, _ in frequent.most_common())]


def _number(texts: Sequence[str], numbers: dict[str, int], unknown: int) -> tuple[Any, list[int]]:
    """The words of all articles in a row, and how many each has."""
    parts = [np.array([numbers.get(word, unknown) for word in _words(text)], dtype=np.int32) for text in texts]
    return np.concatenate(parts), [len(part) for part in parts]


CORPUS = CorpusKind(
    name=NAME,
    title="The articles of enwik8 as words, as WikiText has them: our stand-in for WikiText-103",
    task="language",
    prepare=prepare,
    decode=decode_words,
    options=OPTIONS,
    origin=enwik8.CORPUS.origin,
)
