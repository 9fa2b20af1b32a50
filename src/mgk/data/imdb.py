"""IMDb reviews as bytes: Long Range Arena Text.

The benchmark selects the best checkpoint on the test set (its validation set IS the test set). We hold out 5 % of the
training reviews instead; ``protocol="published"`` is the benchmark's own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data import byte_text
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import decode, find, json_records, read_bytes
from mgk.data.store import Writer, checksum

OPTIONS = {"protocol": "held-out", "seed": 0}
PROTOCOLS = ("held-out", "published")
HELD_OUT = 0.05
LONGEST = 4096
"""What the benchmark reads of a review. All of it is kept on disk; batches cut it."""

Review = tuple[str, int]


def prepare(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Read the reviews from whatever form lies in ``source`` and write their bytes."""
    chosen = check_options("imdb", options, OPTIONS)
    if chosen["protocol"] not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {chosen['protocol']!r}")
    seed = chosen["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    checksums, splits = read(source)
    if chosen["protocol"] == "published":
        splits["valid"] = splits["test"]
    else:
        splits["valid"], splits["train"] = _hold_out(splits["train"], seed)
    with Writer(folder, "imdb", checksums, chosen) as writer:
        for name in progress(("train", "valid", "test"), "bytes"):
            reviews = splits[name]
            writer.sequences(name, "text", *byte_text.encode([text for text, _ in reviews]))
            writer.numbers(name, "labels", np.array([label for _, label in reviews], dtype=np.int64))
            writer.fact(f"{name}: longer than {LONGEST:,} bytes", sum(len(t.encode()) > LONGEST for t, _ in reviews))


def read(source: Path) -> tuple[dict[str, str], dict[str, list[Review]]]:
    """Checksums of what was read, and the reviews of both splits: from jsonl, csv or the original folders."""
    if (source / "aclImdb").is_dir() or (source / "train" / "pos").is_dir():
        return _read_folders(source / "aclImdb" if (source / "aclImdb").is_dir() else source)
    splits: dict[str, list[Review]] = {}
    checksums = {}
    for name in ("train", "test"):
        stem = f"imdb_{name}"
        path = find(source, f"{stem}.jsonl.xz", f"{stem}.jsonl", f"{stem}.csv", f"{name}.csv")
        reader = _read_csv if path.suffix == ".csv" else _read_jsonl
        splits[name] = [_checked(text, label, where) for text, label, where in reader(path)]
        if not splits[name]:
            raise DataError(f"{path} must hold at least one review, got none")
        checksums[path.name] = checksum(path)
    return checksums, splits


def _read_jsonl(path: Path) -> Iterator[tuple[str, int, str]]:
    for number, record in enumerate(json_records(path, {"text": str, "label": int}), start=1):
        yield record["text"], record["label"], f"{path}, record {number:,}"


def _read_csv(path: Path) -> Iterator[tuple[str, int, str]]:
    """With a header that names the columns ``text`` (or ``review``) and ``label`` (or ``sentiment``)."""
    text = decode(read_bytes(path), str(path))
    if text.startswith("\ufeff"):
        raise DataError(f"{path} must not start with a byte order mark, got one")
    rows = _csv_rows(csv.reader(io.StringIO(text, newline=""), strict=True), path)
    header = [name.strip().lower() for name in next(rows, [])]
    columns = {}
    for wanted, names in {"text": ("text", "review"), "label": ("label", "sentiment")}.items():
        places = [place for place, name in enumerate(header) if name in names]
        if len(places) != 1:
            raise DataError(f"{path} must have one column {' or '.join(names)}, got the header {', '.join(header)}")
        columns[wanted] = places[0]
    for number, row in enumerate(rows, start=1):
        where = f"{path}, record {number:,}"
        if len(row) != len(header):
            raise DataError(f"{where} must have {len(header)} columns, got {len(row)}")
        label = row[columns["label"]].strip().lower()
        named = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}
        if label not in named:
            raise DataError(f"{where} must have a label of {', '.join(named)}, got {label!r}")
        yield row[columns["text"]], named[label], where


def _csv_rows(reader: Iterator[list[str]], path: Path) -> Iterator[list[str]]:
    """The rows; an unclosed quote or an endless field names its record."""
    for number in itertools.count():
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}, record {number:,} must be csv, got {error}") from error


def _read_folders(root: Path) -> tuple[dict[str, str], dict[str, list[Review]]]:
    """``train/pos/0_9.txt`` and so on, in the order of their numbers. One checksum for all of them."""
    splits: dict[str, list[Review]] = {}
    digest = hashlib.sha256()
    for name in ("train", "test"):
        splits[name] = []
        for label, part in enumerate(("neg", "pos")):
            paths = sorted(
                (root / name / part).glob("*.txt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]
            )
            if not paths:
                raise DataError(f"{root / name / part} must hold reviews as .txt files, got none")
            for path in paths:
                content = path.read_bytes()
                digest.update(f"{name}/{part}/{path.name}".encode() + hashlib.sha256(content).digest())
                splits[name].append(_checked(decode(content, str(path)), label, str(path)))
    return {"aclImdb": digest.hexdigest()}, splits


def _checked(text: str, label: int, where: str) -> Review:
    if label not in (0, 1):
        raise DataError(f"{where} must have label 0 or 1, got {label}")
    if not text.strip():
        raise DataError(f"{where} must hold text, got an empty review")
    return text, label


def _hold_out(reviews: list[Review], seed: int) -> tuple[list[Review], list[Review]]:
    """Split off the same share of both classes."""
    random = np.random.default_rng(seed)
    labels = np.array([label for _, label in reviews])
    chosen = np.zeros(len(reviews), dtype=bool)
    for label in (0, 1):
        places = np.flatnonzero(labels == label)
        chosen[random.permutation(places)[: round(HELD_OUT * len(places))]] = True
    held = [review for review, out in zip(reviews, chosen, strict=True) if out]
    return held, [review for review, out in zip(reviews, chosen, strict=True) if not out]


CORPUS = CorpusKind(
    name="imdb",
    title="Large Movie Review Dataset as bytes (Long Range Arena Text)",
    task="classification",
    prepare=prepare,
    decode=byte_text.decode,
    options=OPTIONS,
    origin="Maas et al. 2011: the folders of aclImdb_v1.tar.gz, imdb_{train,test}.csv, or imdb_{train,test}.jsonl(.xz)",
)
