"""WikiText-2 and WikiText-103 at word level, with a vocabulary sorted by frequency."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import decode as decode_bytes
from mgk.data.sources import find, lines, read_members
from mgk.data.store import Corpus, Writer, checksum

END = "<eos>"
SPLITS = ("train", "valid", "test")
VOCABULARY_FILE = "vocabulary.txt"


def prepare(name: str, source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Split lines at white space and end each, the blank ones too, with ``<eos>``; number words by their frequency.

    ``<eos>`` is word 0, then come the words of the training text from the most frequent on, ties in the order of their
    first appearance. A word that the training text does not have is ``<unk>``, which it has.
    """
    chosen = check_options(name, options, {})
    files, contents = _read(name, source)
    words = {split: _words(content, where) for split, (content, where) in contents.items()}
    counts = Counter(words["train"])
    counts.pop(END, None)
    vocabulary = [END, *(word for word, _ in counts.most_common())]
    number = {word: place for place, word in enumerate(vocabulary)}
    unknown = number.get("<unk>")
    with Writer(folder, name, {path.name: checksum(path) for path in files}, chosen) as writer:
        for split in progress(SPLITS, "words"):
            missing = 0
            ids = np.empty(len(words[split]), dtype=np.int32)
            for place, word in enumerate(words[split]):
                found = number.get(word, unknown)
                if found is None:
                    raise DataError(f"{contents[split][1]} must hold words of the training text, got {word!r}")
                missing += word not in number
                ids[place] = found
            writer.sequences(split, "text", ids, [len(ids)])
            writer.fact(f"{split}: words that the training text does not have", missing)
        writer.fact("vocabulary", len(vocabulary))
        writer.file(VOCABULARY_FILE, "\n".join(vocabulary))


def _read(name: str, source: Path) -> tuple[list[Path], dict[str, tuple[bytes, str]]]:
    """The three splits, from the archive or from plain ``wiki.train.tokens`` and so on in a folder of that name."""
    plain = source / ("wikitext-2" if name == "wikitext2" else "wikitext-103")
    folder = plain if plain.is_dir() else source
    if (folder / "wiki.train.tokens").is_file():
        paths = [find(folder, f"wiki.{split}.tokens") for split in SPLITS]
        return paths, {split: (path.read_bytes(), str(path)) for split, path in zip(SPLITS, paths, strict=True)}
    archive = find(source, "wikitext.tar.xz")
    members = read_members(archive, *(f"{name}.wiki.{split}.tokens" for split in SPLITS))
    return [archive], {
        split: (members[f"{name}.wiki.{split}.tokens"], f"{archive}, {name}.wiki.{split}.tokens") for split in SPLITS
    }


def _words(content: bytes, where: str) -> list[str]:
    words: list[str] = []
    for line in lines(content, where):
        words += line.split()
        words.append(END)
    if len(words) == words.count(END):
        raise DataError(f"{where} must hold words, got {len(words):,} blank lines")
    return words


@functools.lru_cache(maxsize=4)
def _vocabulary(path: Path, checksum: str) -> list[str]:
    return decode_bytes(path.read_bytes(), str(path)).split("\n")


def vocabulary(corpus: Corpus) -> list[str]:
    """The words, from the most frequent on."""
    # The checksum is there for the cache: a folder may have been prepared again.
    return _vocabulary(corpus.folder / VOCABULARY_FILE, corpus.manifest["arrays"][VOCABULARY_FILE])


def decode(corpus: Corpus, field: str, tokens: NDArray[Any]) -> str:
    """Words with spaces between them, ``<eos>`` as a new line."""
    words = vocabulary(corpus)
    return " ".join(words[token] for token in tokens.tolist()).replace(f" {END}", "\n").replace(END, "\n")


CORPORA = tuple(
    CorpusKind(
        name=name, title=title, task="language", prepare=functools.partial(prepare, name), decode=decode, origin=origin
    )
    for name, title, origin in (
        ("wikitext2", "WikiText-2, words", "wikitext.tar.xz, or wikitext-2-v1: wiki.{train,valid,test}.tokens"),
        ("wikitext103", "WikiText-103, words", "wikitext-103-v1: wiki.{train,valid,test}.tokens"),
    )
)
