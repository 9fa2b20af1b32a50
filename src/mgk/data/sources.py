"""Reading raw files: plain, xz or gz, alone or in a tar, with errors that name the file and the record."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mgk.data.errors import DataError

# What damaged or truncated compressed files raise.
_DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def find(folder: Path, *names: str) -> Path:
    """The first of these files that is there."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        refuse_pickle(folder)
        raise DataError(f"{folder} must be a folder with {' or '.join(names)}, got no folder")
    for stem in {name.split(".")[0] for name in names}:
        for path in folder.glob(f"{stem}*"):
            refuse_pickle(path)
    raise DataError(f"{folder} must hold {' or '.join(names)}, got none of them")


def read_bytes(path: Path) -> bytes:
    """The content, decompressed."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path) as file:
                return file.read()
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read()
        return path.read_bytes()
    except _DAMAGE as error:
        raise DataError(f"{path} must be a whole file, got damage: {error}") from error


def read_members(path: Path, *names: str) -> dict[str, bytes]:
    """Files out of a tar by name. The archive's own paths are never used to write anything."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if member.name.startswith("/") or ".." in parts:
                    raise DataError(f"{path} must not reach outside itself, got the member {member.name!r}")
                if parts and parts[-1] in names and member.isfile():
                    if parts[-1] in found:
                        raise DataError(f"{path} must hold {parts[-1]} once, got it twice")
                    file = archive.extractfile(member)
                    assert file is not None
                    found[parts[-1]] = file.read()
            # To the very end, where a compressed file has its checksum.
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass
    except _DAMAGE as error:
        raise DataError(f"{path} must be a whole archive, got damage: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{path} must hold {', '.join(missing)}, got an archive without")
    return found


def decode(content: bytes, where: str) -> str:
    """UTF-8, or an error with the place of the first byte that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} must be UTF-8, got byte 0x{content[error.start]:02x} at offset {error.start:,}"
        ) from error


def lines(content: bytes, where: str) -> list[str]:
    """Lines without their ends. Only a newline ends a line: U+2028 and its kin are text."""
    text = decode(content, where)
    if text.startswith("\ufeff"):
        raise DataError(f"{where} must not start with a byte order mark, got one")
    split = text.split("\n")
    if split and split[-1] == "":
        split.pop()
    return [line.removesuffix("\r") for line in split]


def json_records(path: Path, fields: dict[str, type]) -> Iterator[dict[str, Any]]:
    """One JSON object a line, each with these fields."""
    content = read_bytes(path)
    for number, raw in enumerate(io.BytesIO(content), start=1):
        where = f"{path}, record {number:,}"
        text = decode(raw, where)
        try:
            record = json.loads(text)
        # A number of too many digits is no JSONDecodeError, and too many brackets are no ValueError.
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} must be JSON, got {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} must be an object, got {type(record).__name__}")
        for field, kind in fields.items():
            if field not in record:
                raise DataError(f"{where} must have the field {field!r}, got {', '.join(record)}")
            value = record[field]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise DataError(f"{where} must have {kind.__name__} in {field!r}, got {value!r:.60}")
            if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
                raise DataError(f"{where} must have whole characters in {field!r}, got half of a surrogate pair")
        yield record


def columns(line: str, count: int, where: str) -> list[str]:
    """Fields between tabs."""
    split = line.split("\t")
    if len(split) != count:
        raise DataError(f"{where} must have {count} columns between tabs, got {len(split)}")
    return split


def refuse_pickle(path: Path) -> None:
    """A pickle can run code while it is read."""
    if path.suffix in (".pkl", ".pickle", ".pt", ".pth"):
        raise DataError(
            f"{path} must not be a pickle, which can run code when read, got {path.suffix}: write its records as jsonl "
            'where you trust it, with python -c "import json, pickle, sys; '
            "[print(json.dumps(r)) for r in pickle.load(open(sys.argv[1], 'rb'))]\" FILE"
        )
