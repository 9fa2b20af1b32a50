"""All corpora by name, and where they are kept."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from mgk.data import aan, enwik8, enwik8_words, imdb, listops, peerread, subwords, translation, wikitext
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.store import Corpus, load

KINDS: dict[str, CorpusKind] = {
    kind.name: kind
    for kind in (
        listops.CORPUS,
        imdb.CORPUS,
        aan.CORPUS,
        peerread.CORPUS,
        enwik8.CORPUS,
        enwik8_words.CORPUS,
        *wikitext.CORPORA,
        *subwords.CORPORA,
        *translation.CORPORA,
    )
}


def find_kind(name: str) -> CorpusKind:
    """The corpus of this name."""
    if name not in KINDS:
        nearest = difflib.get_close_matches(name, KINDS, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise DataError(f"the corpus must be one of {', '.join(KINDS)}, got {name!r}{hint}")
    return KINDS[name]


def default_folder(name: str) -> Path:
    """Where a prepared corpus is kept unless told: ``$MGK_CACHE/NAME``, or ``~/.cache/mgk/NAME``."""
    root = os.environ.get("MGK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "mgk") / name


def prepare(
    name: str,
    source: str | Path | None = None,
    folder: str | Path | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Corpus:
    """Prepare a corpus and map it. What is already there, from the same source with the same options, is kept.

    Args:
        name: one of :data:`KINDS`.
        source: folder of the raw files; ``None`` is ``$MGK_DATA``. A generated corpus needs none.
        folder: where it goes; ``None`` is :func:`default_folder`.
        progress: shows how far it is.
        options: of this corpus, see ``mgk data list``.
    """
    kind = find_kind(name)
    check_options(name, options, kind.options)
    target = default_folder(name) if folder is None else Path(folder)
    if source is None and not kind.is_generated:
        source = os.environ.get("MGK_DATA")
        if source is None:
            raise DataError(
                f"{name} needs a folder of raw files, named by an option (--data, of mgk data prepare --from) or by "
                f"MGK_DATA, got neither: {kind.origin}"
            )
    kind.prepare(None if source is None else Path(source), target, progress, **options)
    return load(target)


def open_corpus(name: str, folder: str | Path | None = None) -> Corpus:
    """Map a corpus that has been prepared."""
    find_kind(name)
    corpus = load(default_folder(name) if folder is None else folder)
    if corpus.name != name:
        raise DataError(f"{corpus.folder} must hold {name}, got {corpus.name}")
    return corpus
