"""Prepared corpora on disk: arrays that are mapped, not read, and a manifest that says where they came from.

A corpus is one folder. Its splits hold fields; a field is either plain numbers (labels) or sequences of tokens, kept as
one flat array and the offsets at which each sequence starts::

    manifest.json
    train.text.tokens.npy   train.text.offsets.npy   train.labels.npy   valid.text.tokens.npy   ...

A folder appears in one rename, when everything in it is written: what can be seen is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mgk
from mgk.data.errors import DataError

try:
    import fcntl
except ImportError:  # pragma: no cover
    # Windows has no such locks: there two preparations at once are on their own.
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Counts up when the layout on disk changes: an older folder is prepared anew."""

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Sequences:
    """Many sequences of tokens in one flat array."""

    tokens: NDArray[Any]
    """``[total]``"""
    offsets: NDArray[np.int64]
    """``[count + 1]``: sequence i is ``tokens[offsets[i]:offsets[i + 1]]``"""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must lie in [0, {len(self)}), got {index}")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Split:
    """One part of a corpus: its sequences and its plain numbers, by name."""

    sequences: Mapping[str, Sequences]
    numbers: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    folder: Path
    manifest: Mapping[str, Any]
    splits: Mapping[str, Split]

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def fingerprint(self) -> str:
        """Changes whenever any token, label or option does."""
        content = {key: self.manifest[key] for key in ("name", "format", "options", "arrays")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Writer:
    """Writes a corpus into a temporary folder beside its place, and moves it there at the end.

    Used as a context: an exception, a full disk included, leaves nothing behind. Where two processes prepare the same
    corpus, the first to finish wins and the other throws its copy away.
    """

    def __init__(self, folder: Path, name: str, source: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = {
            "name": name, "format": FORMAT, "mgk": mgk.__version__, "source": dict(source),
            # As they will read when loaded.
            "options": json.loads(json.dumps(dict(options))),
            "splits": {}, "arrays": {}, "facts": {},
        }  # fmt: skip

    def __enter__(self) -> Writer:
        # What stands there may be replaced only if we put it there.
        if self.folder.exists() and not (_is_empty(self.folder) or _is_ours(self.folder, self.manifest["name"])):
            raise DataError(
                f"{self.folder} must be a prepared {self.manifest['name']} or not there, got something else"
            )
        parent = self.folder.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=parent))
        except OSError as error:
            raise DataError(f"{parent} must be a folder that can be written to, got {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as problem:
            self._explain(problem)
            raise
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self._explain(error)

    def _explain(self, error: BaseException | None) -> None:
        """A full disk deserves a sentence; every other error speaks for itself."""
        if not isinstance(error, OSError):
            return
        # numpy reports a write that was cut short without saying why.
        was_cut = error.errno is None and "requested and" in str(error)
        if was_cut or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{self.folder.parent} must have room for the prepared corpus, got a full disk ({error})"
            ) from error

    def sequences(self, split: str, field: str, tokens: NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> None:
        """Add sequences, given as one flat array and the length of each."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
        if offsets[-1] != len(tokens):
            raise ValueError(f"lengths must add up to {len(tokens)}, got {offsets[-1]}")
        self._save(f"{split}.{field}.tokens.npy", tokens)
        self._save(f"{split}.{field}.offsets.npy", offsets)
        counts = {"count": len(lengths), "tokens": len(tokens), "longest": int(np.max(np.diff(offsets), initial=0))}
        self.manifest["splits"].setdefault(split, {})[field] = counts

    def numbers(self, split: str, field: str, values: NDArray[Any]) -> None:
        """Add plain numbers, one for each sample."""
        self._save(f"{split}.{field}.npy", values)
        self.manifest["splits"].setdefault(split, {})[field] = {"count": len(values)}

    def file(self, name: str, content: str) -> None:
        """Add a text file, such as a vocabulary."""
        (self.temporary / name).write_text(content, encoding="utf-8")
        self.manifest["arrays"][name] = hashlib.sha256(content.encode()).hexdigest()

    def fact(self, name: str, value: Any) -> None:
        """Put something worth knowing into the manifest."""
        self.manifest["facts"][name] = value

    def _save(self, name: str, array: NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        np.save(self.temporary / name, array, allow_pickle=False)
        self.manifest["arrays"][name] = _array_checksum(array)

    def _finish(self) -> None:
        (self.temporary / MANIFEST).write_text(json.dumps(self.manifest, indent=1, sort_keys=True), encoding="utf-8")
        for path in self.temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.temporary.chmod(0o755)
        with _one_at_a_time(self.folder.parent):
            if _is_same(self.folder, self.manifest):
                return
            aside = self.temporary.with_name(f"{self.temporary.name}.old")
            if self.folder.exists():
                # Out of the way first, so that at no time half of it is seen.
                self.folder.rename(aside)
            self.temporary.rename(self.folder)
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(parent: Path) -> Iterator[None]:
    """Other processes that would move a folder there wait, and what was moved is on disk at the end."""
    if fcntl is None:
        yield
        return
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, or nothing where there is none that could be ours."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"name", "format", "arrays", "splits"} <= found.keys() else {}


def _is_ours(folder: Path, name: str) -> bool:
    """Whether we put everything there that is there."""
    found = _read_manifest(folder)
    return bool(found) and found["name"] == name and {p.name for p in folder.iterdir()} <= {MANIFEST, *found["arrays"]}


def _is_same(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the folder holds exactly this already, undamaged."""
    found = _read_manifest(folder)
    if any(found.get(key) != manifest[key] for key in ("name", "format", "source", "options", "arrays")):
        return False
    try:
        verify(load(folder))
    except DataError:
        return False
    return True


def load(folder: str | Path) -> Corpus:
    """Map a prepared corpus. Nothing is read until it is used."""
    folder = Path(folder)
    while True:
        before = _identity(folder)
        try:
            corpus = _load(folder)
        except DataError:
            if _identity(folder) == before:
                raise
        else:
            if _identity(folder) == before:
                return corpus
        # Another process has put a corpus in its place, and what was read may be of both.


def _identity(folder: Path) -> tuple[int, int] | None:
    """Changes when another folder is put in its place."""
    try:
        found = folder.stat()
    except OSError:
        return None
    # The number alone may be given to the next folder. Renaming changes the time.
    return found.st_ino, found.st_ctime_ns


def _load(folder: Path) -> Corpus:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder} must hold a prepared corpus, got no {MANIFEST}: run mgk data prepare") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / MANIFEST} must be JSON, got {error}") from error
    if not isinstance(manifest, dict):
        raise DataError(f"{folder / MANIFEST} must be an object, got {type(manifest).__name__}: prepare it again")
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder} must have format {FORMAT}, got {manifest.get('format')}: prepare it again")
    missing = {"name", "options", "splits", "arrays", "facts"} - manifest.keys()
    if missing:
        raise DataError(f"{folder / MANIFEST} must have {', '.join(sorted(missing))}, got none: prepare it again")
    try:
        splits = {split: _map_split(folder, split, described) for split, described in manifest["splits"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST} must describe every split, got damage: prepare it again") from error
    return Corpus(folder, manifest, splits)


def _map_split(folder: Path, split: str, described: Mapping[str, Mapping[str, int]]) -> Split:
    sequences, numbers = {}, {}
    for field, counts in described.items():
        if "tokens" in counts:
            tokens, offsets = (_map(folder / f"{split}.{field}.{part}.npy") for part in ("tokens", "offsets"))
            if len(offsets) != counts["count"] + 1 or len(tokens) != counts["tokens"]:
                raise DataError(f"{folder} must hold {counts['tokens']:,} tokens of {split}, got {len(tokens):,}")
            sequences[field] = Sequences(tokens, offsets)
        else:
            path = folder / f"{split}.{field}.npy"
            numbers[field] = _map(path)
            if len(numbers[field]) != counts["count"]:
                raise DataError(f"{path} must hold {counts['count']:,} numbers, got {len(numbers[field]):,}")
    return Split(sequences, numbers)


def verify(corpus: Corpus) -> None:
    """Read everything once and compare it with the checksums of the manifest."""
    for name, expected in corpus.manifest["arrays"].items():
        path = corpus.folder / name
        found = _array_checksum(_map(path)) if name.endswith(".npy") else _file_checksum(path)
        if found != expected:
            raise DataError(f"{path} must have SHA-256 {expected[:12]}..., got {found[:12]}...: prepare it again")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _array_checksum(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()


def _map(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # The header is Python, and numpy has Python read it.
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise DataError(f"{path} must be a whole array, got {error}") from error
    # A checksum is one of bytes: in another order, or as times, they would be other numbers.
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.dtype.isnative:
        raise DataError(f"{path} must be a row of integers, got {array.dtype} of shape {list(array.shape)}")
    return array


def _file_checksum(path: Path) -> str:
    try:
        return checksum(path)
    except OSError as error:
        raise DataError(f"{path} must be there, got {error.strerror}: prepare it again") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def flatten(sequences: Iterator[bytes] | Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Byte strings as one flat array and their lengths."""
    parts = list(sequences)
    lengths = np.fromiter((len(part) for part in parts), dtype=np.int64, count=len(parts))
    return np.frombuffer(b"".join(parts), dtype=np.uint8), lengths
