"""Corpora: raw source, checked records, token arrays on disk, batches."""

from mgk.data.batches import Samples, Translations, Windows, iterate
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind
from mgk.data.registry import KINDS, default_folder, open_corpus, prepare
from mgk.data.store import Corpus, Sequences, Split, load, verify

__all__ = [
    "KINDS",
    "Corpus",
    "CorpusKind",
    "DataError",
    "Samples",
    "Sequences",
    "Split",
    "Translations",
    "Windows",
    "default_folder",
    "iterate",
    "load",
    "open_corpus",
    "prepare",
    "verify",
]
